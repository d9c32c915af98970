// Where packed weights live: anonymous memory on huge pages, small matrices side by side.
#pragma once

#include <cstdint>

namespace exl {

struct MemoryBlock;

// `bytes` of zeroed memory, 64-byte aligned; the caller becomes one of the block's owners.
MemoryBlock* claim_memory(int64_t bytes, void** data);
// Once for each claim; the last owner unmaps the block.
void release_memory(MemoryBlock* block);

}  // namespace exl
