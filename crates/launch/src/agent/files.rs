//! Thread for operations on the job's files: if their file system does not respond, this thread waits, and the agent
//! does not.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use brigade_hardware::DeviceFault;
use brigade_rendezvous::{RankFailure, wake};

use super::device_faults::DeviceFaults;
use super::error_files::{self, ErrorFile};
use super::oom::OomKiller;
use crate::output::{AttemptFiles, OutputPlan, RunFolder};
use crate::{LaunchError, LaunchPlan};

/// The agent's side of the thread that handles files.
#[derive(Debug)]
pub(super) struct Files {
    requests: Sender<Request>,
    answers: wake::Receiver<Answer>,
    /// Closed when the thread has ended.
    ended: Receiver<()>,
}

/// Request to the thread.
#[derive(Debug)]
enum Request {
    Make,
    Prepare {
        attempt: u32,
    },
    FindErrors {
        first_rank: usize,
        files: Vec<Option<PathBuf>>,
    },
    ReadError {
        first_rank: usize,
        local_rank: usize,
        file: Option<PathBuf>,
        killer: Option<OomKiller>,
    },
    PassOn {
        failure: Box<RankFailure>,
        file: Option<PathBuf>,
    },
}

/// Answer of the thread.
#[derive(Debug)]
pub(super) enum Answer {
    /// The job's folder was created, if it has one, or could not be.
    Made(Result<(), LaunchError>),
    /// Folder and files of an attempt.
    Prepared { attempt: u32, files: Result<AttemptFiles, LaunchError> },
    /// Local ranks that have written an error.
    Errors(Vec<usize>),
    /// Faults of the ranks' devices.
    DeviceFaults(Vec<DeviceFault>),
    /// Error that a rank has written, and hints at the reason.
    FailureDetails {
        local_rank: usize,
        error: Option<(String, Duration)>,
        hint: Option<String>,
        device_faults: Vec<DeviceFault>,
    },
}

impl Files {
    /// Starts the thread.
    pub(super) fn start(plan: &LaunchPlan) -> io::Result<Self> {
        let (requests, inbox) = mpsc::channel();
        let answers = wake::Receiver::new()?;
        let (ending, ended) = mpsc::channel();
        let worker = Worker {
            output: plan.output.clone(),
            run_id: plan.run_id.clone(),
            agent_id: plan.agent_id.clone(),
            nproc: plan.local_world_size.as_usize(),
            folder: None,
            device_faults: DeviceFaults::watch(plan),
            answers: answers.sender(),
        };
        std::thread::Builder::new().name("files".to_owned()).spawn(move || {
            worker.run(&inbox);
            drop::<Sender<()>>(ending);
        })?;
        Ok(Self { requests, answers, ended })
    }

    /// Creates the folder of the job.
    pub(super) fn make(&self) {
        self.ask(Request::Make);
    }

    /// Creates the folder and files of an attempt.
    pub(super) fn prepare(&self, attempt: u32) {
        self.ask(Request::Prepare { attempt });
    }

    /// Finds the local ranks whose error file is not empty, and the faults that the ranks' devices report. `files` is
    /// in the order of local ranks.
    pub(super) fn find_errors(&self, first_rank: usize, files: Vec<Option<PathBuf>>) {
        self.ask(Request::FindErrors { first_rank, files });
    }

    /// Reads a rank's error file, the faults of the ranks' devices, and the counter of the out-of-memory killer.
    pub(super) fn read_error(
        &self,
        first_rank: usize,
        local_rank: usize,
        file: Option<PathBuf>,
        killer: Option<OomKiller>,
    ) {
        self.ask(Request::ReadError { first_rank, local_rank, file, killer });
    }

    /// Passes the job's failure on to the launcher that has started this one, if there is one.
    pub(super) fn pass_on(&self, failure: RankFailure, file: Option<PathBuf>) {
        self.ask(Request::PassOn { failure: Box::new(failure), file });
    }

    fn ask(&self, request: Request) {
        // The thread accepts requests until this value is dropped.
        let _ = self.requests.send(request);
    }

    /// Returns a descriptor that is readable when there is an answer.
    pub(super) fn control(&self) -> BorrowedFd<'_> {
        self.answers.as_fd()
    }

    /// Returns the next answer, if there is one.
    pub(super) fn answer(&self) -> Option<Answer> {
        self.answers.try_recv()
    }

    /// Removes a folder that exists only as long as the job. Returns `false` if that takes too long: the thread is then
    /// left running.
    pub(super) fn end(self) -> bool {
        drop(self.requests);
        !matches!(self.ended.recv_timeout(END_TIMEOUT), Err(RecvTimeoutError::Timeout))
    }
}

/// The thread's side: handles the requests.
struct Worker {
    output: OutputPlan,
    run_id: String,
    agent_id: String,
    nproc: usize,
    folder: Option<RunFolder>,
    device_faults: DeviceFaults,
    answers: wake::Sender<Answer>,
}

impl Worker {
    fn run(mut self, requests: &Receiver<Request>) {
        while let Ok(request) = requests.recv() {
            let answer = match request {
                Request::Make => {
                    let made = RunFolder::create(&self.output, &self.run_id, &self.agent_id);
                    Answer::Made(made.map(|folder| self.folder = Some(folder)))
                }
                Request::Prepare { attempt } => {
                    self.device_faults.begin_attempt();
                    let none = || RunFolder::default();
                    let folder = self.folder.get_or_insert_with(none);
                    let files = AttemptFiles::make(&self.output, folder, attempt, self.nproc);
                    Answer::Prepared { attempt, files }
                }
                Request::FindErrors { first_rank, files } => {
                    // First: the ranks wait for it.
                    let _ = self.answers.send(Answer::Errors(with_errors(&files)));
                    Answer::DeviceFaults(self.device_faults.look(first_rank, self.nproc))
                }
                Request::ReadError { first_rank, local_rank, file, killer } => {
                    let error_file = file.as_deref().and_then(ErrorFile::read);
                    let error = error_file.map(|it| (it.text, it.age));
                    let hint = killer.and_then(|killer| killer.hint());
                    let device_faults = self.device_faults.look(first_rank, self.nproc);
                    Answer::FailureDetails { local_rank, error, hint, device_faults }
                }
                Request::PassOn { failure, file } => {
                    error_files::pass_on(&failure, file.as_deref());
                    continue;
                }
            };
            let _ = self.answers.send(answer);
        }
    }
}

fn with_errors(files: &[Option<PathBuf>]) -> Vec<usize> {
    let has_error = |file: &Option<PathBuf>| {
        let file = file.as_ref().and_then(|path| path.metadata().ok());
        file.is_some_and(|file| file.is_file() && file.len() > 0)
    };
    let files = files.iter().enumerate();
    files.filter(|(_, file)| has_error(file)).map(|(local_rank, _)| local_rank).collect()
}

/// Maximum time for which the agent waits for this thread at its end.
const END_TIMEOUT: Duration = Duration::from_secs(2);
