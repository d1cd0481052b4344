//! The sizes of 34 and 50 layers.

use brigade_models::{ResNet, XResNet, XResNetOptions};

use crate::golden::{Table, agrees};

#[test]
fn resnet34_is_torchvisions() {
    agrees(Table::Classifiers, "resnet34", |path| ResNet::resnet34(path, 10));
}

#[test]
fn resnet50_is_torchvisions() {
    agrees(Table::Classifiers, "resnet50", |path| ResNet::resnet50(path, 10));
}

#[test]
fn xresnet34_is_fastais() {
    agrees(Table::Classifiers, "xresnet34", |path| XResNet::xresnet34(path, 10));
}

#[test]
fn xresnet50_is_fastais() {
    agrees(Table::Classifiers, "xresnet50", |path| XResNet::xresnet50(path, 10));
}

#[test]
fn resnet50d_is_timms() {
    agrees(Table::Classifiers, "resnet50d", |path| ResNet::resnet50d(path, 10));
}

#[test]
fn xse_resnet50_is_fastais() {
    agrees(Table::Fastai, "xse_resnet50", |path| {
        XResNet::new(path, 10, XResNetOptions::bottleneck([3, 4, 6, 3]).squeeze_excitation())
    });
}
