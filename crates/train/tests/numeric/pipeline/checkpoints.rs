//! What a run on one mesh with stages saves is gone on with on any other.

use std::path::Path;
use std::sync::Arc;

use brigade_checkpoint::Safetensors;
use brigade_checkpoint::convert::{Target, convert};
use brigade_checkpoint::layout::Checkpoint;
use brigade_data::{DataLoader, TensorDataset};
use brigade_models::{Gpt2LmHead, Labelled};
use brigade_nn::{Model, TensorParallelPlan, weights};
use brigade_optim::{AdamW, Scheduler};
use brigade_schedule::Schedule as LearningRate;
use brigade_sharding::pipeline::Schedule;
use brigade_sharding::{Mesh, Sharding};
use brigade_testkit::assert_close;
use brigade_train::{
    Accelerator, PipelineOptions, PreparedLoader, PreparedModel, PreparedOptimizer,
    PreparedScheduler, WeightAverage,
};
use tch::{Device, Kind, Tensor};

use super::{gpt2, values};
use crate::net::fill;
use crate::sharding::on_ranks;

/// Sizes of the axes of a mesh: stages, replicas, shards, context ranks, tensor ranks.
#[derive(Debug, Clone, Copy)]
struct Form {
    sizes: [usize; 5],
    schedule: Schedule,
    sharding: Option<fn() -> Sharding>,
    /// Batches of a step, whose losses are sums where there are several.
    window: usize,
}

impl Form {
    const fn new(sizes: [usize; 5]) -> Self {
        Self { sizes, schedule: Schedule::OneForwardOneBackward, sharding: None, window: 1 }
    }

    fn ranks(self) -> usize {
        self.sizes.iter().product()
    }
}

type Weights = Vec<(String, Vec<f64>)>;

struct Run {
    accelerator: Accelerator,
    model: PreparedModel<Gpt2LmHead>,
    optimizer: PreparedOptimizer,
    scheduler: PreparedScheduler,
    loader: PreparedLoader<DataLoader<TensorDataset<Tensor>>>,
    average: Arc<WeightAverage>,
    losses: Vec<f64>,
    window: usize,
}

/// Texts of an epoch, of which the ranks take eight in a step.
const TEXTS: i64 = 48;
const ROWS: usize = 8;

impl Run {
    /// Trains what is left of the epoch; saves after three steps where a folder is given, and forgets the losses before.
    fn train(&mut self, folder: Option<&Path>) {
        for (step, batch) in self.loader.iter().enumerate() {
            let batch = batch.unwrap();
            let ids: &Tensor = &batch;
            let Self { accelerator, model, optimizer, scheduler, window, average, .. } = self;
            let loss = accelerator.accumulate(&*model, &batch, || {
                let loss = if *window > 1 {
                    accelerator.forward_backward(model, ids, |model, micro| {
                        let loss = model.forward(Labelled::new(micro, micro))?;
                        Ok((loss.sum, loss.count))
                    })?
                } else {
                    accelerator.forward_backward(model, ids, |model, micro| {
                        model.forward(Labelled::new(micro, micro))?.mean()
                    })?
                };
                accelerator.clip_grad_norm(&*model, 0.5)?;
                optimizer.step()?;
                scheduler.step()?;
                optimizer.zero_grad()?;
                if accelerator.sync_gradients() {
                    average.update(0.75)?;
                }
                Ok(loss.value())
            });
            self.losses.push(loss.unwrap());
            if let (2, Some(folder)) = (step, folder) {
                self.accelerator.save_state(folder).unwrap();
                self.accelerator.checkpoints().wait().unwrap();
                self.losses.clear();
            }
        }
    }
}

