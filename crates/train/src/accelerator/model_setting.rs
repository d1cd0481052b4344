//! Another setting for the models that an Accelerator prepares.

use brigade_sharding::Sharding;
use brigade_torch::Result;

use super::Accelerator;
use crate::precision::Precision;

/// Setting of the models that an Accelerator prepares, for [`Accelerator::with_model_setting`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ModelSetting {
    /// Floating-point type in which models compute. The loss scale of fp16 is reset.
    MixedPrecision(Precision),
    /// `true` if convolutional models have their channels last in memory. See
    /// [`AcceleratorBuilder::channels_last`](crate::AcceleratorBuilder::channels_last).
    ChannelsLast(bool),
    /// Sharding of models over the ranks; `None` keeps whole models on each rank.
    Sharding(Option<Sharding>),
}

impl Accelerator {
    /// Returns the same Accelerator with another setting for the models that it prepares from now on. Ranks, trackers,
    /// checkpoints and all other options are shared.
    ///
    /// ```
    /// use brigade_sharding::Sharding;
    /// use brigade_train::{Accelerator, ModelSetting, Precision};
    ///
    /// let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    /// let sixteen = accelerator.with_model_setting(ModelSetting::MixedPrecision(Precision::Bf16))?;
    /// assert_eq!(sixteen.mixed_precision(), Precision::Bf16);
    /// let sharded = accelerator.with_model_setting(ModelSetting::Sharding(Some(Sharding::zero3())))?;
    /// assert!(accelerator.parallel().sharding().is_none() && sharded.parallel().sharding().is_some());
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the same errors as [`AcceleratorBuilder::build`](crate::AcceleratorBuilder::build) with this setting.
    pub fn with_model_setting(&self, setting: ModelSetting) -> Result<Self> {
        match setting {
            ModelSetting::MixedPrecision(precision) => self.with_mixed_precision(precision),
            ModelSetting::ChannelsLast(on) => Ok(self.with_channels_last(on)),
            ModelSetting::Sharding(sharding) => self.with_sharding(sharding),
        }
    }
}
