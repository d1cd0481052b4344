//! Tensors that share memory with vectors, and gradients.

use std::collections::{BTreeMap, HashMap};

use brigade_testkit::dist_test;
use brigade_torch::regions::copy_to_region;
use brigade_torch::{
    Error, ErrorKind, TensorTree, backward, clear_gradient, elements, from_vec, grad_enabled,
    gradient,
};
use tch::{Device, Kind, Tensor};

use crate::rendezvous::{self, values};

#[test]
fn a_vector_becomes_a_tensor_without_a_copy() {
    let data = vec![1f32, 2.0, 3.0, 4.0, 5.0, 6.0];
    let address = data.as_ptr();
    let tensor = from_vec(data, &[2, 3]).unwrap();
    assert_eq!((tensor.size(), tensor.kind()), (vec![2, 3], Kind::Float));
    let view = tensor.get(1);
    assert_eq!(tensor.data_ptr().cast_const().cast(), address);
    // A view keeps the memory when the tensor itself is dropped.
    drop(tensor);
    assert_eq!(elements::<f32>(&view).unwrap().to_vec(), [4.0, 5.0, 6.0]);
    let _ = view.shallow_clone().g_add_scalar_(1);
    assert_eq!(elements::<f32>(&view).unwrap().to_vec(), [5.0, 6.0, 7.0]);

    assert_eq!(from_vec(vec![7u8], &[]).unwrap().size(), [0i64; 0]);
    assert_eq!(from_vec(Vec::<i64>::new(), &[0, 5]).unwrap().size(), [0, 5]);
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    for shape in [&[3][..], &[-2], &[2, -1], &[i64::MAX, i64::MAX], &[0]] {
        let error = from_vec(vec![1f64, 2.0], shape).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{shape:?}: {error}");
    }
}

#[test]
fn elements_need_a_plain_tensor_of_their_type() {
    let tensor = Tensor::arange(6, (Kind::Int64, Device::Cpu)).view([2, 3]);
    assert_eq!(elements::<i64>(&tensor).unwrap().to_vec(), [0, 1, 2, 3, 4, 5]);
    let error = elements::<f32>(&tensor).unwrap_err();
    assert_eq!(error.to_string(), "expected a tensor of Float, found Int64");
    let error = Error::from(tensor.f_matmul(&tensor).unwrap_err()).to_string();
    assert!(
        error.starts_with("tensor operation failed: ") && !error.contains("frame #"),
        "{error}"
    );
    assert!(elements::<i64>(&tensor.tr()).unwrap_err().to_string().contains("contiguous"));
    assert!(elements::<i64>(&tensor.to_sparse_sparse_dim(2)).is_err());
    assert_eq!(elements::<i64>(&tensor.narrow(0, 0, 0)).unwrap().to_vec(), [0i64; 0]);
}

#[test]
fn elements_are_those_that_the_tensor_has_now() {
    // Another handle gives the tensor other memory: larger, of another tensor, none.
    let tensor = Tensor::from_slice(&[1f32, 2.0]);
    let other = tensor.shallow_clone();
    let found = elements::<f32>(&tensor).unwrap();
    let _ = other.shallow_clone().resize_([1 << 24]).fill_(7.0);
    assert_eq!(found.len(), 1 << 24);
    assert!(found.to_vec().iter().all(|&value| value == 7.0));
    other.shallow_clone().set_data(&Tensor::from_slice(&[3f32, 4.0, 5.0]));
    assert_eq!(found.to_vec(), [3.0, 4.0, 5.0]);
    let mut out = [0.0; 2];
    found.copy_to(1..3, &mut out);
    assert_eq!(out, [4.0, 5.0]);
    let _ = other.shallow_clone().resize_([0]);
    assert!(found.is_empty() && found.to_vec().is_empty());
    // No longer contiguous.
    other.shallow_clone().set_data(&Tensor::ones([3, 2], (Kind::Float, Device::Cpu)).tr());
    assert!(found.to_vec().is_empty());
    // No bytes beyond the end, regardless of their type.
    other.shallow_clone().set_data(&Tensor::ones([6], (Kind::Uint8, Device::Cpu)));
    assert_eq!(found.to_vec().len(), 1);

    // In the middle of a walk.
    let tensor = Tensor::ones([1 << 20], (Kind::Float, Device::Cpu));
    let mut seen = 0;
    elements::<f32>(&tensor)
        .unwrap()
        .try_chunks(1 << 10, |chunk| {
            seen += chunk.len();
            let _ = tensor.shallow_clone().resize_([1500]);
            Ok::<(), Error>(())
        })
        .unwrap();
    assert_eq!(seen, 1500);
}

