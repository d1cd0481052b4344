//! Which of libtorch's warnings are shown.

use std::env;
use std::process::Command;

use brigade_torch::WarningFilter;
use tch::{Device, Kind, Tensor};

const CHILD: &str = "BRIGADE_TEST_WARNINGS";

/// libtorch warns at each call.
fn warn() {
    let _ = Tensor::ones([1], (Kind::Float, Device::Cpu)).std(true);
}

#[test]
fn only_what_has_the_text_is_hidden_and_only_in_the_scope() {
    if env::var_os(CHILD).is_some() {
        warn();
        let other = WarningFilter::enter("another text").unwrap();
        warn();
        let filter = WarningFilter::enter("degrees of freedom is <= 0").unwrap();
        warn();
        std::thread::spawn(warn).join().unwrap();
        drop(filter);
        drop(other);
        warn();
        return;
    }
    let name = "warnings::only_what_has_the_text_is_hidden_and_only_in_the_scope";
    let child = Command::new(env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let shown = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success(), "{shown}");
    assert_eq!(shown.matches("degrees of freedom").count(), 4, "{shown}");
}
