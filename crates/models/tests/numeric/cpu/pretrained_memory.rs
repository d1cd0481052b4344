//! A pretrained model takes the memory of a model. Alone in its process, whose memory it measures.

use std::fs;

use brigade_models::{BertForMaskedLm, BertForSequenceClassification, BertOptions, Transformer};
use brigade_nn::{Model, weights};

const MIB: usize = 1 << 20;

/// 64 MiB in 32 bits.
fn options() -> BertOptions {
    BertOptions {
        vocab_size: 6000,
        hidden_size: 512,
        num_attention_heads: 8,
        num_hidden_layers: 4,
        intermediate_size: 2048,
        ..BertOptions::default()
    }
}

/// A size in bytes, of those in /proc/self/status.
fn status(key: &str) -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(key)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

#[test]
fn weights_are_not_in_memory_beside_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name);
    let saved = Model::new(|path| BertForMaskedLm::new(path, &options())).unwrap();
    BertForMaskedLm::save_pretrained(&saved, place("one")).unwrap();
    BertForMaskedLm::save_pretrained_in_parts(&saved, place("parts"), 20 << 20).unwrap();
    fs::create_dir(place("bin")).unwrap();
    fs::copy(place("one/config.json"), place("bin/config.json")).unwrap();
    weights::save_pth(&saved.state_dict(), place("bin/pytorch_model.bin")).unwrap();
    let expected = saved.state_dict();
    let size = saved.num_parameters() * 4;
    assert!(size > 60 * MIB, "{size}");
    for name in ["one", "parts", "bin"] {
        // The peak of memory is measured from here.
        fs::write("/proc/self/clear_refs", "5").unwrap();
        let before = status("VmRSS");
        let model = BertForMaskedLm::from_pretrained(place(name)).unwrap();
        let beside = status("VmHWM").saturating_sub(before).saturating_sub(size);
        assert!(beside <= 20 * MIB, "{name}: {beside} bytes beside the model of {size}");
        for (name, tensor) in model.state_dict() {
            assert_eq!(Some(&tensor), expected.get(&name), "{name}");
        }
        drop(model);
        // The head has initial values.
        let before = status("VmRSS");
        fs::write("/proc/self/clear_refs", "5").unwrap();
        let classifier = BertForSequenceClassification::from_pretrained(place(name)).unwrap();
        let more = status("VmHWM").saturating_sub(before);
        let size = classifier.num_parameters() * 4;
        assert!(more <= size + 20 * MIB, "{name}: {more} bytes for a classifier of {size}");
    }
}
