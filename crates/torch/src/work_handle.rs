//! Handle of a C++ operation in flight.

use cxx::UniquePtr;

use crate::bridge::ffi;

pub(crate) struct WorkHandle(pub(crate) UniquePtr<ffi::Work>);

// SAFETY: a counted pointer (atomic count) to a c10d::Work, whose completion is guarded by a mutex; PyTorch
// waits for works from other threads than the starting one as well.
unsafe impl Send for WorkHandle {}
