//! Tests of deferred copies on streams of GPUs made of host memory: missing synchronisation shows in a program's
//! results.

#![cfg(not(feature = "cuda"))] // libtorch's own kernels have their places

use brigade_test_device::fake::{self, Stream};
use tch::{Device, Kind, Tensor};

const GPU: Device = Device::Cuda(0);

fn pinned(values: &[f32]) -> Tensor {
    Tensor::from_slice(values).pin_memory(GPU)
}

fn start(from: &Tensor, stream: &Stream) -> Tensor {
    stream.run(|| from.to_device_(GPU, Kind::Float, true, false))
}

fn values(tensor: &Tensor) -> Vec<f32> {
    Vec::<f32>::try_from(tensor).unwrap()
}

fn all_nan(tensor: &Tensor) -> bool {
    values(tensor).iter().all(|it| it.is_nan())
}

#[test]
fn a_copy_is_there_once_it_was_waited_for() {
    fake::install(1).unwrap();
    let stream = Stream::new(0).unwrap();
    let from = pinned(&[1.0, 2.0]);
    let waits: [fn(&Stream); 5] = [
        |stream| stream.record().unwrap().wait().unwrap(),
        |stream| stream.record().unwrap().synchronize().unwrap(),
        |stream| stream.synchronize().unwrap(),
        |stream| {
            let event = stream.record().unwrap();
            assert!(!event.query().unwrap());
            assert!(event.query().unwrap());
        },
        |stream| stream.run(|| drop(Tensor::ones([1], (Kind::Float, GPU)))),
    ];
    for (at, wait) in waits.iter().enumerate() {
        let there = start(&from, &stream);
        assert!(!stream.is_idle());
        assert!(all_nan(&there), "the copy has not come");
        wait(&stream);
        assert!(stream.is_idle(), "wait {at}");
        assert_eq!(values(&there), [1.0, 2.0], "wait {at}");
    }
    // An event covers the work at the time of its recording.
    let (one, event) = (start(&from, &stream), stream.record().unwrap());
    let two = start(&from, &stream);
    event.wait().unwrap();
    assert_eq!(values(&one), [1.0, 2.0]);
    assert!(all_nan(&two));
    // A wait between streams does not make the host wait.
    assert_eq!(fake::synchronizations(|| stream.record().unwrap().wait().unwrap()), [""; 0]);
    assert_eq!(fake::synchronizations(|| stream.synchronize().unwrap()), ["synchronize: stream"]);
    assert_eq!(values(&two), [1.0, 2.0]);
}

#[test]
fn a_source_that_is_overwritten_too_early_shows() {
    fake::install(1).unwrap();
    let stream = Stream::new(0).unwrap();
    let mut from = pinned(&[1.0, 2.0]);
    let there = start(&from, &stream);
    let _ = from.fill_(9.0);
    stream.synchronize().unwrap();
    assert_eq!(values(&there), [9.0, 9.0]);
    // Freed memory is not reused before the copy from it, as with libtorch's allocator for CUDA.
    let there = start(&pinned(&[3.0, 4.0]), &stream);
    let _others: Vec<Tensor> = (0..4).map(|_| pinned(&[8.0, 8.0])).collect();
    stream.synchronize().unwrap();
    assert_eq!(values(&there), [3.0, 4.0]);
}

#[test]
fn a_destination_that_is_freed_too_early_shows() {
    fake::install(1).unwrap();
    let stream = Stream::new(0).unwrap();
    let from = pinned(&[1.0, 2.0]);
    let copy_into_freed = |record: bool| {
        // Created on the default stream, written on another.
        let mut there = Tensor::zeros([2], (Kind::Float, GPU));
        let address = there.data_ptr() as usize;
        stream.run(|| fake::copy_non_blocking(&mut there, &from)).unwrap();
        if record {
            fake::record_stream(&there, &stream).unwrap();
        }
        drop(there);
        let next = Tensor::zeros([2], (Kind::Float, GPU));
        let reused = next.data_ptr() as usize == address;
        stream.synchronize().unwrap();
        (reused, values(&next))
    };
    assert_eq!(
        copy_into_freed(false),
        (true, vec![1.0, 2.0]),
        "the late copy has overwritten another tensor"
    );
    assert_eq!(copy_into_freed(true), (false, vec![0.0, 0.0]));
    assert!(fake::record_stream(&from, &stream).is_err());
}

#[test]
fn the_host_reads_too_early() {
    fake::install(1).unwrap();
    let stream = Stream::new(0).unwrap();
    let there = Tensor::from_slice(&[1.0f32, 2.0]).to_device(GPU);
    let mut host = pinned(&[5.0, 5.0]);
    stream.run(|| fake::copy_non_blocking(&mut host, &there)).unwrap();
    assert_eq!(values(&host), [5.0, 5.0], "the copy has not come");
    stream.synchronize().unwrap();
    assert_eq!(values(&host), [1.0, 2.0]);
    // A copy that waits also waits for the work deferred before it.
    let mut later = there.zeros_like();
    stream.run(|| {
        fake::copy_non_blocking(&mut later, &host).unwrap();
        assert_eq!(values(&later), [1.0, 2.0]);
    });
    assert!(stream.is_idle());
}

#[test]
fn freed_memory_has_no_values() {
    fake::install(1).unwrap();
    let tensor = Tensor::ones([4], (Kind::Float, GPU));
    let address = tensor.data_ptr() as usize;
    drop(tensor);
    let next = Tensor::empty([4], (Kind::Float, GPU));
    assert_eq!(next.data_ptr() as usize, address, "memory is used again");
    assert!(all_nan(&next));
    let first = pinned(&[1.0, 2.0]);
    let address = first.data_ptr() as usize;
    drop(first);
    // Into pinned memory that libtorch allocates for the copy, which is deferred.
    let stream = Stream::new(0).unwrap();
    let there = Tensor::ones([2], (Kind::Float, GPU));
    let host = stream.run(|| there.to_device_(Device::Cpu, Kind::Float, true, false));
    assert_eq!(host.data_ptr() as usize, address);
    assert!(all_nan(&host));
    stream.synchronize().unwrap();
    assert_eq!(values(&host), [1.0, 1.0]);
}

#[test]
fn random_delays_end_some_copies_early_and_change_no_order() {
    fake::install(1).unwrap();
    let (from, stream) = (pinned(&[1.0, 2.0]), Stream::new(0).unwrap());
    let early = |seed: u64| {
        let _delays = fake::random_delays(seed);
        let copies: Vec<Tensor> = (0..6).map(|_| start(&from, &stream)).collect();
        let event = stream.record().unwrap();
        let is_there: Vec<bool> = copies.iter().map(|copy| !all_nan(copy)).collect();
        event.wait().unwrap();
        assert!(copies.iter().all(|copy| values(copy) == [1.0, 2.0]));
        is_there
    };
    let all: Vec<Vec<bool>> = (0..64).map(early).collect();
    for is_there in &all {
        // In the stream's order: those that have ended are the first.
        assert!(is_there.is_sorted_by(|a, b| a >= b), "{is_there:?}");
    }
    assert!(all.iter().any(|is_there| is_there[0]) && all.iter().any(|is_there| !is_there[5]));
    assert_eq!(early(7), early(7));
    assert!(all_nan(&start(&from, &stream)), "after the scope no copy ends early");
}
