//! Tests of `brigade env`: it prints what a bug report needs, and nothing secret.

use std::process::Command;

use serde_json::Value;

fn env(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_brigade"))
        .arg("env")
        .args(arguments)
        .env("NCCL_DEBUG", "INFO")
        .env("SECRET_TOKEN", "hush")
        .output()
        .unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_text_to_paste() {
    let text = env(&[]);
    for name in
        ["brigade", "host", "system", "processor", "memory", "GPU", "libtorch", "Python", "ssh"]
    {
        let line = text.lines().find(|line| line.starts_with(&format!("{name:<12}")));
        assert!(line.is_some_and(|line| line.len() > 12), "{name}:\n{text}");
    }
    assert!(text.contains(&format!("{:<12}{} (", "brigade", env!("CARGO_PKG_VERSION"))), "{text}");
    assert!(text.contains("variable    NCCL_DEBUG=INFO\n"), "{text}");
    assert!(!text.contains("hush"), "{text}");
}

#[test]
fn json_to_read() {
    let text = env(&["--json", "--program", env!("CARGO_BIN_EXE_brigade")]);
    let all: Value = serde_json::from_str(&text).unwrap();
    assert!(all["facts"]["memory"]["total_bytes"].as_u64().unwrap() > 0);
    assert!(all["facts"]["program"]["sha256"].as_str().unwrap().len() == 64, "{text}");
    assert!(all["tools"].as_object().unwrap().contains_key("PyTorch"));
    assert!(!text.contains("hush"));
}
