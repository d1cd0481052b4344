//! Heads, transfer models and their groups against fastai: names, shapes, first values, outputs.

use brigade_models::{
    Architecture, ConvNeXt, ConvNeXtOptions, Head, HeadOptions, ImageClassifier, Pretrained,
    ResNet, ResNetOptions, TransferModel, UNet, UNetOptions, VisionTransformer,
    VisionTransformerOptions, resnet18, resnet34, xresnet18,
};
use brigade_nn::{IntoModel, Layer, Model, ModelBuilder, ParamPath, StateDict, weights};
use brigade_test_device::{numeric_device, on_device, tolerance};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::fill::{fill, filled};

fn golden() -> Value {
    serde_json::from_str(include_str!("../golden/vision_learner.json")).unwrap()
}

/// The options that the golden file's arguments stand for.
fn options(args: &Value) -> HeadOptions {
    let mut options = HeadOptions::new(args["n_out"].as_i64().unwrap());
    for (name, value) in args.as_object().unwrap() {
        let flag = value.as_bool();
        match name.as_str() {
            "nf" | "n_out" | "n_in" => {}
            "lin_ftrs" => options.hidden = serde_json::from_value(value.clone()).unwrap(),
            "ps" => {
                options.dropout = match value.as_f64() {
                    Some(single) => vec![single],
                    None => serde_json::from_value(value.clone()).unwrap(),
                }
            }
            "pool" => options.pool = flag.unwrap(),
            "concat_pool" => options.concat_pool = flag.unwrap(),
            "first_bn" => options.first_bn = flag.unwrap(),
            "bn_final" => options.bn_final = flag.unwrap(),
            "lin_first" => options.lin_first = flag.unwrap(),
            "y_range" => options.y_range = serde_json::from_value(value.clone()).unwrap(),
            other => panic!("the golden file has the argument {other}"),
        }
    }
    options
}

fn builder() -> ModelBuilder {
    Model::builder().device(numeric_device())
}

fn state_of<M>(model: &Model<M>) -> Value {
    let state = model.state_dict();
    json!(state.iter().map(|(name, tensor)| (name.to_owned(), tensor.size())).collect::<Vec<_>>())
}

/// How far results may be on the device: on a real GPU the roundings of some twenty layers add up.
fn limit(on_the_cpu: f64) -> f64 {
    on_the_cpu.max(20.0 * tolerance(Kind::Float))
}

/// Compares an output with the golden file's, relative to its largest value.
fn agrees(what: &str, found: &Tensor, expected: &Value, on_the_cpu: f64) {
    let rows: Vec<Vec<f64>> = serde_json::from_value(expected.clone()).unwrap();
    let shape = [rows.len() as i64, rows[0].len() as i64];
    assert_eq!(found.size(), shape, "{what}");
    let expected = on_device(&Tensor::from_slice(&rows.concat())).view(shape);
    let largest = expected.abs().max().double_value(&[]);
    let error = (found.to_kind(Kind::Double) - expected).abs().max().double_value(&[]) / largest;
    eprintln!("{what}: {error:.1e}");
    assert!(error < limit(on_the_cpu), "{what}: {error} away");
}

fn evaluated<M: Layer>(model: &mut Model<M>, input: &Tensor) -> Tensor {
    model.eval();
    tch::no_grad(|| model.forward(input).unwrap())
}

#[test]
fn heads_are_fastais() {
    let golden = golden();
    let heads = golden["heads"].as_array().unwrap();
    assert_eq!(heads.len(), 10);
    for head in heads {
        let args = &head["args"];
        let (features, options) = (args["nf"].as_i64().unwrap(), options(args));
        let mut model = builder().build(|path| Head::new(path, features, &options)).unwrap();
        assert_eq!(state_of(&model), head["state_dict"], "{args}");
        filled(&model);
        let shape: Vec<i64> = serde_json::from_value(head["input_shape"].clone()).unwrap();
        let output = evaluated(&mut model, &fill(&shape, 1960, -1.0, 1.0));
        agrees(&args.to_string(), &output, &head["eval_output"], 8e-6);
        dropouts_are_fastais(&model, head);
    }
}

