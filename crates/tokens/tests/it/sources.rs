//! Texts of folders, tables and files of lines.

use std::fs;
use std::path::Path;

use brigade_tokens::{CsvOptions, Error, FolderOptions, LinesOptions, Result, TextSource};

fn write(root: &Path, name: &str, contents: impl AsRef<[u8]>) {
    let path = root.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, contents).unwrap();
}

/// All texts, compared with each one read by its number.
fn texts(source: &TextSource) -> Vec<String> {
    let all: Vec<String> = source.texts().unwrap().collect::<Result<_>>().unwrap();
    assert_eq!(all.len(), source.len());
    for (index, text) in all.iter().enumerate() {
        assert_eq!(source.text(index).unwrap(), *text);
    }
    let error = source.text(all.len()).unwrap_err().to_string();
    assert_eq!(
        error,
        format!("text {} is out of range: there are {0}, numbered from 0", all.len())
    );
    all
}

fn reviews() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in [
        "train/pos/10.txt",
        "train/pos/9.txt",
        "train/neg/1.TXT",
        "test/neg/0.txt",
        "unsup/0.txt",
        "train/top.txt",
        "root.txt",
        "train/pos/.hidden.txt",
        ".git/x.txt",
        "train/pos/notes.md",
    ] {
        write(folder.path(), name, name);
    }
    folder
}

#[test]
fn folders_give_files_in_the_order_of_their_bytes() {
    let folder = reviews();
    let all = TextSource::folder(folder.path()).unwrap();
    let expected = [
        "root.txt",
        "test/neg/0.txt",
        "train/neg/1.TXT",
        "train/pos/10.txt",
        "train/pos/9.txt",
        "train/top.txt",
        "unsup/0.txt",
    ];
    assert_eq!(texts(&all), expected);
    let labels = all.labels().unwrap();
    assert_eq!(labels[1..], ["neg", "neg", "pos", "pos", "train", "unsup"]);
    assert_eq!(all.is_valid(), None);
    assert_eq!(all.name(1), folder.path().join("test/neg/0.txt").display().to_string());

    let options = FolderOptions::new();
    let split = options.clone().split_by_folder("train", "test").open(folder.path()).unwrap();
    assert_eq!(texts(&split), expected[1..5]);
    assert_eq!(split.is_valid().unwrap(), [true, false, false, false]);
    let some = options.clone().folders(["unsup", "test"]).open(folder.path()).unwrap();
    assert_eq!(texts(&some), ["test/neg/0.txt", "unsup/0.txt"]);
    let root = options.clone().folders(["unsup", "."]).open(folder.path()).unwrap();
    assert_eq!(texts(&root), ["root.txt", "unsup/0.txt"]);
    let flat = options.clone().recurse(false).open(folder.path()).unwrap();
    assert_eq!(texts(&flat), ["root.txt"]);
    let notes = options.extensions([".md"]).open(folder.path()).unwrap();
    assert_eq!(texts(&notes), ["train/pos/notes.md"]);
}

#[test]
fn folders_without_texts_say_what_was_looked_for() {
    let folder = reviews();
    let open = |options: FolderOptions, root: &Path| options.open(root).unwrap_err().to_string();
    let error = open(FolderOptions::new().extensions(["html"]), folder.path());
    assert!(error.ends_with("has no texts: no file of the extensions [\"html\"] in it"), "{error}");
    let error = open(FolderOptions::new().split_by_folder("a", "b"), folder.path());
    assert!(error.ends_with("FOLDER/LABEL/FILE where FOLDER is \"a\" or \"b\""), "{error}");
    let error = open(FolderOptions::new(), Path::new("/nowhere"));
    assert!(error.starts_with("/nowhere: "), "{error}");
    let error = TextSource::files(Vec::<String>::new()).unwrap_err().to_string();
    assert_eq!(error, "the list of files has no texts: it is empty");
}

