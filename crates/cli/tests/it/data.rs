//! Tests of `brigade data`: folders of images, broken files, packs and pictures of samples.

use std::fs;
use std::path::Path;
use std::process::Command;

use brigade_images::{Image, PackedImages, Size};
use serde_json::Value;
use tempfile::TempDir;

fn ask(folder: &Path, arguments: &[&str]) -> (i32, String, String) {
    let mut brigade = Command::new(env!("CARGO_BIN_EXE_brigade"));
    let output = brigade.current_dir(folder).arg("data").args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn answer(folder: &Path, arguments: &[&str]) -> String {
    let (code, stdout, stderr) = ask(folder, arguments);
    assert_eq!(code, 0, "{stderr}");
    stdout
}

/// Writes an image of one colour with a white pixel in a corner.
fn png(path: &Path, size: Size, colour: [u8; 3]) {
    let mut pixels = colour.repeat(size.pixels() as usize);
    pixels[..3].fill(255);
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, size.width, size.height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.write_header().unwrap().write_image_data(&pixels).unwrap();
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, bytes).unwrap();
}

/// Creates `photos/train` and `photos/val` with two classes.
fn photos() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (part, images) in [("train", 4), ("val", 1)] {
        for (class, colour) in [("red", [255, 0, 0]), ("blue", [0, 0, 255])] {
            for number in 0..images {
                let path =
                    folder.path().join(format!("photos/{part}/{class}/{class}_{number}.png"));
                png(&path, Size::new(20 + number, 10), colour);
            }
        }
    }
    folder
}

fn break_one(folder: &Path) {
    fs::write(folder.join("photos/train/red/red_9.jpg"), "a text").unwrap();
}

#[test]
fn the_statistics_of_a_folder() {
    let folder = photos();
    break_one(folder.path());
    let text = answer(folder.path(), &["stats", "photos"]);
    let (train, valid) = text.split_once("\n\n").unwrap();
    assert!(train.starts_with("photos, train: 9 images in 2 classes\n  blue        4\n"), "{text}");
    assert!(train.contains("formats  8 PNG\nwidth    20 to 23, in the middle 22\n"), "{text}");
    assert!(train.contains("broken   1\n  cannot decode photos/train/red/red_9.jpg: "), "{text}");
    assert!(valid.starts_with("photos, valid: 2 images in 2 classes\n"), "{text}");

    let json = answer(folder.path(), &["stats", "photos", "--json"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    let part = &json["parts"][0];
    assert_eq!(part["classes"][1]["name"], "red");
    assert_eq!(part["classes"][1]["images"], 5);
    assert_eq!(part["broken"][0]["image"], "photos/train/red/red_9.jpg");
    // Half of the pixels of 4 images are red, and one of each of the other 4 is white.
    let pixels = f64::from(2 * (20 + 21 + 22 + 23) * 10);
    let mean = (pixels / 2.0 + 4.0) / pixels;
    assert!((part["mean"][0].as_f64().unwrap() - mean).abs() < 1e-9, "{part}");
    let std = (mean * (1.0 - mean)).sqrt();
    assert!((part["std"][0].as_f64().unwrap() - std).abs() < 1e-9, "{part}");
}

#[test]
fn classes_from_names() {
    let folder = photos();
    let flat = folder.path().join("flat");
    for (name, colour) in
        [("cat_1.png", [1, 2, 3]), ("cat_2.png", [4, 5, 6]), ("dog_1.png", [7; 3])]
    {
        png(&flat.join(name), Size::from(8), colour);
    }
    let text = answer(folder.path(), &["stats", "flat", "--label", "^(.+)_[0-9]+"]);
    assert!(
        text.starts_with("flat: 3 images in 2 classes\n  cat        2\n  dog        1\n"),
        "{text}"
    );
    let (code, _, stderr) = ask(folder.path(), &["stats", "flat", "--label", "^(x.+)_"]);
    assert_eq!(code, 2);
    assert_eq!(stderr, "brigade: flat/cat_1.png has no label: its name does not match `^(x.+)_`\n");
}

#[test]
fn a_folder_becomes_packs_with_the_same_classes() {
    let folder = photos();
    let text = answer(folder.path(), &["pack", "photos", "--transforms", "resize=5"]);
    assert!(text.starts_with("photos-train.pack: 8 images in 2 classes, 0.0 MB\n"), "{text}");
    for (part, images) in [("train", 8), ("valid", 2)] {
        let path = folder.path().join(format!("photos-{part}.pack"));
        let packed = PackedImages::labelled(&path).unwrap();
        assert_eq!((packed.len(), packed.categories().names().len()), (images, 2));
        assert_eq!(packed.source().size(0), Some(Size::new(10, 5)));
    }
    let text = answer(folder.path(), &["stats", "photos-train.pack"]);
    assert!(text.contains("formats  8 pack\nwidth    10 to 11"), "{text}");

    break_one(folder.path());
    let (code, _, stderr) = ask(folder.path(), &["pack", "photos/train", "-o", "new.pack"]);
    assert_eq!(code, 1);
    assert!(stderr.contains("red_9.jpg") && stderr.contains("`--skip-broken` leaves"), "{stderr}");
    assert!(
        !folder.path().join("new.pack").exists() && !folder.path().join("new.pack-part").exists()
    );
    let text = answer(folder.path(), &["pack", "photos/train", "-o", "new.pack", "--skip-broken"]);
    assert!(text.contains("new.pack: 8 images") && text.contains("left out: 1\n"), "{text}");
    let (code, _, stderr) = ask(folder.path(), &["pack", "new.pack"]);
    assert_eq!((code, stderr.contains("would replace")), (2, true), "{stderr}");
}

fn picture(path: &Path) -> Image {
    let decoder = png::Decoder::new(std::io::BufReader::new(fs::File::open(path).unwrap()));
    let mut reader = decoder.read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut pixels).unwrap();
    Image::new(info.width, info.height, pixels).unwrap()
}

#[test]
fn samples_as_a_picture() {
    let folder = photos();
    break_one(folder.path());
    let show =
        |arguments: &[&str]| answer(folder.path(), &[&["show", "photos"], arguments].concat());
    let small = ["--transforms", "squish=40", "--rows", "2", "--columns", "2"];
    let text = show(&[&small[..], &["--valid", "--part", "valid", "-o", "valid.png"]].concat());
    assert_eq!(text, "valid.png: 2 samples of 2\n");
    let valid = picture(&folder.path().join("valid.png"));
    assert_eq!(valid.size(), Size::new(2 * 46 + 6, 40 + 13 + 3 + 6 + 6));
    assert_eq!((valid.pixel(20, 30), valid.pixel(66, 30)), (Some([0, 0, 255]), Some([255, 0, 0])));

    let text = show(&["--transforms", "squish=40", "--rows", "3", "--columns", "3"]);
    assert!(text.starts_with("samples.png: 9 samples of 9\ncannot be read, another is"), "{text}");
    let first = picture(&folder.path().join("samples.png"));
    show(&["--transforms", "squish=40", "--rows", "3", "--columns", "3", "--seed", "1"]);
    assert_ne!(picture(&folder.path().join("samples.png")), first);
}

/// Writes shards of a folder's images, with the class of each as text and in JSON.
fn shards(folder: &Path) {
    let file = fs::File::create(folder.join("shard.tar.gz")).unwrap();
    let gzip = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
    let mut tar = tar::Builder::new(gzip);
    let mut add = |name: &str, bytes: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        tar.append_data(&mut header, name, bytes).unwrap();
    };
    for (number, class) in ["red", "blue", "red"].into_iter().enumerate() {
        let image = fs::read(folder.join(format!("photos/train/{class}/{class}_0.png"))).unwrap();
        add(&format!("{number}.input.png"), &image);
        add(&format!("{number}.txt"), format!("{class}\n").as_bytes());
        add(&format!("{number}.json"), format!("{{\"colour\": \"{class}!\"}}").as_bytes());
        add(&format!("{number}.cls"), b"1");
    }
    tar.into_inner().unwrap().finish().unwrap();
}

