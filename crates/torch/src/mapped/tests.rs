//! Files that are whole, cut short at the worst moment, and empty.

use std::fs::OpenOptions;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

use tempfile::TempDir;

use super::*;
use crate::memory_format::channels_last;

/// Values of no short period, so that a piece at a wrong place is seen.
fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|i| (i * 7 + i / 251 + i / 65_521) as u8).collect()
}

fn file(content: &[u8]) -> (TempDir, MappedFile) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, content).unwrap();
    (folder, MappedFile::open(path).unwrap())
}

fn cut(file: &MappedFile, bytes: u64) {
    OpenOptions::new().write(true).open(file.path()).unwrap().set_len(bytes).unwrap();
}

fn maps(file: &MappedFile) -> bool {
    let mapped = ffi::map_window(file.file.as_raw_fd(), 0, 1);
    !mapped.is_null()
}

#[test]
fn every_byte_comes_to_its_place() {
    let content = bytes(3 << 20);
    let (_folder, file) = file(&content);
    assert!(maps(&file), "nothing here is tested where nothing is mapped");
    // Smaller than the tensor, larger, and at places that are no page's.
    for window in [4096, 10_000, 1 << 20, 16 << 20] {
        let file = MappedFile::open(file.path()).unwrap().window(window);
        for (offset, count) in [(0, content.len()), (1, 300_001), (8191, 1 << 20), (77, 5), (9, 0)]
        {
            let mut tensor = Tensor::f_empty([count as i64], (Kind::Uint8, Device::Cpu)).unwrap();
            file.read_into(offset, &mut tensor).unwrap();
            let expected = &content[offset as usize..offset as usize + count];
            assert!(
                crate::elements::<u8>(&tensor).unwrap().to_vec() == expected,
                "{window} {offset}"
            );
            let mut mapped = vec![0; count];
            file.copy(offset, &mut mapped, &|| {}).unwrap();
            assert!(mapped == expected, "{window} {offset}");
            let crc = file.checksum(offset..offset + count as u64).unwrap();
            assert_eq!(crc.finalize(), crc32fast::hash(expected), "{window} {offset}");
        }
    }
}

#[test]
fn tensors_that_are_not_plain_have_the_same_values() {
    let (_folder, file) = file(&bytes(2 << 20));
    let path = file.path().to_owned();
    let plain = |offset, kind, size: &[i64]| {
        let mut tensor = Tensor::f_empty(size, (kind, Device::Cpu)).unwrap();
        file.read_into(offset, &mut tensor).unwrap();
        tensor
    };
    for window in [4096, 50_000, 16 << 20] {
        let file = MappedFile::open(&path).unwrap().window(window);
        // One row is more than the smallest window, and several are; also at an odd place.
        for size in [[2, 64, 32, 32], [64, 3, 5, 7], [1, 1, 1, 1], [3, 0, 2, 2]] {
            for offset in [0, 8, 13] {
                let expected = plain(offset, Kind::Int, &size);
                let empty = Tensor::f_zeros(size, (Kind::Int, Device::Cpu)).unwrap();
                let mut images = channels_last(&empty).unwrap();
                file.read_into(offset, &mut images).unwrap();
                assert_eq!(images, expected, "{size:?} at {offset}, windows of {window}");
                let mut wide = Tensor::f_zeros(size, (Kind::Int64, Device::Cpu)).unwrap();
                file.convert_into(offset, Kind::Int, &mut wide).unwrap();
                assert_eq!(wide, expected.to_kind(Kind::Int64), "{size:?} at {offset}");
            }
        }
        // Any byte but 0 is true.
        let mut truths = Tensor::f_zeros([1000, 100], (Kind::Bool, Device::Cpu)).unwrap();
        let mut turned = truths.f_zeros_like().unwrap().transpose(0, 1).contiguous();
        file.read_into(5, &mut truths).unwrap();
        file.read_into(5, &mut turned.f_t_().unwrap()).unwrap();
        let numbers = plain(5, Kind::Uint8, &[1000, 100]);
        assert_eq!(truths, numbers.ne(0));
        assert_eq!(turned, truths);
    }
}

#[test]
fn a_file_that_is_cut_while_it_is_mapped_is_an_error() {
    let content = bytes(1 << 20);
    // At a page, within one, and to nothing: within the last page there is no fault, only zeros.
    for left in [0, 4096, 700_001, (1 << 20) - 5] {
        for window in [64 << 10, 16 << 20] {
            let (_folder, file) = file(&content);
            let file = file.window(window);
            let mut into = vec![0; content.len()];
            let error = file.copy(0, &mut into, &|| cut(&file, left)).unwrap_err();
            assert!(
                matches!(error, Error::CutShort { expected, found, .. }
                    if expected == 1 << 20 && found == left),
                "{error}"
            );
            assert!(error.to_string().contains("was cut short while it was read"), "{error}");
            // And before anything is mapped.
            let mut tensor = Tensor::f_empty([1 << 20], (Kind::Uint8, Device::Cpu)).unwrap();
            assert!(matches!(file.read_into(0, &mut tensor), Err(Error::CutShort { .. })));
            assert!(matches!(file.checksum(0..1 << 20), Err(Error::CutShort { .. })));
        }
    }
}

