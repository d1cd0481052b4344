//! What draws from libtorch's generator, one test at a time: it belongs to the process.

mod attention;
mod dropout;

use parking_lot::{Mutex, MutexGuard};

static GENERATOR: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    GENERATOR.lock()
}
