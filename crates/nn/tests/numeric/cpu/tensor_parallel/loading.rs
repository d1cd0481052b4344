//! Files of undivided models, of which each rank takes its part.

use std::path::{Path, PathBuf};

use brigade_nn::weights::{self, PartsWriter};
use brigade_nn::{
    Embedding, LayerNorm, Linear, Model, ModelError, ParamPath, ShapeMismatch, StateDict,
};
use brigade_sharding::{Heads, TensorPlan};
use brigade_torch::ProcessGroup;
use tch::{Kind, Tensor};

use super::{builder, on_ranks, whole_state};

fn layers(path: &ParamPath<'_>) {
    Linear::new(path / "up", 6, 12);
    Linear::new(path / "down", 12, 6);
    Linear::new(path / "qkv", 6, 36);
    Linear::new(path / "grouped", 6, 48);
    let table = Embedding::new(path / "table", 7, 3);
    let _ = (path / "tied").tie("weight", table.weight());
    Linear::new(path / "head", 3, 7);
    LayerNorm::new(path / "norm", &[6]);
}

fn plan() -> TensorPlan {
    TensorPlan::new()
        .column("up.weight")
        .row("down.weight")
        .heads("qkv.weight", Heads::fused(3))
        .heads("grouped.weight", Heads::grouped(4, 2))
        .vocabulary("table.weight")
        .vocabulary("head.weight")
}

/// What a rank has of whole values.
fn part(name: &str, whole: &Tensor, group: &ProcessGroup) -> Tensor {
    let (dim, blocks): (i64, &[i64]) = match name {
        "up.weight" | "up.bias" => (0, &[12]),
        "down.weight" => (1, &[12]),
        "qkv.weight" | "qkv.bias" => (0, &[12, 12, 12]),
        "grouped.weight" | "grouped.bias" => (0, &[24, 12, 12]),
        "table.weight" | "tied.weight" | "head.weight" | "head.bias" => (0, &[7]),
        _ => return whole.copy(),
    };
    // The first pieces are those that are larger by one.
    let own =
        |block: &Tensor| block.tensor_split(group.size() as i64, dim)[group.rank()].shallow_clone();
    let pieces: Vec<Tensor> = whole.split_with_sizes(blocks, dim).iter().map(own).collect();
    Tensor::cat(&pieces, dim)
}

fn whole() -> StateDict {
    whole_state(&Model::builder().kind(Kind::Double).build(layers).unwrap())
}

/// The same weights as a safetensors file, a `.pth` file, and several files with an index.
fn write(folder: &Path) -> [PathBuf; 3] {
    let state = whole();
    let [one, pth, parts] =
        ["weights.safetensors", "weights.pth", "parts"].map(|it| folder.join(it));
    weights::save(&state, &one).unwrap();
    weights::save_pth(&state, &pth).unwrap();
    let info = |name, tensor| weights::info_of(name, tensor, &parts).unwrap();
    let infos: Vec<_> = state.iter().map(|(name, tensor)| (name, info(name, tensor))).collect();
    let tensors: Vec<&Tensor> = state.iter().map(|(_, tensor)| tensor).collect();
    let mut writer = PartsWriter::create(&parts, &infos, 2000).unwrap();
    while let Some(place) = writer.next_place() {
        writer.write(tensors[place]).unwrap();
    }
    writer.finish().unwrap();
    assert!(parts.join("model-00002-of-00004.safetensors").exists());
    [one, pth, parts]
}

fn check(model: &Model<()>, state: &StateDict, group: &ProcessGroup) {
    let own = model.state_dict();
    assert_eq!(own.len(), state.len());
    for (name, found) in own.iter() {
        let expected = part(name, state.get(name).unwrap(), group);
        assert_eq!(found, &expected, "{name}");
    }
}

