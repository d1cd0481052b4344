//! Freezing and thawing after `prepare`.

use std::path::{Path, PathBuf};

use brigade_checkpoint::Value;
use brigade_nn::{Linear, Model, Module, ParamPath};
use brigade_optim::{Adam, Group, Muon, Scheduler, Sgd};
use brigade_testkit::{World, dist_test};
use brigade_torch::{ErrorKind, Result};
use brigade_train::{Accelerator, CommHook, PowerSgd, PreparedModel, PreparedOptimizer};
use tch::{Device, Kind, Tensor};

struct Net {
    encoder: Linear,
    head: Linear,
}

impl Net {
    fn new(path: &ParamPath<'_>) -> Self {
        Self {
            encoder: Linear::new(path / "encoder", 6, 8),
            head: Linear::new(path / "head", 8, 3),
        }
    }
}

impl Module<&Tensor> for Net {
    type Output = Tensor;

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.head.forward(&self.encoder.forward(x)?.tanh())
    }
}

type Objects = (PreparedModel<Net>, PreparedOptimizer);

fn objects(accelerator: &Accelerator) -> Objects {
    accelerator.set_seed(5);
    let model = Model::new(Net::new).unwrap();
    let optimizer =
        Adam::default().lr(0.02).group(Group::matching("encoder.*").lr(0.005)).build(&model);
    accelerator.prepare((model, optimizer.unwrap())).unwrap()
}

fn steps(
    accelerator: &Accelerator,
    (model, optimizer): &mut Objects,
    steps: std::ops::Range<i64>,
) -> Result<()> {
    for step in steps {
        let phase = accelerator.processes().process_index() as f64 * 0.7 + step as f64;
        let x = (Tensor::arange(24, (Kind::Float, Device::Cpu)) * 0.37 + phase).sin();
        optimizer.zero_grad()?;
        let loss = model.forward(&x.reshape([4, 6]))?.square().mean(Kind::Float);
        accelerator.backward(&loss)?;
        optimizer.step()?;
    }
    Ok(())
}

fn values(model: &PreparedModel<Net>, part: &str) -> Vec<Vec<f32>> {
    let parameters = model.inner().parameters().into_iter();
    let chosen = parameters.filter(|parameter| parameter.name.starts_with(part));
    chosen.map(|it| Vec::try_from(it.tensor.detach().reshape([-1])).unwrap()).collect()
}

fn names(optimizer: &PreparedOptimizer) -> Vec<Vec<String>> {
    optimizer.groups().unwrap().iter().map(|group| group.names().to_vec()).collect()
}

/// Freezes, saves, resumes elsewhere, thaws: the resumed run is the one that went through.
fn freezes_and_thaws(accelerator: &Accelerator, folder: &Path) -> Result<()> {
    let saved = folder.join("saved");
    let mut through = objects(accelerator);
    steps(accelerator, &mut through, 0..3)?;
    let encoder = values(&through.0, "encoder");
    assert_eq!(through.0.set_trainable("encoder.*", false)?, 2);
    assert_eq!(names(&through.1), [["head.weight", "head.bias"]]);
    steps(accelerator, &mut through, 3..6)?;
    assert_eq!(values(&through.0, "encoder"), encoder, "what is frozen stays");
    accelerator.save_state(&saved)?;
    accelerator.checkpoints().wait()?;
    accelerator.processes().wait_for_everyone()?;
    steps(accelerator, &mut through, 6..8)?;
    through.0.set_trainable("encoder.weight", true)?;
    assert_eq!(
        names(&through.1),
        [vec!["head.weight", "head.bias"], vec!["encoder.weight"]],
        "back in its group"
    );
    assert_eq!(through.1.groups()?[1].lr(), 0.005);
    steps(accelerator, &mut through, 8..11)?;
    assert_ne!(values(&through.0, "encoder.weight"), encoder[..1], "what is thawed is trained");
    assert_eq!(values(&through.0, "encoder.bias"), encoder[1..]);
    assert_eq!(through.1.steps()?, 11);

    let second = Accelerator::builder().sharing(accelerator).build()?;
    let mut resumed = objects(&second);
    // The checkpoint holds what was trained when it was written.
    let error = second.load_state(&saved).unwrap_err();
    assert!(error.to_string().contains("encoder.weight"), "{error}");
    resumed.0.set_trainable("encoder.*", false)?;
    second.load_state(&saved)?;
    assert_eq!(values(&resumed.0, "encoder"), encoder);
    steps(&second, &mut resumed, 6..8)?;
    resumed.0.set_trainable("encoder.weight", true)?;
    steps(&second, &mut resumed, 8..11)?;
    assert_eq!(values(&resumed.0, ""), values(&through.0, ""));
    // The same on all ranks.
    let all = second.processes().gather_object(values(&resumed.0, ""))?;
    assert!(all.iter().all(|values| *values == all[0]));
    Ok(())
}

