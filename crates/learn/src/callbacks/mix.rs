//! Mixtures of the samples of a batch: MixUp and CutMix.

use std::fmt;

use brigade_torch::{Error, Result, copy_to_device};
use brigade_vision::transforms::SampleRng;
use tch::Tensor;

use crate::callback::{Callback, Phases, Step};
use crate::state::{LearnerState, broadcastable};

/// Random numbers for the mixture of a batch.
#[derive(Clone, Debug, PartialEq)]
pub struct MixDraw {
    /// λ drawn from Beta(α, α): one value for each sample, or a single one for CutMix.
    pub lambda: Vec<f64>,
    /// Index of the partner of each sample: a permutation of the batch.
    pub partners: Vec<i64>,
    /// Centre of CutMix's rectangle, as shares of width and height, each at least 0 and below 1.
    pub center: [f64; 2],
}

/// A source of the random numbers of mixtures. By default they are drawn from the Learner's seed, the batch's number
/// and the rank.
pub trait MixSource: fmt::Debug {
    /// Draws the numbers for training batch `batch` of the fit, with `rows` rows and `lambdas` values of λ.
    fn draw(&mut self, batch: usize, rows: usize, lambdas: usize, alpha: f64) -> MixDraw;
}

/// Random numbers from the Learner's seed.
#[derive(Debug, Default)]
struct Seeded {
    seed: u64,
}

impl MixSource for Seeded {
    fn draw(&mut self, batch: usize, rows: usize, lambdas: usize, alpha: f64) -> MixDraw {
        let mut random = SampleRng::new(self.seed.rotate_left(17) ^ batch as u64, MIX_PLACE);
        let lambda =
            (0..lambdas).map(|_| brigade_vision::augment::beta(alpha, &mut random)).collect();
        let mut partners: Vec<i64> = (0..rows as i64).collect();
        for index in (1..rows).rev() {
            partners.swap(index, random.below(index as u64 + 1) as usize);
        }
        let center = [(); 2].map(|()| random.uniform(0.0, 1.0));
        MixDraw { lambda, partners, center }
    }
}

/// Number of the random stream, different from those of the samples' transforms.
const MIX_PLACE: usize = 0x6d69;

/// Settings that MixUp and CutMix share.
#[derive(Debug)]
struct Mixture {
    alpha: f64,
    seeded: Seeded,
    given: Option<Box<dyn MixSource>>,
}

impl Mixture {
    fn new(alpha: f64) -> Self {
        Self { alpha, seeded: Seeded::default(), given: None }
    }

    fn begin(&mut self, learner: &LearnerState) -> Result<()> {
        if !self.alpha.is_finite() || self.alpha < 0.0 {
            return Err(Error::invalid_argument(format!(
                "the parameter of its Beta distribution is {}, expected a finite number from 0",
                self.alpha
            )));
        }
        // Ranks have different samples, and draw different shares.
        self.seeded.seed = learner
            .seed()
            .wrapping_add(learner.accelerator().data_processes().process_index() as u64);
        Ok(())
    }

    fn draw(&mut self, learner: &LearnerState, rows: usize, lambdas: usize) -> MixDraw {
        match &mut self.given {
            Some(source) => source.draw(learner.train_iter(), rows, lambdas, self.alpha),
            None => self.seeded.draw(learner.train_iter(), rows, lambdas, self.alpha),
        }
    }
}

/// Mixes each sample with another one of its batch, in shares drawn from Beta(α, α) (Zhang et al., 2017), as fastai's
/// `MixUp` does. With class targets, the losses of both classes are mixed, otherwise the targets themselves.
///
/// ```no_run
/// use brigade_learn::callbacks::MixUp;
/// # fn f(mut learner: brigade_learn::Learner) -> brigade_torch::Result<()> {
/// learner.fit_flat_cos(2, 1e-3, MixUp::new(0.1))?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct MixUp(Mixture);

impl MixUp {
    /// Makes MixUp with this α. fastai's default is 0.4, and 0 mixes nothing.
    #[must_use]
    pub fn new(alpha: f64) -> Self {
        Self(Mixture::new(alpha))
    }

    /// Sets the source of the random numbers. Defaults to draws from the Learner's seed, the batch's number and the
    /// rank.
    #[must_use]
    pub fn source(mut self, source: impl MixSource + 'static) -> Self {
        self.0.given = Some(Box::new(source));
        self
    }
}

impl Callback for MixUp {
    fn phases(&self) -> Phases {
        Phases::Train
    }

