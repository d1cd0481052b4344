//! Images that cannot be read, and how often they were replaced.

use std::collections::{BTreeMap, BTreeSet};

use parking_lot::Mutex;

use crate::ImageError;

/// The broken and damaged images that this process has found.
#[derive(Debug, Default)]
pub(super) struct Broken {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    images: BTreeSet<usize>,
    /// Images that were damaged and read nevertheless.
    damaged: BTreeSet<usize>,
    skipped: BTreeMap<u64, usize>,
    /// The epoch whose count was not logged yet.
    current: Option<u64>,
}

impl Broken {
    /// Records that samples of `epoch` are read, and logs the count of the epoch before.
    pub(super) fn begin(&self, epoch: u64) {
        let mut state = self.state.lock();
        if state.current != Some(epoch) {
            state.log();
            state.current = Some(epoch);
        }
    }

    pub(super) fn is_known(&self, image: usize) -> bool {
        self.state.lock().images.contains(&image)
    }

    /// Records an image that cannot be read, and logs the reason.
    pub(super) fn add(&self, image: usize, name: &str, error: &ImageError) {
        if self.state.lock().images.insert(image) {
            tracing::warn!(image, name, %error, "skipping an image that cannot be read");
        }
    }

    /// Records an image that is damaged and was read nevertheless, and logs the reason.
    pub(super) fn add_damaged(&self, image: usize, name: &str, warning: &str) {
        if self.state.lock().damaged.insert(image) {
            tracing::warn!(
                image,
                name,
                warning,
                "a damaged image was read, some of its pixels are wrong"
            );
        }
    }

    pub(super) fn damaged(&self) -> Vec<usize> {
        self.state.lock().damaged.iter().copied().collect()
    }

    /// Counts a sample that was replaced by another image.
    pub(super) fn count(&self, epoch: u64) {
        *self.state.lock().skipped.entry(epoch).or_default() += 1;
    }

    pub(super) fn images(&self) -> Vec<usize> {
        self.state.lock().images.iter().copied().collect()
    }

    pub(super) fn skipped(&self, epoch: u64) -> usize {
        self.state.lock().skipped.get(&epoch).copied().unwrap_or_default()
    }
}

impl State {
    fn log(&self) {
        let Some(epoch) = self.current else { return };
        if let Some(samples) = self.skipped.get(&epoch) {
            tracing::warn!(
                epoch,
                samples,
                images = self.images.len(),
                "samples were replaced by the next image that can be read"
            );
        }
    }
}

impl Drop for Broken {
    fn drop(&mut self) {
        self.state.lock().log();
    }
}
