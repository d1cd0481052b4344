//! Batches of images on a GPU: one made of host memory, or a real one where `BRIGADE_TEST_DEVICE=cuda` says so.

use brigade_data::{BatchedDataset, DataLoader, TensorDataset};
use brigade_test_device::{assert_same, gpu, without_waiting};
use brigade_vision::augment::{Augment, Geometric, Hue, Lighting, Mix, Padding, RandomErasing};
use brigade_vision::transforms::{
    CenterCrop, ColorJitter, Compose, Normalize, Phase, RandomHorizontalFlip, RandomResizedCrop,
    RandomVerticalFlip, Resize, ToTensor,
};
use brigade_vision::{Filter, ImageDataset, Size};
use tch::{Device, Kind, Tensor};

use crate::pictures::Pictures;

fn augments() -> Vec<Augment> {
    let cifar = Augment::new()
        .then(Geometric::PaddedCrop { padding: 4 })
        .then(Geometric::Flip { p: 0.5 })
        .normalize(Normalize::IMAGENET);
    let mut all: Vec<Augment> =
        [Mix::MixUp { alpha: 0.4 }, Mix::MixUpBatch { alpha: 1.0 }, Mix::CutMix { alpha: 1.0 }]
            .map(|mix| cifar.clone().mix(mix).padding(Padding::Zeros))
            .into();
    all.extend([cifar.clone(), cifar.padding(Padding::Border)]);
    all.push(
        Augment::fastai()
            .then(Geometric::resized_crop())
            .size(Size::from(24))
            .lighting(Lighting::Contrast { max: 0.1, p: 1.0 })
            .normalize(Normalize::IMAGENET)
            .erasing(RandomErasing::default()),
    );
    all.push(
        Augment::new()
            .lighting(Lighting::Saturation { max: 0.3, p: 1.0 })
            .hue(Hue::default())
            .erasing(RandomErasing::fastai()),
    );
    all
}

#[test]
fn transforms_of_a_batch_wait_for_nothing_and_agree_with_the_cpu() {
    let (device, _alone) = gpu();
    tch::manual_seed(4);
    let images = Tensor::randint(256, [12, 3, 20, 20], (Kind::Uint8, Device::Cpu));
    let masks = Tensor::randint(7, [12, 20, 20], (Kind::Int64, Device::Cpu));
    let points = Tensor::rand([12, 5, 2], (Kind::Float, Device::Cpu));
    let labels = Tensor::randint(10, [12], (Kind::Int64, Device::Cpu));
    let scores = Tensor::randn([12, 10], (Kind::Float, Device::Cpu));
    let seeds: Vec<u64> = (0..12).collect();
    for augment in augments() {
        let drawn = augment.draw(&seeds, &images).unwrap();
        let all = |on: &dyn Fn(&Tensor) -> Tensor, drawn: &Tensor| {
            let (images, labels, scores) = (on(&images), on(&labels), on(&scores));
            let (masks, points) = (on(&masks), on(&points));
            let run = || {
                let targets = augment.targets(&labels, drawn).unwrap();
                let loss = targets.loss(|labels| {
                    scores.f_cross_entropy_loss::<Tensor>(
                        labels,
                        None,
                        tch::Reduction::None,
                        -100,
                        0.0,
                    )
                });
                vec![
                    augment.apply(&images, drawn).unwrap(),
                    augment.apply_to_masks(&masks, drawn).unwrap(),
                    augment.apply_to_points(&points, drawn, &images).unwrap(),
                    targets.one_hot(10).unwrap(),
                    loss.unwrap(),
                ]
            };
            if images.device() == Device::Cpu { run() } else { without_waiting(run) }
        };
        let expected = all(&|tensor| tensor.shallow_clone(), &drawn);
        // Numbers that come from the host are sent through pinned memory.
        for drawn in [drawn.to_device(device), drawn] {
            let found = all(&|tensor| tensor.to_device(device), &drawn);
            for (place, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert_eq!(found.device(), device);
                let found = found.to_device(Device::Cpu);
                assert_eq!((found.kind(), found.size()), (expected.kind(), expected.size()));
                let kinds = [&found, expected].map(|it| it.to_kind(Kind::Double));
                let apart = (&kinds[0] - &kinds[1]).abs().max().double_value(&[]);
                assert!(apart < 1e-4, "{place}: {apart} of {augment:?}");
            }
        }
    }
}

#[test]
fn a_loader_augments_on_the_gpu_what_it_augments_on_the_cpu() {
    let (device, _alone) = gpu();
    let epochs = |device: Device, threads: usize| {
        let images = Tensor::arange(60 * 3 * 64, (Kind::Int64, Device::Cpu)).remainder(253);
        let images = images.to_kind(Kind::Uint8).reshape([60, 3, 8, 8]);
        let labels = Tensor::arange(60, (Kind::Int64, Device::Cpu));
        let data = TensorDataset::new((images, labels)).unwrap().to_device(device).unwrap();
        let augment = Augment::new()
            .then(Geometric::PaddedCrop { padding: 2 })
            .then(Geometric::Flip { p: 0.5 })
            .padding(Padding::Zeros);
        let loader = DataLoader::new(augment.dataset(data).applied()).batch_size(16).seed(9);
        let loader = loader.shuffle(true).threads(threads).device(device);
        let mut all = Vec::new();
        for _epoch in 0..2 {
            for batch in &loader {
                let (images, labels, drawn) = batch.unwrap().into_data();
                assert!([&images, &labels, &drawn].iter().all(|it| it.device() == device));
                all.push([images, labels, drawn].map(|it| it.to_device(Device::Cpu)));
            }
        }
        all
    };
    let expected = epochs(Device::Cpu, 0);
    for threads in [0, 2] {
        let found = epochs(device, threads);
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
            // A real GPU multiplies by 1/255 where the CPU divides.
            assert_same(found, expected, &format!("{threads} threads"));
        }
    }
}

