//! The guide for users of Accelerate covers all of its names.

use std::collections::HashSet;

#[test]
fn every_public_name_is_answered() {
    let guide = include_str!("../../from-accelerate.md");
    let words: HashSet<&str> =
        guide.split(|letter: char| !letter.is_alphanumeric() && letter != '_').collect();
    let names = include_str!("../golden/accelerate_names.txt").lines();
    let names: Vec<&str> = names.filter(|line| !line.starts_with('#')).collect();
    assert!(names.len() > 100, "{} names", names.len());
    let missing: Vec<&&str> = names.iter().filter(|name| !words.contains(**name)).collect();
    assert!(missing.is_empty(), "docs/from-accelerate.md does not say what becomes of {missing:?}");
}
