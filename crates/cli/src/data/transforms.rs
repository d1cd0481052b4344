//! Transforms by their names on the command line.

use brigade_images::Size;
use brigade_images::transforms::{
    AugMix, AutoAugment, AutoAugmentPolicy, CenterCrop, ColorJitter, Compose, PadMode, RandAugment,
    RandomCrop, RandomHorizontalFlip, RandomResizedCrop, RandomVerticalFlip, Resize,
    TrivialAugmentWide,
};

/// Reads a list such as `random-resized-crop=160,flip`.
pub(super) fn parse(list: &str) -> Result<Compose, String> {
    list.split(',').map(str::trim).filter(|item| !item.is_empty()).try_fold(
        Compose::new(),
        |compose, item| {
            let (name, value) = match item.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (item, None),
            };
            add(compose, name, value).map_err(|reason| format!("{item}: {reason}"))
        },
    )
}

fn add(compose: Compose, name: &str, value: Option<&str>) -> Result<Compose, String> {
    Ok(match name {
        "resize" => compose.then(Resize::shorter(number(value)?)),
        "squish" => compose.then(Resize::squish(size(value)?)),
        "crop-resize" => compose.then(Resize::crop(size(value)?)),
        "pad-resize" => compose.then(Resize::pad(size(value)?, PadMode::ZEROS)),
        "center-crop" => compose.then(CenterCrop::new(size(value)?)),
        "random-crop" => compose.then(RandomCrop::new(size(value)?).pad_if_needed(PadMode::ZEROS)),
        "random-resized-crop" => compose.then(RandomResizedCrop::new(size(value)?)),
        "fastai-crop" => compose.then(RandomResizedCrop::fastai(size(value)?)),
        "flip" => compose.then(RandomHorizontalFlip::new(share(value, 0.5)?)),
        "vertical-flip" => compose.then(RandomVerticalFlip::new(share(value, 0.5)?)),
        "color-jitter" => {
            let amount = share(value, 0.4)?;
            let jitter = ColorJitter::new().brightness(amount).contrast(amount).saturation(amount);
            compose.then(jitter)
        }
        "auto-augment" => compose.then(AutoAugment::new(match value {
            None | Some("imagenet") => AutoAugmentPolicy::ImageNet,
            Some("cifar10") => AutoAugmentPolicy::Cifar10,
            Some("svhn") => AutoAugmentPolicy::Svhn,
            Some(_) => return Err("its policies are imagenet, cifar10 and svhn".into()),
        })),
        "aug-mix" => {
            let mixing = AugMix::default();
            compose.then(match value {
                None => mixing,
                Some(value) => mixing.severity(whole(value)? as usize),
            })
        }
        "rand-augment" => {
            let augment = RandAugment::default();
            compose.then(match value {
                None => augment,
                Some(value) => augment.magnitude(whole(value)? as usize),
            })
        }
        "trivial-augment" if value.is_none() => compose.then(TrivialAugmentWide::default()),
        "trivial-augment" => return Err("it takes no value".into()),
        _ => return Err(format!("it is not a transform; known are {NAMES}")),
    })
}

/// The names, for messages and the help.
pub(super) const NAMES: &str = "resize, squish, crop-resize, pad-resize, center-crop, random-crop, \
random-resized-crop, fastai-crop, flip, vertical-flip, color-jitter, auto-augment, rand-augment, \
trivial-augment and aug-mix";

fn whole(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("{text:?} is not a whole number"))
}

/// A side of at least one pixel, and at most one that a batch could hold.
fn side(text: &str) -> Result<u32, String> {
    match whole(text)? {
        side @ 1..=16_384 => Ok(side),
        side => Err(format!("{side} pixels are not between 1 and 16384")),
    }
}

fn number(value: Option<&str>) -> Result<u32, String> {
    side(value.ok_or("it needs a number of pixels, as in resize=256")?)
}

/// `160`, or width and height as `320x240`.
fn size(value: Option<&str>) -> Result<Size, String> {
    let value = value.ok_or("it needs a size, as in center-crop=224 or 320x240")?;
    match value.split_once('x') {
        Some((width, height)) => Ok(Size::new(side(width)?, side(height)?)),
        None => Ok(Size::from(side(value)?)),
    }
}

fn share(value: Option<&str>, default: f64) -> Result<f64, String> {
    let Some(value) = value else { return Ok(default) };
    match value.parse() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err(format!("{value:?} is not a number between 0 and 1")),
    }
}

#[cfg(test)]
mod tests {
    use brigade_images::transforms::Phase;

    use super::*;

    #[test]
    fn every_name_is_known() {
        for name in NAMES.replace(" and", ",").split(", ").filter(|name| !name.is_empty()) {
            let sized = format!("{name}=24");
            let compose = parse(name).or_else(|_| parse(&sized)).unwrap();
            let plan = compose.plan(Size::new(40, 30), Phase::Train, 3).unwrap();
            assert!(plan.output_size().pixels() > 0, "{name}");
        }
        let plan = parse(" resize=32, center-crop=24x16 ").unwrap();
        let plan = plan.plan(Size::new(64, 48), Phase::Valid, 0).unwrap();
        assert_eq!(plan.output_size(), Size::new(24, 16));
    }

    #[test]
    fn mistakes_are_named() {
        for (list, expected) in [
            ("resize", "resize: it needs a number of pixels"),
            ("resize=big", "resize=big: \"big\" is not a whole number"),
            ("resize=0", "0 pixels are not between"),
            ("center-crop=20x", "\"\" is not a whole number"),
            ("flip=2", "\"2\" is not a number between 0 and 1"),
            ("flip,blur=3", "blur=3: it is not a transform; known are resize"),
            ("trivial-augment=3", "it takes no value"),
            ("auto-augment=coco", "its policies are imagenet, cifar10 and svhn"),
        ] {
            let error = parse(list).unwrap_err();
            assert!(error.contains(expected), "{list}: {error}");
        }
    }
}
