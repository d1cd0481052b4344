//! Operations against tables that Pillow and torchvision wrote.

use serde::Deserialize;
use serde_json::Value;

use super::augment::{Kind, Space};
use super::{
    AugMix, AutoAugment, AutoAugmentPolicy, Interpolation, Operation, PadMode, Plan, Renderer,
    affine,
};
use crate::{CropBox, Filter, Image, ImageView, Region, Resizer, Size};

#[derive(Deserialize)]
struct Tables {
    width: u32,
    height: u32,
    image: Vec<u8>,
    cases: Vec<Case>,
    #[serde(default)]
    rand_augment: std::collections::BTreeMap<String, Vec<f64>>,
    #[serde(default)]
    trivial_augment_wide: std::collections::BTreeMap<String, Vec<f64>>,
}

#[derive(Deserialize)]
struct Case {
    op: String,
    #[serde(default)]
    out: Vec<u8>,
    #[serde(flatten)]
    parameters: std::collections::BTreeMap<String, Value>,
}

impl Case {
    fn number(&self, name: &str) -> f64 {
        self.parameters[name].as_f64().unwrap()
    }

    fn numbers(&self, name: &str) -> Vec<f64> {
        let list = self.parameters[name].as_array().unwrap();
        list.iter().map(|number| number.as_f64().unwrap()).collect()
    }

    fn text(&self, name: &str) -> &str {
        self.parameters[name].as_str().unwrap()
    }
}

