//! Names of a job's keys in etcd.

/// Keys of a job.
#[derive(Clone, Debug)]
pub(crate) struct Keys {
    coordinator: String,
    over: String,
}

impl Keys {
    pub(crate) fn new(run_id: &str) -> Self {
        Self {
            coordinator: format!("/brigade/{run_id}/coordinator"),
            over: format!("/brigade/{run_id}/over"),
        }
    }

    pub(crate) fn both(&self) -> [&str; 2] {
        [&self.coordinator, &self.over]
    }
}
