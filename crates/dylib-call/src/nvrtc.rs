//! NVRTC, NVIDIA's compiler of CUDA C++ at run time: a shared library that is loaded when it is needed.

use std::error::Error as _;
use std::ffi::{CString, c_char, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::ptr;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW, Symbol};

/// NVRTC in a shared library. Several threads can compile at a time. It needs no GPU.
pub struct Nvrtc {
    functions: Functions,
    version: (u32, u32),
}

impl std::fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nvrtc").field("version", &self.version).finish_non_exhaustive()
    }
}

/// Error of loading NVRTC, or of compiling with it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NvrtcError {
    /// The library cannot be loaded, or is another one.
    #[error("cannot load NVRTC from {}: {reason}", library.display())]
    Load {
        /// Path of the shared library.
        library: PathBuf,
        /// Message of the dynamic loader.
        reason: String,
    },
    /// The text, its name or an option contains a byte that is zero.
    #[error("the text to compile contains a zero byte")]
    ZeroByte,
    /// A function of NVRTC failed.
    #[error("{function} returned error {code}{}{log}", if log.is_empty() { "" } else { ":\n" })]
    Failed {
        /// Name of the function.
        function: &'static str,
        /// Its result.
        code: i32,
        /// Messages of the compiler.
        log: String,
    },
}

/// Compilation in NVRTC.
type Program = *mut c_void;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Read = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;

struct Functions {
    create: Symbol<Create>,
    compile: Symbol<Compile>,
    destroy: Symbol<unsafe extern "C" fn(*mut Program) -> c_int>,
    log_size: Symbol<Size>,
    log: Symbol<Read>,
    code_size: Symbol<Size>,
    code: Symbol<Read>,
}

impl Nvrtc {
    /// Loads the compiler from `libnvrtc.so`, or from a library that is linked with it. The library stays loaded.
    ///
    /// # Errors
    /// Fails if the library cannot be loaded or has no NVRTC.
    pub fn load(library: &Path) -> Result<Self, NvrtcError> {
        let failed = |error: libloading::Error| NvrtcError::Load {
            library: library.to_owned(),
            // The error itself only names the function.
            reason: error.source().map_or_else(|| error.to_string(), ToString::to_string),
        };
        // NVRTC opens the library of its built-in functions by name. Python's packages have both in one folder, which
        // the dynamic loader does not search.
        for built_ins in built_ins(library) {
            // SAFETY: NVIDIA's library of data; a failure is found when it is needed.
            if let Ok(loaded) = unsafe { Library::open(Some(&built_ins), RTLD_NOW | RTLD_GLOBAL) } {
                let _ = loaded.into_raw();
            }
        }
        // SAFETY: the library's initialisers run. It is NVIDIA's, or libtorch's own.
        let loaded =
            unsafe { Library::open(Some(library), RTLD_NOW | RTLD_LOCAL) }.map_err(failed)?;
        // SAFETY: the types are those of nvrtc.h, which have not changed since CUDA 11.1.
        let functions = unsafe { Functions::of(&loaded) }.map_err(failed)?;
        // SAFETY: the type is that of nvrtc.h.
        let version = unsafe {
            loaded.get::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int>(b"nvrtcVersion\0")
        }
        .map_err(failed)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both places are valid.
        check("nvrtcVersion", unsafe { version(&raw mut major, &raw mut minor) })?;
        // Never unloaded: the functions stay valid.
        let _ = loaded.into_raw();
        let version = (major.unsigned_abs(), minor.unsigned_abs());
        Ok(Self { functions, version })
    }

    /// Returns the major and minor version, such as `(13, 0)`.
    #[must_use]
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// Compiles a text of CUDA C++ and returns the machine code (cubin). `name` stands in messages. The options must
    /// contain a real architecture, such as `--gpu-architecture=sm_90`.
    ///
    /// # Errors
    /// Fails with the compiler's messages.
    pub fn compile(
        &self,
        text: &str,
        name: &str,
        options: &[String],
    ) -> Result<Vec<u8>, NvrtcError> {
        Ok(self.compile_with_log(text, name, options)?.0)
    }

