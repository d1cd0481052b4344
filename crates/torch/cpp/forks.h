// Children of `fork` that go on without `exec`: they have one thread of the process, and its locks as they
// were.
#pragma once

namespace brigade {

// From now on a child of this process knows that it is one.
void watch_forks();

// Whether this process is such a child.
bool is_fork();

// Throws in such a child. `what` is what cannot be used there.
void check_not_fork(const char* what);

// Closes a descriptor in children; `keep_in_forks` ends that, before it is closed here. Of 256 descriptors at
// most; more are kept open.
void close_in_forks(int descriptor);
void keep_in_forks(int descriptor);

} // namespace brigade
