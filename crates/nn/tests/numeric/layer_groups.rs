//! Which parameters belong to normalisations, and a module's own groups.

use brigade_nn::{BatchNorm2d, Init, LayerGroups, Linear, ParamPath};
use tch::Tensor;

use crate::device::{build, float};

#[test]
fn normalisations_are_known_by_their_layer_and_of_adopted_tensors_by_their_shape() {
    let vector = || Tensor::ones([4], float()).set_requires_grad(true);
    let matrix = Tensor::ones([4, 4], float()).set_requires_grad(true);
    let model = build(|p: &ParamPath<'_>| {
        // A PReLU and a layer of the model's own: vectors, and no normalisations.
        let _ = (p / "prelu").parameter("weight", &[4], Init::Constant(0.25));
        let scale = p / "scale";
        let _ = (
            scale.parameter("weight", &[4], Init::Ones),
            scale.parameter("bias", &[4], Init::Zeros),
        );
        let foreign = p / "foreign";
        foreign.adopt_parameter("fc.weight", &matrix);
        foreign.adopt_parameter("fc.bias", &vector());
        foreign.adopt_parameter("norm.weight", &vector());
        foreign.adopt_parameter("norm.bias", &vector());
        foreign.adopt_parameter("prelu.weight", &vector());
        BatchNorm2d::new(p / "bn", 4)
    })
    .unwrap();
    let expected = ["foreign.norm.weight", "foreign.norm.bias", "bn.weight", "bn.bias"];
    assert_eq!(model.norm_parameters(), expected);
}

#[test]
fn groups_of_layers_cover_every_parameter() {
    struct Net;
    impl LayerGroups for Net {
        fn layer_groups(&self) -> Vec<Vec<String>> {
            let group = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
            // Pooling has no parameters.
            vec![group(&["stem", "pool", "body"]), group(&["head"])]
        }
    }
    let net = |names: &'static [&'static str]| {
        move |p: &ParamPath<'_>| {
            names.iter().for_each(|name| drop(Linear::new(p / name, 2, 2)));
            Net
        }
    };
    let groups = build(net(&["stem", "head", "body"])).unwrap().param_groups().unwrap();
    let body = ["stem.weight", "stem.bias", "body.weight", "body.bias"];
    assert_eq!(groups, [body.as_slice(), &["head.weight", "head.bias"]]);
    let error = build(net(&["stem", "head", "body", "tail"])).unwrap().param_groups();
    assert!(error.unwrap_err().to_string().contains("tail.weight"));
}
