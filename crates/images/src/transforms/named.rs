//! Transforms by their names in text.

use std::str::FromStr;

use super::types::*;
use super::{AutoAugmentPolicy, Compose, PadMode};
use crate::{ImageError, Result, Size};

/// A transform with its name in text, as on the command line: `name` or `name=value`.
///
/// ```
/// use brigade_images::transforms::NamedTransform;
///
/// let flip = NamedTransform::all().iter().find(|named| named.name() == "flip").unwrap();
/// assert_eq!((flip.syntax(), flip.about()), ("flip[=P]".to_owned(), "mirrors left and right"));
/// ```
#[derive(Debug)]
pub struct NamedTransform {
    name: &'static str,
    about: &'static str,
    value: Value,
}

/// The kind of value after the `=` of a name, and the function that adds the transform with that value to a list.
#[derive(Debug)]
enum Value {
    Nothing(fn(Compose, ()) -> Compose),
    /// Number of pixels of one side.
    Side(fn(Compose, u32) -> Compose),
    /// Number of pixels of both sides.
    Area(fn(Compose, Size) -> Compose),
    /// A number from 0 to 1, with its name in the help and its default.
    Fraction(fn(Compose, f64) -> Compose, &'static str, f64),
    /// A whole number, with its name in the help and its default.
    Level(fn(Compose, usize) -> Compose, &'static str, usize),
    /// The index of one of these words; the first is the default.
    Choice(fn(Compose, usize) -> Compose, &'static [&'static str]),
}

macro_rules! named {
    ($($variant:ident: $file:ident::$transform:ident, $order:literal {
        $($name:literal: $value:ident($make:expr $(, $more:expr)*), $about:literal;)*
    })+) => {
        &[$($(NamedTransform {
            name: $name,
            about: $about,
            value: Value::$value(
                |transforms, value| {
                    let make = $make;
                    transforms.then(make(value))
                }
                $(, $more)*
            ),
        },)*)+]
    };
}

impl NamedTransform {
    /// Returns all named transforms.
    #[must_use]
    pub fn all() -> &'static [Self] {
        crate::transforms_table!(named)
    }

    /// Returns the name of the transform.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns a description of the transform, in a few words.
    #[must_use]
    pub fn about(&self) -> &'static str {
        self.about
    }

    /// Returns the name with the value that it takes, in brackets if the value has a default.
    #[must_use]
    pub fn syntax(&self) -> String {
        let name = self.name;
        match self.value {
            Value::Nothing(_) => name.to_owned(),
            Value::Side(_) => format!("{name}=N"),
            Value::Area(_) => format!("{name}=N|WxH"),
            Value::Fraction(_, value, _) | Value::Level(_, value, _) => format!("{name}[={value}]"),
            Value::Choice(_, words) => format!("{name}[={}]", words.join("|")),
        }
    }

    /// Adds the transform with this value, or with its default, at the end of a list.
    ///
    /// # Errors
    /// Fails for an invalid value, or for a missing one without a default.
    pub fn add_to(&self, transforms: Compose, value: Option<&str>) -> Result<Compose> {
        let item =
            || value.map_or_else(|| self.name.to_owned(), |value| format!("{}={value}", self.name));
        let added = self.add(transforms, value);
        added.map_err(|reason| ImageError::InvalidArgument(format!("{}: {reason}", item())))
    }

    fn add(&self, transforms: Compose, value: Option<&str>) -> Result<Compose, String> {
        Ok(match (&self.value, value) {
            (Value::Nothing(add), None) => add(transforms, ()),
            (Value::Nothing(_), Some(_)) => return Err("it takes no value".into()),
            (Value::Side(add), Some(value)) => add(transforms, side(value)?),
            (Value::Side(_), None) => {
                return Err(format!("it needs a number of pixels, as in {}=256", self.name));
            }
            (Value::Area(add), Some(value)) => add(transforms, size(value)?),
            (Value::Area(_), None) => {
                return Err(format!("it needs a size, as in {}=224 or 320x240", self.name));
            }
            (Value::Fraction(add, _, default), value) => {
                add(transforms, value.map_or(Ok(*default), fraction)?)
            }
            (Value::Level(add, _, default), value) => add(
                transforms,
                value.map_or(Ok(*default), |value| whole(value).map(|level| level as usize))?,
            ),
            (Value::Choice(add, words), value) => {
                let place =
                    value.map_or(Some(0), |value| words.iter().position(|word| *word == value));
                let place = place.ok_or_else(|| format!("its values are {}", listed(words)))?;
                add(transforms, place)
            }
        })
    }
}

