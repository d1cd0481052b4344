//! Tests of the programs that `brigade launch` can start: programs, Python scripts and modules, targets of Cargo
//! packages.

use std::fs;

use crate::job::{Job, Run};
use crate::work::Work;

#[test]
fn which_python() {
    let work = Work::new(&[
        ("train.py", ""),
        ("venv/bin/python3", "#!/bin/sh\necho venv $@"),
        ("other/python", "#!/bin/sh\necho other $@"),
    ]);
    work.allow("venv/bin/python3");
    work.allow("other/python");
    let started = |set: &[(&str, &str)]| {
        let mut job = work.job(1).flag("train.py");
        job.command.envs(set.iter().copied());
        job.run()
    };
    let path = format!("{}/venv/bin:/usr/bin:/bin", work.path().display());
    assert_eq!(started(&[("PATH", &path)]).stdout, "[0] venv -u train.py\n");
    let other = work.path().join("other/python");
    let other = [("PATH", path.as_str()), ("PYTHON_EXEC", other.to_str().unwrap())];
    assert_eq!(started(&other).stdout, "[0] other -u train.py\n");
    assert_eq!(started(&[("PYTHON_EXEC", "./other/python")]).stdout, "[0] other -u train.py\n");

    let nothing = work.path().join("empty");
    let run = started(&[("PATH", nothing.to_str().unwrap())]);
    assert_eq!(run.code, 127);
    assert_eq!(
        run.stderr,
        "brigade: no Python interpreter: neither python3 nor python is in PATH; name one in \
         PYTHON_EXEC\n"
    );
    let run = started(&[("PYTHON_EXEC", "/no/python")]);
    let said = "brigade: program /no/python not found: PYTHON_EXEC names it\n";
    assert_eq!((run.code, run.stderr.as_str()), (127, said));
}

#[test]
fn a_script_that_cannot_be_is_refused() {
    let work = Work::new(&[("folder.py/file", ""), ("locked.py", "")]);
    let table: [(&[&str], i32, &str); 6] = [
        (&["nothing.py"], 127, "program nothing.py not found in this folder or in PATH"),
        (&["./nothing.py"], 127, "program ./nothing.py not found"),
        (&["folder.py"], 126, "folder.py is a directory, not a program"),
        (&["--no-python", "./locked.py"], 126, "./locked.py is not executable: `chmod +x` it"),
        (&["-m", ""], 127, "-m needs the name of a Python module"),
        (&["-m"], 2, "required arguments were not provided"),
    ];
    for (words, code, message) in table {
        let run = work.run(1, words);
        assert_eq!(run.code, code, "{words:?}: {}", run.stderr);
        assert!(run.stderr.contains(message), "{words:?}: {}", run.stderr);
    }
}

#[test]
fn the_local_rank_in_arguments() {
    let run = Job::new(2).words(["echo", "--out=${local_rank}.txt", "$local_rank", "${x}"]).run();
    for rank in 0..2 {
        assert_eq!(run.lines_of(rank), [format!("--out={rank}.txt $local_rank ${{x}}")]);
    }
}

const MANIFEST: &str = "[package]\nname = \"demo\"\nedition = \"2021\"\n[features]\nloud = []\n\
                        [workspace]\n";
const MAIN: &str = r#"fn main() {
    let args: Vec<_> = std::env::args().skip(1).collect();
    let loud = if cfg!(feature = "loud") { "loud" } else { "quiet" };
    let build = if cfg!(debug_assertions) { "debug" } else { "release" };
    println!("{} of {} {build} {loud} {args:?}", env!("CARGO_BIN_NAME"), std::env::var("RANK").unwrap());
    println!("{}", std::env::var("LD_LIBRARY_PATH").unwrap());
}"#;

