//! Tests of a loader over real data.

#![allow(clippy::unwrap_used)] // tests

use brigade_data::DataLoader;
use brigade_datasets::Digits;

#[test]
fn real_data_arrive_whole() {
    let digits = Digits::test().unwrap().resize(28, 28).unwrap();
    let loader = DataLoader::new(digits).batch_size(64).shuffle(true).threads(2);
    let mut seen = 0;
    for batch in &loader {
        let batch = batch.unwrap();
        let (images, labels) = &*batch;
        assert_eq!(images.size(), [batch.rows() as i64, 1, 28, 28]);
        assert_eq!(labels.size(), [batch.valid() as i64]);
        seen += batch.valid();
        assert_eq!(batch.is_last(), seen == 359);
    }
    assert_eq!(seen, 359);
}