    /// Compiles like [`compile`](Self::compile), and also returns the compiler's messages: with the option
    /// `--ptxas-options=-v`, the registers and spilled bytes of each kernel.
    ///
    /// # Errors
    /// Fails with the compiler's messages.
    pub fn compile_with_log(
        &self,
        text: &str,
        name: &str,
        options: &[String],
    ) -> Result<(Vec<u8>, String), NvrtcError> {
        let zero_ended = |text: &str| CString::new(text).map_err(|_| NvrtcError::ZeroByte);
        let (text, name) = (zero_ended(text)?, zero_ended(name)?);
        let options = options.iter().map(|it| zero_ended(it)).collect::<Result<Vec<_>, _>>()?;
        let pointers: Vec<_> = options.iter().map(|it| it.as_ptr()).collect();
        let count = c_int::try_from(pointers.len()).map_err(|_| NvrtcError::ZeroByte)?;
        let mut program: Program = ptr::null_mut();
        // SAFETY: the texts end with zero and live until the call returns; there are no headers.
        let created = unsafe {
            (self.functions.create)(
                &raw mut program,
                text.as_ptr(),
                name.as_ptr(),
                0,
                ptr::null(),
                ptr::null(),
            )
        };
        check("nvrtcCreateProgram", created)?;
        let program = Owned { program, functions: &self.functions };
        // SAFETY: the program is valid, and the options end with zero.
        let code = unsafe { (self.functions.compile)(program.program, count, pointers.as_ptr()) };
        let log = program.read("nvrtcGetProgramLog", &self.functions.log_size, &self.functions.log);
        let log = log.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
        let log = log.trim_end_matches('\0').trim().to_owned();
        if code != 0 {
            return Err(NvrtcError::Failed { function: "nvrtcCompileProgram", code, log });
        }
        let code =
            program.read("nvrtcGetCUBIN", &self.functions.code_size, &self.functions.code)?;
        Ok((code, log))
    }
}

impl Functions {
    /// # Safety
    /// The library's functions of these names must have the types of nvrtc.h.
    unsafe fn of(library: &Library) -> Result<Self, libloading::Error> {
        // SAFETY: the caller's.
        unsafe {
            Ok(Self {
                create: library.get(b"nvrtcCreateProgram\0")?,
                compile: library.get(b"nvrtcCompileProgram\0")?,
                destroy: library.get(b"nvrtcDestroyProgram\0")?,
                log_size: library.get(b"nvrtcGetProgramLogSize\0")?,
                log: library.get(b"nvrtcGetProgramLog\0")?,
                code_size: library.get(b"nvrtcGetCUBINSize\0")?,
                code: library.get(b"nvrtcGetCUBIN\0")?,
            })
        }
    }
}

struct Owned<'a> {
    program: Program,
    functions: &'a Functions,
}

impl Owned<'_> {
    fn read(
        &self,
        function: &'static str,
        size_of: &Symbol<Size>,
        read: &Symbol<Read>,
    ) -> Result<Vec<u8>, NvrtcError> {
        let mut size = 0;
        // SAFETY: the program is valid.
        check(function, unsafe { size_of(self.program, &raw mut size) })?;
        let mut bytes = vec![0u8; size];
        // SAFETY: there is room for as many bytes as NVRTC has reported.
        check(function, unsafe { read(self.program, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        // SAFETY: the program is valid, and not used any more.
        let _ = unsafe { (self.functions.destroy)(&raw mut self.program) };
    }
}

fn check(function: &'static str, code: c_int) -> Result<(), NvrtcError> {
    if code == 0 { Ok(()) } else { Err(NvrtcError::Failed { function, code, log: String::new() }) }
}

/// Returns the libraries of built-in functions in NVRTC's folder.
fn built_ins(library: &Path) -> Vec<PathBuf> {
    let entries = library.parent().and_then(|folder| fs::read_dir(folder).ok());
    let paths = entries.into_iter().flatten().flatten().map(|entry| entry.path());
    paths
        .filter(|path| {
            let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
            name.starts_with("libnvrtc-builtins") && !name.contains(".alt.")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_nvrtc_is_an_error() {
        let error = Nvrtc::load(Path::new("/nothing/libnvrtc.so")).unwrap_err().to_string();
        assert!(error.contains("cannot load NVRTC from /nothing/libnvrtc.so"), "{error}");
        // The C library is loaded already, under this name.
        let error = Nvrtc::load(Path::new("libc.so.6")).unwrap_err().to_string();
        assert!(error.contains("nvrtc"), "{error}");
    }
}
