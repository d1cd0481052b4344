//! Tests of the device that `BRIGADE_TEST_DEVICE` selects.

use std::process::Command;

use brigade_test_device::{assert_same, numeric_device, on_device, tolerance};
use tch::{Device, Kind, Tensor};

#[test]
fn the_variable_names_the_device() {
    let run = |value: Option<&str>| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "variable::shows_the_device", "--ignored", "--nocapture"]);
        command.env_remove(brigade_test_device::DEVICE_VARIABLE);
        if let Some(value) = value {
            command.env(brigade_test_device::DEVICE_VARIABLE, value);
        }
        let output = command.output().unwrap();
        let text = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap()).concat();
        (output.status.success(), text)
    };
    for value in [None, Some("cpu")] {
        let (good, text) = run(value);
        assert!(good && text.contains("on Cpu"), "{value:?}: {text}");
    }
    let (good, text) = run(Some("fake"));
    if cfg!(feature = "cuda") {
        assert!(!good && text.contains("BRIGADE_TEST_DEVICE=fake: "), "{text}");
    } else {
        assert!(good && text.contains("on Cuda(0) of 2"), "{text}");
    }
    let (good, text) = run(Some("vulkan"));
    assert!(
        !good && text.contains("BRIGADE_TEST_DEVICE=vulkan: it is cpu, fake, cuda or tpu"),
        "{text}"
    );
    if cfg!(not(feature = "tpu")) {
        let (good, text) = run(Some("tpu"));
        assert!(
            !good && text.contains("BRIGADE_TEST_DEVICE=tpu: build with the feature tpu"),
            "{text}"
        );
    }
    if !tch::Cuda::is_available() {
        let (good, text) = run(Some("cuda"));
        assert!(!good && text.contains("xtask setup --cuda"), "{text}");
    }
}

#[test]
fn comparisons_allow_what_the_device_needs() {
    let expected = on_device(&Tensor::from_slice(&[1.0, -2.0]));
    assert_same(&expected.copy(), &expected, "a copy");
    let refused = |found: &Tensor| {
        let compare = || assert_same(found, &expected, "numbers");
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(compare)).is_err()
    };
    assert!(refused(&(&expected + 1e-3)), "other values");
    assert!(refused(&expected.to_kind(Kind::Float)), "another kind");
    assert!(refused(&expected.reshape([2, 1])), "another shape");
    let is_real = numeric_device() != Device::Cpu && !brigade_test_device::fake::is_installed();
    assert_eq!(tolerance(Kind::Double), if is_real { 1e-10 } else { 0.0 });
    assert_eq!(tolerance(Kind::Int64), 0.0);
}

#[test]
#[ignore = "what the other test starts"]
fn shows_the_device() {
    let device = brigade_test_device::device();
    let sum = Tensor::ones([2], (Kind::Float, device)).sum(Kind::Float);
    assert_eq!(sum.device(), device);
    eprintln!("on {device:?} of {}", tch::Cuda::device_count());
}