#[test]
fn damaged_images_are_counted() {
    let folder = photos();
    let golden =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../images/tests/golden/decode/420.jpg");
    let mut jpeg = fs::read(golden).unwrap();
    // The file ends early.
    let middle = jpeg.len() / 2;
    jpeg.splice(middle..middle, [0xFF, 0xD9]);
    fs::write(folder.path().join("photos/train/red/red_9.jpg"), jpeg).unwrap();
    let text = answer(folder.path(), &["stats", "photos/train"]);
    let expected = "broken   0\ndamaged  1, read with wrong pixels\n  photos/train/red/red_9.jpg: coded data that ends";
    assert!(text.contains(expected), "{text}");
    let json = answer(folder.path(), &["stats", "photos/train", "--json"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["parts"][0]["damaged"][0]["image"], "photos/train/red/red_9.jpg");
}

#[test]
fn shards_have_their_classes_in_members() {
    let folder = photos();
    shards(folder.path());
    let shard = "shard.tar.gz";
    let stats = |more: &[&str]| answer(folder.path(), &[&["stats", shard], more].concat());
    assert!(
        stats(&[]).starts_with("shard.tar.gz: 3 images in 2 classes\n  0        0\n  1        3\n")
    );
    let text = stats(&["--label-from", "txt"]);
    assert!(text.starts_with("shard.tar.gz: 3 images in 2 classes\n  blue        1\n"), "{text}");
    fs::create_dir(folder.path().join("folder")).unwrap();
    fs::copy(folder.path().join(shard), folder.path().join("folder/0.tar.gz")).unwrap();
    let text = answer(folder.path(), &["stats", "folder", "--label-from", "txt"]);
    assert!(text.starts_with("folder: 3 images in 2 classes\n  blue        1\n"), "{text}");
    // An archive beside folders of classes is ignored.
    fs::copy(folder.path().join(shard), folder.path().join("photos/train/0.tar.gz")).unwrap();
    let text = answer(folder.path(), &["stats", "photos/train"]);
    assert!(text.starts_with("photos/train: 8 images in 2 classes\n"), "{text}");
    fs::write(folder.path().join("folder/0.parquet"), "").unwrap();
    let (code, _, stderr) = ask(folder.path(), &["stats", "folder"]);
    assert_eq!(code, 2);
    assert_eq!(stderr, "brigade: folder holds tar shards and tables; give the files of one kind\n");
    let json = stats(&["--label-from", "json:colour", "--image-from", "input.png"]);
    assert!(json.contains("\n  red!         2\nformats  3 PNG\n"), "{json}");
    answer(folder.path(), &["pack", shard, "--label-from", "txt", "-o", "shard.pack"]);
    let packed = PackedImages::labelled(folder.path().join("shard.pack")).unwrap();
    assert_eq!((packed.labels(), packed.categories().names().len()), (&[1, 0, 1][..], 2));
}

#[test]
fn tables_are_read_as_folders_are() {
    use parquet::data_type::{ByteArray, ByteArrayType};
    use parquet::file::writer::SerializedFileWriter;

    let folder = photos();
    let schema = "message schema {
        required group picture { required binary bytes; required binary path (UTF8); }
        required binary kind (UTF8);
    }";
    let schema = parquet::schema::parser::parse_message_type(schema).unwrap();
    let file = fs::File::create(folder.path().join("table.parquet")).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema.into(), Default::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let read = |class: &str| {
        fs::read(folder.path().join(format!("photos/train/{class}/{class}_1.png"))).unwrap()
    };
    let images = ["red", "blue", "blue"].map(|class| ByteArray::from(read(class)));
    let names = ["red", "blue", "blue"].map(ByteArray::from);
    for column in [&images, &names, &names] {
        let mut writer = group.next_column().unwrap().unwrap();
        writer.typed::<ByteArrayType>().write_batch(column, None, None).unwrap();
        writer.close().unwrap();
    }
    group.close().unwrap();
    writer.close().unwrap();

    let temporary = folder.path().join("temporary");
    fs::create_dir(&temporary).unwrap();
    // In the layout of the hub.
    let data = folder.path().join("data");
    fs::create_dir(&data).unwrap();
    for number in [0, 1] {
        let name = format!("train-0000{number}-of-00002.parquet");
        fs::copy(folder.path().join("table.parquet"), data.join(name)).unwrap();
    }
    let columns = ["--image-from", "picture", "--label-from", "kind"];
    for (command, expected) in [
        (
            &["stats", "table.parquet"][..],
            "table.parquet: 3 images in 2 classes\n  blue        2\n",
        ),
        (&["stats", "data"], "data: 6 images in 2 classes\n  blue        4\n"),
        (&["show", "table.parquet", "-o", "rows.png"], "rows.png: 3 samples of 3\n"),
        (&["pack", "table.parquet", "-o", "rows.pack"], "rows.pack: 3 images"),
    ] {
        let mut brigade = Command::new(env!("CARGO_BIN_EXE_brigade"));
        brigade.current_dir(folder.path()).arg("data").args(command).args(columns);
        let output = brigade.env("TMPDIR", &temporary).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(text.starts_with(expected), "{command:?}: {text}{errors}");
        assert_eq!(fs::read_dir(&temporary).unwrap().count(), 0, "{command:?}");
    }
    let (code, _, stderr) = ask(folder.path(), &["stats", "table.parquet"]);
    assert_eq!(code, 2, "{stderr}");
    assert!(stderr.contains("has no column"), "{stderr}");
}