fn tables(name: &str) -> Tables {
    let path = format!("{}/tests/golden/{name}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn applied(image: ImageView<'_>, operations: Vec<Operation>) -> Image {
    let mut renderer = Renderer::new();
    renderer.render(image, &Plan::of(image.size(), operations).unwrap()).unwrap();
    renderer.into_image().unwrap()
}

fn largest_difference(found: &Image, expected: &[u8]) -> u8 {
    assert_eq!(found.pixels().len(), expected.len());
    found.pixels().iter().zip(expected).map(|(a, b)| a.abs_diff(*b)).max().unwrap()
}

fn filter(name: &str) -> Filter {
    match name {
        "Nearest" => Filter::Nearest,
        "Box" => Filter::Box,
        "Bilinear" => Filter::Bilinear,
        "Hamming" => Filter::Hamming,
        "Bicubic" => Filter::Bicubic,
        "Lanczos" => Filter::Lanczos,
        other => panic!("{other}"),
    }
}

fn size_of(list: &[f64]) -> Size {
    Size::new(list[0] as u32, list[1] as u32)
}

#[test]
fn resizes_and_crops_are_pillows_to_one_grey_level() {
    let tables = tables("transforms.json");
    let image = Image::new(tables.width, tables.height, tables.image).unwrap();
    let mut seen = 0;
    for case in &tables.cases {
        let square = |case: &Case| {
            let side = case.number("size") as u32;
            Region { left: (64 - side) / 2, top: (48 - side) / 2, width: side, height: side }
        };
        let (operations, most) = match case.op.as_str() {
            "crop_resize_bilinear" | "crop_resize_bicubic" => {
                let bicubic = case.op.ends_with("bicubic");
                let filter = if bicubic { Filter::Bicubic } else { Filter::Bilinear };
                let crop: Vec<u32> =
                    case.numbers("top_left_height_width").iter().map(|x| *x as u32).collect();
                let crop = Region { left: crop[1], top: crop[0], width: crop[3], height: crop[2] };
                let size = case.numbers("size");
                let size = Size::new(size[1] as u32, size[0] as u32);
                (vec![Operation::Crop(crop), Operation::Resize { size, filter }], 1)
            }
            "resize_shorter_side_bilinear" => {
                let resize = super::Resize::shorter(case.number("size") as u32);
                let plan = super::Compose::new().then(resize);
                let plan = plan.plan(image.size(), super::Phase::Train, 0).unwrap();
                let size = case.numbers("out_size");
                assert_eq!(plan.output_size(), Size::new(size[1] as u32, size[0] as u32));
                (plan.operations().to_vec(), 1)
            }
            "center_crop" => (vec![Operation::Crop(square(case))], 0),
            "horizontal_flip" => (vec![Operation::FlipHorizontal], 0),
            _ => continue,
        };
        seen += 1;
        let difference = largest_difference(&applied(image.view(), operations), &case.out);
        assert!(difference <= most, "{}: {difference}", case.op);
    }
    assert_eq!(seen, 7);
}

#[test]
fn filters_and_boxes_are_pillows_to_one_grey_level() {
    let tables = tables("augment.json");
    let image = Image::new(tables.width, tables.height, tables.image).unwrap();
    let mut seen = 0;
    for case in tables.cases.iter().filter(|case| case.op.starts_with("resize")) {
        let filter = filter(case.text("filter"));
        let whole = [0.0, 0.0, f64::from(tables.width), f64::from(tables.height)];
        let corners = match case.op.as_str() {
            "resize_box" => case.numbers("box"),
            _ => whole.to_vec(),
        };
        let part = CropBox {
            left: corners[0],
            top: corners[1],
            width: corners[2] - corners[0],
            height: corners[3] - corners[1],
        };
        let (edge, mut out) = (Region::whole(image.size()), Image::scratch());
        let size = size_of(&case.numbers("size"));
        Resizer::new().resize_part(image.view(), edge, part, size, filter, &mut out).unwrap();
        let difference = largest_difference(&out, &case.out);
        let most = u8::from(filter != Filter::Nearest);
        assert!(difference <= most, "{} {filter:?} {size}: {difference}", case.op);
        seen += 1;
    }
    assert_eq!(seen, 18);
}

#[test]
fn operations_are_pillows_to_the_bit() {
    let tables = tables("augment.json");
    let image = Image::new(tables.width, tables.height, tables.image).unwrap();
    let centre = (f64::from(tables.width) * 0.5, f64::from(tables.height) * 0.5);
    let mut seen = 0;
    for case in tables.cases.iter().filter(|case| !case.op.starts_with("resize")) {
        let factor = || case.number("factor") as f32;
        let operation = match case.op.as_str() {
            "brightness" => Operation::Brightness(factor()),
            "contrast" => Operation::Contrast(factor()),
            "saturation" => Operation::Saturation(factor()),
            "sharpness" => Operation::Sharpness(factor()),
            "hue" => Operation::Hue(case.number("turn")),
            "posterize" => Operation::Posterize(case.number("bits") as u8),
            "solarize" => Operation::Solarize(case.number("threshold") as f32),
            "autocontrast" => Operation::AutoContrast,
            "equalize" => Operation::Equalize,
            "invert" => Operation::Invert,
            "pad" => {
                let sides: Vec<u32> = case.numbers("sides").iter().map(|x| *x as u32).collect();
                let mode = match case.text("mode") {
                    "constant" => PadMode::Constant([9, 8, 7]),
                    "edge" => PadMode::Edge,
                    "reflect" => PadMode::Reflect,
                    _ => PadMode::Symmetric,
                };
                let [left, top, right, bottom] = sides[..] else { panic!("{sides:?}") };
                Operation::Pad { left, top, right, bottom, mode }
            }
            affine => {
                let magnitude = case.number("magnitude");
                let matrix = match affine {
                    "ShearX" => affine::shear(magnitude, 0.0),
                    "ShearY" => affine::shear(0.0, magnitude),
                    "TranslateX" => affine::translate(magnitude.trunc(), 0.0, centre),
                    "TranslateY" => affine::translate(0.0, magnitude.trunc(), centre),
                    "Rotate" => affine::rotate(magnitude, centre),
                    other => panic!("{other}"),
                };
                Operation::Affine { matrix, interpolation: Interpolation::Nearest, fill: [0; 3] }
            }
        };
        let found = applied(image.view(), vec![operation.clone()]);
        assert_eq!(largest_difference(&found, &case.out), 0, "{operation:?}");
        seen += 1;
    }
    assert_eq!(seen, 53);
}

#[test]
fn strengths_are_torchvisions() {
    let tables = tables("augment.json");
    let size = Size::new(tables.width, tables.height);
    for (kinds, space, posterize) in [
        (&tables.rand_augment, Space::rand_augment(size, Interpolation::Nearest, [0; 3]), 4),
        (&tables.trivial_augment_wide, Space::trivial_augment(Interpolation::Nearest, [0; 3]), 6),
    ] {
        assert_eq!(kinds["Posterize"].last(), Some(&f64::from(8 - posterize)));
        (0..31).for_each(|bin| {
            let strength = |name: &str| kinds[name][bin];
            let drawn = |kind| space.operation(kind, bin, 31, false, size);
            let matrix = |kind| match drawn(kind) {
                Some(Operation::Affine { matrix, .. }) => matrix,
                other => panic!("{other:?}"),
            };
            let centre = (f64::from(size.width) * 0.5, f64::from(size.height) * 0.5);
            assert_eq!(matrix(Kind::ShearX), affine::shear(strength("ShearX"), 0.0));
            assert_eq!(matrix(Kind::ShearY), affine::shear(0.0, strength("ShearY")));
            let across = strength("TranslateX").trunc();
            assert_eq!(matrix(Kind::TranslateX), affine::translate(across, 0.0, centre));
            let down = strength("TranslateY").trunc();
            assert_eq!(matrix(Kind::TranslateY), affine::translate(0.0, down, centre));
            assert_eq!(matrix(Kind::Rotate), affine::rotate(strength("Rotate"), centre));
            let factor = |name: &str| (1.0 + strength(name)) as f32;
            assert_eq!(drawn(Kind::Brightness), Some(Operation::Brightness(factor("Brightness"))));
            assert_eq!(drawn(Kind::Color), Some(Operation::Saturation(factor("Color"))));
            assert_eq!(drawn(Kind::Contrast), Some(Operation::Contrast(factor("Contrast"))));
            assert_eq!(drawn(Kind::Sharpness), Some(Operation::Sharpness(factor("Sharpness"))));
            assert_eq!(
                drawn(Kind::Posterize),
                Some(Operation::Posterize(strength("Posterize") as u8))
            );
            assert_eq!(
                drawn(Kind::Solarize),
                Some(Operation::Solarize(strength("Solarize") as f32))
            );
        });
    }
}

/// Content of the file that `make_auto_augment.py` writes.
#[derive(Deserialize)]
struct Automatic {
    width: u32,
    height: u32,
    fill: [u8; 3],
    image: Vec<u8>,
    auto_augment: std::collections::BTreeMap<String, Policy>,
    /// The space, the operation, the place of its strength, whether it is negative, the filter, and
    /// the checksum of the pixels.
    interpolated: Vec<(String, String, usize, bool, String, u32)>,
    aug_mix_space: std::collections::BTreeMap<String, (Value, bool)>,
    aug_mix_few: Vec<String>,
    aug_mix: Vec<Mixed>,
}

#[derive(Deserialize)]
struct Policy {
    policies: Vec<[(String, f64, Option<usize>); 2]>,
    /// torchvision's signs, of which 0 is negative, and the checksum of the pixels.
    outputs: Vec<([u8; 2], u32)>,
}

#[derive(Deserialize)]
struct Mixed {
    bilinear: bool,
    all_ops: bool,
    weights: [Vec<f32>; 2],
    chains: Vec<Vec<(String, usize, bool)>>,
    output: u32,
}

fn automatic() -> (Automatic, Image) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/auto_augment.json");
    let mut tables: Automatic =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let pixels = std::mem::take(&mut tables.image);
    let image = Image::new(tables.width, tables.height, pixels).unwrap();
    (tables, image)
}

