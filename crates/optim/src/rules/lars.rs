//! LARS and LARC.

use brigade_torch::Result;
use brigade_torch::flat::{self, LarcStep};
use tch::Tensor;

use crate::builder::{builder, decoupled_weight_decay};
use crate::check::check;
use crate::options::{Options, WeightDecay};
use crate::rule::{Rule, ShardedStep, Step};

builder! {
    /// LARS (You, Gitman and Ginsburg, 2017), and LARC, which clips that rate: SGD with momentum, where each
    /// parameter's learning rate is scaled by the ratio of its norm to that of its gradient. In fastai's form.
    ///
    /// The weight decay is 0 unless set, and decoupled.
    ///
    /// ```
    /// use brigade_optim::Lars;
    /// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
    /// # let _ = tch::nn::linear(model.root() / "module1" / "hidden1", 2, 2, Default::default());
    /// let optimizer = Lars::larc(0.01).build(&model)?;
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[doc(alias = "LARS")]
    pub struct Lars {
        options(lr): Options::decoupled(lr),
        momentum: f64 = 0.9,
        /// Sets the factor of the ratio of the norms.
        #[doc(alias = "trust_coeff")]
        trust: f64 = 0.02,
        /// Sets the number that is added to the gradient's norm.
        eps: f64 = 1e-8,
        maximize: bool = false,
    }
    private {
        clip: bool = false,
    }
}

impl Lars {
    /// Returns the settings of LARC, where the trust ratio may only reduce the learning rate.
    #[doc(alias = "LARC")]
    pub fn larc(lr: f64) -> Self {
        Self { clip: true, ..Self::new(lr) }
    }

    fn rule(&self) -> Result<(LarsRule, f64)> {
        check("the momentum", self.momentum, 0.0..f64::INFINITY)?;
        check("the trust", self.trust, 0.0..f64::INFINITY)?;
        check("eps", self.eps, 0.0..f64::INFINITY)?;
        let rule = LarsRule {
            trust: self.trust,
            eps: self.eps,
            clip: self.clip,
            maximize: self.maximize,
            decay: self.options.decay,
        };
        Ok((rule, self.momentum))
    }
}

decoupled_weight_decay!(Lars);

#[derive(Debug)]
struct LarsRule {
    trust: f64,
    eps: f64,
    clip: bool,
    maximize: bool,
    decay: WeightDecay,
}

const MOMENTUM_BUFFER: usize = 0;

impl LarsRule {
    fn numbers(&self, step: &Step<'_>) -> LarcStep {
        LarcStep {
            lr: step.lr,
            trust: self.trust,
            clip: self.clip,
            weight_decay: step.weight_decay,
            decoupled: self.decay == WeightDecay::Decoupled,
            eps: self.eps,
            momentum: step.momentum,
            maximize: self.maximize,
        }
    }
}

fn fill_buffers(step: &mut Step<'_>) -> Result<()> {
    if step.momentum == 0.0 { Ok(()) } else { step.fill_missing(MOMENTUM_BUFFER) }
}

/// Returns the momentum buffers of all parameters, or an empty list without momentum.
fn buffers<'s>(step: &'s Step<'_>) -> Vec<&'s Tensor> {
    if step.momentum == 0.0 { Vec::new() } else { step.list(MOMENTUM_BUFFER) }
}

impl Rule for LarsRule {
    fn name(&self) -> &'static str {
        if self.clip { "LARC" } else { "LARS" }
    }

    fn slots(&self) -> &'static [&'static str] {
        &["momentum_buffer"]
    }

    fn counts_steps(&self) -> bool {
        false
    }

    fn momentum_name(&self) -> Option<&'static str> {
        Some("momentum")
    }

    fn hyperparameters(&self) -> Vec<(&'static str, f64)> {
        vec![
            ("trust", self.trust),
            ("eps", self.eps),
            ("maximize", self.maximize.into()),
            ("decoupled_weight_decay", self.decay.as_number()),
        ]
    }

    fn is_optional(&self, _slot: usize) -> bool {
        true
    }

    fn takes_device_scalars(&self) -> bool {
        true
    }

    fn step(&self, step: &mut Step<'_>) -> Result<()> {
        fill_buffers(step)?;
        flat::larc(
            step.parameters,
            step.gradients,
            &buffers(step),
            &self.numbers(step),
            &step.device,
        )?;
        Ok(())
    }

    fn steps_shards(&self) -> bool {
        true
    }

    fn step_shards(&self, step: &mut ShardedStep<'_>) -> Result<()> {
        let mut squares = step.shards().sums();
        step.each_group(|step| {
            fill_buffers(step)?;
            let own = flat::larc_squares(
                step.parameters,
                step.gradients,
                &buffers(step),
                &self.numbers(step),
                &step.device,
            )?;
            squares.add_all(step.parameters, own);
            Ok(())
        })?;
        let mut squares = squares.reduce()?;
        step.each_group(|step| {
            flat::larc_update(
                step.parameters,
                step.gradients,
                &buffers(step),
                &squares.take(step.parameters.len())?,
                &self.numbers(step),
                &step.device,
            )
        })
    }
}
