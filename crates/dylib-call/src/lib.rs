//! Calls a function of a shared library that another process has found.
//!
//! A notebook's kernel compiles each cell to a shared library and loads it. The ranks of a function in that cell are
//! other processes that load the same file: nothing is compiled again, and no state of the notebook's process is
//! inherited, as it would be by `fork`. [`Entry`] is a record in the library that says where its function is;
//! [`Address`] names the record for another process, which checks it before it calls the function.
//!
//! ```
//! use brigade_dylib_call::Entry;
//!
//! extern "C" fn run() -> i32 {
//!     3
//! }
//! static ENTRY: Entry = Entry::new(run);
//!
//! // Another process that can load the same file calls the function by this address. Here the file is the program,
//! // which no process can load as a library.
//! let address = ENTRY.address()?;
//! assert_eq!(address.object, std::env::current_exe()?);
//! assert!(address.call().is_err());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//! [`Nvrtc`] calls NVIDIA's run-time compiler, whose library comes with libtorch for CUDA.
//!
//! This is the second crate with unsafe code, beside the border with libtorch, because the program that loads such
//! a library does not link libtorch itself.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

mod mapping;
mod nvrtc;

use mapping::Mapping;
pub use nvrtc::{Nvrtc, NvrtcError};

/// Record of a function in the program or shared library that it is compiled into.
///
/// ```
/// use brigade_dylib_call::Entry;
///
/// extern "C" fn run() -> i32 {
///     0
/// }
/// static ENTRY: Entry = Entry::new(run);
///
/// // In a program that is not a library, this names the program.
/// let address = ENTRY.address()?;
/// assert_eq!(address.object, std::env::current_exe()?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[repr(C)]
pub struct Entry {
    magic: [u8; 16],
    function: extern "C" fn() -> i32,
}

/// First bytes of a record: a random number, followed by the version of the record's layout.
const MAGIC: [u8; 16] = *b"\x9d\x4e\xc7\x1b\x83\x2f\xa6\x50brigade\x01";

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entry").finish_non_exhaustive()
    }
}

impl Entry {
    /// Creates the record of a function, which returns the exit code of the process that calls it.
    #[must_use]
    pub const fn new(function: extern "C" fn() -> i32) -> Self {
        Self { magic: MAGIC, function }
    }

    /// Returns the location of the record, for [`Address::call`] in another process of this host.
    ///
    /// # Errors
    /// [`EntryError::Mappings`] when `/proc/self/maps` cannot be read, [`EntryError::NotInAFile`] when the record is
    /// not in a mapped file, or its file was deleted.
    pub fn address(&'static self) -> Result<Address, EntryError> {
        let here = std::ptr::from_ref(self).addr() as u64;
        let all = mappings()?;
        let around = all.iter().find(|it| it.range.contains(&here)).and_then(|it| it.file.as_ref());
        let file = around.ok_or(EntryError::NotInAFile)?;
        let base = base_of(&all, file).ok_or(EntryError::NotInAFile)?;
        Ok(Address { object: file.clone(), offset: here - base })
    }
}

/// Location of an [`Entry`]: a file, and the record's offset from the file's first byte in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Path of the program or shared library.
    pub object: PathBuf,
    /// Offset in bytes.
    pub offset: u64,
}

