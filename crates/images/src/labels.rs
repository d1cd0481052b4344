//! Classes of images, and the split into images for training and for validation.
//!
//! A [`Labeller`] finds the label of an image in its path, or a [`LabelTable`] lists it; [`Categories`] number the
//! labels; a [`Split`] lists the images for training and for validation.
//!
//! ```
//! use brigade_images::labels::{Labelled, Labeller, Split};
//! use brigade_images::source::{ImageFiles, ImageSource};
//!
//! // The names of the Oxford-IIIT pets: breeds of cats begin with a large letter.
//! # let folder = tempfile::tempdir()?;
//! # let folder = folder.path();
//! # for name in ["Bengal_1.jpg", "Bengal_2.jpg", "great_pyrenees_1.jpg", "great_pyrenees_2.jpg"] {
//! #     std::fs::write(folder.join(name), [])?;
//! # }
//! let pets = Labelled::of(ImageFiles::find(folder)?, &Labeller::regex(r"^(.*)_\d+\.jpg$")?)?;
//! assert_eq!(pets.categories().names(), ["Bengal", "great_pyrenees"]);
//!
//! let split = Split::random(pets.len(), 0.25, 42)?;
//! let (train, valid) = pets.split(split)?;
//! assert_eq!((train.len(), valid.len()), (3, 1));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod categories;
mod labelled;
mod labeller;
mod split;
mod table;

pub use self::categories::Categories;
pub use self::labelled::{Labelled, LabelledSubset, Subset};
pub use self::labeller::Labeller;
pub use self::split::Split;
pub use self::table::{CsvOptions, LabelTable};

/// Returns the suffixes of a path that begin at a component, the longest first: `a/b/c`, `b/c`, `c`.
fn ends(path: &str) -> impl Iterator<Item = &str> {
    let starts = path.match_indices('/').map(|(slash, _)| slash + 1);
    std::iter::once(0).chain(starts).filter_map(|start| path.get(start..))
}
