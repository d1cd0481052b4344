//! Tests of `--sync`: programs, libraries, Python sources and brigade itself are copied where they are missing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use brigade_test_needs::needs;

use crate::job::BRIGADE;
use crate::site::{Site, site};

#[needs(Hosts)]
fn programs_and_libraries_are_copied_where_they_are_missing() {
    let site = site(3);
    let private = build_with_library(&site);
    let built = Path::new(BRIGADE).parent().unwrap();
    // node2 has neither, node3 has another library of that name.
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
    // Of a copy that takes long, lines with its progress and its end follow.
    let begun = first.stderr.lines().filter(|it| it.contains(": copying "));
    let mut said: Vec<&str> =
        begun.filter_map(|it| it.split_once(" (")).map(|(begun, _)| begun).collect();
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

    // The second time nothing is missing.
    let second = launch().run();
    assert_eq!((second.code, second.stderr.as_str()), (0, ""));
    assert_eq!(second.lines(), first.lines());

    // No space for a copy.
    let cache = site.host(1).home().join(".cache/brigade/sync");
    site.host(1).mount_small(&cache, "64k");
    let full = launch().run();
    assert_eq!((full.code, full.stdout.as_str()), (1, ""));
    assert!(full.stderr.contains("No space left on device"), "{}", full.stderr);
    site.host(1).sh(&format!("umount {}", cache.display()));

    // A program that was rebuilt is copied again, the library is not.
    let source = private.join("train.c");
    fs::write(&source, fs::read_to_string(&source).unwrap().replace("rank", "new rank")).unwrap();
    assert!(compile(&private));
    let third = launch().run();
    assert_eq!(third.lines()[1], "[node2:1] new rank 1: a b", "{}", third.stderr);
    assert!(!third.stderr.contains("libgreet"), "{}", third.stderr);
}

