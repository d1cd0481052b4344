//! The limit of open files: as many as the system allows for the launcher, and the original limit for the processes
//! that it starts.
//!
//! Each host that is started over ssh costs a few descriptors, each rank some. The usual limit of
//! 1024 is for programs that wait with `select`, which cannot take more; a rank may be one of them.

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit, setrlimit};

/// Guard that keeps the limit of this process raised while it lives.
#[derive(Debug)]
pub(crate) struct OpenFiles {
    before: Option<Rlimit>,
}

impl OpenFiles {
    /// Raises the soft limit to the hard one.
    pub(crate) fn raise() -> Self {
        let before = getrlimit(Resource::Nofile);
        let raised = Rlimit { current: before.maximum, ..before };
        let is_raised =
            before.current != before.maximum && setrlimit(Resource::Nofile, raised).is_ok();
        Self { before: is_raised.then_some(before) }
    }

    /// Restores the earlier limit for a child, which has inherited the raised one.
    pub(crate) fn lower_for(&self, child: u32) {
        if let (Some(before), Some(child)) = (self.before, Pid::from_raw(child.cast_signed())) {
            // If that is refused, the child has a higher limit than it needs, which is harmless.
            let _ = prlimit(Some(child), Resource::Nofile, before);
        }
    }
}

impl Drop for OpenFiles {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // A lower soft limit is always allowed.
            let _ = setrlimit(Resource::Nofile, before);
        }
    }
}