#[test]
fn one_rank_freezes_and_thaws() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    freezes_and_thaws(&accelerator, folder.path())
}

fn shared(accelerator: &Accelerator) -> (Option<tempfile::TempDir>, PathBuf) {
    let folder = accelerator.is_main_process().then(|| tempfile::tempdir().unwrap());
    let path = folder.as_ref().map(|folder| folder.path().to_owned());
    let path = accelerator.processes().broadcast_object(path, 0).unwrap().unwrap();
    (folder, path)
}

dist_test!(world = 2, dist_two_ranks_freeze_and_thaw, |_: World| -> Result<()> {
    let accelerator = Accelerator::new()?;
    let (_folder, path) = shared(&accelerator);
    freezes_and_thaws(&accelerator, &path)?;
    accelerator.processes().wait_for_everyone()
});

#[test]
fn a_schedule_follows_groups_that_go_and_come() -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    let model = Model::new(Net::new)?;
    let optimizer = Sgd::new(0.1).group(Group::matching("encoder.*").lr(0.01)).build(&model)?;
    let scheduler = Scheduler::new(&optimizer, |step: u64| 0.1 * 0.5f64.powi(step as i32));
    let (mut model, optimizer, mut scheduler) =
        accelerator.prepare((model, optimizer, scheduler))?;
    model.set_trainable("encoder.*", false)?;
    scheduler.step()?;
    model.set_trainable("*", true)?;
    let rates: Vec<f64> = optimizer.groups().unwrap().iter().map(|group| group.lr()).collect();
    assert_eq!(rates, [0.05, 0.005]);
    model.set_trainable("*", false)?;
    assert!(optimizer.groups()?.is_empty(), "nothing is trained");
    model.set_trainable("head.*", true)?;
    assert_eq!(names(&optimizer), [["head.weight", "head.bias"]]);
    Ok(())
}

dist_test!(world = 2, dist_ranks_that_differ_are_refused_on_both, |_: World| -> Result<()> {
    let accelerator = Accelerator::new()?;
    let (mut model, mut optimizer) = objects(&accelerator);
    let rank = accelerator.processes().process_index();
    let before = names(&optimizer);
    let pattern = ["encoder.*", "head.*"][rank];
    let error = model.set_trainable(pattern, false).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert!(error.to_string().contains(r#"rank 1 set_trainable("head.*""#), "{error}");
    let error = model.set_trainable("decoder.*", false).unwrap_err().to_string();
    assert!(error.contains("no parameter matches") && error.contains("encoder.weight"), "{error}");
    assert_eq!(names(&optimizer), before);
    // A change without the method is detected at the next forward.
    model.set_trainable("encoder.*", false)?;
    model.inner_mut().requires_grad_under("encoder", true)?;
    let x = Tensor::ones([4, 6], (Kind::Float, Device::Cpu));
    let error = model.forward(&x).unwrap_err().to_string();
    assert!(error.contains("set_trainable"), "{error}");
    model.inner_mut().requires_grad_under("encoder", false)?;
    optimizer.zero_grad()?;
    steps(&accelerator, &mut (model, optimizer), 0..2)
});

#[test]
fn a_rule_that_refuses_a_parameter_changes_nothing() -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    let mut model = Model::new(Net::new)?;
    model.requires_grad_under("encoder.bias", false)?;
    model.requires_grad_under("head.bias", false)?;
    let optimizer = Muon::default().build(&model)?;
    let (mut model, optimizer) = accelerator.prepare((model, optimizer))?;
    let error = model.set_trainable("head.*", true).unwrap_err().to_string();
    assert!(error.contains("Muon steps matrices only"), "{error}");
    assert_eq!(names(&optimizer), [["encoder.weight", "head.weight"]]);
    assert_eq!(model.inner().trainable_parameters().len(), 2);
    Ok(())
}

dist_test!(world = 2, dist_a_hooks_state_is_carried_over, |_: World| -> Result<()> {
    let power = PowerSgd { start_iteration: 2, min_compression_rate: 0.5, ..PowerSgd::default() };
    let accelerator = Accelerator::builder().comm_hook(CommHook::PowerSgd(power)).build()?;
    let mut objects = objects(&accelerator);
    steps(&accelerator, &mut objects, 0..4)?;
    objects.0.set_trainable("encoder.*", false)?;
    let state = objects.0.comm_hook_state()?.unwrap();
    assert_eq!(state.get("iteration").and_then(Value::as_int), Some(4));
    let kept: Vec<_> = state.get("error").and_then(Value::as_dict).unwrap().iter().collect();
    assert!(kept.iter().all(|(name, _)| name.as_str().unwrap().starts_with("head")), "{kept:?}");
    steps(&accelerator, &mut objects, 4..6)
});