#[test]
fn a_file_that_is_cut_and_written_again_is_an_error() {
    let content = bytes(1 << 20);
    let (_folder, file) = file(&content);
    let window = file.map(0, content.len()).unwrap().unwrap();
    cut(&file, 0);
    // SAFETY: the window is mapped.
    let last = unsafe { ((window.address() + content.len() - 1) as *const u8).read_volatile() };
    assert_eq!(last, 0, "zeros are in its place");
    cut(&file, content.len() as u64);
    let error = file.check(&window, 0, content.len()).unwrap_err();
    assert!(matches!(error, Error::Read { .. }), "{error}");
    drop(window);
    // The next window in its place is sound.
    let window = file.map(0, content.len()).unwrap().unwrap();
    file.check(&window, 0, content.len()).unwrap();
}

#[test]
fn many_threads_have_windows_of_their_own() {
    let content = bytes(1 << 20);
    let (_folder, whole) = file(&content);
    let whole = whole.window(300_000);
    let expected = crc32fast::hash(&content);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..20 {
                    assert_eq!(whole.checksum(0..1 << 20).unwrap().finalize(), expected);
                }
            });
            scope.spawn(|| {
                for _ in 0..20 {
                    let (_folder, file) = file(&content);
                    let mut into = vec![0; content.len()];
                    let outcome = file.copy(0, &mut into, &|| cut(&file, 9));
                    assert!(matches!(outcome, Err(Error::CutShort { found: 9, .. })));
                }
            });
        }
    });
}

/// Alone in its process: the others want windows, too.
#[test]
fn when_there_is_no_window_left_files_are_read() {
    if std::env::var_os(CHILD).is_none() {
        let ended = again("when_there_is_no_window_left_files_are_read", Path::new("alone"));
        assert!(ended.status.success(), "{ended:?}");
        return;
    }
    let content = bytes(1 << 20);
    let (_folder, file) = file(&content);
    let mut held = Vec::new();
    while let Some(window) = file.map(0, 4096.max(SMALL_BYTES)).unwrap() {
        held.push(window);
        assert!(held.len() < 1000);
    }
    assert_eq!(file.checksum(0..1 << 20).unwrap().finalize(), crc32fast::hash(&content));
    let mut into = vec![0; content.len()];
    file.copy(0, &mut into, &|| unreachable!()).unwrap();
    assert!(into == content);
    cut(&file, 5);
    let outcome = file.read(0, &mut into);
    assert!(matches!(outcome, Err(Error::CutShort { found: 5, .. })), "{outcome:?}");
    drop(held);
    assert!(maps(&file) || cfg!(not(target_os = "linux")));
}

#[test]
fn an_empty_file_has_nothing() {
    let (_folder, file) = file(&[]);
    assert_eq!(file.bytes(), 0);
    let mut nothing = Tensor::f_empty([0, 4], (Kind::Float, Device::Cpu)).unwrap();
    file.read_into(0, &mut nothing).unwrap();
    assert_eq!(file.checksum(0..0).unwrap().finalize(), 0);
    let mut one = Tensor::f_empty([1], (Kind::Float, Device::Cpu)).unwrap();
    let error = file.read_into(0, &mut one).unwrap_err();
    assert!(matches!(error, Error::CutShort { expected: 4, found: 0, .. }), "{error}");
    assert!(file.read_into(u64::MAX - 1, &mut one).is_err());
}

const CHILD: &str = "BRIGADE_TEST_MAPPED_FAULT";

/// One test in a process of its own.
fn again(name: &str, told: &Path) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("mapped::tests::{name}"), "--nocapture"])
        .env(CHILD, told)
        .output()
        .unwrap()
}

/// Faults where no window is. Does nothing unless it was started for that.
#[test]
fn child() {
    let Some(path) = std::env::var_os(CHILD) else { return };
    let foreign = File::open(path).unwrap();
    let (_folder, file) = file(&bytes(1 << 20));
    // One of ours is there at the same time, and has had its fault.
    let window = file.map(0, 1 << 20).unwrap().unwrap();
    cut(&file, 0);
    // SAFETY: a page of a file, mapped for reading, is only addressed below.
    let page = unsafe {
        nix::libc::mmap(
            std::ptr::null_mut(),
            4096,
            nix::libc::PROT_READ,
            nix::libc::MAP_SHARED,
            foreign.as_raw_fd(),
            0,
        )
    };
    assert_ne!(page, nix::libc::MAP_FAILED);
    // SAFETY: the window's pages are there, as zeros.
    assert_eq!(unsafe { (window.address() as *const u8).read_volatile() }, 0);
    println!("begins");
    // SAFETY: none: the file is empty, and the system is to end this process here.
    let found = unsafe { page.cast::<u8>().read_volatile() };
    println!("goes on with {found}");
}

#[test]
fn a_fault_elsewhere_ends_the_process_as_before() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().join("empty");
    std::fs::write(&empty, "").unwrap();
    let ended = again("child", &empty);
    let said = String::from_utf8_lossy(&ended.stdout);
    assert!(said.contains("begins") && !said.contains("goes on"), "{said}");
    assert_eq!(ended.status.signal(), Some(nix::libc::SIGBUS), "{ended:?}");
}
