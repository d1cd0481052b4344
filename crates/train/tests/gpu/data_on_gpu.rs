//! Data sets that lie on a GPU, and what loaders' threads compute there: on one made of host memory, or a real one
//! where `BRIGADE_TEST_DEVICE=cuda` says so.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use brigade_data::{
    BatchContext, BatchedDataset, DataLoader, StreamLoader, TensorDataset, batches_from_fn,
    dataset_from_fn, stream_from_fn,
};
use brigade_nn::{Linear, Model};
use brigade_optim::Sgd;
use brigade_test_device::{fake, gpu, without_waiting};
use brigade_testkit::dist_test;
use brigade_torch::{Backend, DeviceExt, Error, Result, SideStream, Streams, copy_to_device};
use brigade_train::DATASET_SHARE;
use tch::{Device, Kind, Tensor};

use crate::gpu::builder;

/// Images of bytes and their numbers as labels.
fn pictures(count: i64) -> TensorDataset<(Tensor, Tensor)> {
    let cpu = (Kind::Int64, Device::Cpu);
    let images = Tensor::arange(count * 48, cpu).remainder(251).to_kind(Kind::Uint8);
    TensorDataset::new((images.reshape([count, 3, 4, 4]), Tensor::arange(count, cpu))).unwrap()
}

/// Bytes to numbers on the data's device, with what follows from the batch's seed.
fn scaled((images, labels): (Tensor, Tensor), context: &BatchContext) -> Result<(Tensor, Tensor)> {
    let shift = (context.batch_seed() % 7) as f64;
    Ok((images.f_to_kind(Kind::Float)?.f_add_scalar(shift)?, labels))
}

fn on_cpu((images, labels): (Tensor, Tensor)) -> (Tensor, Vec<i64>) {
    (images.to_device(Device::Cpu), Vec::try_from(labels.to_device(Device::Cpu)).unwrap())
}

#[test]
fn a_data_set_on_the_gpu_feeds_steps_that_do_not_wait() {
    let (device, _alone) = gpu();
    let epochs = |device: Device, place: bool, threads: usize| {
        let accelerator = builder(device).build().unwrap();
        tch::manual_seed(3);
        let model = Model::new(|path| Linear::new(path, 48, 5)).unwrap();
        let optimizer = Sgd::new(0.01).build(&model).unwrap();
        let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
        let data = if place {
            accelerator.processes().place_dataset(pictures(50)).unwrap()
        } else {
            pictures(50)
        };
        let expected = if place { device } else { Device::Cpu };
        assert_eq!(data.device(), expected);
        let loader = DataLoader::new(data.map(scaled)).batch_size(8).shuffle(true).seed(5);
        let loader = accelerator.prepare(loader.threads(threads)).unwrap();
        let (mut seen, mut waits) = (Vec::new(), Vec::new());
        for _epoch in 0..2 {
            let mut batches = loader.iter();
            loop {
                let mut step = || {
                    let (images, labels) = batches.next()?.unwrap().into_data();
                    assert_eq!((images.device(), labels.device()), (device, device));
                    let scores = model.forward(&images.flatten(1, -1)).unwrap();
                    let loss = scores.cross_entropy_for_logits(&labels.remainder(5));
                    optimizer.zero_grad().unwrap();
                    accelerator.backward(&loss).unwrap();
                    optimizer.step().unwrap();
                    Some((images, labels))
                };
                let mut batch = None;
                if fake::is_installed() {
                    waits.extend(fake::synchronizations(|| batch = step()));
                } else {
                    batch = without_waiting(step);
                }
                let Some(batch) = batch else { break };
                seen.push(batch);
            }
        }
        // No step waits; a reading thread waits at the end of its epoch.
        assert!(waits.len() <= 2 * threads, "{waits:?}");
        assert!(waits.iter().all(|it| it == fake::SIDE_STREAM), "{waits:?}");
        seen.into_iter().map(on_cpu).collect::<Vec<_>>()
    };
    let expected = epochs(Device::Cpu, false, 0);
    assert_eq!(expected.len(), 14);
    let mut labels: Vec<i64> =
        expected[..7].iter().flat_map(|(_, labels)| labels.clone()).collect();
    labels.sort_unstable();
    assert_eq!(labels, (0..50).collect::<Vec<_>>());
    for (place, threads) in [(true, 0), (true, 1), (true, 3), (false, 2)] {
        assert_eq!(epochs(device, place, threads), expected, "{place}, {threads} threads");
    }
}