/// Creates a package with a build script that records every build.
fn package() -> Work {
    let build = "fn main() { use std::io::Write; let path = std::env::var(\"TRACE\").unwrap(); \
                 let mut file = std::fs::File::options().create(true).append(true).open(path).unwrap(); \
                 file.write_all(b\"built\\n\").unwrap(); }";
    Work::new(&[
        ("Cargo.toml", MANIFEST),
        ("build.rs", build),
        ("src/main.rs", MAIN),
        ("src/bin/other.rs", "fn main() { println!(\"other\"); std::process::exit(5) }"),
        ("src/bin/broken.rs", "fn main() { let x: u8 = \"text\"; }"),
        ("examples/sample.rs", "fn main() { println!(\"sample {:?}\", std::env::args().nth(1)); }"),
    ])
}

impl Work {
    fn cargo(&self, nproc: usize, words: &[&str]) -> Run {
        let mut job = self.job(nproc);
        // Its own target folder, and no variables of this test's build.
        for (name, _) in std::env::vars_os() {
            let name = name.into_string().unwrap_or_default();
            if name.starts_with("CARGO_") && name != "CARGO_HOME" {
                job.command.env_remove(name);
            }
        }
        job.command.env("TRACE", self.path().join("trace")).env("CARGO_NET_OFFLINE", "true");
        job.words(words.iter().copied()).run()
    }
}

