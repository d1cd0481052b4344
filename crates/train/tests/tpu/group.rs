//! TorchTPU's own process group. The plug-in for CPUs has one device that belongs to no slice, so it runs with one rank.

use brigade_test_needs::needs;
use brigade_testkit::DistTest;
use brigade_torch::{Backend, DeviceExt, GroupOptions, ProcessGroup, ReduceOp, Result, Store, TPU};
use tch::{Device, Kind, Tensor};

use crate::training::builder;

fn alone() -> ProcessGroup {
    let store = Store::hash().unwrap();
    ProcessGroup::new(&store, 0, 1, Backend::Tpu, GroupOptions::default()).unwrap()
}

fn numbers(kind: Kind) -> Tensor {
    Tensor::arange(6, (Kind::Float, Device::Cpu)).to_kind(kind).to_device(TPU)
}

#[needs(Tpu)]
fn collectives_of_one_rank_give_its_own_tensors() {
    let group = alone();
    for kind in [Kind::Float, Kind::BFloat16, Kind::Int] {
        let expected = numbers(kind);
        for op in [ReduceOp::Sum, ReduceOp::Max] {
            let mut found = numbers(kind);
            group.all_reduce(&mut found, op).unwrap();
            assert_eq!((found.device(), &found), (TPU, &expected), "{kind:?}, {op:?}");
        }
        let mut found = numbers(kind);
        group.broadcast(&mut found, 0).unwrap();
        assert_eq!(found, expected);
        assert_eq!(group.all_gather(&expected).unwrap(), [expected.shallow_clone()]);
    }
    let expected = numbers(Kind::Float);
    let part = group.reduce_scatter(&[numbers(Kind::Float)], ReduceOp::Mean).unwrap();
    assert_eq!(part, expected);
    assert_eq!(group.all_to_all(&[numbers(Kind::Float)], None).unwrap(), [expected]);
}

#[needs(Tpu)]
fn lists_of_several_kinds_and_means_are_reduced() {
    let group = alone();
    let mut list = [numbers(Kind::Float), numbers(Kind::BFloat16), numbers(Kind::Float)];
    group.all_reduce_coalesced(&mut list, ReduceOp::Mean).unwrap();
    for (found, kind) in list.iter().zip([Kind::Float, Kind::BFloat16, Kind::Float]) {
        assert_eq!(*found, numbers(kind));
    }
}

#[needs(Tpu)]
fn tensors_of_the_cpu_go_by_gloo_beside_it() {
    let group = alone();
    let mut ones = Tensor::ones([3], (Kind::Double, Device::Cpu));
    group.all_reduce(&mut ones, ReduceOp::Sum).unwrap();
    assert_eq!(ones, Tensor::ones([3], (Kind::Double, Device::Cpu)));
    group.barrier().unwrap();
}

#[needs(Tpu)]
fn an_operation_that_it_lacks_is_named() {
    let error = alone().reduce(&mut numbers(Kind::Float), ReduceOp::Sum, 0).unwrap_err();
    assert!(error.to_string().contains("does not support reduce"), "{error}");
}

fn refused_without_a_slice() -> Result<()> {
    let error = builder(TPU).backend(Backend::Tpu).build().unwrap_err().to_string();
    assert!(error.contains("exchange no data with those of other processes"), "{error}");
    Ok(())
}

#[needs(Tpu)]
fn several_ranks_on_a_plug_in_without_slices_are_refused() {
    let name = concat!(module_path!(), "::several_ranks_on_a_plug_in_without_slices_are_refused");
    DistTest::new(name, 2).run_or_panic(|_| refused_without_a_slice());
}

#[needs(Tpu)]
fn a_process_that_has_loaded_it_alone_cannot_join_a_slice() {
    TPU.load().unwrap();
    let error = brigade_torch::join_tpu_slice().unwrap_err().to_string();
    assert!(error.contains("was loaded for this process alone"), "{error}");
}