fn kind(name: &str) -> Kind {
    let mut known = Kind::WIDE.into_iter().chain([Kind::Invert]);
    known.find(|kind| format!("{kind:?}") == name).unwrap()
}

fn checksum(image: &Image) -> u32 {
    crc32fast::hash(image.pixels())
}

#[test]
fn auto_augment_is_torchvisions_to_the_bit() {
    let (tables, image) = automatic();
    for (name, expected) in &tables.auto_augment {
        let policy: AutoAugmentPolicy = serde_json::from_value(name.as_str().into()).unwrap();
        let augment = AutoAugment::new(policy);
        assert_eq!(policy.pairs().len(), expected.policies.len());
        for (index, (pair, theirs)) in policy.pairs().iter().zip(&expected.policies).enumerate() {
            for (ours, (name, probability, magnitude)) in pair.iter().zip(theirs) {
                let theirs = (kind(name), *probability, magnitude.unwrap_or(0));
                assert_eq!(*ours, theirs, "{policy:?}: pair {index}");
            }
            for (signs, output) in &expected.outputs[2 * index..2 * index + 2] {
                let operations = pair.iter().zip(signs).filter_map(|(drawn, sign)| {
                    let negative = drawn.0.is_signed() && *sign == 0;
                    augment.operation(drawn.0, drawn.2, negative, image.size())
                });
                let found = applied(image.view(), operations.collect());
                assert_eq!(checksum(&found), *output, "{policy:?}: pair {index}, {signs:?}");
            }
        }
    }
    assert_eq!(tables.auto_augment.len(), 3);
}

