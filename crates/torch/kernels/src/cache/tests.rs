//! Tests of the cache with a compiler that counts its calls.

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::file::{Element, FILES};

/// Compiler whose code names its input.
#[derive(Default)]
struct Counting {
    calls: AtomicUsize,
    version: (u32, u32),
    /// Time of one call.
    duration: Duration,
    fails: bool,
}

impl Counting {
    fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }
}

impl Compiler for Counting {
    fn version(&self) -> (u32, u32) {
        self.version
    }

    fn compile(&self, variant: &Variant) -> Result<Vec<u8>, CompileError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        thread::sleep(self.duration);
        if self.fails {
            let messages = "an error".to_owned();
            return Err(CompileError { name: variant.source_name(), capability: 90, messages });
        }
        Ok(format!("code {:?} {:?}", variant.options(), self.version).into_bytes())
    }
}

fn variant() -> Variant {
    Variant { file: &FILES[0], element: Element::Bfloat16, capability: 90 }
}

/// Names of the files in a folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn code_is_compiled_once_and_read_from_then_on() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("a/b");
    let (cache, compiler) = (Cache::at(folder.clone()), Counting::default());
    let first = cache.code(&variant(), &compiler).unwrap();
    assert_eq!((first.origin, &first.remark), (Origin::Compiled, &None));
    let again = cache.code(&variant(), &compiler).unwrap();
    assert_eq!(again, Code { origin: Origin::Cached, ..first });
    assert_eq!(compiler.calls(), 1);
    assert_eq!(names(&folder), [variant().file_name((0, 0))]);
}

#[test]
fn another_compiler_or_capability_has_code_of_its_own() {
    let root = tempfile::tempdir().unwrap();
    let cache = Cache::at(root.path().to_owned());
    let (old, new) = (Counting::default(), Counting { version: (13, 1), ..Counting::default() });
    let of_old = cache.code(&variant(), &old).unwrap();
    assert_ne!(cache.code(&variant(), &new).unwrap().bytes, of_old.bytes);
    let other = Variant { capability: 100, ..variant() };
    assert_ne!(cache.code(&other, &old).unwrap().bytes, of_old.bytes);
    assert_eq!(cache.code(&variant(), &old).unwrap().bytes, of_old.bytes);
    assert_eq!((old.calls(), new.calls()), (2, 1));
}

#[test]
fn an_entry_that_is_not_intact_is_compiled_again_with_one_remark() {
    let root = tempfile::tempdir().unwrap();
    let (cache, compiler) = (Cache::at(root.path().to_owned()), Counting::default());
    let good = cache.code(&variant(), &compiler).unwrap().bytes;
    let path = root.path().join(variant().file_name((0, 0)));
    let entry = fs::read(&path).unwrap();
    let other = Variant { element: Element::Float16, ..variant() };
    cache.code(&other, &compiler).unwrap();
    let foreign = fs::read(root.path().join(other.file_name((0, 0)))).unwrap();
    let mut flipped = entry.clone();
    *flipped.last_mut().unwrap() ^= 1;
    let longer = [&entry[..], b"x"].concat();
    let cases: [&[u8]; 7] =
        [b"", &entry[..40], &entry[..HEAD], &entry[..entry.len() - 1], &flipped, &longer, &foreign];
    for (i, damaged) in cases.into_iter().enumerate() {
        fs::write(&path, damaged).unwrap();
        let before = compiler.calls();
        let code = cache.code(&variant(), &compiler).unwrap();
        assert_eq!((&code.bytes, code.origin), (&good, Origin::Compiled), "case {i}");
        let remark = code.remark.unwrap();
        assert!(remark.contains("written again") && !remark.contains('\n'), "{remark}");
        assert_eq!(compiler.calls(), before + 1);
        assert_eq!(fs::read(&path).unwrap(), entry, "case {i}");
        assert_eq!(cache.code(&variant(), &compiler).unwrap().remark, None);
        assert_eq!(compiler.calls(), before + 1);
    }
}

#[test]
fn threads_that_start_together_compile_once() {
    let root = tempfile::tempdir().unwrap();
    let cache = Cache::at(root.path().to_owned());
    let compiler = Counting { duration: Duration::from_millis(50), ..Counting::default() };
    let start = Barrier::new(8);
    let all: Vec<Code> = thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    start.wait();
                    cache.code(&variant(), &compiler).unwrap()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(all.iter().all(|code| code.bytes == all[0].bytes && code.remark.is_none()));
    assert_eq!(compiler.calls(), 1);
    assert_eq!(names(root.path()), [variant().file_name((0, 0))]);
}

#[test]
fn a_process_that_holds_the_lock_for_too_long_is_not_waited_for() {
    let root = tempfile::tempdir().unwrap();
    let cache = Cache { folder: Some(root.path().to_owned()), patience: Duration::from_millis(20) };
    let path = root.path().join(variant().file_name((0, 0))).with_extension("lock");
    let held = File::create(&path).unwrap();
    held.lock().unwrap();
    let compiler = Counting::default();
    assert_eq!(cache.code(&variant(), &compiler).unwrap().origin, Origin::Compiled);
    assert_eq!(cache.code(&variant(), &compiler).unwrap().origin, Origin::Cached);
}

#[test]
fn a_folder_that_cannot_be_made_costs_only_time() {
    let root = tempfile::tempdir().unwrap();
    // Also fails for root, who may write to any folder.
    let file = root.path().join("file");
    fs::write(&file, "").unwrap();
    let (cache, compiler) = (Cache::at(file.join("kernels")), Counting::default());
    for calls in 1..3 {
        let code = cache.code(&variant(), &compiler).unwrap();
        assert_eq!((code.origin, compiler.calls()), (Origin::Compiled, calls));
        assert!(code.remark.is_some_and(|it| it.contains("cannot keep")), "a remark");
    }
}

#[test]
fn a_write_that_fails_costs_only_time_and_leaves_no_temporary_file() {
    let root = tempfile::tempdir().unwrap();
    let (cache, compiler) = (Cache::at(root.path().to_owned()), Counting::default());
    let name = variant().file_name((0, 0));
    // The entry cannot be renamed to a folder with files.
    fs::create_dir(root.path().join(&name)).unwrap();
    fs::write(root.path().join(&name).join("file"), "").unwrap();
    let code = cache.code(&variant(), &compiler).unwrap();
    assert_eq!(code.origin, Origin::Compiled);
    assert!(code.remark.is_some_and(|it| it.contains("cannot keep")), "a remark");
    assert_eq!(names(root.path()), [name]);
}

#[test]
fn an_error_of_the_compiler_leaves_nothing_behind() {
    let root = tempfile::tempdir().unwrap();
    let cache = Cache::at(root.path().to_owned());
    let broken = Counting { fails: true, ..Counting::default() };
    let error = cache.code(&variant(), &broken).unwrap_err();
    let name = variant().source_name();
    assert_eq!(error.to_string(), format!("{name} cannot be compiled for sm_90: an error"));
    assert!(names(root.path()).is_empty(), "{:?}", names(root.path()));
}
