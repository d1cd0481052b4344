//! Tests of `brigade kernels`, with a library in NVRTC's place.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use brigade_dylib_call::Nvrtc;
use brigade_kernels::{Cache, FILES, Origin, Variant};
use tempfile::TempDir;

/// Compiles any text to its length, and refuses `sm_99`.
const STUB: &str = r#"
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned long length; int compiled; } *Program;
int nvrtcVersion(int* major, int* minor) { *major = 42; *minor = 7; return 0; }
int nvrtcCreateProgram(Program* p, const char* text, const char* n, int c, const char** h, const char** i) {
  *p = calloc(1, sizeof(**p));
  (*p)->length = strlen(text);
  return 0;
}
int nvrtcCompileProgram(Program p, int count, const char** options) {
  for (int i = 0; i < count; ++i) if (strstr(options[i], "sm_99")) return 6;
  return 0;
}
int nvrtcDestroyProgram(Program* p) { free(*p); return 0; }
int nvrtcGetProgramLogSize(Program p, unsigned long* size) { *size = 14; return 0; }
int nvrtcGetProgramLog(Program p, char* log) { memcpy(log, "no such sm_99", 14); return 0; }
int nvrtcGetCUBINSize(Program p, unsigned long* size) { *size = sizeof(p->length); return 0; }
int nvrtcGetCUBIN(Program p, char* code) { memcpy(code, &p->length, sizeof(p->length)); return 0; }
"#;

/// Builds the library with the C compiler that also links Rust programs.
fn stub(folder: &Path) -> PathBuf {
    let (source, library) = (folder.join("stub.c"), folder.join("libnvrtc.so.42"));
    fs::write(&source, STUB).unwrap();
    let arguments = ["-shared", "-fPIC", "-o", library.to_str().unwrap(), source.to_str().unwrap()];
    let output = Command::new("cc").args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    library
}

fn build(library: &Path, folder: &Path, arch: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_brigade"))
        .args(["kernels", "--build", "--arch", arch, "--folder", folder.to_str().unwrap()])
        .args(["--nvrtc", library.to_str().unwrap()])
        .output()
        .unwrap()
}

#[test]
fn a_program_finds_the_files_that_the_command_has_written() {
    let root = TempDir::new().unwrap();
    let (library, folder) = (stub(root.path()), root.path().join("kernels"));
    let output = build(&library, &folder, "90,8.0");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("norm_relu bfloat16 sm_80: compiled"), "{text}");
    assert!(text.contains("kernels by NVRTC 42.7 are in "), "{text}");
    // As a training program looks for them (crates/torch/src/kernels.rs).
    let (cache, compiler) = (Cache::at(folder.clone()), Nvrtc::load(&library).unwrap());
    let mut files = 0;
    for capability in [80, 90] {
        for file in FILES {
            for &element in file.elements {
                let variant = Variant { file, element, capability };
                let code = cache.code(&variant, &compiler).unwrap();
                assert_eq!(code.origin, Origin::Cached, "{variant:?}");
                assert_eq!(code.bytes, variant.source().len().to_le_bytes());
                files += 1;
            }
        }
    }
    assert_eq!(fs::read_dir(&folder).unwrap().count(), files);
    let again = build(&library, &folder, "90");
    let text = String::from_utf8_lossy(&again.stdout);
    assert!(text.contains(": already compiled") && !text.contains(": compiled"), "{text}");
}

#[test]
fn wrong_arguments_and_compilers_are_errors() {
    let root = TempDir::new().unwrap();
    let (library, folder) = (stub(root.path()), root.path().join("kernels"));
    let file = root.path().join("file");
    fs::write(&file, "").unwrap();
    let cases = [
        (&library, &folder, "75", "need compute capability 8.0 or more"),
        (&library, &folder, "ninety", "not a compute capability"),
        (
            &library,
            &folder,
            "99",
            "cannot be compiled for sm_99: nvrtcCompileProgram returned error 6",
        ),
        (&file, &folder, "90", "cannot load NVRTC from"),
        (&library, &file, "90", "cannot keep compiled kernels in"),
    ];
    for (library, folder, arch, message) in cases {
        let output = build(library, folder, arch);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains(message), "{arch}: {error}");
    }
}
