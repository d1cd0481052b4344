//! Models that are known by name.

use super::memory::{Mixture, ModelSize, Shape};

/// Name, sizes and kind of a model, as in PyTorch, torchvision and Hugging Face.
type Known = (&'static str, u64, u64, Kind);

enum Kind {
    /// Layers, hidden size, heads, vocabulary size.
    Transformer(u64, u64, u64, u64),
    /// The same, and the intermediate size of gated feed-forward layers.
    Gated(u64, u64, u64, u64, u64),
    /// Layers, hidden size, heads, width of the keys, vocabulary size, and experts.
    Mixture(u64, u64, u64, u64, u64, Mixture),
    /// Number of output values of its convolutions for one sample with this many pixels per side.
    Convolutional { outputs: u64, side: u64 },
}

/// Returns the sizes of the model of that name. `side` is the number of pixels per side of its images.
pub(super) fn find(name: &str, side: Option<u64>) -> Option<ModelSize> {
    let (_, parameters, largest, kind) =
        TABLE.iter().find(|known| known.0.eq_ignore_ascii_case(name))?;
    let transformer = |sizes: [u64; 6], mixture, gated| {
        let [layers, hidden, heads, keys, vocabulary, intermediate] = sizes;
        Shape::Transformer { layers, hidden, heads, keys, vocabulary, mixture, intermediate, gated }
    };
    let shape = match *kind {
        Kind::Transformer(layers, hidden, heads, vocabulary) => {
            transformer([layers, hidden, heads, hidden, vocabulary, 4 * hidden], None, false)
        }
        Kind::Gated(layers, hidden, heads, vocabulary, intermediate) => {
            transformer([layers, hidden, heads, hidden, vocabulary, intermediate], None, true)
        }
        Kind::Mixture(layers, hidden, heads, keys, vocabulary, mixture) => {
            let sizes = [layers, hidden, heads, keys, vocabulary, mixture.intermediate];
            transformer(sizes, Some(mixture), true)
        }
        // The outputs of convolutions grow with the number of pixels.
        Kind::Convolutional { outputs, side: usual } => {
            let side = u128::from(side.unwrap_or(usual));
            let scaled = u128::from(outputs) * side * side / u128::from(usual * usual);
            Shape::Convolutional { outputs: u64::try_from(scaled).unwrap_or(u64::MAX) }
        }
    };
    Some(ModelSize { parameters: *parameters, largest: *largest, shape: Some(shape) })
}

/// Returns all names, for the help and for suggestions.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    TABLE.iter().map(|known| known.0)
}

const TABLE: &[Known] = &[
    ("cnn", 253_706, 200_704, Kind::Convolutional { outputs: 37_632, side: 28 }),
    ("resnet18", 11_689_512, 2_359_296, Kind::Convolutional { outputs: 2_483_712, side: 224 }),
    ("resnet34", 21_797_672, 2_359_296, Kind::Convolutional { outputs: 3_738_112, side: 224 }),
    ("resnet50", 25_557_032, 2_359_296, Kind::Convolutional { outputs: 11_113_984, side: 224 }),
    ("gpt2", 124_439_808, 38_597_376, Kind::Transformer(12, 768, 12, 50_257)),
    ("gpt2-medium", 354_823_168, 51_463_168, Kind::Transformer(24, 1024, 16, 50_257)),
    ("gpt2-large", 774_030_080, 64_328_960, Kind::Transformer(36, 1280, 20, 50_257)),
    ("gpt2-xl", 1_557_611_200, 80_411_200, Kind::Transformer(48, 1600, 25, 50_257)),
    ("llama-7b", 6_738_415_616, 131_072_000, Kind::Gated(32, 4096, 32, 32_000, 11_008)),
    ("llama-13b", 13_015_864_320, 163_840_000, Kind::Gated(40, 5120, 40, 32_000, 13_824)),
    ("mixtral-8x7b", 46_702_792_704, 939_524_096, MIXTRAL),
    ("bert-base", 109_482_240, 23_440_896, Kind::Transformer(12, 768, 12, 0)),
    ("bert-large", 335_141_888, 31_254_528, Kind::Transformer(24, 1024, 16, 0)),
];