/// Holds the layers against fastai's leaves: its dropouts have the same places, and drop as many.
fn dropouts_are_fastais(model: &Model<Head>, head: &Value) {
    for leaf in head["leaves"].as_array().unwrap() {
        let name = leaf[0].as_str().unwrap();
        if matches!(leaf[1].as_str(), Some("Dropout" | "Linear" | "BatchNorm1d")) {
            assert!(model.layers().iter().any(|layer| layer == name), "{leaf} of {}", head["args"]);
        }
    }
    let count = |leaves: &[Value]| {
        let known = ["Dropout", "Linear", "BatchNorm1d"];
        leaves.iter().filter(|leaf| known.contains(&leaf[1].as_str().unwrap())).count()
    };
    assert_eq!(model.layers().len(), count(head["leaves"].as_array().unwrap()));
}

#[test]
fn a_heads_dropouts_have_fastais_probabilities() {
    let golden = golden();
    for head in golden["heads"].as_array().unwrap() {
        let (features, options) = (head["args"]["nf"].as_i64().unwrap(), options(&head["args"]));
        for leaf in head["leaves"].as_array().unwrap() {
            if leaf[1] != "Dropout" {
                continue;
            }
            let text = leaf[2].as_str().unwrap();
            let text = text.strip_prefix("p=").unwrap().split(',').next().unwrap();
            let probability: f64 = text.parse().unwrap();
            let mut model = builder().build(|path| Head::new(path, features, &options)).unwrap();
            let (sender, receiver) = std::sync::mpsc::channel();
            // What a dropout makes of a batch without zeros: the others are divided by 1 - p.
            let _hook = model
                .forward_hook(leaf[0].as_str().unwrap(), move |_, output| {
                    let zeros = output.eq(0.0).to_kind(Kind::Double).mean(Kind::Double);
                    sender.send(zeros.double_value(&[])).unwrap();
                    None
                })
                .unwrap();
            let shape = if options.pool { vec![512, features, 2, 2] } else { vec![512, features] };
            let _ = model.forward(&fill(&shape, 7, -1.0, 1.0)).unwrap();
            // 8192 values at least: six standard deviations are 0.033. After a ReLU half are zeros, and the
            // normalisation moves them.
            let found = receiver.recv().unwrap();
            assert!((found - probability).abs() < 0.04, "{} of {}: {found}", leaf, head["args"]);
        }
    }
}

#[test]
fn a_heads_first_values_are_fastais() {
    let options = HeadOptions { bn_final: true, first_bn: false, ..HeadOptions::new(64) };
    let model = builder().build(|path| Head::new(path, 256, &options)).unwrap();
    let state = model.state_dict();
    let all = |name: &str, value: f64| {
        let tensor = state.get(name).unwrap();
        assert!((tensor - value).abs().max().double_value(&[]) < 1e-9, "{name}: {tensor:?}");
    };
    all("5.weight", 1.0);
    all("5.bias", 1e-3);
    all("3.bias", 0.0);
    // The normalisation of the output is torch's own.
    all("8.weight", 1.0);
    all("8.bias", 0.0);
    for (name, fan_in) in [("3.weight", 512.0), ("7.weight", 512.0)] {
        let deviation = state.get(name).unwrap().std(true).double_value(&[]);
        let expected = (2.0f64 / fan_in).sqrt();
        assert!((deviation / expected - 1.0).abs() < 0.03, "{name}: {deviation}, not {expected}");
    }
}

#[test]
fn several_probabilities_are_one_for_each_linear_layer() {
    let options = HeadOptions { dropout: vec![0.1, 0.2, 0.3], ..HeadOptions::new(2) };
    let error = builder().build(|path| Head::new(path, 8, &options)).unwrap_err().to_string();
    assert!(error.contains("3 probabilities of dropout for 2 linear layers"), "{error}");
}

