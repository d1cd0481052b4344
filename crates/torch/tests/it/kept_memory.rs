//! Memory that stays with the process between steps.

use std::collections::BTreeSet;
use std::fs;

use brigade_torch::{keep_freed_memory, release_memory};
use tch::{Device, Kind, Tensor};

fn floats(megabytes: i64) -> Tensor {
    Tensor::ones([megabytes << 18], (Kind::Float, Device::Cpu))
}

fn address(tensor: &Tensor) -> usize {
    tensor.data_ptr() as usize
}

fn resident_megabytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
}

#[test]
fn the_next_step_gets_the_memory_of_the_last_one() {
    keep_freed_memory();
    // Of several sizes, freed in another order than they were made.
    let step = || {
        let mut held: Vec<Tensor> = [3, 9, 4, 33, 2, 16].map(floats).into();
        let places: BTreeSet<usize> = held.iter().map(address).collect();
        assert!(places.iter().all(|place| place % 64 == 0));
        for tensor in &held {
            assert_eq!(tensor.min().double_value(&[]), 1.0);
        }
        drop(held.swap_remove(1));
        drop(held.swap_remove(2));
        held.push(floats(9));
        assert_eq!(
            held.iter().map(|tensor| tensor.sum(Kind::Double).double_value(&[])).sum::<f64>(),
            f64::from((3 + 16 + 33 + 2 + 9) << 18)
        );
        places
    };
    let first = step();
    // Other tests of this process may hold some of it meanwhile.
    assert!((0..20).any(|_| step() == first));

    let before = resident_megabytes();
    drop(floats(600));
    let kept = resident_megabytes();
    release_memory(false).unwrap();
    let after = resident_megabytes();
    assert!(kept >= before.max(600) && after + 500 < kept, "{before}, {kept}, {after} MB");
    // What was given back can be used again.
    assert_eq!(floats(600).min().double_value(&[]), 1.0);
}

#[test]
fn impossible_sizes_are_libtorchs_error() {
    keep_freed_memory();
    for elements in [1i64 << 50, i64::MAX / 8] {
        let error =
            Tensor::f_empty([elements], (Kind::Float, Device::Cpu)).unwrap_err().to_string();
        assert!(error.contains("allocate") || error.contains("overflow"), "{error}");
    }
}
