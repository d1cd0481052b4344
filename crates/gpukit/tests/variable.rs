//! The device that `BRIGADE_TEST_DEVICE` names.

#![allow(clippy::unwrap_used)] // also in what the tests share

use std::process::Command;

use tch::{Kind, Tensor};

#[test]
fn the_variable_names_the_device() {
    let run = |value: Option<&str>| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "shows_the_device", "--ignored", "--nocapture"]);
        command.env_remove(brigade_gpukit::DEVICE_VARIABLE);
        if let Some(value) = value {
            command.env(brigade_gpukit::DEVICE_VARIABLE, value);
        }
        let output = command.output().unwrap();
        let text = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap()).concat();
        (output.status.success(), text)
    };
    for (value, expected) in
        [(None, "on Cpu"), (Some("cpu"), "on Cpu"), (Some("fake"), "on Cuda(0) of 2")]
    {
        let (good, text) = run(value);
        assert!(good && text.contains(expected), "{value:?}: {text}");
    }
    let (good, text) = run(Some("tpu"));
    assert!(!good && text.contains("BRIGADE_TEST_DEVICE=tpu: it is cpu, fake or cuda"), "{text}");
    if !tch::Cuda::is_available() {
        let (good, text) = run(Some("cuda"));
        assert!(!good && text.contains("xtask setup --cuda"), "{text}");
    }
}

#[test]
#[ignore = "what the other test starts"]
fn shows_the_device() {
    let device = brigade_gpukit::device();
    let sum = Tensor::ones([2], (Kind::Float, device)).sum(Kind::Float);
    assert_eq!(sum.device(), device);
    eprintln!("on {device:?} of {}", tch::Cuda::device_count());
}
