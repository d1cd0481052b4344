//! The list of the transforms that have a name in text and can be serialized.

/// Calls a macro with the list of transforms. A row is `Variant: file::Type, order` with fastai's order among the
/// transforms of an item, and a line for each of its names in text: the kind of its value, the function that creates
/// the transform, and a description. The export of the type, [`NamedTransform::all`], and a Learner's item transforms
/// follow from the row. Exported files of a Learner contain the name of the variant: it must not change.
///
/// [`NamedTransform::all`]: crate::transforms::NamedTransform::all
#[doc(hidden)]
#[macro_export]
macro_rules! transforms_table {
    ($then:ident) => {
        $then! {
            Flip: flip::RandomHorizontalFlip, 0 {
                "flip": Fraction(RandomHorizontalFlip::new, "P", 0.5), "mirrors left and right";
            }
            VerticalFlip: flip::RandomVerticalFlip, 0 {
                "vertical-flip": Fraction(RandomVerticalFlip::new, "P", 0.5), "mirrors top and bottom";
            }
            CenterCrop: center_crop::CenterCrop, 1 {
                "center-crop": Area(CenterCrop::new), "the middle";
            }
            Crop: crop::Crop, 1 {}
            RandomCrop: random_crop::RandomCrop, 1 {
                "random-crop": Area(|size| RandomCrop::new(size).pad_if_needed(PadMode::ZEROS)),
                    "anywhere, black beside smaller images";
            }
            RandomResizedCrop: random_resized_crop::RandomResizedCrop, 1 {
                "random-resized-crop": Area(RandomResizedCrop::new), "a part of random size, by torchvision's rules";
                "fastai-crop": Area(RandomResizedCrop::fastai), "the same by fastai's rules";
            }
            Resize: resize::Resize, 1 {
                "resize": Side(Resize::shorter), "the shorter side to N pixels";
                "squish": Area(Resize::squish), "both sides, whatever the aspect ratio";
                "crop-resize": Area(Resize::crop), "the largest part of that aspect ratio, resized";
                "pad-resize": Area(|size| Resize::pad(size, PadMode::ZEROS)),
                    "the whole image, with black around it";
            }
            ColorJitter: jitter::ColorJitter, 2 {
                "color-jitter": Fraction(
                    |by| ColorJitter::new().brightness(by).contrast(by).saturation(by), "AMOUNT", 0.4
                ), "changes brightness, contrast and saturation";
            }
            AugMix: aug_mix::AugMix, 2 {
                "aug-mix": Level(|severity| AugMix::default().severity(severity), "SEVERITY", 3),
                    "mixes chains of operations";
            }
            AutoAugment: auto_augment::AutoAugment, 2 {
                "auto-augment": Choice(
                    |place| AutoAugment::new(AutoAugmentPolicy::ALL[place]), &["imagenet", "cifar10", "svhn"]
                ), "a policy that was found for these images";
            }
            RandAugment: rand_augment::RandAugment, 2 {
                "rand-augment": Level(|magnitude| RandAugment::default().magnitude(magnitude), "MAGNITUDE", 9),
                    "two random operations";
            }
            TrivialAugmentWide: trivial_augment::TrivialAugmentWide, 2 {
                "trivial-augment": Nothing(|()| TrivialAugmentWide::default()), "one random operation";
            }
        }
    };
}
