// Freed memory that stays with the process, for the tensors of the next step.
#pragma once

#include <cstddef>

namespace brigade {

// Makes this process keep what tensors free: large tensors in blocks of our own, in huge pages; the C
// library's memory as glibc can. False where neither is to be had.
bool keep_freed_memory();

// Gives what is free, and was kept, back to the system.
void release_freed_memory();

// Makes every tensor of the CPU that is allocated from now on begin `bytes` after a multiple of 64.
void shift_allocations(size_t bytes);

} // namespace brigade
