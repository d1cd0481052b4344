//! Generated photographs, where no folder was given.

use std::path::PathBuf;

use anyhow::Context;
use brigade::learn::prelude::Accelerator;
use brigade_testkit::Photos;

use crate::whole;

/// Generates photographs below `data/`, on one process of each host: a folder with `train` and `val`, and in both
/// one for each class.
///
/// # Errors
/// When the folder cannot be written.
pub fn photographs(
    accelerator: &Accelerator,
    classes: usize,
    images: usize,
) -> anyhow::Result<PathBuf> {
    let folder = PathBuf::from(format!("data/photos-{classes}x{images}"));
    accelerator.processes().local_main_process_first(|| {
        let photos = Photos::new(classes, images);
        whole(&folder, |folder| photos.write(folder).context("cannot write the photographs"))
            .map_err(brigade::Error::custom)
    })?;
    Ok(folder)
}

/// Generates photographs whose names begin with their class, in one folder.
///
/// # Errors
/// As [`photographs`].
pub fn named_photographs(
    accelerator: &Accelerator,
    classes: usize,
    images: usize,
) -> anyhow::Result<PathBuf> {
    let folder = PathBuf::from(format!("data/named-photos-{classes}x{images}"));
    let photos = Photos::new(classes, images);
    accelerator.processes().local_main_process_first(|| {
        whole(&folder, |folder| {
            std::fs::create_dir_all(folder)?;
            for (class, name) in photos.classes().iter().enumerate() {
                for index in 0..images {
                    let file = folder.join(format!("{name}_{index}.jpg"));
                    std::fs::write(&file, photos.jpeg(class, index))
                        .with_context(|| format!("cannot write {}", file.display()))?;
                }
            }
            Ok(())
        })
        .map_err(brigade::Error::custom)
    })?;
    Ok(folder)
}