    fn in_evaluation(&self) -> bool {
        false
    }

    fn before_fit(&mut self, learner: &mut LearnerState) -> Step {
        Ok(self.0.begin(learner)?)
    }

    fn before_batch(&mut self, learner: &mut LearnerState) -> Step {
        let rows = learner.batch_rows();
        let MixDraw { lambda, partners, .. } = self.0.draw(learner, rows, rows);
        let share: Vec<f32> = lambda.iter().map(|share| share.max(1.0 - share) as f32).collect();
        let share = copy_to_device(&Tensor::f_from_slice(&share)?, learner.device())?;
        let partners = copy_to_device(&Tensor::f_from_slice(&partners)?, learner.device())?;
        let mixed = |input: &Tensor| -> Result<Tensor> {
            if !input.is_floating_point() {
                return Ok(input.shallow_clone());
            }
            let share = broadcastable(&share, input.dim())?.f_to_kind(input.kind())?;
            Ok(input.f_index_select(0, &partners)?.f_lerp_tensor(input, &share)?)
        };
        let inputs = learner.inputs().iter().map(mixed).collect::<Result<_>>()?;
        learner.set_inputs(inputs);
        mix_targets(learner, &partners, &share)
    }
}

/// Replaces a rectangle of each image by the same region of another image of its batch (Yun et al., 2019; fastai's
/// `CutMix`): one rectangle for the batch, whose area follows Beta(α, α).
#[derive(Debug)]
pub struct CutMix(Mixture);

impl CutMix {
    /// Makes CutMix with this α. fastai's default is 1.
    #[must_use]
    pub fn new(alpha: f64) -> Self {
        Self(Mixture::new(alpha))
    }

    /// Sets the source of the random numbers. Defaults to draws from the Learner's seed, the batch's number and the
    /// rank.
    #[must_use]
    pub fn source(mut self, source: impl MixSource + 'static) -> Self {
        self.0.given = Some(Box::new(source));
        self
    }
}

impl Callback for CutMix {
    fn phases(&self) -> Phases {
        Phases::Train
    }

    fn in_evaluation(&self) -> bool {
        false
    }

    fn before_fit(&mut self, learner: &mut LearnerState) -> Step {
        Ok(self.0.begin(learner)?)
    }

    fn before_batch(&mut self, learner: &mut LearnerState) -> Step {
        let rows = learner.batch_rows();
        let Some(images) = learner.inputs().first().map(Tensor::shallow_clone) else {
            return Ok(());
        };
        let &[_, _, height, width] = images.size().as_slice() else {
            return Err(Error::invalid_argument(format!(
                "CutMix needs images [n, channels, height, width], found {:?}",
                images.size()
            ))
            .into());
        };
        let MixDraw { lambda, partners, center } = self.0.draw(learner, rows, 1);
        let cut = (1.0 - lambda.first().copied().unwrap_or(1.0)).sqrt();
        let side = |length: i64, center: f64| {
            let half = (length as f64 * cut).round_ties_even() as i64;
            let center = (center * length as f64).floor() as i64;
            let low = (center - half.div_euclid(2)).clamp(0, length);
            let high = (center + half.div_euclid(2)).clamp(0, length);
            (low, high - low)
        };
        let ((left, wide), (top, tall)) = (side(width, center[0]), side(height, center[1]));
        let partners = copy_to_device(&Tensor::f_from_slice(&partners)?, learner.device())?;
        // The loader's tensors must not be changed.
        let cut_out = |images: &Tensor| images.f_narrow(2, top, tall)?.f_narrow(3, left, wide);
        let mut mixed = images.f_empty_like()?;
        mixed.f_copy_(&images)?;
        if tall > 0 && wide > 0 {
            cut_out(&mixed)?.f_copy_(&cut_out(&images)?.f_index_select(0, &partners)?)?;
        }
        let mut inputs: Vec<Tensor> = learner.inputs().iter().map(Tensor::shallow_clone).collect();
        inputs[0] = mixed;
        learner.set_inputs(inputs);
        let own = 1.0 - (tall * wide) as f64 / (height * width) as f64;
        let share = vec![own as f32; rows];
        let share = copy_to_device(&Tensor::f_from_slice(&share)?, learner.device())?;
        mix_targets(learner, &partners, &share)
    }
}

fn mix_targets(learner: &mut LearnerState, partners: &Tensor, share: &Tensor) -> Step {
    if let Some(target) = learner.target() {
        let second = target.f_index_select(0, partners)?;
        learner.mix_target(second, share)?;
    }
    Ok(())
}
