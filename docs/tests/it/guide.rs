//! The guides for users of Accelerate, FSDP and DeepSpeed cover all of their names.

use std::collections::HashSet;

#[test]
fn every_public_name_is_answered() {
    let guide = include_str!("../../from-accelerate.md");
    let words = words(guide);
    let names = include_str!("../golden/accelerate_names.txt").lines();
    let names: Vec<&str> = names.filter(|line| !line.starts_with('#')).collect();
    assert!(names.len() > 100, "{} names", names.len());
    let missing: Vec<&&str> = names.iter().filter(|name| !words.contains(**name)).collect();
    assert!(missing.is_empty(), "docs/from-accelerate.md does not say what becomes of {missing:?}");
}

#[test]
fn every_key_of_sharded_training_is_answered() {
    let page = include_str!("../../from-fsdp-and-deepspeed.md");
    let words = words(page);
    let table = include_str!("../../../crates/sharding/tests/settings/accelerate-1.15.0.json");
    let table: serde_json::Value = serde_json::from_str(table).unwrap();
    let deepspeed = table["deepspeed_keys"].as_array().unwrap().iter();
    // Sections have rows of their own keys.
    let keys = deepspeed.map(|path| path.as_str().unwrap().rsplit('.').next().unwrap());
    let fsdp = table["fsdp"].as_array().unwrap().iter();
    let fsdp = fsdp.flat_map(|row| row["given"].as_object().unwrap().keys().map(String::as_str));
    let all: HashSet<&str> = keys.chain(fsdp).collect();
    assert!(all.len() > 130, "{} keys", all.len());
    let mut missing: Vec<&str> = all.into_iter().filter(|key| !words.contains(key)).collect();
    missing.sort_unstable();
    assert!(
        missing.is_empty(),
        "docs/from-fsdp-and-deepspeed.md does not say what becomes of {missing:?}"
    );
}

fn words(page: &str) -> HashSet<&str> {
    page.split(|letter: char| !letter.is_alphanumeric() && letter != '_').collect()
}