#[test]
fn gradients_come_and_go() {
    let weight = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
    assert!(gradient(&weight).unwrap().is_none());
    (&weight * 3.0).sum(Kind::Double).backward();
    let held = gradient(&weight).unwrap().unwrap();
    clear_gradient(&weight).unwrap();
    assert!(gradient(&weight).unwrap().is_none());
    assert_eq!(values(&held), [3.0, 3.0], "another handle keeps it");
    assert!(grad_enabled() && !tch::no_grad(grad_enabled));
}

#[test]
fn containers_are_visited_in_one_order() {
    let number = |n: f64| Tensor::from(n);
    let map = ["b", "a", "c"].map(|key| (key.to_owned(), number(f64::from(key.as_bytes()[0]))));
    let value = (
        number(1.0),
        vec![number(2.0), number(3.0)],
        (Some(number(4.0)), None::<Tensor>, [number(5.0)]),
        map.iter().map(|(k, t)| (k.clone(), t.shallow_clone())).collect::<HashMap<_, _>>(),
        map.into_iter().collect::<BTreeMap<_, _>>(),
    );
    let collect = |visit: &dyn Fn(&mut Vec<f64>)| {
        let mut seen = Vec::new();
        visit(&mut seen);
        seen
    };
    let expected = [1.0, 2.0, 3.0, 4.0, 5.0, 97.0, 98.0, 99.0, 97.0, 98.0, 99.0];
    let seen = collect(&|seen| value.visit(&mut |t| seen.push(t.double_value(&[]))));
    assert_eq!(seen, expected);
    let doubled = value.try_map(&mut |tensor| tensor.f_add(tensor)).unwrap();
    let seen = collect(&|seen| doubled.visit(&mut |t| seen.push(t.double_value(&[]) / 2.0)));
    assert_eq!(seen, expected);
    assert_eq!(doubled.3["c"].double_value(&[]), 198.0);

    let mut calls = 0;
    let failed = value.try_map(&mut |tensor| {
        calls += 1;
        if calls == 3 { Err("third") } else { Ok(tensor.shallow_clone()) }
    });
    assert_eq!((failed.err(), calls), (Some("third"), 3));
}

dist_test!(world = 2, dist_a_gradient_is_summed_in_its_own_memory, |world| {
    let group = rendezvous::group(&world);
    let status = |name: &str| {
        let text = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim_start_matches(':').trim().split(' ').next().unwrap().parse::<u64>().unwrap()
    };
    let x = Tensor::ones([32 << 20], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    // The first messages make buffers.
    let warm_up = x.narrow(0, 0, 1 << 20).detach().set_requires_grad(true);
    for input in [&warm_up, &x] {
        let output = copy_to_region(&group, input).unwrap() * 3.0;
        let before = status("VmRSS");
        std::fs::write("/proc/self/clear_refs", "5").unwrap();
        backward(&output.sum(Kind::Float)).unwrap();
        let peak = status("VmHWM").saturating_sub(before);
        let bytes = input.numel() as u64 * 4 / 1024;
        assert!(input.numel() < x.numel() || peak < bytes * 3 / 2, "{peak} kB, of {bytes}");
    }
    assert_eq!(gradient(&x).unwrap().unwrap().double_value(&[7]), 6.0);
});
