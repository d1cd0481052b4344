//! Distribution of data over the ranks.

use super::Accelerator;
use crate::loader::source::DataLoaderConfiguration;

impl Accelerator {
    /// Returns how batches are distributed over the ranks, as set by the builder's options: for data sets that depend
    /// on it.
    #[must_use]
    pub fn data_loader_configuration(&self) -> DataLoaderConfiguration {
        self.options.loader
    }
}