#[test]
fn targets_of_a_package() {
    let work = package();
    let run = work.cargo(3, &["--bin", "demo", "--", "--bin", "x", "--", "${local_rank}"]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let target = work.path().canonicalize().unwrap().join("target");
    for rank in 0..3 {
        let expected = format!("demo of {rank} debug quiet [\"--bin\", \"x\", \"--\", \"{rank}\"]");
        let lines = run.lines_of(rank);
        assert_eq!(lines[0], expected);
        let folders = ["debug", "debug/deps"].map(|folder| target.join(folder));
        let found: Vec<_> = std::env::split_paths(lines[1]).collect();
        assert_eq!(found[..2], folders, "as `cargo run` sets it");
    }
    let built = fs::read_to_string(work.path().join("trace")).unwrap();
    assert_eq!(built, "built\n", "built once for all ranks");
    assert!(run.stderr.contains("Compiling demo"), "cargo's progress is seen: {}", run.stderr);

    let run = work.cargo(1, &["--bin=demo", "--release", "--features", "loud"]);
    assert!(run.stdout.starts_with("[0] demo of 0 release loud []\n"), "{}", run.stderr);
    let run = work.cargo(1, &["--example", "sample", "-p", "demo", "--", "-v"]);
    assert_eq!(run.stdout, "[0] sample Some(\"-v\")\n", "{}", run.stderr);
    let run = work.cargo(1, &["--bin=other"]);
    assert_eq!((run.code, run.stdout.as_str()), (5, "[0] other\n"), "{}", run.stderr);
}

#[test]
fn without_a_program_the_projects_binary_is_built_and_run() {
    let main = "fn main() { let var = |name| std::env::var(name).unwrap(); \
                println!(\"{} of {} {:?}\", var(\"RANK\"), var(\"WORLD_SIZE\"), cfg!(debug_assertions)); }";
    let manifest = "[package]\nname = \"demo\"\nedition = \"2021\"\n[workspace]\n";
    let work = Work::new(&[("Cargo.toml", manifest), ("src/main.rs", main)]);
    let run = work.cargo(2, &[]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    for rank in 0..2 {
        assert_eq!(run.lines_of(rank), [format!("{rank} of 2 true")]);
    }
    let run = work.cargo(1, &["--release", "-p", "demo"]);
    assert_eq!((run.code, run.stdout.as_str()), (0, "[0] 0 of 1 false\n"), "{}", run.stderr);

    // Arguments alone are those of the project's binary.
    let echo = "fn main() { println!(\"{:?}\", std::env::args().skip(1).collect::<Vec<_>>()); }";
    let other = Work::new(&[("Cargo.toml", manifest), ("src/main.rs", echo)]);
    let run = other.cargo(1, &["--", "--epochs", "4", "--", "-x"]);
    let said = "[0] [\"--epochs\", \"4\", \"--\", \"-x\"]\n";
    assert_eq!((run.code, run.stdout.as_str()), (0, said), "{}", run.stderr);
    let run = Work::new(&[]).cargo(1, &["--", "--epochs", "4"]);
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(run.stderr.contains("no program was given"), "{}", run.stderr);

    let run = work.cargo(1, &["-p", "other"]);
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(
        run.stderr.ends_with("the workspace has no package other; name a program\n"),
        "{}",
        run.stderr
    );
    // Two binaries, without a choice between them.
    fs::create_dir(work.path().join("src/bin")).unwrap();
    fs::write(work.path().join("src/bin/second.rs"), main).unwrap();
    let run = work.cargo(1, &[]);
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(run.stderr.contains("demo") && run.stderr.contains("second"), "{}", run.stderr);

    let run = Work::new(&[]).cargo(1, &[]);
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(run.stderr.contains("no program was given"), "{}", run.stderr);
    assert!(run.stderr.contains("could not find `Cargo.toml`"), "{}", run.stderr);
    assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
}

#[test]
fn a_build_that_fails_starts_nothing() {
    let work = package();
    let table: [(&[&str], &str); 4] = [
        (&["--bin=broken"], "mismatched types"),
        (&["--bin=nothing"], "no bin target named `nothing`"),
        (&["--bin=demo", "--profile=fast"], "profile `fast` is not defined"),
        (&["--bin=demo", "--features=deaf"], "does not contain this feature: deaf"),
    ];
    for (words, message) in table {
        let run = work.cargo(1, words);
        assert_eq!((run.code, run.stdout.as_str()), (101, ""), "{words:?}: {}", run.stderr);
        assert!(run.stderr.contains(message), "{words:?}: {}", run.stderr);
        let last = "brigade: cargo build ended with exit code 101: nothing was started\n";
        assert!(run.stderr.ends_with(last), "{words:?}: {}", run.stderr);
    }
    let run = Work::new(&[]).cargo(1, &["--bin=demo"]);
    assert_eq!(run.code, 101);
    assert!(run.stderr.contains("could not find `Cargo.toml`"), "{}", run.stderr);
}

#[test]
fn two_packages_with_one_name() {
    let member = |name: &str| {
        format!(
            "[package]\nname = \"{name}\"\nedition = \"2021\"\n[[bin]]\nname = \"train\"\npath = \"main.rs\"\n"
        )
    };
    let main = "fn main() { println!(env!(\"CARGO_PKG_NAME\")) }";
    let (one, two) = (member("one"), member("two"));
    let work = Work::new(&[
        ("Cargo.toml", "[workspace]\nmembers = [\"one\", \"two\"]\nresolver = \"2\"\n"),
        ("one/Cargo.toml", &one),
        ("one/main.rs", main),
        ("two/Cargo.toml", &two),
        ("two/main.rs", main),
    ]);
    let run = work.cargo(1, &["--bin=train"]);
    assert_eq!(run.code, 126, "{}", run.stderr);
    let said = "several packages have bin train: choose one with --package one or --package two\n";
    assert!(run.stderr.ends_with(said), "{}", run.stderr);
    assert_eq!(work.cargo(1, &["--bin=train", "--package=two"]).stdout, "[0] two\n");
}

#[test]
fn without_cargo() {
    let work = Work::new(&[]);
    let mut job = work.job(1).flag("--example=x");
    job.command.env("PATH", "/no/such/folder");
    let run = job.run();
    let said = "brigade: program cargo not found in PATH: --example needs it\n";
    assert_eq!((run.code, run.stderr.as_str()), (127, said));
}

#[test]
fn one_kind_at_a_time() {
    for words in [
        &["--bin=a", "--example=b"][..],
        &["--bin=a", "-m"],
        &["--no-python", "-m", "a"],
        &["--bin=a", "--release", "--profile=b"],
    ] {
        let run = Job::new(1).words(words.iter().copied()).run();
        assert_eq!(run.code, 2, "{words:?}");
        assert!(run.stderr.contains("cannot be used with"), "{words:?}: {}", run.stderr);
    }
}
