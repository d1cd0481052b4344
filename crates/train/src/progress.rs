//! A bar that shows how far an epoch is.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::accelerator::Accelerator;

/// An iterator with a bar on the main process's terminal. Made by [`Accelerator::progress`].
#[derive(Debug)]
pub struct Progress<I> {
    iterator: I,
    bar: ProgressBar,
}

impl Accelerator {
    /// Shows a bar for the iterations over `items`: on rank 0 only, and only where standard error is a
    /// terminal.
    pub fn progress<I: IntoIterator>(&self, items: I) -> Progress<I::IntoIter> {
        let iterator = items.into_iter();
        let target = if self.is_main_process() {
            // Hides itself when standard error is no terminal.
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let length = iterator.size_hint().1.map(|length| length as u64);
        let bar = ProgressBar::with_draw_target(length, target);
        if let Ok(style) = ProgressStyle::with_template(
            "{wide_bar} {pos}/{len} [{elapsed_precise}<{eta_precise}, {per_sec}]",
        ) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(200));
        Progress { iterator, bar }
    }
}

impl<I: Iterator> Iterator for Progress<I> {
    type Item = I::Item;

    fn next(&mut self) -> Option<I::Item> {
        let item = self.iterator.next();
        match item {
            Some(_) => self.bar.inc(1),
            None => self.bar.finish_and_clear(),
        }
        item
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.iterator.size_hint()
    }
}

impl<I> Drop for Progress<I> {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
