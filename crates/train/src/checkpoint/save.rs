//! A save, from the copy to the rename.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use brigade_checkpoint::FileName;
use brigade_checkpoint::layout::{
    self, FileFacts, Manifest, MeshAxis, Object, Replaced, Staging, keep_newest, numbered,
    numbered_path, sweep,
};
use brigade_torch::{DeviceExt, Error, Result, Store, TorchError};
use serde::{Deserialize, Serialize};

use super::buffer_pool::BufferPool;
use super::capture::{Captured, capture};
use super::inner::{Inner, Pending};
use super::project::ProjectConfiguration;
use super::write::write_files;
use crate::error::TrainError;

const SCOPE: &str = "save_state";

pub(super) enum Target {
    Path(PathBuf),
    Numbered,
}

/// Everything that a thread needs to write a checkpoint.
struct Save {
    rank: usize,
    ranks: usize,
    /// Store of the ranks, with this save's prefix of keys. `None` with one rank.
    store: Option<(Store, String)>,
    time_limit: Duration,
    flush: bool,
    folder: PathBuf,
    captured: Captured,
    /// The axes of the ranks' mesh, where models are sharded.
    mesh: Option<Vec<MeshAxis>>,
    /// Pool to which the copies' memory is returned. `None` without a copy.
    copies: Option<Arc<BufferPool>>,
    /// Work of rank 0.
    main: Option<Main>,
}

struct Main {
    staging: Staging,
    target: PathBuf,
    /// Number of numbered checkpoints to keep.
    keep: Option<usize>,
}

/// A rank's part of a checkpoint, as rank 0 receives it.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Share {
    files: BTreeMap<FileName, FileFacts>,
    objects: Vec<Object>,
}

/// Failure of a save: the rank, and its reason.
type Failure = (usize, String);

/// Captures and copies the state, then writes it here or on a thread. Returns the path of the checkpoint.
pub(super) fn begin(inner: &Inner, target: &Target) -> Result<PathBuf> {
    inner.weights_may_be_saved()?;
    inner.gradients_may_be_saved()?;
    inner.wait()?;
    let job = &inner.processes.job;
    let number = job.saves.fetch_add(1, Ordering::Relaxed);
    let project = &inner.project;

    let main = if inner.processes.is_main_process() {
        main_part(project, target, number).map(Some)
    } else {
        Ok(None)
    };
    let (mut main, paths) = match main {
        Ok(Some(main)) => {
            let place = (main.target.clone(), main.staging.path().to_owned());
            (Some(main), Ok(Some(place)))
        }
        Ok(None) => (None, Ok(None)),
        Err(error) => (None, Err(error)),
    };
    let paths = inner.processes.agree(SCOPE, paths)?;
    let Some(Some((target, folder))) = paths.into_iter().next() else {
        return Err(TorchError::Internal("save_state: rank 0 sent no path".into()).into());
    };
    let captured = inner.save_hooks.call(&folder).and_then(|()| {
        let mut captured = capture(inner)?;
        if project.background {
            captured.copy(&inner.copies)?;
            // All copies are in flight at once.
            inner.processes.device().synchronize()?;
        }
        Ok(captured)
    });
    let (captured, ready) = match captured {
        Ok(captured) => (Some(captured), Ok(())),
        Err(error) => (None, Err(error)),
    };
    inner.processes.agree(SCOPE, ready)?;
    let Some(captured) = captured else {
        return Err(TorchError::Internal("save_state: no state was captured".into()).into());
    };

    let store = job.store().map(|store| (store.clone(), format!("brigade/save/{number}")));
    let save = Save {
        rank: job.rank(),
        ranks: job.size(),
        store,
        time_limit: job.timeout,
        flush: project.flush,
        folder,
        captured,
        mesh: inner.mesh(),
        copies: project.keeps_copies().then(|| Arc::clone(&inner.copies)),
        main: main.take(),
    };
    if !project.background {
        if let Some(replaced) = save.run()? {
            // The checkpoint is complete; the removal of the one that it replaces need not delay the program. If that
            // fails, the next save removes it.
            let thread = thread::Builder::new().name("brigade-remove".into()).spawn(move || {
                if let Err(error) = replaced.remove() {
                    tracing::warn!("an older checkpoint is left: {error}");
                }
                Ok(())
            });
            let pending = thread.ok().map(Pending);
            *inner.pending.lock() = pending;
        }
        return Ok(target);
    }
    let thread = thread::Builder::new().name("brigade-save".into()).spawn(move || {
        // Training has priority: this thread runs on the cores that it leaves idle. On Linux, priorities are per
        // thread. If the priority cannot be lowered, writing competes with training.
        let _ = rustix::process::setpriority_process(None, LOWEST_PRIORITY);
        Ok(save.run()?.map_or(Ok(()), Replaced::remove)?)
    });
    let thread = thread.map_err(|source| TrainError::File {
        action: "cannot start a thread to write",
        path: target.clone(),
        source,
    })?;
    *inner.pending.lock() = Some(Pending(thread));
    Ok(target)
}

