//! What draws from libtorch's generator, one test at a time: it belongs to the process.

mod attention;
mod dropout;

use std::sync::{Mutex, MutexGuard, PoisonError};

static GENERATOR: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    GENERATOR.lock().unwrap_or_else(PoisonError::into_inner)
}
