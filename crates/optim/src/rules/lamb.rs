//! LAMB.

use brigade_torch::Result;
use brigade_torch::flat::{self, LambStep};
use tch::Tensor;

use crate::builder::{builder, decoupled_weight_decay};
use crate::check::{check, check_betas};
use crate::options::{Options, WeightDecay};
use crate::rule::{Rule, Slots, Step};
use crate::shards::{ShardedStep, Slopes, square_sum, wide, write};

builder! {
    /// LAMB (You et al., 2020) in fastai's form: Adam's step, whose length for each parameter follows the
    /// parameter's norm, at most `max_trust` times.
    ///
    /// The learning rate is 0.001 unless set, the weight decay 0 and decoupled.
    ///
    /// ```
    /// use brigade_optim::Lamb;
    /// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
    /// # let _ = tch::nn::linear(model.root() / "module1" / "hidden1", 2, 2, Default::default());
    /// let optimizer = Lamb::default().lr(0.01).build(&model)?;
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[doc(alias = "LAMB")]
    pub struct Lamb {
        options: Options::decoupled(1e-3),
        betas: (f64, f64) = (0.9, 0.99),
        eps: f64 = 1e-5,
        /// Sets the highest ratio of a parameter's norm to its update's.
        max_trust: f64 = 10.0,
        maximize: bool = false,
    }
}

impl Lamb {
    fn rule(&self) -> Result<(LambRule, f64)> {
        let Self { betas: (beta1, beta2), eps, max_trust, maximize, .. } = *self;
        check_betas(self.betas)?;
        check("eps", eps, 0.0..f64::INFINITY)?;
        check("the highest trust", max_trust, 0.0..f64::INFINITY)?;
        Ok((LambRule { beta2, eps, max_trust, maximize, decay: self.options.decay }, beta1))
    }
}

decoupled_weight_decay!(Lamb);

#[derive(Debug)]
struct LambRule {
    beta2: f64,
    eps: f64,
    max_trust: f64,
    maximize: bool,
    decay: WeightDecay,
}

const EXP_AVG: usize = 0;
const EXP_AVG_SQ: usize = 1;

impl LambRule {
    /// The step of length 1 along moments that have moved.
    fn update(&self, slots: &Slots<'_>, beta1: f64) -> Result<Tensor> {
        let bias = |beta: f64| 1.0 - beta.powf(slots.steps() as f64);
        let mean = wide(slots.require(EXP_AVG)?)?.f_mul_scalar(1.0 / bias(beta1))?;
        let root = wide(slots.require(EXP_AVG_SQ)?)?.f_sqrt()?;
        let root = root.f_mul_scalar(1.0 / bias(self.beta2).sqrt())?.f_add_scalar(self.eps)?;
        Ok(mean.f_div(&root)?)
    }
}

impl Rule for LambRule {
    fn name(&self) -> &'static str {
        "Lamb"
    }

    fn slots(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn counts_steps(&self) -> bool {
        true
    }

    fn momentum_name(&self) -> Option<&'static str> {
        Some("beta1")
    }

    fn hyperparameters(&self) -> Vec<(&'static str, f64)> {
        vec![
            ("beta2", self.beta2),
            ("eps", self.eps),
            ("max_trust", self.max_trust),
            ("maximize", self.maximize.into()),
            ("decoupled_weight_decay", self.decay.as_number()),
        ]
    }

    fn takes_device_scalars(&self) -> bool {
        true
    }

    fn step(&self, step: &mut Step<'_>) -> Result<()> {
        step.fill_missing(EXP_AVG)?;
        step.fill_missing(EXP_AVG_SQ)?;
        for alike in step.by_count() {
            flat::lamb(
                &alike.parameters,
                &alike.gradients,
                &alike.list(EXP_AVG),
                &alike.list(EXP_AVG_SQ),
                &LambStep {
                    lr: step.lr,
                    steps: alike.steps,
                    eps: self.eps,
                    max_trust: self.max_trust,
                    beta1: step.momentum,
                    beta2: self.beta2,
                    weight_decay: step.weight_decay,
                    decoupled: self.decay == WeightDecay::Decoupled,
                    maximize: self.maximize,
                },
                &alike.device,
            )?;
        }
        Ok(())
    }

    fn steps_shards(&self) -> bool {
        true
    }

    fn step_shards(&self, step: &mut ShardedStep<'_>) -> Result<()> {
        // Of the weight and of the update of each parameter.
        let mut squares = step.shards().sums();
        step.each_group(|step| {
            step.fill_missing(EXP_AVG)?;
            step.fill_missing(EXP_AVG_SQ)?;
            let (slopes, beta1) = (Slopes::new(step, self.decay, self.maximize), step.momentum());
            step.each(|parameter, gradient, slots| {
                let (weight, slope) = slopes.of(parameter, gradient)?;
                let (mean, square) = (slots.require(EXP_AVG)?, slots.require(EXP_AVG_SQ)?);
                write(mean, &wide(mean)?.f_lerp(&slope, 1.0 - beta1)?)?;
                write(square, &wide(square)?.f_lerp(&slope.f_square()?, 1.0 - self.beta2)?)?;
                write(parameter, &weight)?;
                let sums = [square_sum(&weight)?, square_sum(&self.update(slots, beta1)?)?];
                squares.add(parameter, Tensor::f_stack(&sums, 0)?);
                Ok(())
            })
        })?;
        let mut squares = squares.reduce()?;
        step.each_group(|step| {
            let (lr, beta1) = (step.lr(), step.momentum());
            step.each(|parameter, _, slots| {
                let norms = squares.next()?.f_sqrt()?;
                let (weight, update) = (norms.f_select(0, 0)?, norms.f_select(0, 1)?);
                let either_is_zero = weight.f_eq(0)?.f_logical_or(&update.f_eq(0)?)?;
                let trust = weight.f_div(&update)?.f_clamp_max(self.max_trust)?;
                let rate = trust.f_masked_fill(&either_is_zero, 1)?.f_mul_scalar(lr)?;
                let update = self.update(slots, beta1)?.f_mul(&rate)?;
                write(parameter, &wide(parameter)?.f_sub(&update)?)
            })
        })
    }
}
