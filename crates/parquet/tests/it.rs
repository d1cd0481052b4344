//! Values of columns of every supported type, and files that are refused.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

use brigade_parquet::{Error, Table, Value};
use parquet::basic::{BrotliLevel, Compression, Encoding, GzipLevel};
use parquet::data_type::{
    BoolType, ByteArray, ByteArrayType, DataType, DoubleType, FloatType, Int32Type, Int64Type,
    Int96Type,
};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::{WriterProperties, WriterVersion};
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;

fn column<T: DataType>(
    group: &mut SerializedRowGroupWriter<'_, File>,
    values: &[T::T],
    levels: Option<&[i16]>,
    repeated: Option<&[i16]>,
) {
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<T>().write_batch(values, levels, repeated).unwrap();
    column.close().unwrap();
}

/// Writes a file with two row groups of two rows each.
fn write(path: &Path) {
    let schema = "message schema {
        required boolean a; required int32 b; required int64 c; required float d; required double e;
        optional group f { required binary bytes; } repeated int32 g; required int96 h;
    }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let entry = KeyValue::new("key".into(), "value".to_owned());
    let properties = WriterProperties::builder().set_key_value_metadata(Some(vec![entry])).build();
    let file = File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties)).unwrap();
    for first in [0_i32, 2] {
        let mut group = writer.next_row_group().unwrap();
        column::<BoolType>(&mut group, &[true, false], None, None);
        column::<Int32Type>(&mut group, &[first, -1], None, None);
        column::<Int64Type>(&mut group, &[1 << 40, 5], None, None);
        column::<FloatType>(&mut group, &[0.5, 1.5], None, None);
        column::<DoubleType>(&mut group, &[0.1, 0.2], None, None);
        column::<ByteArrayType>(&mut group, &[ByteArray::from("x")], Some(&[1, 0]), None);
        column::<Int32Type>(&mut group, &[1, 2, 3], Some(&[1, 1, 1]), Some(&[0, 1, 0]));
        column::<Int96Type>(&mut group, &[Default::default(); 2], None, None);
        group.close().unwrap();
    }
    writer.close().unwrap();
}

fn shown(table: &Table, path: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    let number = table.column(path).unwrap();
    let read = table.values(number, |value| {
        found.push(match value {
            Some(Value::Bytes(bytes)) => String::from_utf8(bytes.to_vec()).unwrap(),
            Some(value) => format!("{value:?}"),
            None => "nothing".into(),
        });
        Ok::<_, Error>(())
    });
    read.unwrap();
    found
}

#[test]
fn values_of_every_type_come_row_by_row() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    write(&path);
    let table = Table::open(&path).unwrap();
    assert_eq!((table.rows(), table.groups(), table.group_rows(1)), (4, 2, 2));
    assert_eq!(table.column_names(), ["a", "b", "c", "d", "e", "f.bytes", "g", "h"]);
    assert_eq!((table.metadata("key"), table.metadata("other")), (Some("value"), None));
    assert_eq!(shown(&table, &["a"])[..2], ["Bool(true)", "Bool(false)"]);
    assert_eq!(shown(&table, &["b"]), ["Int(0)", "Int(-1)", "Int(2)", "Int(-1)"]);
    assert_eq!(shown(&table, &["c"])[0], format!("Int({})", 1_i64 << 40));
    assert_eq!(shown(&table, &["d"])[1], "Float(1.5)");
    assert_eq!(shown(&table, &["e"])[1], "Float(0.2)");
    assert_eq!(shown(&table, &["f", "bytes"]), ["x", "nothing", "x", "nothing"]);
    assert_eq!(table.end().unwrap(), fs::read(&path).unwrap());

    let mut second = Vec::new();
    let read = table.group_values(1..2, 1, |value| {
        second.push(value == Some(Value::Int(2)));
        Ok::<_, Error>(())
    });
    read.unwrap();
    assert_eq!(second, [true, false]);
}

/// Reads a file that pyarrow has written, by `golden/make.py`.
#[test]
fn every_compression_is_read() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let expected = |row: usize| format!("row {row}: {}", "word ".repeat(3 * row));
    for name in ["none", "snappy", "gzip", "brotli", "lz4", "zstd"] {
        let table = Table::open(golden.join(format!("{name}.parquet"))).unwrap();
        let texts = shown(&table, &["text"]);
        assert_eq!(texts, (0..8).map(expected).collect::<Vec<_>>(), "{name}");
        assert_eq!(shown(&table, &["number"])[7], "Int(7)", "{name}");
    }
}