#[test]
fn files_are_whole_texts() {
    let folder = reviews();
    let paths = ["unsup/0.txt", "root.txt"].map(|name| folder.path().join(name));
    let source = TextSource::files(paths).unwrap();
    assert_eq!(texts(&source), ["unsup/0.txt", "root.txt"]);
    assert_eq!(source.labels(), None);
    write(folder.path(), "root.txt", b"ab\xc3\xa9\xff");
    let error = source.text(1).unwrap_err();
    assert!(
        matches!(&error, Error::NotUtf8 { name, offset: 4 } if name.ends_with("root.txt")),
        "{error}"
    );
    fs::remove_file(folder.path().join("root.txt")).unwrap();
    let last = source.texts().unwrap().last().unwrap().unwrap_err();
    assert!(matches!(&last, Error::Io { path, .. } if path.ends_with("root.txt")), "{last}");
}

fn csv(options: &CsvOptions, contents: impl AsRef<[u8]>) -> Result<(TextSource, Vec<String>)> {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "t.csv", contents);
    let source = options.open(folder.path().join("t.csv"))?;
    let all = texts(&source);
    Ok((source, all))
}

#[test]
fn tables_give_columns_by_name_and_number() {
    let options = CsvOptions::new();
    let contents = "is_valid,text,label\nFalse,\"A fine,\n\"\"old\"\" film\",pos\nTRUE,é,neg\n";
    let (source, all) = csv(&options, format!("\u{feff}{contents}")).unwrap();
    assert_eq!(all, ["A fine,\n\"old\" film", "é"]);
    assert_eq!(source.labels().unwrap(), ["pos", "neg"]);
    assert_eq!(source.is_valid().unwrap(), [false, true]);
    assert!(source.name(1).ends_with("t.csv, line 4"), "{}", source.name(1));

    let numbered =
        options.clone().header(false).delimiter(b';').text_columns(["1"]).label_column("0");
    let (source, all) = csv(&numbered, "pos;fine\nneg;bad\n").unwrap();
    assert_eq!(
        (all, source.labels().unwrap()),
        (vec!["fine".into(), "bad".into()], &["pos".to_owned(), "neg".into()][..])
    );
    assert_eq!(source.is_valid(), None);

    let pairs = options.text_columns(["a", "b"]).quoting(false);
    let (source, all) = csv(&pairs, "a,b\n\"x,y\n,z\n").unwrap();
    assert_eq!(all, ["xxfld 1 \"x xxfld 2 y", "xxfld 1  xxfld 2 z"]);
    assert_eq!(source.field_count(), 2);
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "t.csv", "a,b\nx,y\n");
    let source = pairs.open(folder.path().join("t.csv")).unwrap().mark_fields(false);
    assert_eq!(texts(&source), ["x y"]);
    let fields: Vec<_> = source.fields().unwrap().collect::<Result<_>>().unwrap();
    assert_eq!(fields, [["x", "y"]]);
}

