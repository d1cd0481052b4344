//! The cache of the border's compiled C++ returns what was stored, or nothing.

#[path = "../../build/object_cache.rs"]
#[allow(dead_code, reason = "the user's folder is the build script's")]
mod cache;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use brigade_libtorch_setup::ObjectCache as Installer;
use cache::{Flags, Inputs, Label, ObjectCache, Toolchain};
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
        self.cache.store(key, None, &self.folder.path().join("compiled.a")).unwrap();
    }

    /// Puts the archive of a release into the cache, as `cargo xtask package` takes it from a build and `brigade setup`
    /// installs it. Returns its path there.
    fn ship(&self, label: &Label) -> PathBuf {
        let build = ObjectCache::at(self.folder.path().join("build"));
        build.store("exact", Some(label), &self.folder.path().join("compiled.a")).unwrap();
        let package = self.folder.path().join("package");
        fs::create_dir_all(package.join("share/brigade")).unwrap();
        let name = format!("brigade-torch-{}.objects", label.key);
        let carried = package.join("share/brigade").join(&name);
        fs::rename(self.folder.path().join("build/exact.objects"), &carried).unwrap();
        let objects = self.folder.path().join("objects");
        assert!(Installer::at(objects.clone()).install_from(&package.join("brigade")).unwrap());
        fs::remove_file(carried).unwrap();
        objects.join(name)
    }

    /// Loads a key; `None` if the cache does not have it, in which case no file may have been written.
    fn load(&self, key: &str) -> Option<Vec<u8>> {
        self.loaded(|cache, to| cache.load(key, to))
    }

    fn load_shipped(&self, wanted: &Label) -> Option<Vec<u8>> {
        self.loaded(|cache, to| cache.load_shipped(wanted, to))
    }

    fn loaded(&self, load: impl Fn(&ObjectCache, &Path) -> io::Result<bool>) -> Option<Vec<u8>> {
        let to = self.folder.path().join("loaded.a");
        let _ = fs::remove_file(&to);
        let is_loaded = load(&self.cache, &to).unwrap();
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

const ARCHIVE: &[u8] = b"!<arch>\nobjects\n\nof the border";

/// Label of a key, with the major version of g++ and libstdc++, and the minor version of glibc.
fn label(key: &str, gcc: u32, glibc: u32) -> Label {
    let toolchain = Toolchain::parse(&format!("toolchain {gcc} {gcc} 2 {glibc}")).unwrap();
    Label { key: key.to_owned(), toolchain }
}

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
    refuses_damage(&path, || fixture.load("a"));
    fixture.store("a");
    assert_eq!(fixture.load("a").as_deref(), Some(ARCHIVE));
}

/// Checks that nothing is loaded from a file that was cut, altered or extended.
#[track_caller]
fn refuses_damage(path: &Path, load: impl Fn() -> Option<Vec<u8>>) {
    let whole = fs::read(path).unwrap();
    for length in 0..whole.len() {
        fs::write(path, &whole[..length]).unwrap();
        assert_eq!(load(), None, "the first {length} bytes");
    }
    for index in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[index] ^= 1;
        fs::write(path, damaged).unwrap();
        assert_eq!(load(), None, "a bit of byte {index}");
    }
    fs::write(path, [&whole[..], b"more"].concat()).unwrap();
    assert_eq!(load(), None, "bytes at the end");
}

#[test]
fn an_archive_of_a_release_is_loaded_under_its_key_alone() {
    let fixture = Fixture::new();
    assert_eq!(fixture.load_shipped(&label("a", 12, 36)), None);
    let path = fixture.ship(&label("a", 12, 36));
    assert_eq!(fixture.load_shipped(&label("a", 12, 36)).as_deref(), Some(ARCHIVE));
    assert_eq!(fixture.load_shipped(&label("b", 12, 36)), None);
    assert_eq!(fixture.load("a"), None);
    // Under the name of another key.
    fs::rename(&path, path.with_file_name("brigade-torch-b.objects")).unwrap();
    assert_eq!(fixture.load_shipped(&label("b", 12, 36)), None);
}

