//! A struct of tensors is a sample and a batch: collated, dispatched, trained on, gathered, split between
//! ranks, and resumed in the middle of an epoch.

use brigade_data::{Batch, DataLoader, Dataset};
use brigade_nn::{Linear, Model, Module, ParamPath};
use brigade_optim::Sgd;
use brigade_testkit::{World, dist_test, step};
use brigade_torch::{Result, TensorTree};
use brigade_train::Accelerator;
use tch::{Device, Kind, Tensor};

use crate::resume::Shared;

const SAMPLES: usize = 29;

/// Named fields; a number in a sample is a tensor in a batch.
#[derive(Batch, Debug)]
#[batch(crate = "brigade_train")]
struct Sentence<Label = Tensor> {
    tokens: Tokens,
    weight: Option<Tensor>,
    label: Label,
}

/// A tuple struct within the other: inputs and the sample's number.
#[derive(Batch, Debug)]
#[batch(crate = "brigade_train")]
struct Tokens(Tensor, Tensor);

#[derive(Debug)]
struct Sentences;

impl Dataset for Sentences {
    type Sample = Sentence<i64>;

    fn len(&self) -> usize {
        SAMPLES
    }

    fn get(&self, index: usize, seed: u64) -> Result<Self::Sample> {
        let noise = (seed % 1000) as f32 / 1000.0;
        let inputs: Vec<f32> =
            (0..4).map(|column| ((index * 4 + column) as f32 + noise).sin()).collect();
        Ok(Sentence {
            tokens: Tokens(Tensor::from_slice(&inputs), Tensor::from(index as i64)),
            weight: Some(Tensor::from(1.0 + index as f32 / 10.0)),
            label: (index % 3) as i64,
        })
    }
}

struct Net(Linear);

impl Net {
    fn new(path: &ParamPath<'_>) -> Self {
        Self(Linear::new(path / "head", 4, 3))
    }
}

/// A struct is a model's input as well.
impl<'a> Module<&'a Sentence> for Net {
    type Output = Scores;

    fn forward(&self, batch: &'a Sentence) -> Result<Scores> {
        Ok(Scores { logits: self.0.forward(&batch.tokens.0)? })
    }
}

/// And its output.
#[derive(Batch, Debug)]
#[batch(crate = "brigade_train")]
struct Scores {
    logits: Tensor,
}

fn numbers(tensor: &Tensor) -> Vec<i64> {
    Vec::try_from(tensor.to_kind(Kind::Int64)).unwrap()
}

/// Two epochs from where the loader stands. Returns the loss's bits and the samples of every step, of all ranks;
/// `after` may end it after a step.
fn train(
    accelerator: &Accelerator,
    seed: i64,
    from: Option<(&std::path::Path, usize)>,
    mut after: impl FnMut(&Accelerator, usize) -> Result<()>,
) -> Result<Vec<(u64, Vec<i64>)>> {
    accelerator.processes().set_seed_per_process(seed);
    let model = Model::new(Net::new)?;
    let optimizer = Sgd::new(0.1).build(&model)?;
    let loader = DataLoader::new(Sentences).batch_size(3).shuffle(true).threads(1);
    let loader = loader.seed(seed.unsigned_abs());
    let (mut model, mut optimizer, loader) = accelerator.prepare((model, optimizer, loader))?;
    if let Some((folder, _)) = from {
        accelerator.load_state(folder)?;
    }
    let mut steps = Vec::new();
    let mut count = from.map_or(0, |(_, steps)| steps);
    model.train();
    for _ in loader.epoch()..2 {
        for batch in &loader {
            let batch = batch?;
            let scores = model.forward(&*batch)?;
            let losses = scores.logits.cross_entropy_loss::<Tensor>(
                &batch.label,
                None,
                tch::Reduction::None,
                -100,
                0.0,
            );
            let loss = (losses * batch.weight.as_ref().unwrap()).mean(Kind::Float);
            accelerator.backward(&loss)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
            let real = accelerator.gather_for_metrics(&batch, &*batch)?;
            let mean =
                accelerator.processes().reduce(&loss.detach(), brigade_torch::ReduceOp::Sum)?;
            steps.push((mean.double_value(&[]).to_bits(), numbers(&real.tokens.1)));
            count += 1;
            after(accelerator, count)?;
        }
    }
    Ok(steps)
}

