//! Transforms of one image, in fastai's order, and their saved form.

use std::fmt;
use std::sync::Arc;

use brigade_torch::{Error, Result};
use brigade_vision::Size;
use brigade_vision::transforms as images;
use brigade_vision::transforms::{Compose, PadMode, RandomHorizontalFlip, Transform};
use serde::{Deserialize, Serialize};

/// Constructors of random resized crops with fastai's defaults.
///
/// ```
/// use brigade_learn::data::RandomResizedCrop;
///
/// assert_eq!(
///     RandomResizedCrop::new(160).scale(0.35, 1.0),
///     brigade_vision::transforms::RandomResizedCrop::fastai(160).scale(0.35, 1.0),
/// );
/// ```
#[derive(Clone, Copy, Debug)]
pub enum RandomResizedCrop {}

impl RandomResizedCrop {
    /// Returns a crop that is random in training; in validation the image is squeezed to a little more than the size
    /// and its middle is cropped. [`RandomResizedCrop::fastai`](images::RandomResizedCrop::fastai) describes its
    /// options.
    #[must_use]
    #[expect(
        clippy::new_ret_no_self,
        reason = "the type is brigade-vision's, with fastai's defaults"
    )]
    pub fn new(size: impl Into<Size>) -> images::RandomResizedCrop {
        images::RandomResizedCrop::fastai(size)
    }
}

/// Constructors of resizes with fastai's defaults.
#[derive(Clone, Copy, Debug)]
pub enum Resize {}

impl Resize {
    /// Returns a crop to the size's aspect ratio, at a random place in training and in the middle in validation, with a
    /// resize: fastai's default method.
    #[must_use]
    #[expect(
        clippy::new_ret_no_self,
        reason = "the type is brigade-vision's, with fastai's defaults"
    )]
    pub fn new(size: impl Into<Size>) -> images::Resize {
        images::Resize::crop(size)
    }

    /// Returns a resize that ignores the aspect ratio: fastai's `ResizeMethod.Squish`.
    #[must_use]
    pub fn squish(size: impl Into<Size>) -> images::Resize {
        images::Resize::squish(size)
    }

    /// Returns a resize that keeps the aspect ratio and pads the image by reflection at its sides: fastai's
    /// `ResizeMethod.Pad`.
    #[must_use]
    pub fn pad(size: impl Into<Size>) -> images::Resize {
        images::Resize::pad(size, PadMode::Reflect)
    }
}

/// A random horizontal flip in training: fastai's `FlipItem`.
pub type Flip = RandomHorizontalFlip;

/// A transform of a single image: any of `brigade_vision::transforms`, or a [custom one](Self::own).
#[derive(Clone)]
pub struct ItemTransform(Kind);

#[derive(Clone)]
enum Kind {
    Known(Known),
    Own { order: i32, name: String, append: Arc<dyn Fn(Compose) -> Compose + Send + Sync> },
}

impl ItemTransform {
    /// Makes a custom transform. It runs after those of lower order, as in fastai: 0 is the order of flips, 1 of crops
    /// and resizes, 2 of changes of colour. A Learner with such a transform cannot be exported.
    pub fn own(transform: impl Transform + Clone + 'static, order: i32) -> Self {
        let name = format!("{transform:?}");
        let append = Arc::new(move |transforms: Compose| transforms.then(transform.clone()));
        Self(Kind::Own { order, name, append })
    }

    /// Returns the transform's order among those of an item: transforms of lower order run first.
    #[must_use]
    pub fn order(&self) -> i32 {
        match &self.0 {
            Kind::Own { order, .. } => *order,
            Kind::Known(known) => known.order(),
        }
    }

    fn append(&self, transforms: Compose) -> Compose {
        match &self.0 {
            Kind::Own { append, .. } => append(transforms),
            Kind::Known(known) => known.append(transforms),
        }
    }
}

impl fmt::Debug for ItemTransform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Known(known) => known.fmt(f),
            Kind::Own { name, .. } => f.write_str(name),
        }
    }
}

/// An element of a list of transforms.
pub trait Part {
    /// Type of the transform: an [`ItemTransform`] or a [`BatchTransform`](super::BatchTransform).
    type Transform;

    /// Converts the element to a transform.
    fn part(self) -> Self::Transform;
}

/// A transform, or a tuple or vector of them, in the order in which they are listed.
pub trait Parts<T> {
    /// Converts the argument to a list of transforms.
    fn parts(self) -> Vec<T>;
}

impl<P: Part> Parts<P::Transform> for P {
    fn parts(self) -> Vec<P::Transform> {
        vec![self.part()]
    }
}

impl<T> Parts<T> for Vec<T> {
    fn parts(self) -> Self {
        self
    }
}

impl<T> Parts<T> for () {
    fn parts(self) -> Vec<T> {
        Vec::new()
    }
}

macro_rules! tuples {
    ($($($part:ident)+;)+) => {
        $(impl<T, $($part: Part<Transform = T>),+> Parts<T> for ($($part,)+) {
            #[expect(non_snake_case, reason = "a value for each type")]
            fn parts(self) -> Vec<T> {
                let ($($part,)+) = self;
                vec![$($part.part()),+]
            }
        })+
    };
}

tuples! {
    A;
    A B;
    A B C;
    A B C D;
    A B C D E;
    A B C D E F;
}

impl Part for ItemTransform {
    type Transform = Self;

    fn part(self) -> Self {
        self
    }
}

/// Makes the serializable transforms from the table of `brigade-images`.
macro_rules! known {
    ($($name:ident: $file:ident::$transform:ident, $order:literal { $($named:tt)* })+) => {
        /// A serializable transform.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub(super) enum Known {
            $($name(images::$transform),)+
        }

        impl Known {
            fn order(&self) -> i32 {
                match self {
                    $(Self::$name(_) => $order,)+
                }
            }

            fn append(&self, transforms: Compose) -> Compose {
                match self {
                    $(Self::$name(transform) => transforms.then(*transform),)+
                }
            }
        }

        $(impl Part for images::$transform {
            type Transform = ItemTransform;

            fn part(self) -> ItemTransform {
                ItemTransform(Kind::Known(Known::$name(self)))
            }
        })+
    };
}

brigade_vision::transforms_table!(known);

/// Joins transforms into one list.
pub(super) fn compose(transforms: &[ItemTransform]) -> Compose {
    transforms.iter().fold(Compose::new(), |list, next| next.append(list))
}

/// Sorts as fastai does: by order, and those with the same order as they are listed.
pub(super) fn in_order(mut transforms: Vec<ItemTransform>) -> Vec<ItemTransform> {
    transforms.sort_by_key(ItemTransform::order);
    transforms
}

/// Converts transforms to their saved form.
pub(super) fn written(transforms: &[ItemTransform]) -> Result<Vec<Known>> {
    let written = |transform: &ItemTransform| match &transform.0 {
        Kind::Known(known) => Ok(known.clone()),
        Kind::Own { name, .. } => Err(Error::invalid_argument(format!(
            "the item transform {name} is defined by the program and cannot be exported; use those of \
             brigade_vision::transforms, or make the data set's images with it once"
        ))),
    };
    transforms.iter().map(written).collect()
}

impl From<Known> for ItemTransform {
    fn from(known: Known) -> Self {
        Self(Kind::Known(known))
    }
}
