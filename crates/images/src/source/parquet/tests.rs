//! Tables of images, written with the same library.

use std::fs::{self, File};
use std::sync::Arc;

use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use tempfile::TempDir;

use super::*;

const FEATURES: &str = r#"{"info": {"features": {"image": {"_type": "Image"},
    "label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}"#;

/// Writes a table in the layout of the Python library `datasets`, in groups of two rows. `None` is null.
fn table(
    path: &Path,
    rows: &[(Option<&str>, Option<i64>)],
    compression: Compression,
    huggingface: Option<&str>,
) {
    let schema = "message schema {
        optional group image { optional binary bytes; optional binary path (UTF8); }
        optional int64 label;
    }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let metadata =
        huggingface.map(|text| vec![KeyValue::new("huggingface".into(), text.to_owned())]);
    let properties = WriterProperties::builder()
        .set_compression(compression)
        .set_key_value_metadata(metadata)
        .build();
    let file = File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties)).unwrap();
    for rows in rows.chunks(2) {
        let mut group = writer.next_row_group().unwrap();
        let bytes: Vec<_> = rows.iter().filter_map(|row| row.0).map(ByteArray::from).collect();
        let levels: Vec<i16> = rows.iter().map(|row| if row.0.is_some() { 2 } else { 1 }).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&bytes, Some(&levels), None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let levels = vec![1; rows.len()];
        column.typed::<ByteArrayType>().write_batch(&[], Some(&levels), None).unwrap();
        column.close().unwrap();
        let labels: Vec<i64> = rows.iter().filter_map(|row| row.1).collect();
        let levels: Vec<i16> = rows.iter().map(|row| i16::from(row.1.is_some())).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<Int64Type>().write_batch(&labels, Some(&levels), None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    }
    writer.close().unwrap();
}

fn tables(compression: Compression) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let long = "long ".repeat(1000);
    let first = [(Some("a"), Some(1)), (Some(&*long), Some(0)), (Some(""), Some(1))];
    let second = [(Some("d"), Some(0))];
    table(&folder.path().join("x-00000-of-00002.parquet"), &first, compression, Some(FEATURES));
    table(&folder.path().join("x-00001-of-00002.parquet"), &second, compression, Some(FEATURES));
    folder
}

fn read(images: &impl ImageSource, index: usize) -> String {
    let mut buffer = Vec::new();
    images.read(index, &mut buffer).unwrap();
    String::from_utf8(buffer).unwrap()
}

#[test]
fn a_copy_that_is_open_may_be_deleted() {
    let folder = tables(Compression::SNAPPY);
    let spool = tempfile::tempdir().unwrap();
    let images = ParquetImages::open(folder.path().to_str().unwrap(), spool.path()).unwrap();
    spool.close().unwrap();
    let images = images.source();
    assert_eq!((read(images, 3), read(images, 0)), ("d".to_owned(), "a".to_owned()));
}

#[test]
fn tables_of_the_hub_are_images_with_classes() {
    for compression in
        [Compression::UNCOMPRESSED, Compression::SNAPPY, Compression::ZSTD(Default::default())]
    {
        let folder = tables(compression);
        let spool = folder.path().join("spool");
        let pattern = format!("{}/x-{{00000..00001}}-of-00002.parquet", folder.path().display());
        let pets = ParquetImages::open(&pattern, &spool).unwrap();
        assert_eq!(pets.labels(), [1, 0, 1, 0]);
        assert_eq!(pets.categories().names(), ["cat", "dog"]);
        let images = pets.source();
        let found: Vec<_> = [3, 0, 2].map(|index| read(images, index)).into();
        assert_eq!(found, ["d", "a", ""]);
        assert_eq!(read(images, 1).len(), 5000);
        assert!(images.name(3).starts_with("row 0 of "), "{}", images.name(3));
        assert!(images.name(3).ends_with("x-00001-of-00002.parquet"));
        assert!(images.read(4, &mut Vec::new()).is_err());
    }
}