#[test]
fn mistakes_are_named() {
    let folder = photos();
    for (arguments, code, expected) in [
        (&["show", "nothing"][..], 1, "cannot read nothing: "),
        (&["show", "photos", "--transforms", "blur"], 2, "blur: not a transform; expected one of"),
        (&["show", "photos/val", "--part", "valid"], 2, "photos/val has one part only"),
        (&["show", "photos", "-o", "no/folder/a.png"], 1, "cannot write no/folder/a.png: "),
        (&["stats", "photos/train/red"], 2, "photos/train/red"),
        (&["stats", "table.parquet"], 1, "cannot read table.parquet: "),
        (&["stats", "table.parquet", "--label", "(.)"], 2, "table.parquet contains its labels"),
        (&["stats", "photos", "--label-from", "txt"], 2, "photos is neither"),
        (&["stats", "nothing.tar.gz"], 1, "cannot read nothing.tar.gz: "),
        (&["stats", "nothing.pack"], 1, "cannot read nothing.pack: "),
        (&["stats", "shard.tar", "--label", "(.)"], 2, "shard.tar contains its labels"),
        (&["pack", "photos", "--label", "("], 2, "("),
        (&["show", "photos", "--rows", "0"], 2, "invalid value '0' for '--rows <N>'"),
    ] {
        let (found, stdout, stderr) = ask(folder.path(), arguments);
        assert!(stderr.contains(expected), "{arguments:?}: {stderr}{stdout}");
        assert_eq!(found, code, "{arguments:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
}