/// Reads both kinds of LZ4, and a page of which a few bytes of Brotli become megabytes.
#[test]
fn what_is_written_compressed_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    let level = |level| BrotliLevel::try_new(level).unwrap();
    for compression in [
        Compression::LZ4,
        Compression::LZ4_RAW,
        Compression::GZIP(GzipLevel::default()),
        Compression::BROTLI(level(1)),
        Compression::BROTLI(level(9)),
        Compression::ZSTD(Default::default()),
        Compression::SNAPPY,
    ] {
        let schema = parse_message_type("message schema { required binary a; }").unwrap();
        let properties = WriterProperties::builder().set_compression(compression);
        let properties = properties.set_dictionary_enabled(false).build();
        let file = File::create(&path).unwrap();
        let mut writer =
            SerializedFileWriter::new(file, Arc::new(schema), Arc::new(properties)).unwrap();
        let mut group = writer.next_row_group().unwrap();
        let values = ["some", "words", &"w".repeat(2 << 20)].map(ByteArray::from);
        column::<ByteArrayType>(&mut group, &values, None, None);
        group.close().unwrap();
        writer.close().unwrap();
        let table = Table::open(&path).unwrap();
        let texts = shown(&table, &["a"]);
        assert_eq!(texts[..2], ["some", "words"], "{compression}");
        assert_eq!(texts[2].len(), 2 << 20, "{compression}");
    }
}

/// Otherwise the reader would decode all of such a page before it compares the size.
#[test]
fn pages_that_hold_more_than_they_claim_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    for (compression, version) in [
        (Compression::GZIP(GzipLevel::default()), WriterVersion::PARQUET_1_0),
        (Compression::GZIP(GzipLevel::default()), WriterVersion::PARQUET_2_0),
        (Compression::BROTLI(BrotliLevel::try_new(5).unwrap()), WriterVersion::PARQUET_1_0),
        (Compression::BROTLI(BrotliLevel::try_new(5).unwrap()), WriterVersion::PARQUET_2_0),
    ] {
        let schema = parse_message_type("message schema { required binary a; }").unwrap();
        let properties = WriterProperties::builder().set_compression(compression);
        let properties = properties.set_dictionary_enabled(false).set_writer_version(version);
        let properties = properties.set_encoding(Encoding::PLAIN).build();
        let file = File::create(&path).unwrap();
        let mut writer =
            SerializedFileWriter::new(file, Arc::new(schema), Arc::new(properties)).unwrap();
        let mut group = writer.next_row_group().unwrap();
        let value = ByteArray::from(&*"w".repeat(2 << 20));
        column::<ByteArrayType>(&mut group, &[value], None, None);
        group.close().unwrap();
        writer.close().unwrap();
        let whole = Table::open(&path).unwrap();
        assert_eq!(shown(&whole, &["a"])[0].len(), 2 << 20);

        // The first page's kind, then its size in four bytes, replaced by 1000.
        let mut bytes = fs::read(&path).unwrap();
        let size = bytes.get_mut(4..11).unwrap();
        assert!(
            matches!(size, [0x15, 0 | 6, 0x15, 0x80..=0xff, 0x80..=0xff, 0x80..=0xff, 0..0x80]),
            "{size:?}"
        );
        size[3..].copy_from_slice(&[0x80 | 2000_u32 as u8, 0x80 | (2000_u32 >> 7) as u8, 0x80, 0]);
        fs::write(&path, bytes).unwrap();
        let table = Table::open(&path).unwrap();
        let error = table.values(0, |_| Ok::<_, Error>(())).unwrap_err().to_string();
        let expected = "a page at 4 holds more than the 1000 bytes it claims";
        assert!(error.ends_with(expected), "{compression}: {error}");
    }
}

#[test]
fn what_is_not_read_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    write(&path);
    let table = Table::open(&path).unwrap();
    let refuse = |name: &str| {
        let number = table.column(&[name]).unwrap();
        table.values(number, |_| Ok::<_, Error>(())).unwrap_err().to_string()
    };
    assert!(refuse("g").contains("its column g has lists, expected one a row"));
    assert!(refuse("h").contains("its column h is of a type that is not read"));
    assert_eq!(table.column(&["f"]), None);

    // Changes each byte once: gives an error or other values, and never a panic or much memory.
    let whole = fs::read(&path).unwrap();
    for place in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[place] ^= 0xff;
        fs::write(&path, bytes).unwrap();
        let Ok(table) = Table::open(&path) else { continue };
        for number in 0..table.column_names().len() {
            let _ = table.values(number, |_| Ok::<_, Error>(()));
        }
    }
    fs::write(&path, &whole[..whole.len() - 9]).unwrap();
    assert!(matches!(Table::open(&path), Err(Error::Damaged { .. })));
    assert!(matches!(Table::open(folder.path().join("b")), Err(Error::Read { .. })));
}
