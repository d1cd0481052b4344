//! Training on several processes from a Jupyter notebook, with the [evcxr](https://github.com/evcxr/evcxr) kernel.
//!
//! [`notebook_launcher`] calls a function of a cell on several ranks and returns what each of them returns, as
//! [Accelerate's](https://huggingface.co/docs/accelerate/basic_tutorials/notebook) does:
//!
//! ```no_run
//! use brigade_notebook::notebook_launcher;
//!
//! # fn accelerator() -> Result<(usize, usize), std::fmt::Error> { Ok((0, 2)) }
//! fn train(rate: f64) -> Result<Vec<f64>, std::fmt::Error> {
//!     let (rank, ranks) = accelerator()?; // Accelerator::new(), and the training loop
//!     Ok(vec![rate; ranks - rank])
//! }
//!
//! let losses = notebook_launcher(train, 0.01, 2)?;
//! # Ok::<(), brigade_notebook::NotebookError>(())
//! ```
//!
//! # How the ranks start
//!
//! evcxr compiles each cell, with all functions of the notebook, to a shared library and loads it into a process of its
//! own. Here the ranks are new processes of the program `brigade`, which load the same library and call the same
//! function ([`brigade_dylib_call`]): nothing is compiled again, and they start as fast as those of `brigade launch`,
//! whose agent starts and watches them. They are not forks of the notebook's process, because libtorch's threads,
//! OpenMP's and CUDA's contexts do not survive `fork`; for that reason Accelerate requires a fresh kernel when CUDA was
//! used, whereas a cell here may use tensors and devices before it launches. They are not threads either: libtorch's
//! random numbers and the reducer are one per process, and one rank's globals would be another's.
//!
//! The function's arguments and results cross the process boundary in [MessagePack](https://msgpack.org), so they are
//! types of [`serde`]. Output of the ranks appears in the cell as it comes.
//!
//! `notebook_launcher` is generic over the function's type, so the cell's library contains a record for it
//! ([`Entry`](brigade_dylib_call::Entry)): a random number with the version of the layout, and the address of an
//! `extern "C"` function that reads the arguments, calls the notebook's function and writes the result. The place of
//! the record, as the library's path and an offset, is found in `/proc/self/maps`. The launcher writes the arguments
//! into a folder of the call and starts `brigade notebook-agent`, which ends with the notebook's process, and whose
//! ranks are `brigade notebook-rank LIBRARY OFFSET`. A rank loads the library, checks the record at the offset, and
//! calls the function. Results come back as files of the folder, failures from the events of the job.
//!
//! A function is found in another process by its type alone, so the type must be zero-sized. That excludes closures
//! with captured values. Zero-sized closures are rejected as well: one may have captured a zero-sized value that is a
//! proof about its own process.
//!
//! In a test or program without evcxr ([`debug_launcher`]) there is no library to load: the ranks are the same test
//! started again (`brigade_launch::children`), as those of `dist_test!`.
//!
//! [`display`] displays tensors, images, plots and the results of a Learner as pictures and tables.

mod call;
pub mod display;
mod error;
mod launcher;
mod program;

pub use error::NotebookError;
pub use launcher::{NotebookLauncher, debug_launcher, notebook_launcher};

/// Re-exports for notebooks: `use brigade::notebook::prelude::*`.
pub mod prelude {
    #[cfg(feature = "learn")]
    pub use crate::display::show_graph;
    pub use crate::display::{CellDisplay, curve, images, schedule_plot};
    pub use crate::{NotebookError, NotebookLauncher, debug_launcher, notebook_launcher};
}
