//! Batch sizes after a real out-of-memory error.

use brigade_nn::{Linear, Model, Module, ParamPath, Unit};
use brigade_optim::Sgd;
use brigade_sharding::Sharding;
use brigade_testkit::{World, dist_test};
use brigade_torch::{Error, Result};
use brigade_train::{Accelerator, BatchSizes, Precision, TrainError};
use nix::sys::resource::{Resource, setrlimit};
use tch::{Kind, Tensor};

use crate::net;

const MIB: u64 = 1 << 20;

fn accelerator() -> Accelerator {
    Accelerator::builder().cpu(true).quiet(true).build().unwrap()
}

/// From now on this process gets only so much more address space.
fn limit_memory(more: u64) {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split_whitespace().next().unwrap().parse().unwrap();
    let limit = pages * 4096 + more;
    setrlimit(Resource::RLIMIT_AS, limit, limit).unwrap();
}

/// A batch of `size` samples of 16 MiB each.
fn batch(size: usize) -> [i64; 1] {
    [size as i64 * (16 * MIB as i64) / 4]
}

// One rank is a process of its own as well, so that its limit is not another test's.
dist_test!(world = 1, dist_halves_until_it_fits, |_world: World| {
    let accelerator = accelerator();
    limit_memory(900 * MIB);
    let mut tried = Vec::new();
    let fits = accelerator.find_executable_batch_size(64, |size| -> Result<usize> {
        tried.push(size);
        let _ = Tensor::f_zeros(batch(size), tch::kind::FLOAT_CPU)?;
        Ok(size)
    });
    assert_eq!(fits.unwrap(), 32);
    assert_eq!(tried, [64, 32]);
    // The same error through tch's operators without a result.
    let fits = accelerator
        .find_executable_batch_size(128, |size| -> Result<Tensor> {
            Ok(Tensor::zeros(batch(size), tch::kind::FLOAT_CPU))
        })
        .unwrap();
    assert_eq!(fits.size(), batch(32));
    drop(fits);
    let by_tens = BatchSizes::new(100, |size| size - 10);
    let by_tens = accelerator.find_executable_batch_size(by_tens, |size| -> Result<usize> {
        let _ = Tensor::f_zeros(batch(size), tch::kind::FLOAT_CPU)?;
        Ok(size)
    });
    let fits = by_tens.unwrap();
    assert!([30, 40, 50].contains(&fits), "{fits} of 16 MiB in 900 MiB");
    let never = accelerator.find_executable_batch_size(3, |_| -> Result<()> {
        let _ = Tensor::f_zeros(batch(64), tch::kind::FLOAT_CPU)?;
        Ok(())
    });
    let never = never.unwrap_err();
    assert!(
        matches!(never.downcast_ref(), Some(TrainError::NoBatchSize { start: 3, smallest: 1 })),
        "{never}"
    );
});

dist_test!(world = 2, dist_all_ranks_go_on_with_the_same_size, |world: World| {
    let accelerator = accelerator();
    if world.rank.as_usize() == 1 {
        limit_memory(900 * MIB);
    }
    let mut tried = Vec::new();
    let fits = accelerator.find_executable_batch_size(64, |size| -> Result<usize> {
        tried.push(size);
        // Rank 0 has more, but takes one page only.
        let shape = if world.rank.as_usize() == 1 { batch(size) } else { [1024] };
        let _ = Tensor::f_zeros(shape, tch::kind::FLOAT_CPU)?;
        Ok(size)
    });
    assert_eq!((fits.unwrap(), tried), (32, vec![64, 32]));
    // Another error on one rank ends the search on all.
    let failed = accelerator.find_executable_batch_size(8, |_| -> Result<()> {
        match world.rank.as_usize() {
            0 => Err(Error::invalid_argument("the data are gone")),
            _ => Ok(()),
        }
    });
    assert!(failed.unwrap_err().to_string().contains("the data are gone"));
    // A rank that fails while the other waits in a collective, as it stands in the middle of training.
    let failed = accelerator.find_executable_batch_size(8, |_| -> Result<()> {
        if world.rank.as_usize() == 0 {
            return Err(Error::invalid_argument("the data are gone"));
        }
        accelerator.processes().wait_for_everyone()
    });
    assert!(failed.unwrap_err().to_string().contains("the data are gone"));
    // The ranks are still together.
    let sum = accelerator
        .processes()
        .reduce(&Tensor::ones([1], (Kind::Float, tch::Device::Cpu)), brigade_torch::ReduceOp::Sum);
    assert_eq!(sum.unwrap().double_value(&[0]), 2.0);
});