#[test]
fn an_archive_of_a_release_needs_a_toolchain_that_is_as_new() {
    let fixture = Fixture::new();
    fixture.ship(&label("a", 12, 36));
    let is_used = |line: &str| {
        let toolchain = Toolchain::parse(line).unwrap_or_else(|| panic!("{line}"));
        fixture.load_shipped(&Label { key: "a".to_owned(), toolchain }).is_some()
    };
    for newer in ["12 12 2 36", "13 13 2 39", "15 15 3 0", "12 13 2 36"] {
        assert!(is_used(&format!("toolchain {newer}")), "{newer}");
    }
    for older in ["11 11 2 36", "12 12 2 35", "13 11 2 39", "11 12 2 39", "12 12 1 99"] {
        assert!(!is_used(&format!("toolchain {older}")), "{older}");
    }
}

#[test]
fn an_archive_of_a_release_that_is_damaged_or_has_no_label_is_not_loaded() {
    let fixture = Fixture::new();
    let wanted = label("a", 12, 36);
    let path = fixture.ship(&wanted);
    refuses_damage(&path, || fixture.load_shipped(&wanted));
    fixture.store("unlabelled");
    fs::rename(path.with_file_name("unlabelled.objects"), &path).unwrap();
    assert_eq!(fixture.load_shipped(&wanted), None);
    fixture.ship(&wanted);
    assert_eq!(fixture.load_shipped(&wanted).as_deref(), Some(ARCHIVE));
}

#[test]
fn a_compiler_says_what_it_links_with() {
    let said = "\n\ntoolchain 12 12 2 36\n";
    assert_eq!(Toolchain::parse(said), Some(label("a", 12, 36).toolchain));
    for other in [
        "",
        "toolchain",
        // Another C library, and another library of C++.
        "toolchain 12 12 __GLIBC__ __GLIBC_MINOR__\n",
        "toolchain 12 _GLIBCXX_RELEASE 2 36\n",
        "toolchain 12 12 2\n",
        "toolchain 12 12 2 36 1\n",
        "toolchain 12 12 2 -36\n",
        "toolchain 99999999999 12 2 36\n",
    ] {
        assert_eq!(Toolchain::parse(other), None, "{other:?}");
    }
    // The build of this test has asked its compiler, unless another program is set.
    if std::env::var_os("CXX").is_none() {
        let folder = TempDir::new().unwrap();
        let question = folder.path().join("question.cpp");
        fs::write(&question, Toolchain::QUESTION).unwrap();
        let output = Command::new("c++").args(["-E", "-P"]).arg(&question).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        let version = Command::new("c++").arg("--version").output().unwrap();
        let is_clang = String::from_utf8_lossy(&version.stdout).contains("clang");
        assert_eq!(Toolchain::parse(&said).is_none(), is_clang, "{said}");
    }
}

#[test]
fn flags_mean_the_same_in_other_folders_and_with_another_optimisation() {
    let flags = |text: &str, folders: [&str; 2]| {
        Flags::of(text.split(' ').map(OsStr::new), &folders.map(str::to_owned))
    };
    let (first, second) = (["/a/out", "/opt/torch"], ["/b/target", "/venv/torch"]);
    let release = flags("-O3 -fPIC -I /a/out/x -isystem /opt/torch/include", first).unwrap();
    let debug = flags("-O0 -fPIC -I /b/target/x -isystem /venv/torch/include", second).unwrap();
    assert_eq!(release.meaning, ["-fPIC", "-I", "<0>/x", "-isystem", "<1>/include"]);
    assert_eq!(release.meaning, debug.meaning);
    assert_eq!(
        (release.optimisation, debug.optimisation),
        (vec!["-O3".into()], vec!["-O0".into()])
    );
    let inside = flags("-I/a/out -I/a/out/kernels", ["/a/out", "/a/out/kernels"]).unwrap();
    let beside = flags("-I/b/target -I/b/kernels", ["/b/target", "/b/kernels"]).unwrap();
    assert_eq!(inside.meaning, beside.meaning);
    let other = flags("-O3 -fPIC -mavx2 -I /a/out/x -isystem /opt/torch/include", first);
    assert_ne!(other.unwrap().meaning, debug.meaning);
    assert_eq!(flags("-O3 -march=native", first), None);
}