fn run(form: Form, body: impl Fn(&mut Run) + Sync) -> (Weights, Vec<f64>) {
    let found = on_ranks(form.ranks(), |builder, _| {
        tch::set_num_threads(1);
        let [stages, replicas, shards, context, tensor] = form.sizes;
        let mesh = Mesh::builder().pipeline(stages).replicate(replicas).shard(shards);
        let mesh = mesh.context(context).tensor(tensor).build(form.ranks()).unwrap();
        let builder = builder.sharding(form.sharding.map(|new| new())).mesh(mesh);
        let options = PipelineOptions::new(4).schedule(form.schedule);
        let builder = if stages > 1 { builder.pipeline_options(options) } else { builder };
        let accelerator = builder.gradient_accumulation_steps(form.window).build().unwrap();
        let model =
            accelerator.parallel().model_builder(Gpt2LmHead::tensor_plan()).kind(Kind::Double);
        let model = model.without_first_values();
        let model = model.build(|path| Gpt2LmHead::new(path, &gpt2(4))).unwrap();
        let optimizer = AdamW::default().lr(0.01).eps(1e-3).build(&model).unwrap();
        let schedule = LearningRate::linear(0.01, 0.001, 100).unwrap().warmup(4, 0.0).unwrap();
        let scheduler = Scheduler::new(&optimizer, schedule);
        let places = Tensor::arange(TEXTS * 6, (Kind::Int64, Device::Cpu));
        let ids = (&places * 7 + places.floor_divide_scalar(6) * 3).remainder(19).view([-1, 6]);
        let loader = DataLoader::new(TensorDataset::new(ids).unwrap()).seed(3);
        let loader = loader.batch_size(ROWS / replicas / shards).shuffle(true);
        let objects = accelerator.prepare((model, optimizer, scheduler, loader)).unwrap();
        let (model, optimizer, scheduler, loader) = objects;
        let average = Arc::new(WeightAverage::new(&model).unwrap());
        accelerator.checkpoints().register(&average);
        let losses = Vec::new();
        let window = form.window;
        let mut run =
            Run { accelerator, model, optimizer, scheduler, loader, average, losses, window };
        body(&mut run);
        let weights = || run.model.full_state_dict().unwrap().map(|state| numbers(&state));
        let mut found = weights().unwrap_or_default();
        run.average.swap().unwrap();
        let averages = weights().unwrap_or_default().into_iter();
        found.extend(averages.map(|(name, values)| (format!("average of {name}"), values)));
        (found, run.losses)
    });
    found.into_iter().next().unwrap()
}

fn numbers(state: &brigade_nn::StateDict) -> Weights {
    state.iter().map(|(name, tensor)| (name.to_owned(), values(tensor))).collect()
}

/// Saves after three steps; returns weights and losses after three more.
fn save(form: Form, folder: &Path) -> (Weights, Vec<f64>) {
    let whole = Model::builder().kind(Kind::Double).build(|path| Gpt2LmHead::new(path, &gpt2(4)));
    let whole = whole.unwrap();
    fill(&whole);
    let first = folder.with_extension("safetensors");
    whole.save_weights(&first).unwrap();
    run(form, |run| {
        run.accelerator.load_model(&mut run.model, &first).unwrap();
        run.train(Some(folder));
    })
}

fn resume(form: Form, folder: &Path) -> (Weights, Vec<f64>) {
    run(form, |run| {
        let loaded = run.accelerator.load_state(folder).unwrap();
        assert_eq!(loaded.step, 3 / form.window as u64);
        assert_eq!(loaded.samples, 3 * ROWS as u64);
        run.train(None);
        assert_eq!(run.losses.len(), 3);
    })
}

fn same(found: &(Weights, Vec<f64>), expected: &(Weights, Vec<f64>)) {
    assert_eq!(found.0.len(), expected.0.len());
    for ((name, found), (expected_name, expected)) in found.0.iter().zip(&expected.0) {
        assert_eq!(name, expected_name);
        assert_close(found, expected, 1e-11, 1e-13);
    }
}

