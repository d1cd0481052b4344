//! The cache of the border's compiled C++ returns what was stored, or nothing.

#[path = "../../build/object_cache.rs"]
#[allow(dead_code, reason = "the user's folder is the build script's")]
mod cache;

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, SystemTime};

use cache::{Inputs, ObjectCache};
use tempfile::TempDir;

/// Archive of a compiler, in a folder with a cache.
struct Fixture {
    folder: TempDir,
    cache: ObjectCache,
}

impl Fixture {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        fs::write(folder.path().join("compiled.a"), ARCHIVE).unwrap();
        let cache = ObjectCache::at(folder.path().join("objects"));
        Self { folder, cache }
    }

    fn store(&self, key: &str) {
        self.cache.store(key, &self.folder.path().join("compiled.a")).unwrap();
    }

    /// Loads a key; `None` if the cache does not have it, in which case no file may have been written.
    fn load(&self, key: &str) -> Option<Vec<u8>> {
        let to = self.folder.path().join("loaded.a");
        let _ = fs::remove_file(&to);
        let is_loaded = self.cache.load(key, &to).unwrap();
        assert_eq!(is_loaded, to.exists());
        is_loaded.then(|| fs::read(to).unwrap())
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.path().join("objects")).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

const ARCHIVE: &[u8] = b"!<arch>\nobjects of the border";

#[test]
fn a_stored_archive_is_loaded_under_its_key_alone() {
    let fixture = Fixture::new();
    assert_eq!(fixture.load("a"), None);
    fixture.store("a");
    assert_eq!(fixture.load("a").as_deref(), Some(ARCHIVE));
    assert_eq!(fixture.load("b"), None);
    assert_eq!(fixture.names(), ["a.objects"]);
}

#[test]
fn a_damaged_archive_is_not_loaded_and_is_replaced() {
    let fixture = Fixture::new();
    fixture.store("a");
    let path = fixture.folder.path().join("objects/a.objects");
    let whole = fs::read(&path).unwrap();
    for length in 0..whole.len() {
        fs::write(&path, &whole[..length]).unwrap();
        assert_eq!(fixture.load("a"), None, "the first {length} bytes");
    }
    for index in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[index] ^= 1;
        fs::write(&path, damaged).unwrap();
        assert_eq!(fixture.load("a"), None, "a bit of byte {index}");
    }
    fs::write(&path, [&whole[..], b"more"].concat()).unwrap();
    assert_eq!(fixture.load("a"), None, "bytes at the end");
    fixture.store("a");
    assert_eq!(fixture.load("a").as_deref(), Some(ARCHIVE));
}

#[test]
fn a_folder_that_cannot_be_written_is_an_error_and_is_read_all_the_same() {
    let fixture = Fixture::new();
    // A file in place of the folder: permissions do not stop root.
    let place = fixture.folder.path().join("file");
    fs::write(&place, "").unwrap();
    let cache = ObjectCache::at(place.join("objects"));
    cache.store("a", &fixture.folder.path().join("compiled.a")).unwrap_err();
    assert!(!cache.load("a", &fixture.folder.path().join("loaded.a")).unwrap());
}

#[test]
fn the_least_recently_used_archives_and_abandoned_files_are_removed() {
    let fixture = Fixture::new();
    let objects = fixture.folder.path().join("objects");
    for index in 0..8 {
        let key = format!("{index:02}");
        fixture.store(&key);
        set_age(&objects.join(format!("{key}.objects")), 100 - index);
    }
    fs::write(objects.join("x.1.unfinished"), "").unwrap();
    set_age(&objects.join("x.1.unfinished"), 2);
    fs::write(objects.join("y.2.unfinished"), "").unwrap();
    // The oldest one is used again.
    assert!(fixture.load("00").is_some());
    fixture.store("new");
    let names = fixture.names();
    assert_eq!(names.len(), 9, "{names:?}");
    assert!(names.contains(&"00.objects".to_owned()), "{names:?}");
    assert!(!names.contains(&"01.objects".to_owned()), "{names:?}");
    assert!(names.contains(&"y.2.unfinished".to_owned()), "{names:?}");
}

/// Sets the time at which a file was last used, in hours before now.
fn set_age(path: &Path, hours: u64) {
    let time = SystemTime::now() - Duration::from_secs(3600 * hours);
    File::options().append(true).open(path).unwrap().set_modified(time).unwrap();
}

#[test]
fn each_input_changes_the_key() {
    let key = |inputs: &[(&str, &str)]| {
        let mut hash = Inputs::new();
        for (name, text) in inputs {
            hash.add(name, text.as_bytes());
        }
        hash.key()
    };
    let all = [
        key(&[]),
        key(&[("flag", "")]),
        key(&[("flag", "-O3")]),
        key(&[("flag", "-O2")]),
        key(&[("flag", "-O"), ("flag", "3")]),
        key(&[("fla", "g-O3")]),
        key(&[("flag", "-O3"), ("flag", "")]),
    ];
    for (index, key) in all.iter().enumerate() {
        assert_eq!(key.len(), 64);
        assert!(!all[..index].contains(key), "inputs {index} have the key of others");
    }
    assert_eq!(all[2], key(&[("flag", "-O3")]));
}

#[test]
fn a_text_changes_the_key_and_the_place_of_its_folder_does_not() {
    let tree = |text: &str, header: &str| {
        let folder = TempDir::new().unwrap();
        fs::create_dir(folder.path().join("sub")).unwrap();
        fs::write(folder.path().join("a.cpp"), text).unwrap();
        fs::write(folder.path().join("sub/b.h"), header).unwrap();
        let mut contents = Inputs::new();
        contents.add_contents(folder.path()).unwrap();
        let mut sizes = Inputs::new();
        sizes.add_sizes(folder.path()).unwrap();
        (contents.key(), sizes.key())
    };
    let first = tree("int a;", "int b;");
    assert_eq!(first, tree("int a;", "int b;"));
    let same_sizes = tree("int a;", "int c;");
    assert_ne!(first.0, same_sizes.0);
    assert_eq!(first.1, same_sizes.1);
    let other_sizes = tree("int a;", "int bb;");
    assert!(first.0 != other_sizes.0 && first.1 != other_sizes.1);
}
