//! Loading weights takes no memory beside the model. Alone in its process, whose memory it measures.

use std::fs;

use brigade_nn::{Linear, Model, ParamPath};

use crate::status::status;

#[test]
fn weights_are_read_into_the_model() {
    let layers = |path: &ParamPath<'_>| -> Vec<Linear> {
        (0..16).map(|layer| Linear::new(path / layer, 1024, 1024)).collect()
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("weights.safetensors");
    let saved = Model::new(layers).unwrap();
    saved.save_weights(&file).unwrap();
    let mut model = Model::new(layers).unwrap();
    let first = model.parameters()[0].tensor.data_ptr();
    // The highest memory so far begins again here.
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = status("VmRSS");
    model.load_weights(&file).unwrap();
    let more = status("VmHWM").saturating_sub(before);
    let weights = model.num_parameters() * 4;
    assert!(more * 10 < weights, "{more} bytes more for {weights} bytes of weights");
    for (ours, theirs) in model.parameters().iter().zip(saved.parameters()) {
        assert_eq!(ours.tensor, theirs.tensor, "{}", ours.name);
    }
    assert_eq!(model.parameters()[0].tensor.data_ptr(), first);
}
