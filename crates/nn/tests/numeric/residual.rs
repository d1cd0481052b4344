//! Normalisation with the addition of a residual branch.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use brigade_nn::{
    Branch, Dropout, LayerNorm, Linear, Model, Module, ParamPath, PreActivation, RmsNorm,
};
use brigade_torch::{Activation, ResidualNorm, Result, rng_state, set_rng_state};
use tch::{Device, Kind, Tensor};

struct Block {
    dropout: Dropout,
    layer: LayerNorm,
    rms: RmsNorm,
}

impl Block {
    fn new(path: &ParamPath<'_>, maskless: bool) -> Self {
        let drop = if maskless { Dropout::maskless } else { Dropout::new };
        Self {
            dropout: drop(&(path / "dropout"), 0.3),
            layer: LayerNorm::new(path / "layer", &[8]),
            rms: RmsNorm::new(path / "rms", 8, 1e-6),
        }
    }
}

/// Stream and branch.
impl Module<(&Tensor, &Tensor)> for Block {
    type Output = [Tensor; 6];

    fn forward(&self, (stream, values): (&Tensor, &Tensor)) -> Result<[Tensor; 6]> {
        let branch = || self.dropout.branch(values.shallow_clone());
        let pre = self.layer.forward_residual(stream, Some(&branch()?))?;
        let post = self.layer.forward_post_residual(stream, Some(&branch()?))?;
        let rms = self.rms.forward_residual(stream, Some(&branch()?))?;
        let [a, b, c] = [pre, post, rms].map(|ResidualNorm { stream, normed }| [stream, normed]);
        let all: Vec<Tensor> = a.into_iter().chain(b).chain(c).collect();
        Ok(all.try_into().unwrap())
    }
}

/// The same by the layers one after the other.
fn apart(block: &Block, stream: &Tensor, values: &Tensor) -> [Tensor; 6] {
    let sum = || block.dropout.forward(values).unwrap() + stream;
    let pre = sum();
    let post = block.layer.forward(&sum()).unwrap();
    let rms = sum();
    let normed = [block.layer.forward(&pre).unwrap(), block.rms.forward(&rms).unwrap()];
    let [of_pre, of_rms] = normed;
    [pre, of_pre, post.shallow_clone(), post, rms, of_rms]
}

fn inputs() -> [Tensor; 2] {
    [0, 1].map(|_| Tensor::randn([4, 8], (Kind::Float, Device::Cpu)))
}

#[test]
fn it_is_the_layers_one_after_the_other_bit_for_bit() {
    for maskless in [true, false] {
        let mut model = Model::new(|path| Block::new(path, maskless)).unwrap();
        for trains in [true, false] {
            if trains {
                model.train();
            } else {
                model.eval();
            }
            let [stream, values] = inputs();
            let start = rng_state(Device::Cpu).unwrap();
            let found = model.forward((&stream, &values)).unwrap();
            set_rng_state(Device::Cpu, &start).unwrap();
            let expected = apart(model.module(), &stream, &values);
            for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert!(found.equal(expected), "{index}, maskless {maskless}, training {trains}");
            }
            let dropped = found[0].eq_tensor(&stream).any();
            assert_eq!(bool::try_from(dropped).unwrap(), trains);
        }
    }
}

#[test]
fn hooks_see_and_change_the_outputs_of_all_layers() {
    let model = Model::new(|path| Block::new(path, true)).unwrap();
    let calls = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&calls);
    let mut model = model;
    let _dropout = model
        .forward_hook("dropout", move |_, output| {
            seen.fetch_add(1, Ordering::Relaxed);
            Some(output.zeros_like())
        })
        .unwrap();
    let _norm = model.forward_hook("layer", |_, output| Some(output + 1.0)).unwrap();
    let [stream, values] = inputs();
    let found = model.forward((&stream, &values)).unwrap();
    assert_eq!(calls.load(Ordering::Relaxed), 3);
    let normed = stream.layer_norm([8], None::<Tensor>, None::<Tensor>, 1e-5, false) + 1.0;
    // The branch became 0.
    assert!(found[0].equal(&stream) && found[1].equal(&normed));
    // Behind the layers the next stream is what the hook has made.
    assert!(found[2].equal(&normed) && found[3].equal(&normed));
}

#[test]
fn a_bias_is_added_in_front_of_dropout() {
    for (maskless, hooked) in [(true, false), (false, false), (true, true)] {
        let mut model = Model::new(|path| Block::new(path, maskless)).unwrap();
        let _hook = hooked.then(|| model.forward_hook("dropout", |_, _| None).unwrap());
        for trains in [true, false] {
            if trains {
                model.train();
            } else {
                model.eval();
            }
            let [stream, values] = inputs();
            let bias = Tensor::randn([8], (Kind::Float, Device::Cpu));
            let Block { dropout, layer, .. } = model.module();
            let start = rng_state(Device::Cpu).unwrap();
            let branch = dropout.branch(&values + &bias).unwrap();
            let sum = branch.add_to(&stream).unwrap();
            set_rng_state(Device::Cpu, &start).unwrap();
            let branch = dropout.biased_branch(values.shallow_clone(), Some(bias)).unwrap();
            assert_eq!(branch.bias.is_some(), !hooked && (maskless || !trains));
            let found = branch.add_to(&stream).unwrap();
            let about = format!("maskless {maskless}, hooked {hooked}, training {trains}");
            assert!(found.equal(&sum), "{about}");
            set_rng_state(Device::Cpu, &start).unwrap();
            let found = layer.forward_residual(&stream, Some(&branch)).unwrap();
            if maskless && !hooked {
                assert!(found.stream.equal(&sum), "{about}");
            }
            assert!(found.normed.equal(&layer.forward(&found.stream).unwrap()), "{about}");
        }
    }
}

#[test]
fn a_branch_of_a_layer_is_its_forward() {
    struct Layer(Linear, Dropout);
    let model = Model::new(|path: &ParamPath<'_>| {
        Layer(Linear::new(path / "linear", 8, 8), Dropout::maskless(path / "dropout", 0.3))
    });
    let model = model.unwrap();
    let Layer(linear, dropout) = model.module();
    let [stream, values] = inputs();
    let expected = linear.forward(&values).unwrap();
    let branch = linear.forward_branch(&values, dropout).unwrap();
    assert!(branch.values.equal(&expected) && branch.bias.is_none());
    assert_eq!(branch.dropout, 0.3);
    let input = PreActivation::new(stream.shallow_clone());
    let branch = linear.forward_activated_branch(&input, Activation::Relu, dropout).unwrap();
    let expected = linear.forward_activated(&input, Activation::Relu).unwrap();
    assert!(branch.values.equal(&expected));
}

#[test]
fn an_error_names_the_layer() {
    struct Wrong(LayerNorm);
    impl Module<&Tensor> for Wrong {
        type Output = Tensor;
        fn forward(&self, stream: &Tensor) -> Result<Tensor> {
            let branch = Branch::new(stream.narrow(0, 0, 1));
            Ok(self.0.forward_residual(stream, Some(&branch))?.normed)
        }
    }
    let model =
        Model::new(|path: &ParamPath<'_>| Wrong(LayerNorm::new(path / "norm", &[8]))).unwrap();
    let error = model.forward(&inputs()[0]).unwrap_err().to_string();
    assert!(error.contains("norm") && error.contains("[1, 8]"), "{error}");
}