impl Address {
    /// Loads the shared library, calls the record's function and returns its result. The library stays loaded.
    ///
    /// # Errors
    /// [`EntryError::Read`] when the file cannot be found; [`EntryError::Load`] when it is not a shared library, or
    /// needs a library that is missing; [`EntryError::NoEntry`] when there is no record at the address;
    /// [`EntryError::Mappings`] when `/proc/self/maps` cannot be read.
    pub fn call(&self) -> Result<i32, EntryError> {
        let load = |source| EntryError::Load { object: self.object.clone(), source };
        // The kernel shows the path with all links resolved.
        let object = fs::canonicalize(&self.object)
            .map_err(|source| EntryError::Read { object: self.object.clone(), source })?;
        // SAFETY: the library's initialisers run. The user compiled the library, and a function of it requested this
        // call: the same as starting a program of the user's.
        let library = unsafe { Library::open(Some(&object), RTLD_NOW | RTLD_LOCAL) };
        // Never unloaded: threads and destructors of thread-locals may be left.
        let _ = library.map_err(load)?.into_raw();
        let no_entry = || EntryError::NoEntry { object: self.object.clone(), offset: self.offset };

        let all = mappings()?;
        let base = base_of(&all, &object).ok_or_else(no_entry)?;
        let start = base.checked_add(self.offset).ok_or_else(no_entry)?;
        let end = start.checked_add(size_of::<Entry>() as u64).ok_or_else(no_entry)?;
        let is_inside = |mapping: &Mapping| {
            mapping.is_readable
                && mapping.file.as_deref() == Some(&object)
                && mapping.range.start <= start
                && end <= mapping.range.end
        };
        if !all.iter().any(is_inside) || start % align_of::<Entry>() as u64 != 0 {
            return Err(no_entry());
        }
        let record = std::ptr::with_exposed_provenance::<Entry>(start as usize);
        // SAFETY: the bytes are in a readable mapping of the library, which is never unloaded, and aligned. Bytes of
        // any value are a valid array.
        let magic = unsafe { (&raw const (*record).magic).read() };
        if magic != MAGIC {
            return Err(no_entry());
        }
        // SAFETY: behind the magic number, which no other data has, stands the function pointer that `Entry::new` put
        // there; the layout is `repr(C)`, and its version is part of the number.
        let function = unsafe { (&raw const (*record).function).read() };
        Ok(function())
    }
}

/// Error of finding an entry's address, or of calling it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EntryError {
    /// The process cannot read its own memory map.
    #[error("cannot read /proc/self/maps: {0}")]
    Mappings(io::Error),
    /// The code is not in a file, or the file was deleted.
    #[error("the function is not in a file that another process can load; compile it again")]
    NotInAFile,
    /// The shared library cannot be found.
    #[error("cannot open the shared library {}: {source}", object.display())]
    Read {
        /// Path of the shared library.
        object: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The dynamic loader cannot load the file.
    #[error("cannot load the shared library {}: {source}", object.display())]
    Load {
        /// Path of the shared library.
        object: PathBuf,
        /// Error of the dynamic loader.
        source: libloading::Error,
    },
    /// The file has no record at the address: it is not the file of which the address was taken.
    #[error(
        "{} has no entry at offset {offset}: it was written by another version of Brigade, or replaced",
        object.display()
    )]
    NoEntry {
        /// Path of the shared library.
        object: PathBuf,
        /// Offset of the address in bytes.
        offset: u64,
    },
}

/// Returns the value of a function's own type, which has no size: the function as another process can create it.
///
/// Returns `None` for closures and function pointers, whose values belong to the caller's process.
///
/// ```
/// fn double(number: i32) -> i32 {
///     2 * number
/// }
/// fn again<F: Fn(i32) -> i32 + Copy + 'static>(_: F) -> Option<F> {
///     brigade_dylib_call::function()
/// }
/// assert_eq!(again(double).map(|function| function(4)), Some(8));
/// assert!(again(|number| number).is_none());
/// assert!(again(double as fn(i32) -> i32).is_none());
/// ```
#[must_use]
pub fn function<F, A, R>() -> Option<F>
where
    F: Fn(A) -> R + Copy + 'static,
{
    // Callable types without a size are those of functions and of closures. A closure without a size may have captured
    // a value without a size that only exists for a reason in the caller's process.
    if size_of::<F>() != 0 || std::any::type_name::<F>().contains("{{closure}}") {
        return None;
    }
    // SAFETY: F is the type of a function: it has one value, which has no state. An aligned dangling pointer is valid
    // for reads of no bytes.
    Some(unsafe { std::ptr::NonNull::<F>::dangling().read() })
}

fn mappings() -> Result<Vec<Mapping>, EntryError> {
    let text = fs::read("/proc/self/maps").map_err(EntryError::Mappings)?;
    Ok(mapping::parse(&text))
}

/// Returns the lowest address of a file's mappings.
fn base_of(all: &[Mapping], file: &Path) -> Option<u64> {
    let of_file = all.iter().filter(|it| it.file.as_deref() == Some(file));
    of_file.map(|it| it.range.start).min()
}
