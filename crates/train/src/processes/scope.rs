//! Code that one rank runs before, or for, the others.

use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};

use brigade_torch::{Error, ProcessGroup, Result};

use crate::error::TrainError;
use crate::processes::Processes;

impl Processes {
    /// Waits until every rank has called it: a barrier.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone or the time limit passed.
    #[track_caller]
    pub fn wait_for_everyone(&self) -> Result<()> {
        match self.traced() {
            Some(group) => Ok(group.barrier()?),
            None => Ok(()),
        }
    }

    /// Runs the body on rank 0 first, then on the others: for a download or a cache that one rank makes and all ranks
    /// read.
    ///
    /// When rank 0 fails, no other rank runs the body: all get the error. The body must not contain
    /// collectives.
    ///
    /// ```
    /// # use brigade_train::{ConnectOptions, Processes};
    /// # use brigade_torch::Error;
    /// # let processes = Processes::join(ConnectOptions { cpu: true, ..Default::default() })?;
    /// # let file = std::env::temp_dir().join(format!("brigade-first-{}", std::process::id()));
    /// // Rank 0 makes the file, the others find it.
    /// let text = processes.main_process_first(|| -> Result<String, Error> {
    ///     if !file.exists() {
    ///         std::fs::write(&file, "words").expect("a temporary file");
    ///     }
    ///     Ok(std::fs::read_to_string(&file).expect("the file of rank 0"))
    /// })?;
    /// assert_eq!(text, "words");
    /// # std::fs::remove_file(&file).unwrap();
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the body's own error; [`crate::TrainError::Leader`] on the others when rank 0 failed;
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone.
    #[track_caller]
    pub fn main_process_first<R, E>(&self, body: impl FnOnce() -> Result<R, E>) -> Result<R>
    where
        E: Into<Error>,
    {
        first("main_process_first", self.traced().as_ref(), 0, 0, body)
    }

    /// Runs the body on the first rank of each host first, then on the host's others: for files that are not shared
    /// between hosts. Hosts do not wait for each other.
    ///
    /// # Errors
    /// Returns the same errors as [`Processes::main_process_first`].
    #[track_caller]
    pub fn local_main_process_first<R, E>(&self, body: impl FnOnce() -> Result<R, E>) -> Result<R>
    where
        E: Into<Error>,
    {
        let here = Location::caller();
        let group = self.job.host_group().or_else(|| self.group()).map(|group| group.at(here));
        let leader = self.process_index() - self.local_process_index();
        first("local_main_process_first", group.as_ref(), 0, leader, body)
    }

    /// Runs the body only on rank 0; the others wait until it has ended. Returns the body's result on rank 0, and
    /// `None` on the others.
    ///
    /// # Errors
    /// Returns the body's own error; [`crate::TrainError::Leader`] on the others when rank 0 failed;
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone.
    #[track_caller]
    pub fn on_main_process<R, E>(&self, body: impl FnOnce() -> Result<R, E>) -> Result<Option<R>>
    where
        E: Into<Error>,
    {
        lead("on_main_process", self.traced().as_ref(), 0, 0, body)
    }

    /// Runs the body on the first rank of each host; the host's other ranks wait until it has ended, and return `None`.
    ///
    /// # Errors
    /// Returns the same errors as [`Processes::on_main_process`].
    #[track_caller]
    pub fn on_local_main_process<R, E>(
        &self,
        body: impl FnOnce() -> Result<R, E>,
    ) -> Result<Option<R>>
    where
        E: Into<Error>,
    {
        let here = Location::caller();
        let group = self.job.host_group().or_else(|| self.group()).map(|group| group.at(here));
        let leader = self.process_index() - self.local_process_index();
        lead("on_local_main_process", group.as_ref(), 0, leader, body)
    }

    /// Runs the body only on the last rank; the others wait until it has ended, and return `None`.
    ///
    /// # Errors
    /// Returns the same errors as [`Processes::on_main_process`].
    #[track_caller]
    pub fn on_last_process<R, E>(&self, body: impl FnOnce() -> Result<R, E>) -> Result<Option<R>>
    where
        E: Into<Error>,
    {
        self.on_process(self.num_processes() - 1, body)
    }

    /// Runs the body only on rank `rank`; the others wait until it has ended, and return `None`.
    ///
    /// # Errors
    /// Returns the same errors as [`Processes::on_main_process`], and [`brigade_torch::ErrorKind::InvalidArgument`]
    /// when there is no such rank.
    #[track_caller]
    pub fn on_process<R, E>(
        &self,
        rank: usize,
        body: impl FnOnce() -> Result<R, E>,
    ) -> Result<Option<R>>
    where
        E: Into<Error>,
    {
        if rank >= self.num_processes() {
            return Err(Error::invalid_argument(format!(
                "on_process: rank {rank} does not exist among {} ranks",
                self.num_processes()
            )));
        }
        lead("on_process", self.traced().as_ref(), rank, rank, body)
    }
}

/// Runs the body on the leader, then on the other ranks.
fn first<R, E: Into<Error>>(
    scope: &'static str,
    group: Option<&ProcessGroup>,
    leader: usize,
    leader_rank: usize,
    body: impl FnOnce() -> Result<R, E>,
) -> Result<R> {
    let mut body = Some(body);
    let led = lead(scope, group, leader, leader_rank, || match body.take() {
        Some(body) => body(),
        None => unreachable!("the leader runs the body once"),
    })?;
    match (led, body) {
        (Some(result), _) => Ok(result),
        (None, Some(body)) => body().map_err(Into::into),
        (None, None) => unreachable!("a rank that did not lead still has its body"),
    }
}

/// Runs the body on the leader (given by its rank in the group, and in the job for messages), and notifies the others
/// of the result. A panic is reported as well, then resumed.
fn lead<R, E: Into<Error>>(
    scope: &'static str,
    group: Option<&ProcessGroup>,
    leader: usize,
    leader_rank: usize,
    body: impl FnOnce() -> Result<R, E>,
) -> Result<Option<R>> {
    let Some(group) = group else {
        return body().map(Some).map_err(Into::into);
    };
    if group.rank() != leader {
        let failure: Option<String> = group.broadcast_object(None, leader)?;
        return match failure {
            None => Ok(None),
            Some(reason) => Err(TrainError::Leader { scope, rank: leader_rank, reason }.into()),
        };
    }
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(result)) => {
            group.broadcast_object(Some(&None::<String>), leader)?;
            Ok(Some(result))
        }
        Ok(Err(error)) => {
            let error = error.into();
            // Return the body's error, even if a peer could not be notified.
            let _ = group.broadcast_object(Some(&Some(error.to_string())), leader);
            Err(error)
        }
        Err(panic) => {
            let reason = panic
                .downcast_ref::<&str>()
                .map(|text| (*text).to_owned())
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_else(|| "it panicked".to_owned());
            let _ = group.broadcast_object(Some(&Some(format!("panic: {reason}"))), leader);
            resume_unwind(panic)
        }
    }
}