#[test]
fn vision_learners_models_are_fastais() {
    let golden = golden();
    let learners = golden["learners"].as_array().unwrap();
    assert_eq!(learners.len(), 5);
    for learner in learners {
        let (name, args) = (learner["arch"].as_str().unwrap(), &learner["args"]);
        let channels = args["n_in"].as_i64().unwrap_or(3);
        let architecture = name.parse::<Architecture>().unwrap().in_channels(channels);
        let options = options(args);
        let mut model =
            builder().build(|path| TransferModel::new(path, &architecture, &options)).unwrap();

        assert_eq!(state_of(&model), learner["state_dict"], "{name} {args}");
        assert_eq!(model.num_parameters() as u64, learner["parameters"].as_u64().unwrap());
        let names: Vec<String> = model.parameters().into_iter().map(|it| it.name).collect();
        assert_eq!(json!(names), learner["named_parameters"]);
        let groups = model.param_groups().unwrap();
        assert_eq!(json!(summary(&model, &groups)), learner["groups"]);
        assert_eq!(groups.concat(), names);

        let norms = model.norm_parameters();
        // None of the layers that are not normalisations has a bias here.
        assert_eq!(json!(norms.len()), learner["no_weight_decay"]);
        let last = &groups[groups.len() - 1];
        let trainable: Vec<Value> = names
            .iter()
            .filter(|name| norms.contains(name) || last.contains(name))
            .map(|name| json!(name))
            .collect();
        let expected = learner["trainable_after_freeze"].as_array().unwrap();
        assert_eq!(json!(trainable.len()), expected[0]);
        if expected.len() > 1 {
            assert_eq!(trainable, expected[1..]);
        }
        let state = model.state_dict();
        for norm in learner["head_batchnorm_initial_weight_bias"].as_array().unwrap() {
            for (leaf, expected) in [("weight", &norm[1]), ("bias", &norm[2])] {
                let full = format!("1.{}.{leaf}", norm[0].as_str().unwrap());
                let values = state.get(&full).unwrap();
                let (low, high) = (values.min().double_value(&[]), values.max().double_value(&[]));
                let expected = expected.as_f64().unwrap();
                assert!(low == expected && high == expected, "{full}: {low} to {high}");
            }
        }

        filled(&model);
        let images = fill(&[4, channels, 64, 64], 1950, -1.0, 1.0).narrow(0, 0, 2);
        let (sender, receiver) = std::sync::mpsc::channel();
        let hook = model.forward_hook("0", move |_, maps| {
            let sum = maps.to_kind(Kind::Double).sum(Kind::Double).double_value(&[]);
            sender.send((maps.size(), sum)).unwrap();
            None
        });
        let hook = hook.unwrap();
        let logits = evaluated(&mut model, &images);
        drop(hook);
        let (shape, sum) = receiver.recv().unwrap();
        let body = &learner["body_output"];
        assert_eq!(json!(shape), body[0]);
        let expected = body[1][0].as_f64().unwrap();
        assert!((sum / expected - 1.0).abs() < limit(5e-6), "{name} {args}: {sum}, not {expected}");
        agrees(&format!("{name} {args}"), &logits, &learner["eval_logits"], 1e-5);
    }
}

/// Of each group: how many parameters, the first and the last name, how many elements.
fn summary<M>(model: &Model<M>, groups: &[Vec<String>]) -> Vec<(usize, String, String, usize)> {
    let parameters = model.parameters();
    let elements = |name: &String| {
        parameters.iter().find(|parameter| parameter.name == *name).unwrap().tensor.numel()
    };
    let of = |group: &Vec<String>| {
        let (first, last) = (group[0].clone(), group[group.len() - 1].clone());
        (group.len(), first, last, group.iter().map(elements).sum())
    };
    groups.iter().map(of).collect()
}

#[test]
fn the_unets_groups_are_the_early_encoder_the_late_one_and_the_decoder() {
    for options in
        [UNetOptions::new(5), UNetOptions { last_cross: false, blur: true, ..UNetOptions::new(5) }]
    {
        let build = |path: &ParamPath<'_>| UNet::new(path, ResNetOptions::basic([2; 4]), options);
        let model = builder().build(build).unwrap();
        let groups = model.param_groups().unwrap();
        let found = summary(&model, &groups);
        // The encoder's are those of the transfer model.
        let first = |names: [&str; 2]| names.map(|name| format!("layers.0.{name}"));
        let [first_name, last_name] = first(["0.weight", "5.1.bn2.bias"]);
        assert_eq!(found[0], (30, first_name, last_name, 683_072));
        let [first_name, last_name] = first(["6.0.conv1.weight", "7.1.bn2.bias"]);
        assert_eq!(found[1], (30, first_name, last_name, 10_493_440));
        assert_eq!(found[2].1, "layers.1.weight");
        assert!(model.module().classifier().starts_with("layers.1"), "the last one is the head's");
        assert_eq!(found[2].2, format!("{}.bias", model.module().classifier()));
        assert_eq!(groups.concat().len(), model.parameters().len());
    }
}

