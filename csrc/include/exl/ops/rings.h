// Search for trellis codes (EXL3): the ring of states whose values come closest to given targets.
//
//   ring    256 positions. Position p adds counts[p] new bits to a state of 16 bits, and the first
//           positions continue from the last: state[p] >> counts[p] is the lower part of state[p-1]
//   node    the 16 - counts[p] bits that the states of p - 1 and p share
//   cost    of a node: the least sum of (values[state] - target)^2 over paths that end there
//
// Minimizes the cost over the rings through one node before position 0. The node is taken from the
// best path without ends over `reach` positions on both sides of it.
#pragma once

#include <cstdint>

namespace exl {

constexpr int64_t kRingPositions = 256;
constexpr int kStateBits = 16;
constexpr int64_t kStates = int64_t{1} << kStateBits;

struct RingArgs {
    const float* targets;  // [count, 256], rows target_stride apart
    int64_t count;
    int64_t target_stride;
    const float* values;  // [65536]
    int even_bits;        // new bits of even positions, 1 to 8
    int odd_bits;         // new bits of odd positions: as many, or one more
    int64_t reach;        // 1 to 128
    int32_t* states;      // [count, 256]
};

}  // namespace exl
