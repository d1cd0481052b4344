//! Loaders of a Parquet table.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use brigade_text::TextLoaders;
use brigade_tokens::ParquetOptions;
use brigade_train::Accelerator;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

fn write(path: &Path, columns: [&[&'static str]; 2]) {
    let schema = "message table { required binary review (UTF8); required binary label (UTF8); }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let properties = Arc::new(WriterProperties::builder().build());
    let mut writer =
        SerializedFileWriter::new(File::create(path).unwrap(), schema, properties).unwrap();
    let mut group = writer.next_row_group().unwrap();
    for values in columns {
        let values: Vec<ByteArray> = values.iter().map(|value| ByteArray::from(*value)).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    writer.close().unwrap();
}

#[test]
fn tables_become_loaders() {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["one.parquet", "two.parquet"].map(|name| folder.path().join(name));
    write(&paths[0], [&["a fine film", "a bad film"], &["pos", "neg"]]);
    write(&paths[1], [&["a film", "bad", "fine"], &["pos", "neg", "pos"]]);
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build().unwrap();
    let options = || ParquetOptions::new().text_columns(["review"]);
    let data = TextLoaders::from_parquet(paths, options()).min_freq(1).valid_indices([4]);
    let data = data.loaders(&accelerator, 2).unwrap();
    assert_eq!((data.loaders.train_batches(), data.loaders.valid_batches()), (2, 1));
    assert_eq!(data.loaders.class_names().unwrap(), ["neg", "pos"]);
    let missing = [folder.path().join("three.parquet")];
    let error = TextLoaders::from_parquet(missing, options()).loaders(&accelerator, 2).unwrap_err();
    assert!(error.to_string().contains("three.parquet"), "{error}");
}
