//! Texts in Parquet tables, made here with the same library.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

use brigade_tokens::{Error, ParquetOptions, Result, TextSource};
use parquet::data_type::{BoolType, ByteArray, ByteArrayType, Int64Type};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

const FEATURES: &str =
    r#"{"info": {"features": {"label": {"names": ["neg", "pos"], "_type": "ClassLabel"}}}}"#;

type Row = (Option<&'static [u8]>, &'static str, i64, bool);

/// Writes a table in groups of two rows.
fn table(path: &Path, rows: &[Row], features: Option<&str>) {
    let schema = "message schema {
        optional binary text (UTF8); required binary title (UTF8); required int64 label; required boolean is_valid;
    }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let metadata = features.map(|text| vec![KeyValue::new("huggingface".into(), text.to_owned())]);
    let properties = WriterProperties::builder().set_key_value_metadata(metadata).build();
    let file = File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties)).unwrap();
    for rows in rows.chunks(2) {
        let mut group = writer.next_row_group().unwrap();
        let texts: Vec<_> = rows.iter().filter_map(|row| row.0).map(ByteArray::from).collect();
        let levels: Vec<i16> = rows.iter().map(|row| i16::from(row.0.is_some())).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&texts, Some(&levels), None).unwrap();
        column.close().unwrap();
        let titles: Vec<_> = rows.iter().map(|row| ByteArray::from(row.1)).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&titles, None, None).unwrap();
        column.close().unwrap();
        let labels: Vec<i64> = rows.iter().map(|row| row.2).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<Int64Type>().write_batch(&labels, None, None).unwrap();
        column.close().unwrap();
        let valid: Vec<bool> = rows.iter().map(|row| row.3).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<BoolType>().write_batch(&valid, None, None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    }
    writer.close().unwrap();
}

const ROWS: [Row; 3] = [
    (Some(b"fine"), "a", 1, false),
    (Some("é".as_bytes()), "b", 0, true),
    (Some(b""), "c", 1, false),
];

fn texts(source: &TextSource) -> Vec<String> {
    let all: Vec<String> = source.texts().unwrap().collect::<Result<_>>().unwrap();
    for (index, text) in all.iter().enumerate() {
        assert_eq!(source.text(index).unwrap(), *text);
    }
    all
}

#[test]
fn tables_give_texts_labels_and_splits() {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["a", "b"].map(|name| folder.path().join(format!("{name}.parquet")));
    table(&paths[0], &ROWS, Some(FEATURES));
    table(&paths[1], &ROWS[..1], Some(FEATURES));
    let source = ParquetOptions::new().open(&paths).unwrap();
    assert_eq!(texts(&source), ["fine", "é", "", "fine"]);
    assert_eq!(source.labels().unwrap(), ["pos", "neg", "pos", "pos"]);
    assert_eq!(source.is_valid().unwrap(), [false, true, false, false]);
    assert!(source.name(2).ends_with("a.parquet, row 2"), "{}", source.name(2));
    assert!(source.name(3).ends_with("b.parquet, row 0"), "{}", source.name(3));

    table(&paths[1], &ROWS, None);
    let options = ParquetOptions::new().text_columns(["title", "text"]).label_column("title");
    let source = options.valid_column("label").open(&paths[1..]).unwrap();
    assert_eq!(texts(&source)[1], "xxfld 1 b xxfld 2 é");
    assert_eq!(source.labels().unwrap(), ["a", "b", "c"]);
    assert_eq!(source.is_valid().unwrap(), [true, false, true]);
    let numbered = ParquetOptions::new().open(&paths[1..]).unwrap();
    assert_eq!(numbered.labels().unwrap(), ["1", "0", "1"]);
}

#[test]
fn tables_that_do_not_fit_say_where() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    let refuse = |options: &ParquetOptions| options.open([&path]).unwrap_err().to_string();
    let options = ParquetOptions::new();
    assert!(matches!(options.open([&path]).unwrap_err(), Error::Io { .. }));
    fs::write(&path, "x").unwrap();
    assert!(refuse(&options).contains("a.parquet is damaged or in another format: "));
    table(&path, &[], None);
    assert_eq!(refuse(&options), "the list of tables has no texts: they have no rows");
    table(&path, &ROWS, None);
    let error = refuse(&options.clone().text_columns(["x"]));
    assert!(error.contains("no column \"x\"; its columns are [\"text\", \"title\""), "{error}");
    let error = refuse(&options.clone().valid_column("title"));
    assert!(error.contains("column \"title\" has \"a\", expected true or false"), "{error}");
    let error = options.clone().text_columns(["label"]).open([&path]).unwrap().text(0).unwrap_err();
    assert!(error.to_string().contains("its column \"label\" does not hold texts"), "{error}");

    let last = |rows: &[Row]| {
        table(&path, rows, None);
        let source = options.open([&path]).unwrap();
        source.texts().unwrap().find_map(Result::err).unwrap().to_string()
    };
    let error = last(&[ROWS[0], ROWS[1], ROWS[2], (None, "x", 0, false)]);
    assert!(error.contains("row 3 has nothing in its column \"text\""), "{error}");
    let error = last(&[ROWS[0], (Some(b"a\xff"), "x", 0, false)]);
    assert!(
        error.contains("a.parquet, row 1, column \"text\" is not UTF-8: the byte at offset 1"),
        "{error}"
    );
}