/// The body of a transfer model with a file's weights computes what the whole architecture computes before
/// its pooling, and the head stays as it was drawn.
fn takes_the_weights<M: Layer>(
    architecture: &Architecture,
    whole: impl IntoModel<Module = M>,
    unused: &[&str],
) {
    let mut whole = whole.into_model().unwrap();
    whole.to_device(numeric_device()).unwrap();
    filled(&whole);
    let head = HeadOptions { dropout: vec![0.0], ..HeadOptions::new(3) };
    let mut model = builder().build(|path| TransferModel::new(path, architecture, &head)).unwrap();
    let drawn = model.state_dict().get("1.3.weight").map(Tensor::copy);
    let report = Pretrained::new().load_state_dict(&mut model, &whole.state_dict()).unwrap();
    assert_eq!(report.unused, unused, "{architecture:?}");
    assert_eq!(report.loaded + unused.len(), whole.state_dict().len(), "{architecture:?}");
    assert_eq!(report.renamed, whole.state_dict().len());
    assert!(report.head.iter().all(|name| name.starts_with("1.")), "{:?}", report.head);
    assert_eq!(model.state_dict().get("1.3.weight").map(Tensor::copy), drawn);

    // The parameters come in the same order.
    let body: Vec<_> = model.parameters_under("0").unwrap();
    for (own, theirs) in body.iter().zip(whole.parameters()) {
        assert_eq!(own.tensor, theirs.tensor, "{} is not {}", own.name, theirs.name);
    }
    let images = fill(&[2, 3, 64, 64], 900, -1.0, 1.0);
    assert_eq!(evaluated(&mut model, &images).size(), [2, 3]);
}

#[test]
fn files_of_whole_architectures_load() {
    takes_the_weights(&Architecture::resnet18(), resnet18(10), &["1.fc.weight", "1.fc.bias"]);
    takes_the_weights(&Architecture::xresnet18(), xresnet18(10), &["1.11.weight", "1.11.bias"]);
    let options = ResNetOptions::basic([1, 1, 1, 1]).variant_d();
    takes_the_weights(
        &Architecture::TimmResNet(options),
        |path: &ParamPath<'_>| ResNet::new(path, 10, options),
        &["1.fc.weight", "1.fc.bias"],
    );
    let options = ConvNeXtOptions {
        channels: [8, 16, 24, 32],
        blocks: [1, 1, 2, 1],
        ..ConvNeXtOptions::tiny()
    };
    takes_the_weights(
        &Architecture::ConvNeXt(options),
        |path: &ParamPath<'_>| ConvNeXt::new(path, 10, options),
        &[
            "1.classifier.0.weight",
            "1.classifier.0.bias",
            "1.classifier.2.weight",
            "1.classifier.2.bias",
        ],
    );
    let options = VisionTransformerOptions {
        image_size: 64,
        depth: 2,
        ..VisionTransformerOptions::new(48, 3)
    };
    takes_the_weights(
        &Architecture::VisionTransformer(options),
        |path: &ParamPath<'_>| VisionTransformer::new(path, 10, options),
        &["1.head.weight", "1.head.bias"],
    );
}

#[test]
fn a_file_may_have_its_model_inside_of_another_module() {
    let options = ResNetOptions::basic([1, 1, 1, 1]);
    let whole = builder().build(|path| ResNet::new(path, 10, options)).unwrap();
    let mut state = StateDict::new();
    for (name, values) in whole.state_dict().iter() {
        state.insert(format!("module.backbone.{name}"), values.copy()).unwrap();
    }
    state.insert("loss.weight", Tensor::ones([3], (Kind::Float, Device::Cpu))).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("student.pth");
    weights::save_pth(&state, &file).unwrap();

    let mut model = builder().build(|path| ResNet::new(path, 3, options)).unwrap();
    let report = Pretrained::new().load(&mut model, &file).unwrap();
    assert_eq!((report.prefix.as_str(), report.key.as_str()), ("module.backbone.", ""));
    assert_eq!(report.unused, ["loss.weight"]);
    assert_eq!(report.head, ["fc.weight", "fc.bias"]);
    assert_eq!(report.loaded + 2, whole.state_dict().len());
    let (own, theirs) = (model.state_dict(), whole.state_dict());
    assert_eq!(own.get("layer2.0.conv1.weight"), theirs.get("layer2.0.conv1.weight"));
}

