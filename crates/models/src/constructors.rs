//! Short names of the architectures, for where a model is asked for.

use brigade_nn::ParamPath;

use crate::{ConvNeXt, ResNet, VisionTransformer, XResNet};

macro_rules! constructors {
    ($($(#[$doc:meta])* $name:ident => $module:ident::$constructor:ident;)*) => {
        $($(#[$doc])*
        pub fn $name(classes: i64) -> impl Fn(&ParamPath<'_>) -> $module + Clone + Send + Sync {
            move |path: &ParamPath<'_>| $module::$constructor(path, classes)
        })*
    };
}

constructors! {
    /// Returns the constructor of [`ResNet::resnet18`] for so many classes.
    ///
    /// ```
    /// use brigade_models::resnet18;
    /// use brigade_nn::Model;
    ///
    /// assert_eq!(Model::new(resnet18(1000))?.num_parameters(), 11_689_512);
    /// # Ok::<(), brigade_nn::Error>(())
    /// ```
    resnet18 => ResNet::resnet18;
    /// Returns the constructor of [`ResNet::resnet34`] for so many classes.
    resnet34 => ResNet::resnet34;
    /// Returns the constructor of [`ResNet::resnet50`] for so many classes.
    resnet50 => ResNet::resnet50;
    /// Returns the constructor of [`ResNet::resnet101`] for so many classes.
    resnet101 => ResNet::resnet101;
    /// Returns the constructor of [`ResNet::resnet152`] for so many classes.
    resnet152 => ResNet::resnet152;
    /// Returns the constructor of [`ResNet::resnet50d`] for so many classes.
    resnet50d => ResNet::resnet50d;
    /// Returns the constructor of [`XResNet::xresnet18`] for so many classes.
    xresnet18 => XResNet::xresnet18;
    /// Returns the constructor of [`XResNet::xresnet34`] for so many classes.
    xresnet34 => XResNet::xresnet34;
    /// Returns the constructor of [`XResNet::xresnet50`] for so many classes.
    xresnet50 => XResNet::xresnet50;
    /// Returns the constructor of [`XResNet::xresnet101`] for so many classes.
    xresnet101 => XResNet::xresnet101;
    /// Returns the constructor of [`ConvNeXt::tiny`] for so many classes.
    convnext_tiny => ConvNeXt::tiny;
    /// Returns the constructor of [`VisionTransformer::tiny`] for so many classes.
    vit_tiny => VisionTransformer::tiny;
    /// Returns the constructor of [`VisionTransformer::small`] for so many classes.
    vit_small => VisionTransformer::small;
    /// Returns the constructor of [`VisionTransformer::base`] for so many classes.
    vit_base => VisionTransformer::base;
}
