//! Files with quantised weights of other packages, which brigade-checkpoint has.

use brigade_nn::{Linear, Model, ParamPath, Weights, weights};
use tch::{Device, Kind, Tensor, no_grad};

#[test]
fn weights_of_other_packages_are_used_as_they_are() {
    let fixtures = "../checkpoint/tests/fixtures/quantized";
    for (name, is_packed) in [
        ("gptq4", true),
        ("gptq4_act_order", true),
        ("gptq8", true),
        ("awq", true),
        ("gptq8_groups", false),
        ("nf4", false),
    ] {
        let expected = weights::load(format!("{fixtures}/{name}/expected.safetensors")).unwrap();
        let expected = expected.get("fc.weight").unwrap();
        let (rows, columns) = expected.size2().unwrap();
        let layer = |path: &ParamPath<'_>| {
            Linear::with_options(
                path / "fc",
                columns,
                rows,
                brigade_nn::LinearOptions { bias: false },
            )
        };
        let mut model = Model::deferred(layer).unwrap();
        model.load_weights(format!("{fixtures}/{name}/model.safetensors")).unwrap();
        model.materialize().unwrap();
        assert_eq!(model.is_quantized(), is_packed, "{name}");
        let input =
            Tensor::arange(3 * columns, (Kind::Float, Device::Cpu)).view([3, columns]).sin();
        let found = no_grad(|| model.forward(&input)).unwrap().to_kind(Kind::Double);
        let exact = input.to_kind(Kind::Double).matmul(&expected.to_kind(Kind::Double).tr());
        let error = (found - &exact).abs().max().double_value(&[]);
        let scale = input.abs().matmul(&expected.abs().tr()).max().double_value(&[]);
        assert!(error <= 1e-5 * scale, "{name}: {error} of {scale}");
        // As floating-point numbers, too.
        let mut float = Model::deferred(layer).unwrap();
        float.load_weights(format!("{fixtures}/{name}/model.safetensors")).unwrap();
        float.quantize(&Weights::float(Kind::Float)).unwrap();
        assert!(!float.is_quantized());
    }
}
