//! Transforms of one image, before it is part of a batch.
//!
//! A [`Transform`] chooses the next [`Operation`]s for an image's size, a [`Phase`] and a random generator; [`Compose`]
//! is a list of transforms, and a [`Plan`] the operations that it chose for one image. Operations are plain data, known
//! before the image is decoded, so that a crop, a resize and a flip at the beginning need not be separate steps: only
//! the rows that they keep are decoded and only the pixels that they keep are resampled.
//!
//! ```
//! use brigade_images::transforms::{Compose, Operation, Phase, RandomHorizontalFlip, Resize};
//! use brigade_images::{Filter, Size};
//!
//! let transforms = Compose::new().then(Resize::shorter(32)).then(RandomHorizontalFlip::new(1.0));
//! let plan = transforms.plan(Size::new(64, 48), Phase::Train, 7)?;
//! assert_eq!(
//!     plan.operations(),
//!     [
//!         Operation::Resize { size: Size::new(42, 32), filter: Filter::Bilinear },
//!         Operation::FlipHorizontal,
//!     ]
//! );
//! assert_eq!(plan.output_size(), Size::new(42, 32));
//! # Ok::<(), brigade_images::ImageError>(())
//! ```

mod affine;
mod aug_mix;
mod augment;
mod auto_augment;
mod center_crop;
mod compose;
mod crop;
mod flip;
#[cfg(test)]
mod golden;
mod jitter;
mod named;
mod operation;
mod pad;
mod pixels;
mod plan;
mod rand_augment;
mod random;
mod random_crop;
mod random_resized_crop;
mod render;
mod resize;
mod table;
mod trivial_augment;

pub use affine::Interpolation;
pub use auto_augment::AutoAugmentPolicy;
pub use compose::{Compose, Phase, Transform};
pub use named::NamedTransform;
pub use operation::Operation;
pub use pad::PadMode;
pub use plan::Plan;
pub use random::SampleRng;
pub use render::Flips;
pub(crate) use render::{Pixels, RegionReader, Renderer};
pub(crate) use resize::Presize;

macro_rules! exports {
    ($($variant:ident: $file:ident::$transform:ident, $order:literal { $($names:tt)* })+) => {
        $(pub use $file::$transform;)+

        /// The types of the table, for crates that re-export all of them.
        #[doc(hidden)]
        pub mod types {
            $(pub use super::$file::$transform;)+
        }
    };
}

crate::transforms_table!(exports);
