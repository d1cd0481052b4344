//! Datasets whose batches contain the numbers that were drawn for them.

use brigade_data::{BatchContext, BatchedDataset};
use brigade_torch::Result;
use tch::Tensor;

use super::Augment;

impl Augment {
    /// Wraps a dataset, so that its batches have a third tensor, `[n, 25]`, with the numbers that were drawn for the
    /// transforms: images, labels, numbers.
    #[must_use]
    pub fn dataset<D>(&self, dataset: D) -> AugmentedDataset<D> {
        AugmentedDataset { dataset, augment: self.clone() }
    }
}

/// A dataset of images whose batches contain the numbers that an [`Augment`] has drawn for them. Created by
/// [`Augment::dataset`].
#[derive(Clone, Debug)]
pub struct AugmentedDataset<D> {
    dataset: D,
    augment: Augment,
}

impl<D> AugmentedDataset<D> {
    /// Returns the wrapped dataset.
    pub fn inner(&self) -> &D {
        &self.dataset
    }

    /// Returns a dataset that transforms the images of a batch in the thread that makes the batch, on the device of the
    /// images: for a dataset [on a GPU](brigade_data::TensorDataset::to_device), the transforms run on the GPU
    /// concurrently with the training step. Batches are images, unchanged labels, and the numbers for
    /// [`Augment::targets`].
    ///
    /// ```
    /// use brigade_data::{DataLoader, TensorDataset};
    /// use brigade_vision::augment::{Augment, Geometric, Padding};
    /// use brigade_vision::transforms::Normalize;
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let device = Device::cuda_if_available();
    /// let images = Tensor::randint(256, [50, 3, 32, 32], (Kind::Uint8, Device::Cpu));
    /// let labels = Tensor::randint(10, [50], (Kind::Int64, Device::Cpu));
    /// let data = TensorDataset::new((images, labels))?.to_device(device)?;
    /// // The usual recipe for CIFAR-10.
    /// let augment = Augment::new()
    ///     .then(Geometric::PaddedCrop { padding: 4 })
    ///     .then(Geometric::Flip { p: 0.5 })
    ///     .padding(Padding::Zeros)
    ///     .normalize(Normalize { mean: [0.491, 0.482, 0.447], std: [0.247, 0.243, 0.262] });
    /// let data = augment.dataset(data).applied();
    /// let loader = DataLoader::new(data).batch_size(25).shuffle(true).threads(1).device(device);
    /// for batch in &loader {
    ///     let (images, labels, _drawn) = batch?.into_data();
    ///     assert_eq!((images.kind(), images.device()), (Kind::Float, device));
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn applied(self) -> AppliedDataset<D> {
        AppliedDataset(self)
    }
}

/// A dataset of images whose batches are transformed. Created by [`AugmentedDataset::applied`].
#[derive(Clone, Debug)]
pub struct AppliedDataset<D>(AugmentedDataset<D>);

impl<D> BatchedDataset for AppliedDataset<D>
where
    D: BatchedDataset<Batch = (Tensor, Tensor)>,
{
    type Batch = (Tensor, Tensor, Tensor);

    fn num_samples(&self) -> usize {
        self.0.num_samples()
    }

    fn batch(&self, indices: &[usize], context: &BatchContext) -> Result<Self::Batch> {
        let (images, labels, drawn) = self.0.batch(indices, context)?;
        let augment = &self.0.augment;
        // Once, also for the later uses.
        let drawn = augment.checked(&images, &drawn)?;
        Ok((augment.apply(&images, &drawn)?, labels, drawn))
    }
}

impl<D> BatchedDataset for AugmentedDataset<D>
where
    D: BatchedDataset<Batch = (Tensor, Tensor)>,
{
    type Batch = (Tensor, Tensor, Tensor);

    fn num_samples(&self) -> usize {
        self.dataset.num_samples()
    }

    fn batch(&self, indices: &[usize], context: &BatchContext) -> Result<Self::Batch> {
        let (images, labels) = self.dataset.batch(indices, context)?;
        let seeds: Vec<u64> = indices.iter().map(|&index| context.sample_seed(index)).collect();
        let drawn = self.augment.draw(&seeds, &images)?;
        Ok((images, labels, drawn))
    }
}
