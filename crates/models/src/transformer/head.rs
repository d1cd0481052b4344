//! The head of a causal language model.

use brigade_nn::{Init, ParamPath};
use brigade_torch::{Result, linear};
use tch::Tensor;

use crate::init::{Redraw, redraw};

/// A linear layer without bias to the vocabulary, often with the weight of the embedding.
#[derive(Debug)]
pub(super) struct LanguageHead {
    /// `[vocabulary, width]`
    weight: Tensor,
    /// The full name where the weight is its own.
    own: Option<String>,
}

impl LanguageHead {
    pub(super) fn new(
        path: &ParamPath<'_>,
        shape: [i64; 2],
        deviation: f64,
        tied: Option<&Tensor>,
    ) -> Self {
        if let Some(embedding) = tied {
            return Self { weight: path.tie("weight", embedding), own: None };
        }
        let weight = path.parameter("weight", &shape, Init::KaimingUniform);
        redraw(path, &weight, Redraw::Normal(deviation));
        Self { weight, own: Some(path.name().to_owned()) }
    }

    pub(super) fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Logits `[…, vocabulary]`.
    pub(super) fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        linear(hidden, &self.weight, None)
    }

    /// Logits `[batch, vocabulary]` of the last of the tokens.
    pub(super) fn last(&self, hidden: &Tensor) -> Result<Tensor> {
        self.forward(&hidden.f_select(1, -1)?)
    }

    /// A body's groups with the head in the last one.
    pub(super) fn with_groups(&self, mut groups: Vec<Vec<String>>) -> Vec<Vec<String>> {
        if let (Some(last), Some(own)) = (groups.last_mut(), &self.own) {
            last.push(own.clone());
        }
        groups
    }
}