// One rank runs out of memory between two collectives, in which the other waits for it.
dist_test!(world = 2, dist_one_rank_alone_runs_out_in_the_middle_of_training, |world: World| {
    let fp16 = Precision::Fp16;
    let build = || Accelerator::builder().cpu(true).quiet(true).mixed_precision(fp16).build();
    let accelerator = build().unwrap();
    let before = accelerator.processes().group().unwrap();
    if world.rank.as_usize() == 1 {
        // Each new process group takes threads, and so address space.
        limit_memory(1400 * MIB);
    }
    let mut tried = Vec::new();
    let attempt = |size| -> Result<u64> {
        tried.push(size);
        let model = net::model(Kind::Float);
        let optimizer = Sgd::new(0.1).build(&model)?;
        let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
        for step in 0..3 {
            let input = Tensor::full([2, 5], 0.1, tch::kind::FLOAT_CPU);
            let loss = model.forward(&input)?.square().mean(Kind::Float);
            if (world.rank.as_usize(), step) == (1, 1) {
                let _ = Tensor::f_zeros(batch(size), tch::kind::FLOAT_CPU)?;
            }
            accelerator.backward(&loss)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
        }
        optimizer.steps()
    };
    let steps =
        accelerator.find_executable_batch_size(BatchSizes::new(512, |size| size / 4), attempt);
    assert_eq!((steps.unwrap(), tried), (3, vec![512, 128, 32]));
    // What goes on is another group; the one before is closed, and says so.
    assert!(before.barrier().is_err());
    let sum = accelerator
        .processes()
        .reduce(&Tensor::ones([1], (Kind::Float, tch::Device::Cpu)), brigade_torch::ReduceOp::Sum);
    assert_eq!(sum.unwrap().double_value(&[0]), 2.0);
});

#[test]
fn invalid_searches_are_refused() {
    let refused = accelerator().find_executable_batch_size(0, |_| -> Result<()> { Ok(()) });
    assert!(refused.unwrap_err().to_string().contains("at least 1"));
    let out_of_memory = |_| -> Result<()> {
        Err(tch::TchError::Torch("CUDA out of memory. Tried to allocate".into()).into())
    };
    let endless =
        accelerator().find_executable_batch_size(BatchSizes::new(4, |size| size), out_of_memory);
    assert!(endless.unwrap_err().to_string().contains("expected a smaller one"));
    let other = accelerator()
        .find_executable_batch_size(4, |_| -> Result<()> { Err(Error::invalid_argument("no")) });
    assert_eq!(other.unwrap_err().to_string(), "no");
}

/// Takes memory in its unit's part of the forward.
struct Hungry {
    first: Linear,
    unit: Unit,
    second: Linear,
    /// Bytes, as the shape of a tensor.
    takes: [i64; 1],
}

impl Module<&Tensor> for Hungry {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let x = self.first.forward(input)?;
        self.unit.run(|| -> Result<Tensor> {
            let _ = Tensor::f_zeros(self.takes, tch::kind::FLOAT_CPU)?;
            self.second.forward(&x)
        })
    }
}

// The rank that has memory waits in the gradients' reduction for the one that has not.
dist_test!(world = 2, dist_sharded_ranks_go_on_with_the_same_size, |world: World| {
    let builder = Accelerator::builder().cpu(true).quiet(true);
    let accelerator = builder.sharding(Sharding::zero3()).build().unwrap();
    let is_short = world.rank.as_usize() == 1;
    if is_short {
        // Each new process group takes threads, and so address space.
        limit_memory(1800 * MIB);
    }
    let mut tried = Vec::new();
    let attempt = |size| -> Result<f64> {
        tried.push(size);
        let model = Model::new(|path: &ParamPath<'_>| Hungry {
            first: Linear::new(path / "first", 4, 4),
            unit: (path / "second").unit(),
            second: Linear::new(path / "second", 4, 2),
            takes: if is_short { batch(size) } else { [1] },
        })?;
        let optimizer = Sgd::new(0.1).build(&model)?;
        let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
        for _ in 0..3 {
            let inputs = Tensor::f_ones([2, 4], tch::kind::FLOAT_CPU)?;
            let loss = model.forward(&inputs)?.f_square()?.f_mean(Kind::Float)?;
            accelerator.backward(&loss)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
        }
        model.gathered(|model| Ok(model.parameters()[0].tensor.f_norm()?.f_double_value(&[])?))
    };
    let norm =
        accelerator.find_executable_batch_size(BatchSizes::new(512, |size| size / 8), attempt);
    assert!(norm.unwrap().is_finite());
    assert_eq!(tried, [512, 64, 8][..tried.len()]);
    assert!(tried.len() > 1);
});