#[test]
fn what_threads_compute_is_there_when_the_loop_uses_it() {
    let (device, _alone) = gpu();
    // The copies are deferred until something waits for them; until then the memory holds NaN.
    let sent = |device: Device| {
        batches_from_fn(40, move |indices, _| {
            let values: Vec<f32> = indices.iter().map(|index| *index as f32).collect();
            Ok((copy_to_device(&Tensor::from_slice(&values), device)?, Tensor::from_slice(&values)))
        })
    };
    let expected: Vec<f32> = (0..40).map(|index| index as f32).collect();
    // Each is read as soon as it is complete: a thread that ends waits for its stream.
    let values = |tensor: &Tensor| {
        Vec::<f32>::try_from(tensor.to_device(Device::Cpu).flatten(0, -1)).unwrap()
    };
    let read = |batches: &mut dyn Iterator<Item = (Tensor, Tensor)>, of_host: Device| {
        let mut found = (Vec::new(), Vec::new());
        for (sent, host) in batches {
            assert_eq!((sent.device(), host.device()), (device, of_host));
            found.0.extend(values(&sent));
            found.1.extend(values(&host));
        }
        assert_eq!(found, (expected.clone(), expected.clone()));
    };
    for threads in [0, 1, 3] {
        let loader = DataLoader::new(sent(device)).batch_size(4).threads(threads);
        // Without an Accelerator the CPU's tensors are not moved.
        let loader = loader.device(device);
        read(&mut loader.iter().map(|batch| batch.unwrap().into_data()), Device::Cpu);
        let accelerator = builder(device).build().unwrap();
        let loader = accelerator.prepare(loader).unwrap();
        read(&mut loader.iter().map(|batch| batch.unwrap().into_data()), device);
    }
    let stream = stream_from_fn(move |_, _| {
        (0..40).map(move |number| {
            let number = Tensor::from_slice(&[number as f32]);
            Ok((copy_to_device(&number, device)?, number))
        })
    });
    let loader = StreamLoader::new(stream).batch_size(8).device(device);
    read(&mut loader.iter().map(|batch| batch.unwrap().into_data()), Device::Cpu);
    // Without the device, a loader computes on a stream that nothing waits for.
    let untold = DataLoader::new(sent(device)).batch_size(4).threads(1);
    let error = untold.iter().next().unwrap().unwrap_err().to_string();
    assert!(error.contains(&device.label()) && error.contains("DataLoader::device"), "{error}");
}

#[test]
fn threads_that_come_later_have_the_streams_of_those_that_have_ended() {
    let (device, _alone) = gpu();
    let streams = |threads: usize| -> Vec<String> {
        let together = Barrier::new(threads);
        thread::scope(|scope| {
            let enter = || {
                let side = SideStream::enter(device, None).unwrap();
                let streams = Streams::current(&[device]).unwrap();
                together.wait();
                drop(side);
                assert_ne!(
                    format!("{:?}", Streams::current(&[device]).unwrap()),
                    format!("{streams:?}")
                );
                format!("{streams:?}")
            };
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(enter)).collect();
            let mut found: Vec<_> = threads.into_iter().map(|it| it.join().unwrap()).collect();
            found.sort();
            found
        })
    };
    let first = streams(3);
    assert!(first[0] != first[1] && first[1] != first[2], "each has its own: {first:?}");
    for _ in 0..40 {
        assert_eq!(streams(3), first);
    }
}

#[test]
fn a_thread_that_ends_waits_for_its_own_stream_and_no_training_for_it() {
    let (device, _alone) = gpu();
    let numbers = || Tensor::arange(3, (Kind::Float, Device::Cpu));
    let read = || {
        let read = thread::spawn(move || {
            let _side = SideStream::enter(device, None).unwrap();
            copy_to_device(&numbers(), device).unwrap()
        });
        read.join().unwrap()
    };
    assert_eq!(without_waiting(read).to_device(Device::Cpu), numbers());
    if fake::is_installed() {
        let waits = fake::synchronizations(|| drop(read()));
        assert_eq!(waits, [fake::SIDE_STREAM], "its copy was under way");
    }
}