const FORMS: [Form; 12] = [
    Form::new([1, 1, 1, 1, 1]),
    Form::new([2, 1, 1, 1, 1]),
    Form::new([4, 1, 1, 1, 1]),
    Form { schedule: Schedule::Interleaved, ..Form::new([2, 1, 1, 1, 1]) },
    Form::new([2, 1, 1, 1, 2]),
    Form::new([2, 2, 1, 1, 1]),
    Form { sharding: Some(Sharding::zero3), ..Form::new([1, 1, 2, 1, 1]) },
    Form { sharding: Some(|| Sharding::hybrid(2)), ..Form::new([1, 2, 2, 1, 1]) },
    Form { sharding: Some(Sharding::zero3), ..Form::new([2, 1, 2, 1, 1]) },
    Form { sharding: Some(Sharding::zero1), ..Form::new([2, 1, 2, 1, 2]) },
    Form::new([2, 1, 1, 2, 1]),
    Form { sharding: Some(Sharding::zero3), ..Form::new([2, 1, 1, 2, 1]) },
];

#[test]
fn any_mesh_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let mut first: Option<(Weights, Vec<f64>)> = None;
    for (number, form) in FORMS.into_iter().enumerate() {
        let folder = folder.path().join(number.to_string());
        let expected = save(form, &folder);
        same(&expected, first.get_or_insert_with(|| expected.clone()));
        // Each mesh is loaded by others, in turn.
        for other in [number + 1, number + 3].map(|other| FORMS[other % FORMS.len()]) {
            same(&resume(other, &folder), &expected);
        }
        assert!(resume(form, &folder) == expected, "bit for bit: {form:?}");
    }
}

/// A checkpoint within a window of accumulation has the gradients so far, and their weight.
#[test]
fn windows_go_on_with_the_same_ranks() {
    let folder = tempfile::tempdir().unwrap();
    for (number, form) in [FORMS[1], FORMS[5], FORMS[8]].into_iter().enumerate() {
        let form = Form { window: 2, ..form };
        let folder = folder.path().join(number.to_string());
        let expected = save(form, &folder);
        assert!(resume(form, &folder) == expected, "bit for bit: {form:?}");
        let other = Form { window: 2, ..FORMS[4] };
        run(other, |run| {
            let error = run.accelerator.load_state(&folder).unwrap_err().to_string();
            assert!(error.contains("within a window of accumulation on pp 2"), "{error}");
        });
    }
}