fn main_part(project: &ProjectConfiguration, target: &Target, number: u64) -> Result<Main> {
    let (target, keep) = match target {
        Target::Path(path) => (path.clone(), None),
        Target::Numbered => {
            let folder = project.checkpoints()?;
            let newest = numbered(&folder)?.last().map_or(0, |newest| newest + 1);
            (numbered_path(&folder, newest.max(project.iteration)), project.total_limit)
        }
    };
    if let Some(parent) = target.parent().filter(|parent| parent.is_dir()) {
        sweep(parent)?;
    }
    let unique = format!("{}-{number}", std::process::id());
    Ok(Main { staging: Staging::create(&target, &unique)?, target, keep })
}

impl Save {
    /// Writes the checkpoint. On rank 0, returns the one that it has replaced.
    fn run(mut self) -> Result<Option<Replaced>> {
        let (step, samples) = (self.captured.step, self.captured.samples);
        let files = std::mem::take(&mut self.captured.files);
        let objects = std::mem::take(&mut self.captured.objects);
        let written = write_files(&self.folder, files, self.flush, self.copies.as_deref());
        let (share, own_error) = match written {
            Ok(files) => (Ok(Share { files, objects }), None),
            Err(error) => (Err(error.to_string()), Some(error)),
        };
        let mut replaced = None;
        let outcome = match self.main.take() {
            Some(main) => {
                let shares = self.gather(share);
                let outcome = shares.and_then(|shares| {
                    let manifest = self.manifest(step, samples, shares);
                    replaced = commit(main, manifest, self.flush).map_err(|error| (0, error))?;
                    Ok(())
                });
                self.publish(outcome)
            }
            None => self.submit(&share),
        };
        match (outcome, own_error) {
            (Ok(()), _) => Ok(replaced),
            (Err(_), Some(own)) => Err(own),
            (Err(SaveFailure::Own(error)), None) => Err(error),
            (Err(SaveFailure::Rank(rank, reason)), None) => {
                Err(TrainError::Leader { scope: SCOPE, rank, reason }.into())
            }
        }
    }

    /// Returns the parts of all ranks, or the first rank's failure. Called on rank 0.
    fn gather(&self, own: Result<Share, String>) -> Result<Vec<Share>, (usize, Error)> {
        let failed =
            |rank, reason| (rank, TrainError::Leader { scope: SCOPE, rank, reason }.into());
        let mut shares = vec![own.map_err(|reason| failed(0, reason))];
        let deadline = Instant::now() + self.time_limit;
        // Waits for all ranks, even after a failure: the folder must not be removed while a rank writes into it.
        for rank in 1..self.ranks {
            let Some((store, key)) = &self.store else { continue };
            let share = wait_for(store, &format!("{key}/{rank}"), deadline);
            shares.push(match share {
                Ok(Ok(share)) => Ok(share),
                Ok(Err(reason)) => Err(failed(rank, reason)),
                Err(error) => Err((rank, error)),
            });
        }
        shares.into_iter().collect()
    }

    fn manifest(&self, step: u64, samples: u64, shares: Vec<Share>) -> Manifest {
        let made_by = concat!("brigade ", env!("CARGO_PKG_VERSION"));
        let mut manifest = Manifest { step, samples, ..Manifest::new(made_by, self.ranks) };
        if let Some(mesh) = &self.mesh {
            manifest.mesh.clone_from(mesh);
        }
        for share in shares {
            for object in share.objects {
                // Ranks with other stages list their tensors of the same objects.
                match manifest.objects.iter_mut().find(|known| known.name == object.name) {
                    Some(known) => {
                        known.tensor_files.extend(object.tensor_files);
                        known.tensors.extend(object.tensors);
                    }
                    None => manifest.objects.push(object),
                }
            }
            manifest.files.extend(share.files);
        }
        manifest
    }