#[test]
fn flags_of_the_users_are_found_in_each_variable() {
    let target = "x86_64-unknown-linux-gnu";
    let has_own_flags = |name: &str, value: &str| {
        cache::has_own_flags(target, |asked| (asked == name).then(|| value.to_owned()))
    };
    for name in [
        "CFLAGS",
        "CXXFLAGS",
        "HOST_CXXFLAGS",
        "TARGET_CXXFLAGS",
        "CXXFLAGS_x86_64-unknown-linux-gnu",
        "CXXFLAGS_x86_64_unknown_linux_gnu",
    ] {
        assert!(has_own_flags(name, "-O2 -g"), "{name}");
        assert!(!has_own_flags(name, " "), "{name}");
    }
    assert!(has_own_flags("CXX", "g++ -fsanitize=address"));
    assert!(!has_own_flags("CXX", "ccache g++-13"));
    assert!(!has_own_flags("CXXFLAGS_aarch64_unknown_linux_gnu", "-O2"));
    assert!(!has_own_flags("LDFLAGS", "-s"));
}

/// A package carries the archive: its texts must not name folders of the machine that has compiled it.
#[test]
fn the_archive_of_this_build_names_no_folder_of_this_machine() {
    let archive = fs::read(concat!(env!("OUT_DIR"), "/libbrigade_torch.a")).unwrap();
    let has = |text: &str| archive.windows(text.len()).any(|it| it == text.as_bytes());
    // What `__FILE__` becomes, in the messages of libtorch's checks.
    assert!(has("brigade-torch/cpp/"));
    let home = std::env::home_dir().map(|it| it.display().to_string()).unwrap_or_default();
    for folder in [env!("OUT_DIR"), env!("CARGO_MANIFEST_DIR"), home.as_str()] {
        assert!(folder.len() < 2 || !has(folder), "{folder}");
    }
}

#[test]
fn a_folder_that_cannot_be_written_is_an_error_and_is_read_all_the_same() {
    let fixture = Fixture::new();
    // A file in place of the folder: permissions do not stop root.
    let place = fixture.folder.path().join("file");
    fs::write(&place, "").unwrap();
    let cache = ObjectCache::at(place.join("objects"));
    cache.store("a", None, &fixture.folder.path().join("compiled.a")).unwrap_err();
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

#[test]
fn archives_of_two_releases_are_kept_beside_those_of_builds() {
    let fixture = Fixture::new();
    let shipped = ["r1", "r2", "r3"].map(|key| (key, fixture.ship(&label(key, 12, 36))));
    for (hours, (_, path)) in [30, 20, 10].into_iter().zip(&shipped) {
        set_age(path, hours);
    }
    // The oldest one is used again, which removes what is too much.
    assert!(fixture.load_shipped(&label("r1", 12, 36)).is_some());
    let kept = shipped.each_ref().map(|(_, path)| path.exists());
    assert_eq!(kept, [true, false, true]);
    // As many as are kept of builds.
    for index in 0..9 {
        fixture.store(&format!("{index:02}"));
    }
    assert_eq!(fixture.names().len(), 10, "{:?}", fixture.names());
    assert!(shipped[0].1.exists() && shipped[2].1.exists());
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
        // Left out of the contents: it differs.
        fs::write(folder.path().join("Cargo.toml"), folder.path().display().to_string()).unwrap();
        let mut contents = Inputs::new();
        contents.add_contents(folder.path(), |path| !path.ends_with("Cargo.toml")).unwrap();
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