/// Parses a list of [`NamedTransform`]s, separated by commas: `random-resized-crop=160,flip`.
///
/// ```
/// use brigade_images::Size;
/// use brigade_images::transforms::{Compose, Phase};
///
/// let transforms: Compose = "resize=32,center-crop=24x16".parse()?;
/// let plan = transforms.plan(Size::new(64, 48), Phase::Valid, 0)?;
/// assert_eq!(plan.output_size(), Size::new(24, 16));
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
impl FromStr for Compose {
    type Err = ImageError;

    fn from_str(list: &str) -> Result<Self> {
        let mut items = list.split(',').map(str::trim).filter(|item| !item.is_empty());
        items.try_fold(Self::new(), |transforms, item| {
            let (name, value) = match item.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (item, None),
            };
            match NamedTransform::all().iter().find(|named| named.name == name) {
                Some(named) => named.add_to(transforms, value),
                None => Err(ImageError::InvalidArgument(format!(
                    "{item}: not a transform; expected one of {}",
                    known()
                ))),
            }
        })
    }
}

fn known() -> String {
    let names: Vec<_> = NamedTransform::all().iter().map(NamedTransform::name).collect();
    listed(&names)
}

fn listed(words: &[&str]) -> String {
    match words {
        [first @ .., last] if !first.is_empty() => format!("{} and {last}", first.join(", ")),
        _ => words.concat(),
    }
}

fn whole(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("{text:?} is not a whole number"))
}

/// Parses a side of at least one pixel, and at most as many as a batch could hold.
fn side(text: &str) -> Result<u32, String> {
    match whole(text)? {
        side @ 1..=16_384 => Ok(side),
        side => Err(format!("{side} pixels are not between 1 and 16384")),
    }
}

/// Parses `160`, or width and height as `320x240`.
fn size(text: &str) -> Result<Size, String> {
    match text.split_once('x') {
        Some((width, height)) => Ok(Size::new(side(width)?, side(height)?)),
        None => Ok(Size::from(side(text)?)),
    }
}

fn fraction(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(fraction) if (0.0..=1.0).contains(&fraction) => Ok(fraction),
        _ => Err(format!("{text:?} is not a number between 0 and 1")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transforms::Phase;

    fn parse(list: &str) -> Result<Compose, String> {
        list.parse().map_err(|error: ImageError| error.to_string())
    }

    #[test]
    fn every_name_is_known() {
        for named in NamedTransform::all() {
            let name = named.name();
            let sized = format!("{name}=24");
            let compose = parse(name).or_else(|_| parse(&sized)).unwrap();
            let plan = compose.plan(Size::new(40, 30), Phase::Train, 3).unwrap();
            assert!(plan.output_size().pixels() > 0, "{name}");
            assert!(named.syntax().starts_with(name), "{}", named.syntax());
            assert!(!named.about().is_empty(), "{name}");
        }
        let plan = parse(" resize=32, center-crop=24x16 ").unwrap();
        let plan = plan.plan(Size::new(64, 48), Phase::Valid, 0).unwrap();
        assert_eq!(plan.output_size(), Size::new(24, 16));
    }

    #[test]
    fn a_name_alone_stands_for_the_defaults_of_the_type() {
        let defaults = [
            ("flip", Compose::new().then(RandomHorizontalFlip::default())),
            ("vertical-flip", Compose::new().then(RandomVerticalFlip::default())),
            ("aug-mix", Compose::new().then(AugMix::default())),
            ("auto-augment", Compose::new().then(AutoAugment::new(AutoAugmentPolicy::ImageNet))),
            (
                "auto-augment=cifar10",
                Compose::new().then(AutoAugment::new(AutoAugmentPolicy::Cifar10)),
            ),
            ("auto-augment=svhn", Compose::new().then(AutoAugment::new(AutoAugmentPolicy::Svhn))),
            ("rand-augment", Compose::new().then(RandAugment::default())),
            ("trivial-augment", Compose::new().then(TrivialAugmentWide::default())),
        ];
        for (name, expected) in defaults {
            assert_eq!(format!("{:?}", parse(name).unwrap()), format!("{expected:?}"), "{name}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        for (list, expected) in [
            ("resize", "resize: it needs a number of pixels"),
            ("resize=big", "resize=big: \"big\" is not a whole number"),
            ("resize=0", "0 pixels are not between"),
            ("squish", "it needs a size, as in squish=224 or 320x240"),
            ("center-crop=20x", "\"\" is not a whole number"),
            ("flip=2", "\"2\" is not a number between 0 and 1"),
            ("flip,blur=3", "blur=3: not a transform; expected one of flip, vertical-flip"),
            ("trivial-augment=3", "it takes no value"),
            ("auto-augment=coco", "its values are imagenet, cifar10 and svhn"),
        ] {
            let error = parse(list).unwrap_err();
            assert!(error.contains(expected), "{list}: {error}");
        }
    }
}