const MIXTRAL: Kind = Kind::Mixture(
    32,
    4096,
    32,
    1024,
    32_000,
    Mixture { experts: 8, chosen: 2, intermediate: 14_336 },
);

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of output values of a ResNet's convolutions for one image, layer by layer.
    fn resnet(blocks: [u64; 4], bottleneck: bool) -> u64 {
        let mut outputs = 64 * 112 * 112;
        let mut side = 56;
        for (stage, count) in blocks.into_iter().enumerate() {
            let width = 64 << stage;
            for block in 0..count {
                let first = block == 0 && stage > 0;
                let before = if first { 2 * side } else { side };
                outputs += if bottleneck {
                    width * before * before + width * side * side + 4 * width * side * side
                } else {
                    2 * width * side * side
                };
                let projected = if bottleneck { block == 0 } else { first };
                if projected {
                    outputs += if bottleneck { 4 } else { 1 } * width * side * side;
                }
            }
            side /= 2;
        }
        outputs
    }

    #[test]
    fn convolutions_are_counted_right() {
        let outputs = |name| match find(name, None).unwrap().shape {
            Some(Shape::Convolutional { outputs }) => outputs,
            _ => panic!("{name} is convolutional"),
        };
        assert_eq!(outputs("cnn"), 32 * 28 * 28 + 64 * 14 * 14);
        assert_eq!(outputs("resnet18"), resnet([2, 2, 2, 2], false));
        assert_eq!(outputs("resnet34"), resnet([3, 4, 6, 3], false));
        assert_eq!(outputs("resnet50"), resnet([3, 4, 6, 3], true));
    }

    #[test]
    fn transformers_have_the_parameters_that_their_shapes_give() {
        for (name, positions) in
            [("gpt2", 1024), ("gpt2-medium", 1024), ("gpt2-large", 1024), ("gpt2-xl", 1024)]
        {
            let model = find(name, None).unwrap();
            let Some(Shape::Transformer { layers, hidden, vocabulary, .. }) = model.shape else {
                panic!("{name} is a transformer")
            };
            let block = 12 * hidden * hidden + 13 * hidden;
            let expected = layers * block + 2 * hidden + (vocabulary + positions) * hidden;
            assert_eq!(model.parameters, expected, "{name}");
            assert_eq!(model.largest, vocabulary * hidden, "{name}");
        }
    }

    #[test]
    fn a_mixture_has_the_parameters_that_its_shape_gives() {
        let model = find("mixtral-8x7b", None).unwrap();
        let Some(Shape::Transformer { layers, hidden, keys, vocabulary, mixture, .. }) =
            model.shape
        else {
            panic!("a transformer")
        };
        let Mixture { experts, intermediate, .. } = mixture.unwrap();
        let attention = 2 * hidden * (hidden + keys);
        let of_experts = experts * 3 * hidden * intermediate;
        let block = attention + of_experts + experts * hidden + 2 * hidden;
        assert_eq!(model.parameters, layers * block + (2 * vocabulary + 1) * hidden);
        assert_eq!(model.largest, experts * 2 * intermediate * hidden);
        let by_unit = model.parameters_by_unit();
        let sizes = |experts: bool| -> u64 {
            let of = by_unit.iter().filter(|it| it.is_expert == experts);
            of.map(|it| it.shape.iter().product::<u64>()).sum()
        };
        assert_eq!(sizes(true), layers * of_experts);
        assert_eq!(sizes(true) + sizes(false), model.parameters);
        let head = by_unit.iter().filter(|it| it.unit.is_none() && it.shape.len() > 1);
        // The last normalisation counts among the embedding's rows.
        assert_eq!(head.map(|it| it.shape[0]).collect::<Vec<_>>(), [vocabulary + 1, vocabulary]);
    }

    #[test]
    fn smaller_images_take_less() {
        let Some(Shape::Convolutional { outputs }) = find("ResNet18", Some(32)).unwrap().shape
        else {
            panic!("convolutional")
        };
        assert_eq!(outputs, 2_483_712 * 32 * 32 / (224 * 224));
        assert_eq!(find("resnet19", None), None);
    }
}
