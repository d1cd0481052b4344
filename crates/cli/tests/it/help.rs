//! Golden file of the command line: a flag that changes shows in a diff. After an intended change, `UPDATE_GOLDEN=1
//! cargo nextest run -p brigade-cli help::` rewrites the files.

use std::path::Path;
use std::process::Command;

/// Collects the `-h` of a command and of all its subcommands.
pub(crate) fn short_pages(command: &[String], pages: &mut Vec<(Vec<String>, String)>) {
    let mut brigade = Command::new(env!("CARGO_BIN_EXE_brigade"));
    let output = brigade.args(command).arg("-h").output().unwrap();
    let page = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{command:?}: {page}");
    let lines = page.lines().skip_while(|it| *it != "Commands:" && *it != "Schedules:").skip(1);
    let names = lines.take_while(|it| !it.is_empty()).filter_map(|it| it.split_whitespace().next());
    for name in names.filter(|it| *it != "help") {
        short_pages(&[command, &[name.to_owned()]].concat(), pages);
    }
    pages.push((command.to_vec(), page));
}

#[test]
fn a_short_help_has_one_line_for_each_option() {
    let mut pages = Vec::new();
    short_pages(&[], &mut pages);
    assert!(pages.len() > 30, "{} pages", pages.len());
    for (command, page) in &pages {
        let lists = page.lines().take_while(|it| !["Examples:", "Exit codes:"].contains(it));
        for line in lists.filter(|it| it.starts_with(' ')) {
            let name = line.trim_start();
            let indent = line.len() - name.len();
            let is_usage = name.starts_with("brigade ");
            assert!(
                is_usage || indent == 2 || (indent == 6 && name.starts_with("--")),
                "{command:?}: {line}"
            );
        }
    }
    let (_, launch) = pages.iter().find(|(command, _)| command == &["launch"]).unwrap();
    let options =
        launch.lines().filter(|line| line.starts_with("  ") && line.trim_start().starts_with('-'));
    assert!(options.count() <= 16, "{launch}");
}

#[test]
fn help_texts_are_those_on_file() {
    let pages: [(&str, &[&str]); 59] = [
        ("brigade", &["--help"]),
        ("launch", &["launch", "--help"]),
        ("launch-short", &["launch", "-h"]),
        ("emit", &["emit", "--help"]),
        ("emit-slurm", &["emit", "slurm", "--help"]),
        ("emit-slurm-short", &["emit", "slurm", "-h"]),
        ("emit-k8s-short", &["emit", "k8s", "-h"]),
        ("emit-jobset-short", &["emit", "jobset", "-h"]),
        ("new", &["new", "--help"]),
        ("init", &["init", "--help"]),
        ("data", &["data", "--help"]),
        ("data-show", &["data", "show", "--help"]),
        ("data-stats", &["data", "stats", "--help"]),
        ("data-pack", &["data", "pack", "--help"]),
        ("kernel", &["kernel", "--help"]),
        ("kernel-install", &["kernel", "install", "--help"]),
        ("kernels", &["kernels", "--help"]),
        ("watch", &["watch", "--help"]),
        ("report", &["report", "--help"]),
        ("setup", &["setup", "--help"]),
        ("setup-short", &["setup", "-h"]),
        ("checkpoint", &["checkpoint", "--help"]),
        ("checkpoint-inspect", &["checkpoint", "inspect", "--help"]),
        ("checkpoint-verify", &["checkpoint", "verify", "--help"]),
        ("checkpoint-convert", &["checkpoint", "convert", "--help"]),
        ("checkpoint-merge", &["checkpoint", "merge", "--help"]),
        ("checkpoint-split", &["checkpoint", "split", "--help"]),
        ("config", &["config", "--help"]),
        ("config-default", &["config", "default", "--help"]),
        ("config-show", &["config", "show", "--help"]),
        ("config-get", &["config", "get", "--help"]),
        ("config-set", &["config", "set", "--help"]),
        ("config-update", &["config", "update", "--help"]),
        ("doctor", &["doctor", "--help"]),
        ("env", &["env", "--help"]),
        ("completions", &["completions", "--help"]),
        ("estimate", &["estimate", "--help"]),
        ("man", &["man", "--help"]),
        ("test", &["test", "--help"]),
        ("explain", &["explain", "--help"]),
        ("explain-shards", &["explain", "shards", "--help"]),
        ("explain-sharding", &["explain", "sharding", "--help"]),
        ("explain-mesh", &["explain", "mesh", "--help"]),
        ("explain-pipeline", &["explain", "pipeline", "--help"]),
        ("explain-device-map", &["explain", "device-map", "--help"]),
        ("explain-schedule", &["explain", "schedule", "--help"]),
        ("schedule/constant", &["explain", "schedule", "constant", "--help"]),
        ("schedule/linear", &["explain", "schedule", "linear", "--help"]),
        ("schedule/cosine", &["explain", "schedule", "cosine", "--help"]),
        ("schedule/cosine-restarts", &["explain", "schedule", "cosine-restarts", "--help"]),
        ("schedule/one-cycle", &["explain", "schedule", "one-cycle", "--help"]),
        ("schedule/fit-one-cycle", &["explain", "schedule", "fit-one-cycle", "--help"]),
        ("schedule/flat-cosine", &["explain", "schedule", "flat-cosine", "--help"]),
        ("schedule/polynomial", &["explain", "schedule", "polynomial", "--help"]),
        ("schedule/exponential", &["explain", "schedule", "exponential", "--help"]),
        ("schedule/step", &["explain", "schedule", "step", "--help"]),
        ("schedule/multi-step", &["explain", "schedule", "multi-step", "--help"]),
        ("schedule/inverse-sqrt", &["explain", "schedule", "inverse-sqrt", "--help"]),
        ("schedule/sequence", &["explain", "schedule", "sequence", "--help"]),
        ("schedule/on-plateau", &["explain", "schedule", "on-plateau", "--help"]),
    ];
    for (name, arguments) in pages {
        let output = Command::new(env!("CARGO_BIN_EXE_brigade")).args(arguments).output().unwrap();
        assert!(output.status.success());
        let found = String::from_utf8(output.stdout).unwrap();
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
        let file = file.with_extension("txt");
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(&file, &found).unwrap();
        }
        let expected = std::fs::read_to_string(&file)
            .unwrap_or_else(|error| panic!("cannot read {}: {error}", file.display()));
        assert!(
            expected == found,
            "{name} changed; if that is intended, `UPDATE_GOLDEN=1 cargo nextest run -p brigade-cli help::` writes the \
             file anew; it is now:\n{found}"
        );
    }
}