#[test]
fn an_epoch_that_is_left_frees_its_memory_and_errors_arrive_in_their_place() {
    let (device, _alone) = gpu();
    let accelerator = builder(device).build().unwrap();
    for threads in [0, 2] {
        let data = pictures(64).to_device(device).unwrap().map(scaled);
        let loader = DataLoader::new(data).batch_size(4).threads(threads).overlap_epochs(true);
        let loader = accelerator.prepare(loader).unwrap();
        // Memory of the data set itself, and memory that a first epoch leaves allocated.
        let whole = || {
            if fake::is_installed() { fake::memory(1).unwrap().allocated } else { 0 }
        };
        let before = whole();
        let mut batches = loader.iter();
        let first = batches.next().unwrap().unwrap().into_data();
        assert_eq!(on_cpu(first).1, [0, 1, 2, 3]);
        drop(batches);
        assert_eq!(whole(), before, "{threads} threads");
        drop(loader);

        let read = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&read);
        let fails = pictures(12).to_device(device).unwrap().map(move |batch, context| {
            counted.fetch_add(1, Ordering::SeqCst);
            match context.batch {
                1 => Err(Error::custom("the second is damaged")),
                2 => panic!("the third is on fire"),
                _ => scaled(batch, context),
            }
        });
        let loader = DataLoader::new(fails).batch_size(3).threads(threads);
        let loader = accelerator.prepare(loader).unwrap();
        let outcomes: Vec<Result<Vec<i64>, String>> = loader
            .iter()
            .map(|batch| {
                batch.map(|it| on_cpu(it.into_data()).1).map_err(|error| error.to_string())
            })
            .collect();
        assert_eq!(outcomes.len(), 4);
        assert_eq!(outcomes[0], Ok(vec![0, 1, 2]));
        assert!(outcomes[1].as_ref().unwrap_err().contains("the second is damaged"));
        assert!(outcomes[2].as_ref().unwrap_err().contains("the third is on fire"));
        assert_eq!(outcomes[3], Ok(vec![9, 10, 11]));
        assert_eq!(read.load(Ordering::SeqCst), 4);
    }
}

#[test]
fn a_run_goes_on_in_the_middle_of_an_epoch_of_data_on_the_gpu() {
    let (device, _alone) = gpu();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    // The seed is that of the first run; the second run's differs.
    let run = |seed: u64, resume: bool, place: bool| {
        let accelerator = builder(device).build().unwrap();
        let data = if place {
            accelerator.processes().place_dataset(pictures(30)).unwrap()
        } else {
            pictures(30)
        };
        let loader = DataLoader::new(data.map(scaled)).batch_size(4).shuffle(true).seed(seed);
        let loader = accelerator.prepare(loader.threads(2)).unwrap();
        if resume {
            accelerator.load_state(&path).unwrap();
        }
        let mut batches = Vec::new();
        for (index, batch) in loader.iter().enumerate() {
            batches.push(on_cpu(batch.unwrap().into_data()));
            if !resume && index == 2 {
                accelerator.save_state(&path).unwrap();
            }
        }
        batches
    };
    let whole = run(1, false, true);
    assert_eq!(whole.len(), 8);
    assert_eq!(run(2, true, true), whole[3..]);
    assert_eq!(run(2, true, false), whole[3..]);
}

