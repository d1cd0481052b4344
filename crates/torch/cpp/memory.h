// Freed memory that stays with the process, for the tensors of the next step.
#pragma once

namespace brigade {

// Makes this process keep what tensors free: large tensors in blocks of our own, in huge pages; the C
// library's memory as glibc can. False where neither is to be had.
bool keep_freed_memory();

// Gives what is free, and was kept, back to the system.
void release_freed_memory();

} // namespace brigade
