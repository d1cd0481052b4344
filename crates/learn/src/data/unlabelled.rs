//! Files without targets, to predict.

use std::path::PathBuf;
use std::sync::Arc;

use brigade_data::{BatchContext, BatchedDataset, DataError};
use brigade_rank_env::text::counted;
use brigade_torch::Result;
use tch::Tensor;

use crate::loaders::{Item, ItemCodec};

/// Files without targets, read in the same way as the validation data: fastai's `test_dl`. The Learner's
/// [`predictions_of`](crate::Learner::predictions_of) takes a [`DataLoader`](brigade_data::DataLoader) of them.
///
/// ```
/// use brigade_data::{BatchedDataset, DataLoader};
/// use brigade_learn::data::{ImageLoaders, Resize, Unlabelled};
/// # use brigade_testkit::Photos;
/// # use brigade_train::Accelerator;
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path();
/// # Photos::new(2, 5).size(60, 45).write(path)?;
/// # let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
/// let data = ImageLoaders::from_folder(path).item_transforms(Resize::new(32)).loaders(&accelerator, 4)?;
/// let codec = data.item_codec().expect("data of images have one");
/// let files = [path.join("val/disc/0000.jpg"), path.join("val/square/0000.jpg")];
/// let unlabelled = DataLoader::new(Unlabelled::new(codec, files)).batch_size(64).threads(2);
/// for batch in &unlabelled {
///     let (images, targets) = batch?.into_data();
///     assert_eq!((images.size(), targets.is_none()), (vec![2, 3, 32, 32], true));
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Unlabelled {
    codec: Arc<dyn ItemCodec>,
    files: Vec<PathBuf>,
}

impl Unlabelled {
    /// Makes the data set from files, in their order, and the codec that reads them.
    pub fn new<P: Into<PathBuf>>(
        codec: &Arc<dyn ItemCodec>,
        files: impl IntoIterator<Item = P>,
    ) -> Self {
        Self { codec: Arc::clone(codec), files: files.into_iter().map(Into::into).collect() }
    }
}

impl BatchedDataset for Unlabelled {
    type Batch = (Tensor, Option<Tensor>);

    fn num_samples(&self) -> usize {
        self.files.len()
    }

    fn batch(&self, indices: &[usize], _: &BatchContext) -> Result<Self::Batch> {
        let mut rows = Vec::with_capacity(indices.len());
        for &index in indices {
            let len = self.files.len();
            let file = self.files.get(index).ok_or(DataError::Index { index, len })?;
            let row = self.codec.encode(&Item::File(file.clone()))?;
            let [row] = <[Tensor; 1]>::try_from(row).map_err(|row| {
                let message =
                    format!("{} is {}, expected one", file.display(), counted(row.len(), "tensor"));
                DataError::Unfit { message }
            })?;
            rows.push(row);
        }
        Ok((Tensor::f_cat(&rows, 0)?, None))
    }
}
