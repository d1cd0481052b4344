//! Weights files that torchvision and timm wrote here, and what the networks compute with them.

use std::path::{Path, PathBuf};
use std::process::Command;

use brigade_models::{
    ConvNeXt, ImageClassifier, Pretrained, ResNet, ResNetOptions, Stem, VisionTransformer,
    VisionTransformerOptions, XResNet,
};
use brigade_nn::{Layer, Model, ParamPath, weights};
use brigade_test_needs::{Need, needs};
use tch::Tensor;

const CLASSES: i64 = 10;

#[needs(TorchModels)]
fn weights_and_first_values_are_torchvisions_and_timms() {
    let folder = tempfile::tempdir().unwrap();
    let script =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/make_pretrained.py");
    let python = brigade_test_needs::python(Need::TorchModels).unwrap();
    let output = Command::new(python).arg(script).arg(folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let folder = folder.path();

    let same = Names::Same;
    agrees(folder, "resnet18.pth", same, |path| ResNet::resnet18(path, CLASSES));
    agrees(folder, "resnet101.pth", same, |path| ResNet::resnet101(path, CLASSES));
    agrees(folder, "wide_resnet50_2.pth", same, |path| ResNet::wide_resnet50(path, CLASSES));
    agrees(folder, "resnext50_32x4d.pth", same, |path| ResNet::resnext50(path, CLASSES));
    agrees(folder, "convnext_tiny.pth", same, |path| ConvNeXt::tiny(path, CLASSES));
    agrees(folder, "resnet18d.pth", same, |path| {
        ResNet::new(path, CLASSES, ResNetOptions::basic([2, 2, 2, 2]).variant_d())
    });
    agrees(folder, "resnet26t.pth", same, |path| {
        let variant = ResNetOptions::bottleneck([2, 2, 2, 2]).variant_d();
        ResNet::new(path, CLASSES, ResNetOptions { stem: Stem::Deep([24, 32]), ..variant })
    });
    agrees(folder, "resnet50d.safetensors", same, |path| ResNet::resnet50d(path, CLASSES));
    agrees(folder, "vit_tiny_patch16_224.pth", same, |path| VisionTransformer::tiny(path, CLASSES));
    agrees(folder, "vit_small_patch16_224.pth", same, |path| {
        VisionTransformer::small(path, CLASSES)
    });
    // A file of one library in the architecture of another.
    let mapped = Names::Mapped;
    agrees(folder, "timm_convnext_tiny.pth", mapped, |path| ConvNeXt::tiny(path, CLASSES));
    agrees(folder, "resnet50d.safetensors", mapped, |path| XResNet::xresnet50(path, CLASSES));
    agrees(folder, "torchvision_vit.pth", mapped, |path| {
        let options = VisionTransformerOptions::new(48, 3);
        let options = VisionTransformerOptions { image_size: 64, depth: 2, ..options };
        VisionTransformer::new(path, CLASSES, options)
    });
    other_sizes(folder);
}

#[derive(Clone, Copy, PartialEq)]
enum Names {
    /// Of the library that the architecture follows: a seed gives its first values too.
    Same,
    Mapped,
}

fn agrees<M: Layer + ImageClassifier>(
    folder: &Path,
    file: &str,
    names: Names,
    build: impl Fn(&ParamPath<'_>) -> M,
) {
    let stem = file.split_once('.').unwrap().0;
    let expected = weights::load(folder.join(format!("{stem}_expected.safetensors"))).unwrap();
    tch::manual_seed(17);
    let mut model = Model::new(build).unwrap();
    let state = model.state_dict();
    if names == Names::Same {
        let theirs: Vec<&str> =
            expected.names().filter_map(|name| name.strip_prefix("initial.")).collect();
        assert_eq!(theirs.len(), state.len(), "{file}");
        for (name, values) in state.iter() {
            let theirs = expected.get(&format!("initial.{name}")).unwrap();
            assert_eq!(values.size(), theirs.size(), "{file}: {name}");
            let close = values.allclose(theirs, 1e-5, 1e-7, false);
            assert!(close, "{file}: the first values of {name}");
        }
    }
    let report = Pretrained::new().load(&mut model, folder.join(file)).unwrap();
    assert_eq!(report.loaded, state.len(), "{file}");
    assert!(report.head.is_empty() && report.unused.is_empty(), "{file}: {report:?}");
    assert_eq!(report.renamed > 0, names == Names::Mapped, "{file}");
    model.eval();
    let output = tch::no_grad(|| model.forward(expected.get("images").unwrap()).unwrap());
    let theirs = expected.get("output").unwrap();
    let difference = (&output - theirs).abs().max().double_value(&[]);
    let largest = theirs.abs().max().double_value(&[]);
    assert!(difference <= 1e-4 * largest, "{file}: {difference} of {largest}");
}

/// Another number of classes, of channels, another size of image.
fn other_sizes(folder: &Path) {
    let grey = ResNetOptions { in_channels: 1, ..ResNetOptions::basic([2, 2, 2, 2]) };
    let mut model = Model::new(|path| ResNet::new(path, 37, grey)).unwrap();
    let before = model.state_dict().deep_clone().unwrap();
    let report = Pretrained::new().load(&mut model, folder.join("resnet18.pth")).unwrap();
    assert_eq!(report.head, ["fc.weight", "fc.bias"]);
    assert_eq!(report.adapted, ["conv1.weight"]);
    let after = model.state_dict();
    assert_eq!(after.get("fc.weight"), before.get("fc.weight"));
    let colour = weights::load(folder.join("resnet18.pth")).unwrap();
    let sum = colour.get("conv1.weight").unwrap().sum_dim_intlist(1, true, tch::Kind::Float);
    assert_eq!(after.get("conv1.weight"), Some(&sum));

    let larger =
        VisionTransformerOptions { image_size: 288, ..VisionTransformerOptions::new(192, 3) };
    let mut model = Model::new(|path| VisionTransformer::new(path, CLASSES, larger)).unwrap();
    let file = folder.join("vit_tiny_patch16_224.pth");
    let report = Pretrained::new().load(&mut model, file).unwrap();
    assert_eq!(report.adapted, ["pos_embed"]);
    let images = Tensor::zeros([1, 3, 288, 288], (tch::Kind::Float, tch::Device::Cpu));
    assert_eq!(model.forward(&images).unwrap().size(), [1, CLASSES]);

    // More than the head differs: nothing is changed.
    let mut model = Model::new(|path| ResNet::resnet34(path, CLASSES)).unwrap();
    let before = model.state_dict().deep_clone().unwrap();
    let error = Pretrained::new().load(&mut model, folder.join("resnet18.pth")).unwrap_err();
    assert!(error.to_string().contains("missing in the weights: layer1.2.conv1.weight"), "{error}");
    let after = model.state_dict();
    assert!(before.iter().all(|(name, values)| after.get(name) == Some(values)));
}
