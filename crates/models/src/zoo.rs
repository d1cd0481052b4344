//! The list of named image classifiers.

use std::borrow::Borrow;
use std::str::FromStr;

use brigade_nn::ParamPath;
use brigade_torch::Error;

use crate::{
    Architecture, ConvNeXt, ConvNeXtOptions, ResNet, ResNetOptions, VisionTransformer,
    VisionTransformerOptions, XResNet, XResNetOptions,
};

/// Defines named classifiers. A row is `name: Model::method => Variant(options)`. It defines the model's method, the
/// function `name(classes)` for code that takes a constructor, and the [`Architecture`] with that name.
macro_rules! zoo {
    ($($(#[$doc:meta])* $name:ident: $model:ident::$method:ident => $variant:ident($options:expr);)*) => {
        $(
            impl $model {
                $(#[$doc])*
                pub fn $method<'a>(path: impl Borrow<ParamPath<'a>>, classes: i64) -> Self {
                    Self::new(path, classes, $options)
                }
            }

            #[doc = concat!(
                "Returns the constructor of [`", stringify!($model), "::", stringify!($method),
                "`] for this number of classes."
            )]
            pub fn $name(classes: i64) -> impl Fn(&ParamPath<'_>) -> $model + Clone + Send + Sync {
                move |path: &ParamPath<'_>| $model::$method(path, classes)
            }
        )*

        impl Architecture {
            $(
                $(#[$doc])*
                #[must_use]
                pub fn $name() -> Self {
                    Self::$variant($options)
                }
            )*
        }

        impl FromStr for Architecture {
            type Err = Error;

            /// Parses the name of one of the functions, such as `resnet34`.
            fn from_str(name: &str) -> Result<Self, Error> {
                match name {
                    $(stringify!($name) => Ok(Self::$name()),)*
                    _ => {
                        let known = [$(stringify!($name)),*].join(", ");
                        Err(Error::invalid_argument(format!(
                            "unknown architecture `{name}`; expected one of {known}"
                        )))
                    }
                }
            }
        }
    };
}

zoo! {
    /// torchvision's `resnet18`: 11.7 million parameters with 1000 classes.
    resnet18: ResNet::resnet18 => ResNet(ResNetOptions::basic([2, 2, 2, 2]));
    /// torchvision's `resnet34`: 21.8 million parameters with 1000 classes.
    resnet34: ResNet::resnet34 => ResNet(ResNetOptions::basic([3, 4, 6, 3]));
    /// torchvision's `resnet50`: 25.6 million parameters with 1000 classes.
    resnet50: ResNet::resnet50 => ResNet(ResNetOptions::bottleneck([3, 4, 6, 3]));
    /// torchvision's `resnet101`: 44.5 million parameters with 1000 classes.
    resnet101: ResNet::resnet101 => ResNet(ResNetOptions::bottleneck([3, 4, 23, 3]));
    /// torchvision's `resnet152`: 60.2 million parameters with 1000 classes.
    resnet152: ResNet::resnet152 => ResNet(ResNetOptions::bottleneck([3, 8, 36, 3]));
    /// timm's `resnet50d`: 25.6 million parameters with 1000 classes. See [`ResNetOptions::variant_d`].
    resnet50d: ResNet::resnet50d => TimmResNet(ResNetOptions::bottleneck([3, 4, 6, 3]).variant_d());
    /// fastai's `xresnet18`: 11.2 million parameters with 10 classes.
    xresnet18: XResNet::xresnet18 => XResNet(XResNetOptions::basic([2, 2, 2, 2]));
    /// fastai's `xresnet34`: 21.3 million parameters with 10 classes.
    xresnet34: XResNet::xresnet34 => XResNet(XResNetOptions::basic([3, 4, 6, 3]));
    /// fastai's `xresnet50`: 23.5 million parameters with 10 classes.
    xresnet50: XResNet::xresnet50 => XResNet(XResNetOptions::bottleneck([3, 4, 6, 3]));
    /// fastai's `xresnet101`: 42.5 million parameters with 10 classes.
    xresnet101: XResNet::xresnet101 => XResNet(XResNetOptions::bottleneck([3, 4, 23, 3]));
    /// torchvision's `convnext_tiny`: 28.6 million parameters with 1000 classes.
    convnext_tiny: ConvNeXt::tiny => ConvNeXt(ConvNeXtOptions::tiny());
    /// timm's `vit_tiny_patch16_224`: 5.7 million parameters with 1000 classes.
    vit_tiny: VisionTransformer::tiny => VisionTransformer(VisionTransformerOptions::new(192, 3));
    /// timm's `vit_small_patch16_224`: 22.1 million parameters with 1000 classes.
    vit_small: VisionTransformer::small => VisionTransformer(VisionTransformerOptions::new(384, 6));
    /// timm's `vit_base_patch16_224`: 86.6 million parameters with 1000 classes.
    vit_base: VisionTransformer::base => VisionTransformer(VisionTransformerOptions::new(768, 12));
}
