//! Data: how it is shared out, where it lies, and where an epoch begins.

use brigade_data::TensorDataset;
use brigade_torch::TensorTree;

use super::Accelerator;
use crate::error::Result;
use crate::loader::PreparedLoader;
use crate::loader::placement::{self, DATASET_SHARE};
use crate::loader::source::{DataLoaderConfiguration, Loader};

impl Accelerator {
    /// How batches are shared out among the ranks, as the builder's options say: for data sets that depend on it.
    #[must_use]
    pub fn data_loader_configuration(&self) -> DataLoaderConfiguration {
        self.options.loader
    }

    /// Puts a data set on this rank's device where it takes at most half of the memory that is free there
    /// ([`DATASET_SHARE`]), and leaves it on the host otherwise; its [`device`](TensorDataset::device) and a line of
    /// the log say which it was. Each rank decides for itself: batches hold the same values either way.
    ///
    /// It is to be called when model and optimizer are on the device, since they count as memory in use; what
    /// activations will take is not known here, and is what the other half is for.
    ///
    /// ```
    /// use brigade_data::{DataLoader, TensorDataset};
    /// use brigade_train::{Accelerator, Tensor};
    ///
    /// let accelerator = Accelerator::builder().quiet(true).build()?;
    /// let data = TensorDataset::new(Tensor::from_slice(&[1f32, 2., 3., 4.]))?;
    /// let data = accelerator.place_dataset(data)?;
    /// assert_eq!(data.device(), accelerator.device());
    /// let loader = accelerator.prepare(DataLoader::new(data).batch_size(2).shuffle(true))?;
    /// # assert_eq!(loader.len(), 2);
    /// # Ok::<(), brigade_train::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::Torch`] when the device does not say what is free or has failed.
    pub fn place_dataset<T>(&self, dataset: TensorDataset<T>) -> Result<TensorDataset<T>>
    where
        T: TensorTree<Owned = T> + Send + 'static,
    {
        self.place_dataset_within(dataset, DATASET_SHARE)
    }

    /// As [`Accelerator::place_dataset`], with another share of the free memory, 0 to 1.
    ///
    /// # Errors
    /// As there; [`crate::Error::InvalidArgument`] for another share.
    pub fn place_dataset_within<T>(
        &self,
        dataset: TensorDataset<T>,
        share: f64,
    ) -> Result<TensorDataset<T>>
    where
        T: TensorTree<Owned = T> + Send + 'static,
    {
        placement::place(&self.processes, dataset, share)
    }

    /// Leaves out the first batches of a loader's next epoch, as after a restart that no checkpoint
    /// tells of. A loader that `load_state` has restored does so by itself.
    pub fn skip_first_batches<L: Loader>(&self, loader: &PreparedLoader<L>, batches: usize) {
        let loader = loader.inner();
        loader.set_skip_samples(0);
        loader.set_skip_batches(batches);
    }
}
