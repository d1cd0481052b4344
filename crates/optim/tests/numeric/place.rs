//! A step on the CPU gives an element the same bits wherever it lies: in a whole tensor, as data parallelism has
//! it, or in a shard, as sharded training has it.
//!
//! It holds for rules whose step of an element depends on that element alone. Adafactor, LAMB, LARS, LARC and Muon
//! reduce whole tensors, so that a part of one is stepped otherwise. Steps by `Optimizer::step_with`, except of Adam,
//! AdamW and SGD, and programs' own rules are made of libtorch's operations, some of which compute the last elements
//! of a tensor by other code.

use brigade_optim::{
    Adagrad, Adam, AdamW, Lookahead, Optimizer, OptimizerSettings, Overrides, QHAdam, RAdam,
    RmsProp, Sgd, all_optimizers,
};
use brigade_torch::{NamedTensor, set_gradient};
use tch::{Device, Kind, Tensor};

/// Rules that reduce whole tensors.
const REDUCING: [&str; 4] = ["Adafactor", "Lamb", "Lars", "Muon"];
const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half];
/// Long enough for several threads, and not a multiple of any vector's length.
const LENGTH: i64 = 70_003;
/// Parts of all lengths: shorter than a vector, with a rest behind the last one, and of several threads.
const CUTS: [i64; 8] = [0, 1, 4, 21, 1_024, 1_339, 33_336, LENGTH];

fn variants() -> Vec<(&'static str, Box<dyn OptimizerSettings>)> {
    let sgd = || Sgd::new(0.125).momentum(0.9);
    let ranger = RAdam::ranger().lookahead(Lookahead::default().every(2).alpha(0.75));
    let own: Vec<(&str, Box<dyn OptimizerSettings>)> = vec![
        ("SGD without momentum", Box::new(Sgd::new(0.125).weight_decay(0.01))),
        ("SGD with Nesterov's momentum", Box::new(sgd().nesterov(true).weight_decay(0.01))),
        ("SGD with dampening", Box::new(sgd().dampening(0.25).maximize(true))),
        (
            "SGD with decoupled decay",
            Box::new(sgd().weight_decay(0.1).decoupled_weight_decay(true).maximize(true)),
        ),
        ("Adam with weight decay", Box::new(Adam::default().weight_decay(0.1))),
        ("Adam with a short mean", Box::new(Adam::default().betas(0.3, 0.9).maximize(true))),
        ("amsgrad", Box::new(Adam::default().amsgrad(true).maximize(true))),
        ("AdamW with amsgrad", Box::new(AdamW::default().amsgrad(true).weight_decay(0.1))),
        ("Adam with Lookahead", Box::new(Adam::default().lookahead(Lookahead::default().every(2)))),
        ("Adagrad with decays", Box::new(Adagrad::default().lr_decay(0.1).weight_decay(0.1))),
        (
            "Adagrad upwards",
            Box::new(Adagrad::default().initial_accumulator_value(0.2).maximize(true)),
        ),
        (
            "RMSprop, centered",
            Box::new(RmsProp::default().centered(true).momentum(0.9).weight_decay(0.1)),
        ),
        (
            "RMSprop of fastai",
            Box::new(RmsProp::default().momentum(0.9).momentum_of_gradient(true).maximize(true)),
        ),
        ("RAdam with a rectified step", Box::new(RAdam::default().betas(0.9, 0.8))),
        ("RAdam of fastai", Box::new(RAdam::fastai().betas(0.9, 0.8).weight_decay(0.1))),
        ("Ranger", Box::new(ranger)),
        (
            "QHAdam upwards",
            Box::new(QHAdam::default().nus(0.4, 0.6).weight_decay(0.1).maximize(true)),
        ),
    ];
    let all = all_optimizers().into_iter().filter(|(name, _)| !REDUCING.contains(name));
    all.chain(own).collect()
}

/// Numbers of all exponents that 16 bits have, and both signs.
fn numbers(seed: i64, kind: Kind) -> Tensor {
    let i = Tensor::arange(LENGTH, (Kind::Double, Device::Cpu));
    let angle = (&i + seed as f64 * 0.61) * 0.37;
    let magnitude = (i * 0.013 + seed as f64).cos() * 4.0 - 3.0;
    (angle.sin() * magnitude.exp2()).to_kind(kind)
}

/// How the elements lie: in tensors of their own, or in one memory, each behind an element that is not stepped.
#[derive(Debug, Clone, Copy)]
enum Memory {
    Whole,
    Parts,
    Views,
}

