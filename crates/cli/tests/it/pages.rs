//! Tests that shells and man accept the output of `brigade completions` and `brigade man`.

use std::fs;
use std::io::Write;
use std::process::{Command, Output, Stdio};

fn brigade(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_brigade"))
        .args(arguments)
        .env("SHELL", "/bin/zsh")
        .output()
        .unwrap()
}

#[test]
fn bash_completes_commands_and_flags() {
    let script = brigade(&["completions", "bash"]);
    assert!(script.status.success());
    let ask = "COMP_WORDS=(brigade launch --npr); COMP_CWORD=2; _brigade brigade --npr launch; \
               printf '%s\\n' \"${COMPREPLY[@]}\"";
    let mut bash = Command::new("bash")
        .args(["--noprofile", "--norc", "-s"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = bash.stdin.take().unwrap();
    stdin.write_all(&script.stdout).unwrap();
    stdin.write_all(ask.as_bytes()).unwrap();
    drop(stdin);
    let output = bash.wait_with_output().unwrap();
    let words = String::from_utf8(output.stdout).unwrap();
    assert!(words.lines().any(|word| word == "--nproc"), "{words}");
}

/// Returns the completions of bash after these words.
fn offered(words: &[&str]) -> Vec<String> {
    let script = brigade(&["completions", "bash"]);
    let (last, before) = (words[words.len() - 1], words[words.len() - 2]);
    let ask = format!(
        "COMP_WORDS=({}); COMP_CWORD={}; _brigade brigade '{last}' '{before}'; printf '%s\\n' \
         \"${{COMPREPLY[@]}}\"",
        words.iter().map(|word| format!("'{word}' ")).collect::<String>(),
        words.len() - 1
    );
    let mut bash = Command::new("bash")
        .args(["--noprofile", "--norc", "-s"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = bash.stdin.take().unwrap();
    stdin.write_all(&script.stdout).unwrap();
    stdin.write_all(ask.as_bytes()).unwrap();
    drop(stdin);
    let output = bash.wait_with_output().unwrap();
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn bash_completes_values_and_only_commands_for_users() {
    let values: [(&[&str], &[&str]); 5] = [
        (&["brigade", "launch", "--mixed-precision", ""], &["no", "fp16", "bf16", "fp8"]),
        (&["brigade", "launch", "--color", ""], &["auto", "always", "never"]),
        (&["brigade", "launch", "--bind", "co"], &["cores", "core-complex"]),
        (&["brigade", "new", "--template", "co"], &["complete"]),
        (&["brigade", "checkpoint", "convert", "--to", "s"], &["safetensors"]),
    ];
    for (words, expected) in values {
        assert_eq!(offered(words), expected, "{words:?}");
    }
    let commands = offered(&["brigade", ""]);
    assert!(commands.iter().any(|it| it == "launch"), "{commands:?}");
    let hidden = |it: &String| it.starts_with("__") || it.starts_with("notebook-");
    assert!(!commands.iter().any(hidden), "{commands:?}");
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = String::from_utf8(brigade(&["completions", shell]).stdout).unwrap();
        // bash's names of functions have "__" between those of commands.
        for name in [" __doctor", "'__doctor", "notebook-agent", "notebook-rank"] {
            assert!(!script.contains(name), "{shell}: {name}");
        }
    }
}

#[test]
fn the_version_is_a_command_too() {
    let version = brigade(&["version"]);
    assert!(version.status.success());
    assert_eq!(version.stdout, brigade(&["--version"]).stdout);
    // A build for development has no commit.
    let text = String::from_utf8(version.stdout).unwrap();
    let start = concat!("brigade ", env!("CARGO_PKG_VERSION"), " (");
    let target = format!("{}-unknown-linux-gnu)\n", std::env::consts::ARCH);
    assert!(text.starts_with(start) && text.ends_with(&target), "{text}");
    let short = String::from_utf8(brigade(&["-V"]).stdout).unwrap();
    assert_eq!(short, concat!("brigade ", env!("CARGO_PKG_VERSION"), "\n"));
}

#[test]
fn every_shell_has_a_script() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = brigade(&["completions", shell]);
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && script.contains("explain"), "{shell}");
    }
    let by_environment = brigade(&["completions"]);
    assert_eq!(by_environment.stdout, brigade(&["completions", "zsh"]).stdout);
}

#[test]
fn pages_of_all_commands() {
    let folder = tempfile::tempdir().unwrap();
    let output = brigade(&["man", "--out-dir", folder.path().join("man1").to_str().unwrap()]);
    assert!(output.status.success());
    for name in ["brigade", "brigade-launch", "brigade-explain", "brigade-explain-shards"] {
        let page = fs::read_to_string(folder.path().join(format!("man1/{name}.1"))).unwrap();
        assert!(page.contains(".SH SYNOPSIS"), "{name}");
    }
    let launch = brigade(&["man", "launch"]);
    assert!(String::from_utf8(launch.stdout).unwrap().contains("\\-\\-nproc"));
    let nested = brigade(&["man", "explain", "shards"]);
    assert!(nested.status.success());
    let unknown = brigade(&["man", "lunch"]);
    assert_eq!(unknown.status.code(), Some(1));
    let message = String::from_utf8(unknown.stderr).unwrap();
    assert!(
        message.contains("no command `lunch`") && message.contains("brigade launch"),
        "{message}"
    );
}
