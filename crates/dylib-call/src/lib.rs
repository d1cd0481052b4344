//! Calls a function of a shared library that another process has found.
//!
//! A notebook's kernel compiles each cell to a shared library and loads it. The ranks of a function in that cell are
//! other processes that load the same file: nothing is compiled again, and no state of the notebook's process is
//! inherited, as it would be by `fork`. [`Entry`] is a record in the library that says where its function is;
//! [`Address`] names the record for another process, which checks it before it calls the function.
//!
//! This is the second crate with unsafe code, beside the border with libtorch, because the program that loads such
//! a library does not link libtorch itself.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

mod mapping;

use mapping::Mapping;

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
    /// Makes the record of a function, which returns the exit code of the process that calls it.
    #[must_use]
    pub const fn new(function: extern "C" fn() -> i32) -> Self {
        Self { magic: MAGIC, function }
    }

    /// Returns where the record is, for [`Address::call`] in another process of this host.
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

/// Where an [`Entry`] is: a file, and the record's distance from the file's first byte in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// The program or shared library.
    pub object: PathBuf,
    /// In bytes.
    pub offset: u64,
}

impl Address {
    /// Loads the shared library and calls the record's function; returns what it returns. The library stays loaded.
    ///
    /// # Errors
    /// [`EntryError::Load`] when the file is no shared library, or lacks one that it needs;
    /// [`EntryError::NoEntry`] when there is no record at the address; [`EntryError::Mappings`].
    pub fn call(&self) -> Result<i32, EntryError> {
        let load = |source| EntryError::Load { object: self.object.clone(), source };
        // The path that the kernel will show.
        let object = fs::canonicalize(&self.object)
            .map_err(|source| EntryError::Read { object: self.object.clone(), source })?;
        // SAFETY: the library's initialisers run. It is one that the user has compiled and whose own function asked
        // for this call: the same as starting a program of the user's.
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

/// Why an entry has no address, or cannot be called.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EntryError {
    /// The process cannot see its own memory map.
    #[error("cannot read /proc/self/maps: {0}")]
    Mappings(io::Error),
    /// The code is not in a file, or no longer.
    #[error("the function is not in a file that another process can load; compile it again")]
    NotInAFile,
    /// The file cannot be found.
    #[error("cannot open the shared library {}: {source}", object.display())]
    Read {
        /// The file.
        object: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The dynamic loader refuses the file.
    #[error("cannot load the shared library {}: {source}", object.display())]
    Load {
        /// The file.
        object: PathBuf,
        /// The loader's answer.
        source: libloading::Error,
    },
    /// Another file than the one that the address is of.
    #[error(
        "{} has no entry at offset {offset}: it was written by another version of Brigade, or replaced",
        object.display()
    )]
    NoEntry {
        /// The file.
        object: PathBuf,
        /// In bytes.
        offset: u64,
    },
}

/// Returns a value of a function's own type, which has no size: the function in another process.
///
/// `None` for closures and function pointers: what they hold is the caller's.
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
    // Types without a size that can be called are those of functions and of closures. A closure without a size may
    // have captured a value without a size that stands for a fact of the caller's process.
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

/// The lowest address of a file's mappings.
fn base_of(all: &[Mapping], file: &Path) -> Option<u64> {
    let of_file = all.iter().filter(|it| it.file.as_deref() == Some(file));
    of_file.map(|it| it.range.start).min()
}