impl Memory {
    fn lay_out(self, whole: &Tensor) -> Vec<Tensor> {
        let parts = CUTS.windows(2).map(|cut| whole.narrow(0, cut[0], cut[1] - cut[0]));
        match self {
            Self::Whole => vec![whole.copy()],
            Self::Parts => parts.map(|part| part.copy()).collect(),
            Self::Views => {
                let count = parts.len() as i64;
                let memory = Tensor::zeros([LENGTH + count], (whole.kind(), Device::Cpu));
                let views = CUTS
                    .windows(2)
                    .zip(1..)
                    .map(|(cut, gaps)| memory.narrow(0, cut[0] + gaps, cut[1] - cut[0]));
                let views: Vec<Tensor> = views.collect();
                for (view, part) in views.iter().zip(parts) {
                    view.shallow_clone().copy_(&part);
                }
                views
            }
        }
    }
}

/// Steps along `inputs` but for the first, which is the parameter. Returns the parameter and its states, each as one
/// tensor.
fn stepped(settings: &dyn OptimizerSettings, inputs: &[Tensor], memory: Memory) -> Vec<Tensor> {
    let parameters = memory.lay_out(&inputs[0]);
    let named = |(number, tensor): (usize, &Tensor)| NamedTensor {
        name: format!("p{number}"),
        tensor: tensor.set_requires_grad(true),
    };
    let parameters: Vec<NamedTensor> = parameters.iter().enumerate().map(named).collect();
    let mut optimizer: Optimizer = settings.build_with(&parameters, Overrides::default()).unwrap();
    for gradient in &inputs[1..] {
        let gradients = memory.lay_out(gradient);
        for (parameter, gradient) in parameters.iter().zip(&gradients) {
            set_gradient(&parameter.tensor, gradient).unwrap();
        }
        optimizer.step().unwrap();
    }
    let values = parameters.iter().map(|parameter| parameter.tensor.detach()).collect();
    let mut all: Vec<Vec<Tensor>> = vec![values];
    for parameter in optimizer.state_dict().unwrap().parameters {
        for (slot, (_, tensor)) in parameter.tensors.into_iter().enumerate() {
            if all.len() <= slot + 1 {
                all.push(Vec::new());
            }
            all[slot + 1].push(tensor);
        }
    }
    // A count of steps is not an element.
    all.retain(|parts| parts[0].dim() == 1);
    all.iter().map(|parts| Tensor::cat(parts, 0)).collect()
}

fn bits(tensor: &Tensor) -> Tensor {
    let integer = match tensor.kind() {
        Kind::Double => Kind::Int64,
        Kind::Float => Kind::Int,
        _ => Kind::Int16,
    };
    tensor.view_dtype(integer)
}

#[test]
fn a_step_gives_an_element_the_same_bits_wherever_it_lies() {
    let threads = tch::get_num_threads();
    let mut failures = Vec::new();
    for kind in KINDS {
        // Made once: a sine depends on its place and on the number of threads.
        let inputs: Vec<Tensor> = (0..5).map(|seed| numbers(seed, kind)).collect();
        for (name, settings) in variants() {
            tch::set_num_threads(1);
            let expected = stepped(&*settings, &inputs, Memory::Whole);
            assert!(bits(&expected[0]) != bits(&inputs[0]), "{name} in {kind:?} has not stepped");
            for (threads, memory) in [
                (2, Memory::Whole),
                (3, Memory::Whole),
                (1, Memory::Parts),
                (2, Memory::Parts),
                (1, Memory::Views),
                (2, Memory::Views),
            ] {
                tch::set_num_threads(threads);
                let found = stepped(&*settings, &inputs, memory);
                assert_eq!(found.len(), expected.len());
                for (tensor, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let differing = bits(found).ne_tensor(&bits(expected));
                    let count = differing.sum(Kind::Int64).int64_value(&[]);
                    if count > 0 {
                        let first = differing.to_kind(Kind::Int).argmax(0, false).int64_value(&[]);
                        failures.push(format!(
                            "{name} in {kind:?}, {memory:?}, {threads} threads: {count} elements of tensor \
                             {tensor} differ, the first is {first}: {} and {}",
                            found.double_value(&[first]),
                            expected.double_value(&[first]),
                        ));
                    }
                }
            }
        }
    }
    tch::set_num_threads(threads);
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}
