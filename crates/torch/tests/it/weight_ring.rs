//! Parts of a ring that are larger than one thread reads.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, ThreadId};

use brigade_torch::{RingPart, WeightRing, WeightSource};
use tch::{Device, Kind, Tensor};

/// Elements of a tensor of 2 MB.
const LENGTH: i64 = 1 << 19;

/// A ring with one part of six tensors, whose values `read` sets by their number.
fn ring(
    read: impl Fn(i64, &Tensor) -> Result<(), brigade_torch::Error> + Send + Sync + 'static,
) -> (Vec<Tensor>, WeightRing) {
    let read = Arc::new(read);
    let tensors = (0..6).map(|number| {
        let read = Arc::clone(&read);
        let source = WeightSource::Read(Arc::new(move |into: &Tensor| read(number, into)));
        // Of different lengths, so that shares are not the same number of tensors.
        (Tensor::zeros([LENGTH + 1000 * number], (Kind::Float, Device::Cpu)), source)
    });
    let tensors: Vec<_> = tensors.collect();
    let handles = tensors.iter().map(|it| it.0.shallow_clone()).collect();
    let part = RingPart { name: "block".to_owned(), tensors };
    (handles, WeightRing::new(Device::Cpu, 2, vec![part]).unwrap())
}

fn fill(number: i64, into: &Tensor) -> Result<(), brigade_torch::Error> {
    into.shallow_clone().f_fill_(number).map(drop)?;
    Ok(())
}

#[test]
fn large_parts_are_read_by_several_threads_each_tensor_once() {
    let readers: Arc<Mutex<Vec<(i64, ThreadId)>>> = Arc::default();
    let (tensors, ring) = ring({
        let readers = Arc::clone(&readers);
        move |number, into: &Tensor| {
            readers.lock().unwrap().push((number, thread::current().id()));
            fill(number, into)
        }
    });
    let _held = ring.hold(&[0]).unwrap();
    for (number, tensor) in (0..).zip(&tensors) {
        let expected = f64::from(number);
        assert_eq!(
            (tensor.min().double_value(&[]), tensor.max().double_value(&[])),
            (expected, expected)
        );
    }
    let readers = readers.lock().unwrap();
    let numbers: HashSet<i64> = readers.iter().map(|it| it.0).collect();
    let threads: HashSet<ThreadId> = readers.iter().map(|it| it.1).collect();
    assert_eq!((numbers.len(), readers.len()), (6, 6));
    assert_eq!(threads.len(), thread::available_parallelism().unwrap().get().min(4));
}

#[test]
fn a_read_that_fails_or_panics_in_any_thread_is_the_parts_error_and_the_next_use_reads_again() {
    for bad in 0..6 {
        let failures = Arc::new(Mutex::new(vec!["failed", "panicked"]));
        let (tensors, ring) = ring({
            let failures = Arc::clone(&failures);
            move |number, into: &Tensor| {
                let failure = if number == bad { failures.lock().unwrap().pop() } else { None };
                match failure {
                    Some("panicked") => panic!("a read panicked on purpose"),
                    Some(_) => Err(brigade_torch::Error::custom("no such weight")),
                    None => fill(number, into),
                }
            }
        });
        for expected in ["the read of a weight panicked", "no such weight"] {
            let error = ring.hold(&[0]).unwrap_err().to_string();
            assert!(error.contains("`block`") && error.contains(expected), "{bad}: {error}");
        }
        let _held = ring.hold(&[0]).unwrap();
        assert_eq!(tensors[5].double_value(&[0]), 5.0);
    }
}

/// A part with one tensor, whose value `read` sets.
fn part(
    name: &str,
    read: impl Fn(&Tensor) -> Result<(), brigade_torch::Error> + Send + Sync + 'static,
) -> (Tensor, RingPart) {
    let tensor = Tensor::zeros([8], (Kind::Float, Device::Cpu));
    let source = WeightSource::Read(Arc::new(read));
    let tensors = vec![(tensor.shallow_clone(), source)];
    (tensor, RingPart { name: name.to_owned(), tensors })
}

/// The disk is a channel, which gives a value when the test says so.
#[test]
fn a_slow_disk_delays_the_part_that_is_read_and_not_the_one_that_computes() {
    let (disk, values) = mpsc::channel::<i64>();
    let values = Mutex::new(values);
    let (begun, begins) = mpsc::channel();
    let (first, one) = part("first", |into| fill(1, into));
    let (second, two) = part("second", move |into: &Tensor| {
        begun.send(()).unwrap();
        fill(values.lock().unwrap().recv().unwrap(), into)
    });
    let ring = WeightRing::new(Device::Cpu, 2, vec![one, two]).unwrap();
    for value in [2, 3] {
        {
            let _held = ring.hold(&[0]).unwrap();
            if value == 2 {
                // The second part is read ahead, and the disk gives nothing yet.
                begins.recv().unwrap();
            }
            assert_eq!(first.double_value(&[7]), 1.0);
        }
        disk.send(value).unwrap();
        let _held = ring.hold(&[1]).unwrap();
        assert_eq!(second.double_value(&[7]), 2.0);
    }
    assert_eq!(ring.meter().fetches, 2);
}

#[test]
fn a_ring_that_ends_while_a_slow_disk_reads_waits_for_the_read() {
    let (disk, values) = mpsc::channel::<i64>();
    let values = Mutex::new(values);
    let (begun, begins) = mpsc::channel();
    let (_first, one) = part("first", |into| fill(1, into));
    let (_second, two) = part("second", move |into: &Tensor| {
        begun.send(()).unwrap();
        fill(values.lock().unwrap().recv().unwrap(), into)
    });
    let ring = WeightRing::new(Device::Cpu, 2, vec![one, two]).unwrap();
    drop(ring.hold(&[0]).unwrap());
    begins.recv().unwrap();
    let ends = thread::spawn(move || drop(ring));
    assert!(!ends.is_finished());
    disk.send(5).unwrap();
    ends.join().unwrap();
}