#[test]
fn the_copy_is_made_once_and_shared() {
    let folder = tables(Compression::SNAPPY);
    let spool = folder.path().join("spool");
    let pattern = folder.path().to_str().unwrap();
    let copies = || {
        let names = fs::read_dir(&spool).unwrap().map(|entry| entry.unwrap().path());
        names.filter(|path| path.extension().unwrap() != "lock").collect::<Vec<_>>()
    };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| ParquetImages::open(pattern, &spool).unwrap());
        }
    });
    let [copy] = copies().try_into().unwrap();
    let before = fs::metadata(&copy).unwrap().modified().unwrap();
    let images = ParquetImages::open(pattern, &spool).unwrap();
    assert_eq!(fs::metadata(&copy).unwrap().modified().unwrap(), before);
    assert_eq!(images.len(), 4);

    // Another table needs another copy, and a copy that was cut short is not used.
    let second = folder.path().join("x-00001-of-00002.parquet");
    table(&second, &[(Some("e"), Some(1))], Compression::SNAPPY, Some(FEATURES));
    assert_eq!(read(ParquetImages::open(pattern, &spool).unwrap().source(), 3), "e");
    assert_eq!(copies().len(), 2);
    File::options().write(true).open(&copy).unwrap().set_len(1024).unwrap();
    table(&second, &[(Some("d"), Some(0))], Compression::SNAPPY, Some(FEATURES));
    let error = ParquetImages::open(pattern, &spool).unwrap_err().to_string();
    assert!(error.contains("it is not a copy of a table with 4 rows; delete it"), "{error}");
}

#[test]
fn what_a_killed_process_left_of_a_copy_is_written_over() {
    let folder = tables(Compression::SNAPPY);
    let (pattern, spool) = (folder.path().to_str().unwrap(), folder.path().join("spool"));
    ParquetImages::open(pattern, &spool).unwrap();
    let files = || fs::read_dir(&spool).unwrap().map(|entry| entry.unwrap().path());
    let copy = files().find(|path| path.extension().unwrap() == "tar").unwrap();
    fs::rename(&copy, copy.with_extension("partial")).unwrap();
    File::options().write(true).open(copy.with_extension("partial")).unwrap().set_len(700).unwrap();
    let images = ParquetImages::open(pattern, &spool).unwrap();
    assert_eq!(read(images.source(), 3), "d");
    assert_eq!(files().filter(|path| path.extension().unwrap() != "lock").count(), 1);

    // An unreadable table does not leave a part of a copy either.
    let second = folder.path().join("x-00001-of-00002.parquet");
    table(&second, &[(Some("other"), Some(1))], Compression::SNAPPY, Some(FEATURES));
    let mut bytes = fs::read(&second).unwrap();
    bytes[4..24].fill(0xff);
    fs::write(&second, bytes).unwrap();
    assert!(ParquetImages::open(pattern, &spool).is_err());
    assert!(files().all(|path| path.extension().unwrap() != "partial"));
}

#[test]
fn classes_without_names_are_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    table(&path, &[(Some("a"), Some(2)), (Some("b"), Some(0))], Compression::SNAPPY, None);
    let images = ParquetImages::open(path.to_str().unwrap(), folder.path()).unwrap();
    assert_eq!((images.labels(), images.categories().names().len()), (&[2, 0][..], 3));
    let by_path = ParquetOptions::new().label("image").open(path.to_str().unwrap(), folder.path());
    assert!(by_path.unwrap_err().to_string().contains("has no column image"));
}

#[test]
fn rows_and_files_that_do_not_fit_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    let open = |options: ParquetOptions| {
        options.open(path.to_str().unwrap(), folder.path()).unwrap_err().to_string()
    };
    let write = |rows: &[_], metadata| table(&path, rows, Compression::SNAPPY, metadata);
    let options = ParquetOptions::new();
    write(&[(Some("a"), Some(1)), (None, Some(1))], None);
    assert!(open(options.clone()).contains("row 1 has no bytes in its column image"));
    write(&[(Some("a"), Some(1)), (Some("b"), Some(1)), (Some("c"), None)], None);
    assert!(open(options.clone()).contains("row 2 of "));
    assert!(open(options.clone()).contains("its column label holds nothing"));
    write(&[(Some("a"), Some(-1))], None);
    assert!(open(options.clone()).contains("its column label holds -1"));
    write(&[(Some("a"), Some(2))], Some(FEATURES));
    assert!(open(options.clone()).contains("has the label 2, expected 0 to 1"));
    write(&[(Some("a"), Some(2))], Some("{"));
    assert!(open(options.clone()).contains("its metadata `huggingface` is not JSON"));
    write(&[(Some("a"), Some(1))], None);
    let error = open(options.clone().label("x"));
    assert!(error.contains("has no column x; its columns are image.bytes, image.path"), "{error}");
    assert!(open(options.clone().image("label")).contains("column label does not hold bytes"));
    fs::write(&path, "text").unwrap();
    assert!(open(options.clone()).contains("a.parquet is damaged or in another format: "));
    fs::remove_file(&path).unwrap();
    assert!(open(options).contains("cannot read "));
}