/// Files of the command line's conversions, and of the Accelerator, are those of one process.
#[test]
fn files_do_not_depend_on_the_stages() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut known: Option<[Weights; 3]> = None;
    for (number, form) in FORMS.iter().enumerate() {
        let saved = folder.join(number.to_string());
        save(*form, &saved);
        let checkpoint = Checkpoint::open(&saved).unwrap();
        assert!(checkpoint.verify().is_empty());
        let manifest = checkpoint.manifest();
        let axes: Vec<String> =
            manifest.mesh.iter().map(|axis| format!("{} {}", axis.name, axis.size)).collect();
        if number == 4 {
            assert_eq!(axes, ["pp 2", "tp 2"]);
            // The first and the last stage have the embedding, and one of them writes it.
            let model = manifest.of_kind("model").next().unwrap();
            let files = |name: &str| -> Vec<String> {
                let chunks = model.tensors[name].chunks.iter();
                chunks.map(|chunk| chunk.file.to_string()).collect()
            };
            let embedding = files("transformer.wte.weight");
            assert_eq!(embedding.len(), 2);
            assert!(embedding.iter().all(|file| file.contains("-stage-00001-of-00002-")));
            assert!(files("transformer.ln_f.weight")[0].contains("-stage-00002-of-00002"));
            let written = std::fs::read_dir(&saved).unwrap().map(|entry| entry.unwrap().path());
            let mut places = 0;
            for file in
                written.filter(|path| path.extension().is_some_and(|it| it == "safetensors"))
            {
                places += usize::from(
                    weights::load(&file).unwrap().get("transformer.wte.weight").is_some(),
                );
            }
            assert_eq!(places, 2, "a part of each tensor rank");
        }
        let merged = folder.join(format!("{number}-merged.safetensors"));
        convert(&saved, &merged, Target::Weights(&Safetensors)).unwrap();
        // A folder for torch.distributed.checkpoint has the same weights, and the optimizer's states.
        let [dcp, again] =
            ["dcp", "again.safetensors"].map(|it| folder.join(format!("{number}-{it}")));
        let report = convert(&saved, &dcp, Target::Dcp).unwrap();
        let is_whole = |it: &String| !it.starts_with("model") && !it.starts_with("optim");
        assert!(report.left_out.iter().all(is_whole), "{report:?}");
        convert(&dcp, &again, Target::Weights(&Safetensors)).unwrap();
        let [found, expected] = [&again, &merged].map(|file| weights::load(file).unwrap());
        assert!(found.names().eq(expected.names()));
        assert!(expected.iter().all(|(name, value)| found.get(name) == Some(value)));
        let (file, parts) =
            (folder.join(format!("{number}.safetensors")), folder.join(format!("{number}-parts")));
        run(*form, |run| {
            run.accelerator.load_state(&saved).unwrap();
            run.accelerator.save_model(&run.model, &file).unwrap();
            run.accelerator.checkpoints().save_model_in_parts(&run.model, &parts, 3000).unwrap();
            // Removed values are restored from files, and from whole states.
            let model = run.model.full_state_dict().unwrap();
            let optimizer = run.optimizer.full_state_dict().unwrap();
            let own = |run: &Run| -> Vec<Vec<f64>> {
                run.model.local_parameters().iter().map(|it| values(&it.tensor)).collect()
            };
            let before = own(run);
            let forget = |run: &mut Run| {
                run.model.local_parameters().iter_mut().for_each(|it| {
                    tch::no_grad(|| drop(it.tensor.zero_()));
                });
                run.model.sharder().iter().for_each(|it| it.shards_changed().unwrap());
                assert_ne!(own(run), before);
            };
            for from in [&merged, &file, &parts] {
                forget(run);
                run.accelerator.load_model(&mut run.model, from).unwrap();
                assert_eq!(own(run), before);
            }
            forget(run);
            run.model.load_full_state_dict(model.as_ref()).unwrap();
            assert_eq!(own(run), before);
            run.optimizer.load_full_state_dict(optimizer).unwrap();
            run.train(None);
        });
        let read = |path: &Path| {
            let mut found = numbers(&weights::load(path).unwrap());
            found.sort_by(|(left, _), (right, _)| left.cmp(right));
            found
        };
        let found = [read(&merged), read(&file), read(&parts)];
        assert_eq!(found[0], found[1]);
        assert_eq!(found[0].len(), found[2].len() + 1, "a tied weight is written once");
        let known = known.get_or_insert_with(|| found.clone());
        for (found, known) in found.iter().zip(known.iter()) {
            same(&(found.clone(), vec![]), &(known.clone(), vec![]));
        }
    }
}

#[test]
fn another_model_is_refused_before_anything_changes() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("saved");
    let two = FORMS[1];
    save(two, &folder);
    on_ranks(2, |builder, _| {
        let mesh = Mesh::builder().pipeline(2).build(2).unwrap();
        let options = PipelineOptions::new(4);
        let builder = builder.sharding(None).mesh(mesh).pipeline_options(options);
        let accelerator = builder.build().unwrap();
        let prepared = |blocks| {
            let model =
                accelerator.parallel().model_builder(Gpt2LmHead::tensor_plan()).kind(Kind::Double);
            let model = model.without_first_values();
            let model = model.build(|path| Gpt2LmHead::new(path, &gpt2(blocks))).unwrap();
            let optimizer = AdamW::default().build(&model).unwrap();
            accelerator.prepare((model, optimizer)).unwrap()
        };
        for (blocks, name) in [(3, "h.3."), (5, "h.4.")] {
            let (model, optimizer) = prepared(blocks);
            let before = numbers(&model.inner().state_dict());
            let error = accelerator.load_state(&folder).unwrap_err().to_string();
            assert!(error.contains(name) || error.contains("of kind"), "{error}");
            assert_eq!(numbers(&model.inner().state_dict()), before);
            assert_eq!(optimizer.steps().unwrap(), 0);
        }
    });
}