#[test]
fn tables_that_do_not_fit_say_where() {
    let options = CsvOptions::new();
    let table: [(CsvOptions, &[u8], &str); 9] = [
        (options.clone(), b"", "has no column \"text\"; its columns are []"),
        (options.clone(), b"a,b\n1,2\n", "has no column \"text\"; its columns are [\"a\", \"b\"]"),
        (options.clone(), b"text,label\n", "has no texts: it has no rows"),
        (
            options.clone(),
            b"text,label\nx,y\nz\n",
            "line 3: it has 1 column, and the lines before have 2",
        ),
        (
            options.clone(),
            b"text,label\nx,y\nab\xe9,y\n",
            "t.csv, line 3, column \"text\" is not UTF-8: the byte at offset 2",
        ),
        (options.clone(), b"text,label\nx,\xff\n", "line 2, column \"label\" is not UTF-8"),
        (
            options.clone(),
            b"text,is_valid\nx,maybe\n",
            "line 2: column \"is_valid\" has \"maybe\", expected true or false",
        ),
        (
            options.clone().text_columns(["7"]),
            b"text,label\nx,y\n",
            "line 2: it has 2 columns, and column \"7\" is number 7 from 0",
        ),
        (options.text_columns(Vec::<String>::new()), b"text\nx\n", "one column at least"),
    ];
    for (options, contents, expected) in table {
        let error = csv(&options, contents).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

fn lines(options: &LinesOptions, contents: impl AsRef<[u8]>) -> Result<(TextSource, Vec<String>)> {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "t.txt", contents);
    let source = options.open(folder.path().join("t.txt"))?;
    let all = texts(&source);
    Ok((source, all))
}

#[test]
fn lines_are_texts() {
    let (source, all) = lines(&LinesOptions::new(), "one\r\n\n  \n two é\nthree").unwrap();
    assert_eq!(all, ["one", " two é", "three"]);
    assert!(source.name(1).ends_with("t.txt, line 4"), "{}", source.name(1));
    let (_, all) = lines(&LinesOptions::new().keep_blank(true), "one\n\ntwo\n").unwrap();
    assert_eq!(all, ["one", "", "two"]);

    let options = LinesOptions::json(["a", "b"]).label_field("l").valid_field("v");
    let contents = "{\"a\": \"x\", \"b\": \"y\", \"l\": 3, \"v\": true}\n\n\
                    {\"l\": \"z\", \"v\": 0, \"b\": \"\\n\", \"a\": \"\\u00e9\"}\n";
    let (source, all) = lines(&options, contents).unwrap();
    assert_eq!(all, ["xxfld 1 x xxfld 2 y", "xxfld 1 é xxfld 2 \n"]);
    assert_eq!(source.labels().unwrap(), ["3", "z"]);
    assert_eq!(source.is_valid().unwrap(), [true, false]);
}

#[test]
fn lines_that_do_not_fit_say_where() {
    let json = || LinesOptions::json(["a"]);
    let table: [(LinesOptions, &[u8], &str); 10] = [
        (LinesOptions::new(), b"", "t.txt has no texts"),
        (LinesOptions::new(), b"\n \n", "t.txt has no texts: it has no lines that are not blank"),
        (LinesOptions::new(), b"a\nb\xff\n", "t.txt, line 2 is not UTF-8: the byte at offset 1"),
        (json(), b"{\"a\": \"x\"}\n{", "t.txt, line 2: it is not a JSON object"),
        (json(), b"[1]\n", "line 1: it is not a JSON object"),
        (json(), b"{\"b\": 1}\n", "line 1: it has no field \"a\"; its fields are [\"b\"]"),
        (json(), b"{\"a\": 1}\n", "line 1: field \"a\" is not a text"),
        (json().label_field("l"), b"{\"a\": \"x\", \"l\": []}\n", "line 1: field \"l\" is neither"),
        (
            json().valid_field("v"),
            b"{\"a\": \"x\", \"v\": 2}\n",
            "has \"2\", expected true or false",
        ),
        (LinesOptions::new().label_field("l"), b"x\n", "plain text have no label"),
    ];
    for (options, contents, expected) in table {
        let error = lines(&options, contents).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn texts_in_memory_take_labels() {
    let source = TextSource::memory(["a", "b"]).unwrap();
    let source = source.with_labels(["x", "y"]).unwrap().with_is_valid([true, false]).unwrap();
    assert_eq!(texts(&source), ["a", "b"]);
    assert_eq!(
        (source.labels().unwrap(), source.is_valid().unwrap()),
        (&["x".to_owned(), "y".into()][..], &[true, false][..])
    );
    let error = source.with_labels(["x"]).unwrap_err().to_string();
    assert_eq!(error, "there are 1 labels for 2 texts");
    let pairs = TextSource::rows([["a", "b"], ["c", "d"]]).unwrap();
    assert_eq!(pairs.fields_of(1).unwrap(), ["c", "d"]);
    let error = TextSource::memory(Vec::<String>::new()).unwrap_err().to_string();
    assert_eq!(error, "the list has no texts: it is empty");
}
