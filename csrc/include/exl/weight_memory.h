// Memory of packed weights: anonymous mappings on huge pages, shared by small matrices.
#pragma once

#include <cstdint>

namespace exl {

struct MemoryBlock;

// Allocates `bytes` of zeroed memory, 64-byte aligned. The caller becomes one of the owners of the
// returned block.
MemoryBlock* claim_memory(int64_t bytes, void** data);
// Gives up ownership; called once for each claim. The last owner unmaps the block.
void release_memory(MemoryBlock* block);

}  // namespace exl
