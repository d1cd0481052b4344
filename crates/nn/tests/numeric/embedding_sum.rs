//! Sums of embeddings with dropout.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use brigade_nn::{Dropout, Embedding, EmbeddingOptions, Model, Module, ParamPath};
use brigade_torch::{Result, rng_state, set_rng_state};
use tch::{Device, Kind, Tensor};

struct Tokens {
    words: Embedding,
    positions: Embedding,
    types: Embedding,
    dropout: Dropout,
}

impl Tokens {
    fn new(path: &ParamPath<'_>, maskless: bool) -> Self {
        let drop = if maskless { Dropout::maskless } else { Dropout::new };
        let options = EmbeddingOptions { padding: Some(0) };
        Self {
            words: Embedding::with_options(path / "words", 20, 8, options),
            positions: Embedding::new(path / "positions", 5, 8),
            types: Embedding::new(path / "types", 2, 8),
            dropout: drop(&(path / "dropout"), 0.3),
        }
    }

    /// Returns the sum by the layers one after the other.
    fn apart(&self, ids: &Tensor) -> Tensor {
        let [places, first] = others(ids);
        let words = self.words.forward(ids).unwrap();
        let positions = self.positions.forward(&places).unwrap();
        let types = self.types.forward(&first).unwrap();
        self.dropout.forward(&(words + (positions + types))).unwrap()
    }
}

/// Ids of the positions, and the type of all tokens.
fn others(ids: &Tensor) -> [Tensor; 2] {
    let options = (Kind::Int64, Device::Cpu);
    [Tensor::arange(ids.size()[1], options).unsqueeze(0), Tensor::zeros([1, 1], options)]
}

impl Module<&Tensor> for Tokens {
    type Output = Tensor;

    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let [places, first] = others(ids);
        let others = [(&self.positions, &places), (&self.types, &first)];
        Ok(self.words.forward_sum(ids, &others, Some(&self.dropout))?.0)
    }
}

fn ids() -> Tensor {
    Tensor::from_slice(&[3i64, 0, 19, 3, 3, 1]).view([2, 3])
}

#[test]
fn it_is_the_layers_one_after_the_other_bit_for_bit() {
    for (maskless, hooked) in [(true, false), (false, false), (true, true)] {
        let mut model = Model::new(|path| Tokens::new(path, maskless)).unwrap();
        let _hook = hooked.then(|| model.forward_hook("types", |_, _| None).unwrap());
        for trains in [true, false] {
            if trains {
                model.train();
            } else {
                model.eval();
            }
            let start = rng_state(Device::Cpu).unwrap();
            let gradients = |output: Tensor| {
                output.sin().sum(Kind::Float).backward();
                let Tokens { words, positions, types, .. } = model.module();
                [words, positions, types].map(|layer| {
                    let mut gradient = layer.weight().grad();
                    let found = gradient.copy();
                    let _ = gradient.zero_();
                    found
                })
            };
            let output = model.forward(&ids()).unwrap();
            let found = output.detach();
            let of_found = gradients(output);
            set_rng_state(Device::Cpu, &start).unwrap();
            let output = model.module().apart(&ids());
            let about = format!("maskless {maskless}, hooked {hooked}, training {trains}");
            assert!(found.equal(&output.detach()), "{about}");
            for (found, expected) in of_found.iter().zip(gradients(output)) {
                assert!(found.equal(&expected), "gradient, {about}");
            }
        }
    }
}

#[test]
fn hooks_see_and_change_the_outputs_of_all_layers() {
    let mut model = Model::new(|path| Tokens::new(path, true)).unwrap();
    let calls = Arc::new(AtomicUsize::new(0));
    let _hooks = ["words", "positions", "types", "dropout"].map(|name| {
        let calls = Arc::clone(&calls);
        let count = move |_: &str, output: &Tensor| {
            calls.fetch_add(1, Ordering::Relaxed);
            (name == "dropout").then(|| output.zeros_like())
        };
        model.forward_hook(name, count).unwrap()
    });
    let output = model.forward(&ids()).unwrap();
    assert_eq!(calls.load(Ordering::Relaxed), 4);
    assert!(output.equal(&output.zeros_like()));
}

#[test]
fn an_id_without_a_row_names_its_layer() {
    let model = Model::new(|path| Tokens::new(path, true)).unwrap();
    let error = model.forward(&(ids() + 1)).unwrap_err().to_string();
    assert!(error.contains("words") && error.contains("20"), "{error}");
    let long = Tensor::zeros([1, 6], (Kind::Int64, Device::Cpu));
    let error = model.forward(&long).unwrap_err().to_string();
    assert!(error.contains("positions") && error.contains('5'), "{error}");
}