/// A script is copied with the modules and packages beside it, a module with its package; another version of them on a
/// host is neither used nor changed.
#[needs(Hosts, Python)]
fn python_programs_are_copied_with_what_they_import() {
    let site = site(3);
    let private = site.network.folder().join("private");
    fs::create_dir_all(private.join("lib/deep")).unwrap();
    let write = |place: &str, text: &str| fs::write(private.join(place), text).unwrap();
    let show = "print(os.environ['RANK'], net.NAME, part.name(), sys.argv[1:], os.getcwd())\n";
    write("train.py", &format!("import os, sys\nimport net\nfrom lib.deep import part\n{show}"));
    write("net.py", "NAME = 'net 1'\n");
    write("lib/__init__.py", "");
    write(
        "lib/__main__.py",
        &format!("import os, sys\nfrom .deep import part\nimport net\n{show}"),
    );
    write("lib/deep/__init__.py", "");
    let part =
        "import pathlib\ndef name(): return (pathlib.Path(__file__).parent / 'name').read_text()\n";
    write("lib/deep/part.py", part);
    write("lib/deep/name", "part 1");
    // node2 has none of it, node3 another version, in the working folder of its ranks.
    site.host(1).hide(&private);
    site.host(2).hide(&private);
    site.host(1).sh(&format!("echo NAME = \\'own\\' >{}/net.py", private.display()));
    site.host(2).sh(&format!(
        "cd {}; mkdir lib; touch lib/__init__.py; echo 'print(\"old\")' >lib/__main__.py; \
         echo 'print(\"old\")' >train.py; echo NAME = \\'own\\' >net.py",
        private.display()
    ));

    let script = private.join("train.py");
    let launch = |words: &[&str]| {
        let launch = site.launch("node1:1,node2:1,node3:1").args(["--sync"]);
        launch.args(words.iter().copied()).run()
    };
    let script = [script.to_str().unwrap(), "a b", "--sync"];
    let first = launch(&script);
    assert_eq!(first.code, 0, "{}", first.stderr);
    let work = site.work.display();
    let lines = |net: [&str; 3], part: &str, arguments: &str, folder: &dyn std::fmt::Display| {
        let of =
            |i: usize| format!("[node{}:{i}] {i} {} {part} {arguments} {folder}", i + 1, net[i]);
        (0..3).map(of).collect::<Vec<_>>()
    };
    assert_eq!(first.lines(), lines(["net 1"; 3], "part 1", "['a b', '--sync']", &work));
    let mut said: Vec<&str> =
        first.stderr.lines().filter(|it| !it.contains("copying brigade")).collect();
    said.sort_unstable();
    let files = "copying train.py and 6 files beside it (0.0 MB)";
    assert_eq!(
        said,
        [format!("brigade: node2: {files}"), format!("brigade: node3: {files}")],
        "{}",
        first.stderr
    );

    // The second time nothing is missing; after a change everything is copied.
    let second = launch(&script);
    assert_eq!((second.code, second.stderr.as_str()), (0, ""));
    assert_eq!(second.lines(), first.lines());
    write("lib/deep/name", "part 2");
    let third = launch(&script);
    assert_eq!(third.lines(), lines(["net 1"; 3], "part 2", "['a b', '--sync']", &work));

    // A module is found below the working folder, before the host's own; `net` is not part of its package, and so each
    // host's own is used.
    let folder = private.to_str().unwrap();
    let module = launch(&["--workdir", folder, "-m", "lib", "a b"]);
    assert_eq!(module.code, 0, "{}", module.stderr);
    let expected = lines(["net 1", "own", "own"], "part 2", "['a b']", &private.display());
    assert_eq!(module.lines(), expected);
    assert!(
        module.stderr.contains("node3: copying lib/__init__.py and 4 files"),
        "{}",
        module.stderr
    );
    site.host(2).sh(&format!("grep -q old {}/lib/__main__.py", private.display()));

    // Modules that are not copied are named.
    let installed = launch(&["-m", "json.tool", "--help"]);
    assert_eq!(installed.code, 0, "{}", installed.stderr);
    let note = "brigade: note: --sync copies nothing of the module json.tool: it is not below ";
    assert!(installed.stderr.starts_with(note), "{}", installed.stderr);
    fs::write(site.work.join("own.py"), "print('own')\n").unwrap();
    let given = launch(&["python3", "-u", "own.py"]);
    assert_eq!(given.code, 0, "{}", given.stderr);
    let note = "brigade: note: --sync copies neither python3, which each host finds in its own \
                PATH, nor own.py, which it is given; to have a script copied, name it as the program\n";
    assert_eq!(given.stderr, note);
    // All hosts have this folder.
    let shared = launch(&["own.py"]);
    assert_eq!((shared.code, shared.stderr.as_str()), (0, ""));
}

/// Builds a program and a library in a folder of its own, to which the program's run path points.
fn build_with_library(site: &Site) -> PathBuf {
    let private = site.network.folder().join("private");
    fs::create_dir_all(private.join("lib")).unwrap();
    let library = "const char *greet(void) { return getenv(\"RANK\"); }\n";
    fs::write(private.join("greet.c"), format!("#include <stdlib.h>\n{library}")).unwrap();
    let program = "#include <stdio.h>\nconst char *greet(void);\n\
                   int main(int n, char **a) { printf(\"rank %s: %s\\n\", greet(), a[1]); }\n";
    fs::write(private.join("train.c"), program).unwrap();
    // The workspace cannot be built without a C compiler.
    assert!(compile(&private));
    private
}

fn compile(folder: &Path) -> bool {
    let script = "set -e; cc -shared -fPIC -o lib/libgreet.so greet.c; \
                  cc -o train.new train.c -Llib -lgreet \"-Wl,-rpath,$PWD/lib\"; mv train.new train";
    let status = Command::new("sh").args(["-c", script]).current_dir(folder).status();
    status.is_ok_and(|status| status.success())
}