fn decoded(transforms: Compose, phase: Phase) -> ImageDataset<Pictures> {
    let pictures = Pictures::new(23);
    let labels = pictures.labels();
    ImageDataset::new(pictures, labels)
        .unwrap()
        .transforms(transforms)
        .phase(phase)
        .to_tensor(ToTensor::u8())
}

fn read<D>(dataset: D, device: Device) -> (Tensor, Vec<i64>)
where
    D: BatchedDataset<Batch = (Tensor, Tensor)> + 'static,
{
    let loader = DataLoader::new(dataset).batch_size(6).shuffle(true).seed(3).threads(2);
    let (mut images, mut labels) = (Vec::new(), Vec::new());
    for batch in &loader.device(device) {
        let (some, of_them) = batch.unwrap().into_data();
        assert_eq!((some.device(), of_them.device()), (device, device));
        images.push(some.to_device(Device::Cpu));
        labels.extend(Vec::<i64>::try_from(of_them.to_device(Device::Cpu)).unwrap());
    }
    (Tensor::cat(&images, 0), labels)
}

#[test]
fn images_resized_on_the_gpu_are_those_of_the_cpu() {
    let (device, _alone) = gpu();
    let cubic = |size: u32| RandomResizedCrop::new(size).filter(Filter::Bicubic);
    let lists: [(Compose, Phase); 4] = [
        (
            Compose::new()
                .then(RandomVerticalFlip::default())
                .then(RandomResizedCrop::new(20))
                .then(RandomHorizontalFlip::default()),
            Phase::Train,
        ),
        (Compose::new().then(cubic(12)), Phase::Train),
        (Compose::new().then(Resize::shorter(24)).then(CenterCrop::new(20)), Phase::Valid),
        (Compose::new().then(CenterCrop::new(28)), Phase::Valid),
    ];
    for (transforms, phase) in lists {
        let expected = read(decoded(transforms.clone(), phase), Device::Cpu);
        for on in [Device::Cpu, device] {
            let found = read(decoded(transforms.clone(), phase).resized_on(on), on);
            assert_eq!(found.1, expected.1);
            assert_eq!((found.0.kind(), found.0.size()), (Kind::Uint8, expected.0.size()));
            let apart: Tensor = found.0.to_kind(Kind::Int64) - expected.0.to_kind(Kind::Int64);
            assert!(apart.abs().max().int64_value(&[]) <= 1, "{on:?}: {transforms:?}");
            // The CPU rounds to bytes between its two passes, up as often as down.
            let mean =
                |values: &Tensor| values.to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
            let (share, sum) = (mean(&apart.abs()), mean(&apart));
            assert!(share < 0.25 && sum.abs() < 0.05, "{share}, {sum}: {transforms:?}");
        }
    }
}

#[test]
fn what_a_device_does_not_resize_is_an_error_of_the_batch() {
    let first = |dataset: ImageDataset<Pictures>| {
        let loader = DataLoader::new(dataset.resized_on(Device::Cpu)).batch_size(6);
        loader.iter().next().unwrap().unwrap_err().to_string()
    };
    let resized = || Compose::new().then(Resize::squish(8));
    let jitter = ColorJitter::new().brightness(0.5);
    let error = first(decoded(resized().then(jitter), Phase::Train));
    assert!(error.contains("picture-0.png: Brightness("), "{error}");
    assert!(error.contains("crops, flips, and bilinear and bicubic resizes alone"), "{error}");
    let sizes = first(decoded(Compose::new().then(Resize::shorter(9)), Phase::Valid));
    assert!(sizes.contains("after the transforms, the batch's first image"), "{sizes}");
    let normalized = ToTensor::f32().normalize(Normalize::IMAGENET);
    let error = first(decoded(resized(), Phase::Valid).to_tensor(normalized));
    assert!(error.contains("images that are resized on a device are bytes"), "{error}");
    // Colours before the resize are the CPU's.
    let before = Compose::new().then(ColorJitter::new().brightness(0.5)).then(Resize::squish(8));
    let dataset = decoded(before, Phase::Train).resized_on(Device::Cpu);
    assert_eq!(read(dataset, Device::Cpu).0.size(), [23, 3, 8, 8]);
    let broken = Pictures::new(8).with_broken(&[2]);
    let labels = broken.labels();
    let dataset = ImageDataset::new(broken, labels).unwrap().transforms(resized());
    let error = first(dataset);
    assert!(error.contains("picture-2.png"), "{error}");
}
