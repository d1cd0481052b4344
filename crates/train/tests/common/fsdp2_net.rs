//! The model of the comparisons with PyTorch's `fully_shard`.

use brigade_nn::{Linear, Module, ParamPath, Unit};
use brigade_torch::Result;
use tch::Tensor;

/// Layers with rows that two ranks do not divide evenly, and fewer rows than ranks.
pub(crate) struct Net {
    stem: Linear,
    blocks: Vec<(Unit, Linear, Linear)>,
    head: Linear,
}

impl Net {
    pub(crate) fn new(path: &ParamPath<'_>, outputs: i64) -> Self {
        let blocks = (0..3).map(|number| {
            let path = path / "blocks" / number;
            (path.unit(), Linear::new(&path / "up", 7, 5), Linear::new(&path / "down", 5, 7))
        });
        let blocks = blocks.collect();
        Self {
            stem: Linear::new(path / "stem", 5, 7),
            blocks,
            head: Linear::new(path / "head", 7, outputs),
        }
    }
}

impl Module<&Tensor> for Net {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let mut x = self.stem.forward(input)?;
        for (unit, up, down) in &self.blocks {
            x = unit.run(|| Ok(&x + down.forward(&up.forward(&x)?.tanh())?))?;
        }
        self.head.forward(&x)
    }
}