#[test]
fn a_data_set_goes_to_the_gpu_where_there_is_room_and_stays_on_the_host_otherwise() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    let accelerator = builder(device).build().unwrap();
    let rows = |bytes: i64| {
        TensorDataset::new(Tensor::zeros([bytes / 64, 64], (Kind::Uint8, Device::Cpu))).unwrap()
    };
    fake::empty_cache(1).unwrap();
    let taken = fake::memory(1).unwrap().reserved;
    fake::set_capacity(1, taken + (8 << 20)).unwrap();
    let place = |bytes: i64, share: f64| {
        accelerator.processes().place_dataset_within(rows(bytes), share).unwrap().device()
    };
    assert_eq!(place(3 << 20, DATASET_SHARE), device);
    assert_eq!(place(5 << 20, DATASET_SHARE), Device::Cpu);
    assert_eq!(place(5 << 20, 0.9), device);
    assert_eq!(accelerator.processes().place_dataset(rows(5 << 20)).unwrap().device(), Device::Cpu);
    for share in [-0.1, 1.5, f64::NAN] {
        let error =
            accelerator.processes().place_dataset_within(rows(64), share).unwrap_err().to_string();
        assert!(error.contains("a share of the free memory is 0 to 1"), "{error}");
    }
    // The error for a batch without memory contains the operation and the state of memory.
    let wide = accelerator.processes().place_dataset_within(rows(6 << 20), 1.0).unwrap();
    assert_eq!(wide.device(), device);
    let loader = DataLoader::new(wide).batch_size(90_000).threads(1);
    let loader = accelerator.prepare(loader).unwrap();
    let error = loader.iter().next().unwrap().unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    let text = error.to_string();
    assert!(
        text.starts_with("rank 0 ran out of memory on cuda:1 in the copy of a batch"),
        "{text}"
    );
}

#[test]
fn a_whole_data_set_is_read_into_tensors() {
    for threads in [0, 3] {
        let squares = dataset_from_fn(200, |index, seed| {
            Ok(([index as u8; 6], (seed % 2 == index as u64 % 2, index)))
        });
        let data = TensorDataset::read_all(squares, threads).unwrap();
        assert_eq!((data.len(), data.bytes()), (200, 200 * (6 + 1 + 8)));
        let (rows, (_, index)) = data.batch(&[199, 0, 70], &BatchContext::default()).unwrap();
        assert_eq!((rows.kind(), rows.size()), (Kind::Uint8, vec![3, 6]));
        assert_eq!(Vec::<i64>::try_from(index).unwrap(), [199, 0, 70]);
        assert_eq!(Vec::<u8>::try_from(rows.select(1, 5)).unwrap(), [199, 0, 70]);
    }
    let ragged = batches_from_fn(100, |indices, _| {
        let width = if indices.contains(&80) { 3 } else { 2 };
        Ok(Tensor::zeros([indices.len() as i64, width], (Kind::Float, Device::Cpu)))
    });
    let error = TensorDataset::read_all(ragged, 2).unwrap_err().to_string();
    assert!(error.contains("samples 64 to 100 have [3] of Float, the first have [2]"), "{error}");
    let none = dataset_from_fn(0, |index, _| Ok(index));
    let error = TensorDataset::read_all(none, 1).unwrap_err().to_string();
    assert!(error.contains("without samples"), "{error}");
    let fails = dataset_from_fn(9, |index, _| match index {
        7 => Err(Error::custom("the eighth is damaged")),
        _ => Ok(index),
    });
    let error = TensorDataset::read_all(fails, 2).unwrap_err().to_string();
    assert!(error.contains("the eighth is damaged"), "{error}");
}

dist_test!(world = 2, dist_ranks_with_their_data_on_one_gpu_share_its_samples_out, |world| {
    let (device, _alone) = gpu();
    let builder = builder(device).backend(Backend::Gloo(Default::default()));
    let accelerator = builder.build().unwrap();
    // One rank has enough memory, the other does not: batches are the same.
    let share = if accelerator.processes().process_index() == 0 { DATASET_SHARE } else { 0.0 };
    let data = accelerator.processes().place_dataset_within(pictures(24), share).unwrap();
    assert_eq!(data.device() == device, accelerator.processes().process_index() == 0);
    let loader = DataLoader::new(data).batch_size(3).shuffle(true).threads(2);
    let loader = accelerator.prepare(loader).unwrap();
    let mut all = Vec::new();
    for batch in &loader {
        let (images, labels) = batch.unwrap().into_data();
        let first = images.flatten(1, -1).select(1, 0).to_kind(Kind::Int64);
        assert_eq!(first, (&labels * 48).remainder(251));
        all.push(accelerator.processes().gather(&labels).unwrap());
    }
    let mut seen = Vec::<i64>::try_from(Tensor::cat(&all, 0).to_device(Device::Cpu)).unwrap();
    seen.sort_unstable();
    assert_eq!(seen, (0..24).collect::<Vec<_>>());
    assert_eq!(world.world_size.as_usize(), 2);
});