#[test]
fn each_rank_reads_its_part_of_every_format() {
    let folder = tempfile::tempdir().unwrap();
    let files = write(folder.path());
    for ranks in [2, 3, 4] {
        on_ranks(ranks, |group| {
            let state = whole();
            for file in &files {
                for kind in [Kind::Double, Kind::Float] {
                    let new = || builder(Some(&group), plan()).kind(kind);
                    let mut plain = new().build(layers).unwrap();
                    assert_eq!(plain.load_weights(file).unwrap().loaded, state.len());
                    let mut deferred = new().deferred().build(layers).unwrap();
                    assert_eq!(deferred.load_weights(file).unwrap().loaded, state.len());
                    deferred.materialize().unwrap();
                    let mut converted = StateDict::new();
                    for (name, tensor) in state.iter() {
                        converted.insert(name, tensor.to_kind(kind)).unwrap();
                    }
                    check(&plain, &converted, &group);
                    check(&deferred, &converted, &group);
                }
            }
        });
    }
}

fn resized(name: &str, shape: &[i64]) -> StateDict {
    let mut state = StateDict::new();
    for (known, tensor) in whole() {
        let tensor =
            if known == name { Tensor::ones(shape, tch::kind::DOUBLE_CPU) } else { tensor };
        state.insert(known, tensor).unwrap();
    }
    state
}

#[test]
fn another_shape_is_an_error_with_the_whole_shapes() {
    let folder = tempfile::tempdir().unwrap();
    // Of another model, and of this rank's part, which is not taken for the whole.
    let wrong = [("qkv.weight", [30, 6]), ("up.weight", [6, 6]), ("down.weight", [6, 6])];
    let wrong = wrong.map(|(name, shape)| {
        let (safe, pth) =
            (folder.path().join(format!("{name}.safetensors")), folder.path().join(name));
        let state = resized(name, &shape);
        weights::save(&state, &safe).unwrap();
        weights::save_pth(&state, &pth).unwrap();
        (name, shape, [safe, pth])
    });
    on_ranks(2, |group| {
        for (name, shape, files) in &wrong {
            let state = resized(name, shape);
            for deferred in [false, true] {
                let model = builder(Some(&group), plan());
                let model = if deferred { model.deferred() } else { model };
                let mut model = model.build(layers).unwrap();
                let whole = model.whole_size(name).unwrap();
                let refuse = |result: brigade_torch::Result<_>| {
                    let error = result.map(drop).unwrap_err();
                    let Some(ModelError::Mismatch(report)) = error.downcast_ref() else {
                        panic!("{error}");
                    };
                    let expected = ShapeMismatch {
                        name: (*name).to_owned(),
                        in_model: whole.clone(),
                        in_weights: shape.to_vec(),
                    };
                    assert_eq!(report.mismatched, [expected]);
                    assert!(error.to_string().contains(&format!("{whole:?} in the model")));
                };
                for file in files {
                    refuse(model.load_weights(file));
                }
                if deferred {
                    model.materialize().unwrap();
                } else {
                    refuse(model.load_state_dict(&state));
                }
                let is_zero =
                    |(_, tensor): (&str, &Tensor)| tensor.abs().max().double_value(&[]) == 0.0;
                assert!(
                    model
                        .state_dict()
                        .iter()
                        .filter(|(name, _)| *name != "norm.weight")
                        .all(is_zero)
                );
            }
        }
    });
}

#[test]
fn what_matches_is_loaded_and_the_rest_stays() {
    on_ranks(3, |group| {
        let mut model = builder(Some(&group), plan()).build(layers).unwrap();
        let state = resized("head.weight", &[9, 3]);
        let mut fewer = StateDict::new();
        for (name, tensor) in state {
            if name != "up.bias" {
                fewer.insert(name, tensor).unwrap();
            }
        }
        let report = model.load_matching(&fewer).unwrap();
        let mismatched: Vec<String> = report.mismatched.iter().map(ToString::to_string).collect();
        assert_eq!(mismatched, ["head.weight ([7, 3] in the model, [9, 3] in the weights)"]);
        assert_eq!((report.missing, report.loaded), (vec!["up.bias".to_owned()], fewer.len() - 1));
        let mut expected = StateDict::new();
        for (name, tensor) in whole() {
            let stays = ["head.weight", "up.bias"].contains(&name.as_str());
            expected.insert(name, if stays { tensor.zeros_like() } else { tensor }).unwrap();
        }
        check(&model, &expected, &group);
    });
}
