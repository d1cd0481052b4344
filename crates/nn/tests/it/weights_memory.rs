//! Loading weights takes no memory of their size beside the model. Alone in its process, whose memory it measures.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use brigade_checkpoint::FileName;
use brigade_checkpoint::shards::{self, Index, IndexMetadata};
use brigade_nn::{Linear, Model, ParamPath, StateDict, weights};
use tch::Kind;

use crate::status::status;

const LAYERS: i64 = 16;
const MIB: usize = 1 << 20;

/// 64 MiB in 32 bits.
fn layers(path: &ParamPath<'_>) -> Vec<Linear> {
    (0..LAYERS).map(|layer| Linear::new(path / layer, 1024, 1024)).collect()
}

/// Bytes that loading the model takes at its highest.
fn taken(model: &mut Model<Vec<Linear>>, place: &Path) -> usize {
    // The peak of memory is measured from here.
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = status("VmRSS");
    model.load_weights(place).unwrap();
    status("VmHWM").saturating_sub(before)
}

fn save_in_parts(state: &StateDict, folder: &Path) {
    let stem = FileName::new("model").unwrap();
    let all: Vec<_> = state.iter().collect();
    let mut index = Index { metadata: IndexMetadata::default(), weight_map: BTreeMap::new() };
    for (number, part) in all.chunks(all.len() / 4).enumerate() {
        let file = shards::file_name(&stem, number, 4);
        let mut state = StateDict::new();
        for (name, tensor) in part {
            state.insert(*name, tensor.shallow_clone()).unwrap();
            index.weight_map.insert((*name).to_owned(), file.clone());
        }
        weights::save(&state, folder.join(&*file)).unwrap();
    }
    fs::write(folder.join(&*shards::index_name(&stem)), index.to_json()).unwrap();
}

#[test]
fn weights_are_read_into_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    let saved = Model::new(layers).unwrap();
    let state = saved.state_dict();
    saved.save_weights(file("one.safetensors")).unwrap();
    weights::save_pth(&state, file("one.pth")).unwrap();
    save_in_parts(&state, folder.path());
    let mut model = Model::new(layers).unwrap();
    let first = model.parameters()[0].tensor.data_ptr();
    let mut double = Model::builder().kind(Kind::Double).build(layers).unwrap();
    for name in ["one.safetensors", "one.pth", "model.safetensors.index.json", "."] {
        let place = file(name);
        for parameter in model.parameters() {
            let _ = tch::no_grad(|| parameter.tensor.shallow_clone().zero_());
        }
        // The allowance contains the memory of the program itself: directories of files, and the heap's pages.
        let more = taken(&mut model, &place);
        assert!(more <= 4 * MIB, "{name}: {more} bytes beside the model");
        let more = taken(&mut double, &place);
        assert!(more <= 18 * MIB, "{name}, converted: {more} bytes beside the model");
        for ((ours, wide), theirs) in
            model.parameters().iter().zip(double.parameters()).zip(saved.parameters())
        {
            assert_eq!(ours.tensor, theirs.tensor, "{}", ours.name);
            assert_eq!(wide.tensor, theirs.tensor.to_kind(Kind::Double), "{}", ours.name);
        }
    }
    assert_eq!(model.parameters()[0].tensor.data_ptr(), first);
}
