//! `brigade data`: folders of images, what is broken in them, packs and pictures of samples.

#![allow(clippy::unwrap_used)] // also in what the tests share

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

/// A picture of one colour with a white pixel in a corner.
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

/// `photos/train` and `photos/val` with two classes.
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

#[test]
fn mistakes_are_named() {
    let folder = photos();
    for (arguments, code, expected) in [
        (&["show", "nothing"][..], 1, "cannot read nothing: "),
        (&["show", "photos", "--transforms", "blur"], 2, "blur: it is not a transform; known are"),
        (&["show", "photos/val", "--part", "valid"], 2, "photos/val has one part only"),
        (&["show", "photos", "-o", "no/folder/a.png"], 1, "cannot write no/folder/a.png: "),
        (&["stats", "photos/train/red"], 2, "photos/train/red"),
        (&["stats", "table.parquet"], 2, "a program reads tables with `ParquetImages`"),
        (&["stats", "nothing.pack"], 1, "cannot read nothing.pack: "),
        (&["stats", "shard.tar", "--label", "(.)"], 2, "shard.tar has labels of its own"),
        (&["pack", "photos", "--label", "("], 2, "("),
        (&["show", "photos", "--rows", "0"], 2, "invalid value '0' for '--rows <N>'"),
    ] {
        let (found, stdout, stderr) = ask(folder.path(), arguments);
        assert!(stderr.contains(expected), "{arguments:?}: {stderr}{stdout}");
        assert_eq!(found, code, "{arguments:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
}
