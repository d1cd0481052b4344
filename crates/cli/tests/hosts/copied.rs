//! `--sync`: programs, libraries and brigade itself, copied where they are missing.

#![allow(clippy::unwrap_used)] // clippy.toml allows it in tests, but knows only functions marked so

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::site::{BRIGADE, Site, site};

#[test]
fn programs_and_libraries_are_copied_where_they_are_missing() {
    let Some(site) = site(3) else { return };
    let Some(private) = build_with_library(&site) else { return };
    let built = Path::new(BRIGADE).parent().unwrap();
    // node2 has nothing, node3 has another library of that name.
    site.host(1).hide(built);
    site.host(1).hide(&private);
    site.host(2).hide(&private);
    let other = private.join("lib/libgreet.so");
    site.host(2).sh(&format!(
        "mkdir {0}/lib; echo broken >{1}",
        private.display(),
        other.display()
    ));

    let program = private.join("train");
    let program = program.to_str().unwrap();
    let missing = site.launch("node1:1,node2:1").args([program]).run();
    assert_eq!(missing.code, 127, "{}", missing.stderr);

    let launch = || site.launch("node1:1,node2:1,node3:2").args(["--sync", program, "a b"]);
    let first = launch().run();
    assert_eq!(first.code, 0, "{}", first.stderr);
    let expected = [
        "[node1:0] rank 0: a b",
        "[node2:1] rank 1: a b",
        "[node3:2] rank 2: a b",
        "[node3:3] rank 3: a b",
    ];
    assert_eq!(first.lines(), expected);
    let mut said: Vec<&str> =
        first.stderr.lines().map(|it| it.split(" (").next().unwrap()).collect();
    said.sort_unstable();
    let copying = |host: &str, what: &str| format!("brigade: {host}: copying {what}");
    let expected = [
        copying("node2", "brigade"),
        copying("node2", "libgreet.so"),
        copying("node2", "train"),
        copying("node3", "libgreet.so"),
        copying("node3", "train"),
    ];
    assert_eq!(said, expected);

    // The second time everything is there.
    let second = launch().run();
    assert_eq!((second.code, second.stderr.as_str()), (0, ""));
    assert_eq!(second.lines(), first.lines());

    // No room for a copy.
    let cache = site.host(1).home().join(".cache/brigade/sync");
    site.host(1).mount_small(&cache, "64k");
    let full = launch().run();
    assert_eq!((full.code, full.stdout.as_str()), (1, ""));
    assert!(full.stderr.contains("No space left on device"), "{}", full.stderr);
    site.host(1).sh(&format!("umount {}", cache.display()));

    // A program that has been built anew is copied anew, the library is not.
    let source = private.join("train.c");
    fs::write(&source, fs::read_to_string(&source).unwrap().replace("rank", "new rank")).unwrap();
    assert!(compile(&private));
    let third = launch().run();
    assert_eq!(third.lines()[1], "[node2:1] new rank 1: a b", "{}", third.stderr);
    assert!(!third.stderr.contains("libgreet"), "{}", third.stderr);
}

/// A program and a library in a folder of its own, to which the program's run path leads; `None`
/// where there is no compiler.
fn build_with_library(site: &Site) -> Option<PathBuf> {
    let private = site.network.folder().join("private");
    fs::create_dir_all(private.join("lib")).unwrap();
    let library = "const char *greet(void) { return getenv(\"RANK\"); }\n";
    fs::write(private.join("greet.c"), format!("#include <stdlib.h>\n{library}")).unwrap();
    let program = "#include <stdio.h>\nconst char *greet(void);\n\
                   int main(int n, char **a) { printf(\"rank %s: %s\\n\", greet(), a[1]); }\n";
    fs::write(private.join("train.c"), program).unwrap();
    if !compile(&private) {
        eprintln!("skipped: there is no C compiler");
        return None;
    }
    Some(private)
}

fn compile(folder: &Path) -> bool {
    let script = "set -e; cc -shared -fPIC -o lib/libgreet.so greet.c; \
                  cc -o train.new train.c -Llib -lgreet \"-Wl,-rpath,$PWD/lib\"; mv train.new train";
    let status = Command::new("sh").args(["-c", script]).current_dir(folder).status();
    status.is_ok_and(|status| status.success())
}