    /// Publishes the outcome and waits for the other ranks' acknowledgements: the store ends with this process, which
    /// may be about to end. Called on rank 0.
    fn publish(&self, outcome: Result<(), (usize, Error)>) -> Result<(), SaveFailure> {
        if let Some((store, key)) = &self.store {
            let message: Result<(), Failure> = match &outcome {
                Ok(()) => Ok(()),
                Err((rank, error)) => Err(match error.downcast_ref() {
                    Some(TrainError::Leader { reason, .. }) => (*rank, reason.clone()),
                    _ => (*rank, error.to_string()),
                }),
            };
            let message = serde_json::to_vec(&message).unwrap_or_default();
            let published = store.set(&format!("{key}/outcome"), message);
            let ack_deadline = Instant::now() + self.time_limit.min(ACK_TIMEOUT);
            for rank in 1..self.ranks {
                // A rank that has died is detected elsewhere.
                let _ = wait_for::<()>(store, &format!("{key}/{rank}/ack"), ack_deadline);
                // If they stay, they only occupy a few bytes.
                let _ = store.delete(&format!("{key}/{rank}"));
                let _ = store.delete(&format!("{key}/{rank}/ack"));
            }
            if let (Ok(()), Err(error)) = (&outcome, published) {
                return Err(SaveFailure::Own(error));
            }
        }
        outcome.map_err(|(_, error)| SaveFailure::Own(error))
    }

    /// Sends rank 0 this rank's part and waits for the outcome. Called on the other ranks.
    fn submit(&self, share: &Result<Share, String>) -> Result<(), SaveFailure> {
        let Some((store, key)) = &self.store else { return Ok(()) };
        let own = |error: Error| SaveFailure::Own(error);
        let message = serde_json::to_vec(share).unwrap_or_default();
        store.set(&format!("{key}/{}", self.rank), message).map_err(&own)?;
        let deadline = Instant::now() + self.time_limit;
        let outcome: Result<(), Failure> =
            wait_for(store, &format!("{key}/outcome"), deadline).map_err(own)?;
        // Rank 0 may exit as soon as it has the result.
        let _ = store.set(&format!("{key}/{}/ack", self.rank), b"null");
        outcome.map_err(|(rank, reason)| SaveFailure::Rank(rank, reason))
    }
}

/// Time limit of rank 0 for acknowledgements of a save's outcome.
const ACK_TIMEOUT: Duration = Duration::from_secs(5);

/// An error of this rank, or another rank's as text.
enum SaveFailure {
    Own(Error),
    Rank(usize, String),
}

fn commit(main: Main, mut manifest: Manifest, flush: bool) -> Result<Option<Replaced>> {
    let Main { staging, target, keep } = main;
    // Files written by hooks.
    for name in layout::files(staging.path())? {
        if let Entry::Vacant(vacant) = manifest.files.entry(name) {
            let facts = FileFacts::of(&staging.path().join(vacant.key()), flush)?;
            vacant.insert(facts);
        }
    }
    let replaced = staging.replace(&manifest, flush)?;
    if let (Some(limit), Some(folder)) = (keep, target.parent()) {
        keep_newest(folder, limit)?;
    }
    Ok(replaced)
}

/// Polls instead of waiting in the store: a connection serves one call at a time, and
/// training needs it, too.
fn wait_for<T: for<'de> Deserialize<'de>>(
    store: &Store,
    key: &str,
    deadline: Instant,
) -> Result<T> {
    let mut pause = Duration::from_millis(1);
    while !store.contains(&[key])? {
        if Instant::now() >= deadline {
            return Err(Error::invalid_argument(format!(
                "{SCOPE}: the time limit is over and no rank has set `{key}` in the store: a rank \
                 is gone or still writes"
            )));
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
    serde_json::from_slice(&store.get(key)?).map_err(|error| {
        Error::invalid_argument(format!("{SCOPE}: could not decode another rank's reply: {error}"))
    })
}

const LOWEST_PRIORITY: i32 = 19;