#[test]
fn another_number_of_channels_takes_the_rule_of_the_library() {
    let whole = builder().build(resnet18(10)).unwrap();
    let theirs = whole.state_dict().get("conv1.weight").unwrap().copy();
    let first = |architecture: Architecture, name: &str| {
        let head = HeadOptions::new(3);
        let mut model =
            builder().build(|path| TransferModel::new(path, &architecture, &head)).unwrap();
        let report = Pretrained::new().load_state_dict(&mut model, &whole.state_dict()).unwrap();
        assert_eq!(report.adapted, [name]);
        model.state_dict().get(name).unwrap().copy()
    };
    let same = |found: &Tensor, expected: &Tensor| {
        assert_eq!(found.size(), expected.size());
        let error = (found - expected).abs().max().double_value(&[]);
        assert!(error < 1e-6, "{error} away");
    };
    let torchvisions = |channels| Architecture::resnet18().in_channels(channels);
    same(&first(torchvisions(1), "0.0.weight"), &theirs.sum_dim_intlist(1, true, Kind::Float));
    same(&first(torchvisions(2), "0.0.weight"), &(theirs.narrow(1, 0, 2) * 1.5));
    let four = first(torchvisions(4), "0.0.weight");
    same(&four.narrow(1, 0, 3), &theirs);
    same(&four.narrow(1, 3, 1), &theirs.narrow(1, 0, 1).zeros_like());
    let timms = Architecture::TimmResNet(ResNetOptions::basic([2; 4])).in_channels(4);
    let four = first(timms, "0.model.conv1.weight");
    same(&four.narrow(1, 3, 1), &(theirs.narrow(1, 0, 1) * 0.75));
}

#[test]
fn positions_are_resized_in_a_transfer_model_as_in_the_whole_one() {
    let options = |image_size| {
        let options = VisionTransformerOptions::new(48, 3);
        VisionTransformerOptions { image_size, depth: 1, ..options }
    };
    let whole = |size| builder().build(move |path| VisionTransformer::new(path, 10, options(size)));
    let small = whole(64).unwrap();
    let mut large = whole(96).unwrap();
    let _ = Pretrained::new().load_state_dict(&mut large, &small.state_dict()).unwrap();
    let architecture = Architecture::VisionTransformer(options(96));
    let head = HeadOptions::new(3);
    let mut model = builder().build(|path| TransferModel::new(path, &architecture, &head)).unwrap();
    let report = Pretrained::new().load_state_dict(&mut model, &small.state_dict()).unwrap();
    assert_eq!(report.adapted, ["0.model.pos_embed"]);
    let (found, expected) = (model.state_dict(), large.state_dict());
    assert_eq!(found.get("0.model.pos_embed"), expected.get("pos_embed"));
}

#[test]
fn a_transfer_models_own_file_loads_with_another_number_of_classes() {
    let build = |classes| {
        let head = HeadOptions::new(classes);
        builder()
            .build(move |path| TransferModel::new(path, &Architecture::resnet18(), &head))
            .unwrap()
    };
    let (trained, mut model) = (build(5), build(7));
    let report = Pretrained::new().load_state_dict(&mut model, &trained.state_dict()).unwrap();
    assert_eq!((report.head, report.renamed), (vec!["1.8.weight".to_owned()], 0));
    assert_eq!(model.state_dict().get("1.4.weight"), trained.state_dict().get("1.4.weight"));
}

#[test]
fn an_encoder_takes_a_classifiers_file_and_nothing_else() {
    let whole = builder().build(resnet18(10)).unwrap();
    let build = |path: &ParamPath<'_>| {
        UNet::new(path, ResNetOptions::basic([2, 2, 2, 2]), UNetOptions::new(5))
    };
    let mut model = builder().build(build).unwrap();
    let decoder = model.state_dict().get("layers.4.conv1.0.weight").unwrap().copy();
    let report = Pretrained::new().load_state_dict(&mut model, &whole.state_dict()).unwrap();
    assert_eq!(report.loaded, 120);
    let state = model.state_dict();
    assert_eq!(state.get("layers.0.4.1.bn2.bias"), whole.state_dict().get("layer1.1.bn2.bias"));
    assert_eq!(state.get("layers.4.conv1.0.weight"), Some(&decoder));
    let larger = builder().build(resnet34(10)).unwrap().state_dict();
    let error = Pretrained::new().load_state_dict(&mut model, &larger).unwrap_err().to_string();
    assert!(error.contains("layers.0.4.2.conv1.weight"), "{error}");
}