fn trained_gathered_and_resumed(dispatch: bool) -> Result<()> {
    let first = Accelerator::new()?;
    let again = || Accelerator::builder().sharing(&first).dispatch_batches(dispatch).build();
    let folder = Shared::new(&first);
    let at = |steps: usize| folder.join(steps.to_string());
    let steps = train(&again()?, 1, None, |accelerator, count| {
        if count == 3 || count == 7 {
            accelerator.save_state(at(count))?;
        }
        Ok(())
    })?;
    // Each epoch has every sample once, although the last batches are completed.
    assert_eq!(steps.len() % 2, 0, "{} steps", steps.len());
    for epoch in steps.chunks(steps.len() / 2) {
        let mut seen: Vec<i64> = epoch.iter().flat_map(|(_, seen)| seen.clone()).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..SAMPLES as i64).collect::<Vec<_>>());
    }
    for count in [3, 7] {
        step!("resume after {count} steps, dispatch {dispatch}");
        // Other weights and another order until the checkpoint is loaded.
        let rest = train(&again()?, 2, Some((&at(count), count)), |_, _| Ok(()))?;
        assert_eq!(rest, steps[count..], "after {count} steps");
    }
    Ok(())
}

#[test]
fn one_process_trains_on_structs() {
    trained_gathered_and_resumed(false).unwrap();
}

dist_test!(world = 2, seconds = 120, two_ranks_train_on_structs, |_world: World| -> Result<()> {
    trained_gathered_and_resumed(false)
});

dist_test!(world = 2, seconds = 120, rank_0_reads_structs_for_all, |_world: World| -> Result<()> {
    trained_gathered_and_resumed(true)
});

dist_test!(world = 2, dist_structs_are_gathered_and_split, |world: World| -> Result<()> {
    let accelerator = Accelerator::new()?;
    let rank = world.rank.as_usize() as i64;
    let row = |values: &[i64]| Tensor::from_slice(values);
    let own = Sentence {
        tokens: Tokens(row(&[rank]), row(&[10 + rank])),
        weight: None,
        label: row(&[20 + rank]),
    };
    let all = accelerator.processes().gather(&own)?;
    assert_eq!(numbers(&all.tokens.0), [0, 1]);
    assert_eq!((numbers(&all.tokens.1), numbers(&all.label)), (vec![10, 11], vec![20, 21]));
    assert!(all.weight.is_none());

    let five = Sentence {
        tokens: Tokens(row(&[0, 1, 2, 3, 4]), Tensor::zeros([5, 2], (Kind::Float, Device::Cpu))),
        weight: Some(Tensor::ones([5], (Kind::Float, Device::Cpu))),
        label: row(&[5, 6, 7, 8, 9]),
    };
    let part = accelerator.processes().split_between_processes_padded(&five)?;
    assert_eq!(numbers(&part.tokens.0), if rank == 0 { [0, 1, 2] } else { [3, 4, 4] });
    assert_eq!(part.tokens.1.size(), [3, 2]);
    let micro: Vec<Vec<i64>> =
        part.split_rows(2)?.iter().map(|part| numbers(&part.label)).collect();
    assert_eq!(micro, if rank == 0 { [vec![5, 6], vec![7]] } else { [vec![8, 9], vec![9]] });

    let uneven = Tokens(row(&[1]), row(&[1, 2]));
    let error = accelerator.processes().split_between_processes(&uneven).unwrap_err().to_string();
    assert!(error.contains("[[1], [2]] have no common number of rows"), "{error}");
    Ok(())
});