#[test]
fn affine_maps_between_pixels_are_pillows_to_the_bit() {
    let (tables, image) = automatic();
    for (space, name, place, negative, filter, output) in &tables.interpolated {
        let interpolation = match filter.as_str() {
            "bilinear" => Interpolation::Bilinear,
            "bicubic" => Interpolation::Bicubic,
            other => panic!("{other}"),
        };
        let drawn = match space.as_str() {
            "rand_augment" => Space::rand_augment(image.size(), interpolation, tables.fill),
            _ => Space::trivial_augment(interpolation, tables.fill),
        };
        let operation = drawn.operation(kind(name), *place, 31, *negative, image.size()).unwrap();
        let found = applied(image.view(), vec![operation.clone()]);
        assert_eq!(checksum(&found), *output, "{space}: {operation:?}");
    }
    assert_eq!(tables.interpolated.len(), 120);
}

#[test]
fn aug_mix_is_torchvisions_on_pillows_pixels() {
    let (tables, image) = automatic();
    let names = |transform: AugMix| -> Vec<String> {
        transform.kinds().iter().map(|kind| format!("{kind:?}")).collect()
    };
    let few = names(AugMix::default().all_operations(false));
    assert_eq!(few, tables.aug_mix_few);
    let all = names(AugMix::default());
    assert_eq!((all.len(), all[..few.len()].to_vec()), (tables.aug_mix_space.len(), few));
    for (name, (strengths, signed)) in &tables.aug_mix_space {
        assert!(all.contains(name), "{name}");
        assert_eq!(kind(name).is_signed(), *signed, "{name}");
        if *name != "Posterize" {
            continue;
        }
        for (place, bits) in strengths.as_array().unwrap().iter().enumerate() {
            let drawn = AugMix::default().operation(Kind::Posterize, place, false, image.size());
            assert_eq!(drawn, Some(Operation::Posterize(bits.as_u64().unwrap() as u8)));
        }
    }
    for (index, mixed) in tables.aug_mix.iter().enumerate() {
        let interpolation =
            if mixed.bilinear { Interpolation::Bilinear } else { Interpolation::Nearest };
        let transform = AugMix::default()
            .fill(tables.fill)
            .interpolation(interpolation)
            .all_operations(mixed.all_ops);
        let chains = mixed.weights[1].iter().zip(&mixed.chains).map(|(weight, chain)| {
            let operations = chain.iter().map(|(name, place, negative)| {
                assert!(transform.kinds().contains(&kind(name)), "{name}");
                transform.operation(kind(name), *place, *negative, image.size()).unwrap()
            });
            (weight * mixed.weights[0][1], operations.collect())
        });
        let mix = Operation::Mix { weight: mixed.weights[0][0], chains: chains.collect() };
        let found = applied(image.view(), vec![mix]);
        assert_eq!(checksum(&found), mixed.output, "number {index}");
    }
    assert_eq!(tables.aug_mix.len(), 4);
}
