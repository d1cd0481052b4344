//! `record` in a process of its own: what a failing program leaves for its launcher.
//!
//! The test starts its own executable again, with the case to play in a variable.

use std::process::Command;
use std::thread;

use brigade_rank_env::{ErrorRecord, env, record};

/// Plays a case.
#[test]
#[ignore = "is what the test below starts"]
fn play() {
    let case = std::env::var("BRIGADE_TEST_CASE").unwrap();
    let result = record(|| match case.as_str() {
        "fails" => Err(anyhow::anyhow!("no disk").context("cannot save")),
        "panics" => panic!("out of {}", "range"),
        "recovers" => {
            let _ = std::panic::catch_unwind(|| panic!("caught"));
            let _ = thread::spawn(|| panic!("in a thread")).join();
            Ok(())
        }
        "recovers and fails" => {
            let _ = std::panic::catch_unwind(|| panic!("caught"));
            Err(anyhow::anyhow!("the end"))
        }
        _ => Ok(()),
    });
    assert!(result.is_ok(), "{result:?}");
}

#[test]
fn the_record_holds_what_ended_the_program() {
    let folder = tempfile::tempdir().unwrap();
    let table = [
        ("succeeds", None),
        ("recovers", None),
        ("fails", Some("cannot save: no disk")),
        ("recovers and fails", Some("the end")),
        ("panics", Some("out of range")),
    ];
    for (case, expected) in table {
        let path = folder.path().join(case);
        let run = |path: Option<&std::path::Path>| {
            let mut program = Command::new(std::env::current_exe().unwrap());
            program
                .args(["--exact", "record::play", "--include-ignored"])
                .env("BRIGADE_TEST_CASE", case);
            program.env_remove(env::TORCHELASTIC_ERROR_FILE);
            if let Some(path) = path {
                program.env(env::TORCHELASTIC_ERROR_FILE, path);
            }
            program.output().unwrap()
        };
        let output = run(Some(&path));
        assert_eq!(output.status.success(), expected.is_none(), "{case}: {output:?}");
        let left = ErrorRecord::read(&path).map(|error| error.message);
        match expected {
            None => assert_eq!(left, None, "{case}"),
            Some("out of range") => {
                let left = left.unwrap();
                assert!(left.starts_with("panicked at "), "{left}");
                assert!(left.ends_with(": out of range"), "{left}");
            }
            Some(expected) => assert_eq!(left.as_deref(), Some(expected), "{case}"),
        }
        // The same without a launcher, and where the file cannot be written.
        let alone = [run(None), run(Some(&folder.path().join("no/such/folder")))];
        for output in alone {
            assert_eq!(output.status.success(), expected.is_none(), "{case}: {output:?}");
        }
    }
}
