//! Tests of archives that are made byte by byte and with the crate tar.

use std::fs::File;
use std::os::unix::fs::FileExt;

use tar::{Builder, EntryType, Header};
use tempfile::TempDir;

use super::*;

fn archive(folder: &TempDir, name: &str, members: &[(&str, &str)]) -> PathBuf {
    let path = folder.path().join(name);
    let mut tar = Builder::new(File::create(&path).unwrap());
    for (name, bytes) in members {
        let mut header = Header::new_gnu();
        header.set_size(bytes.len() as u64);
        tar.append_data(&mut header, name, bytes.as_bytes()).unwrap();
    }
    tar.finish().unwrap();
    path
}

fn bytes(images: &impl ImageSource, index: usize) -> String {
    let mut buffer = b"before".to_vec();
    images.read(index, &mut buffer).unwrap();
    String::from_utf8(buffer).unwrap()
}

fn open(path: &Path) -> Result<WebDataset, String> {
    WebDatasetOptions::new().open_shards([path]).map_err(|error| error.to_string())
}

#[test]
fn members_are_grouped_up_to_the_first_dot_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let first = [
        ("v1.0/b.cls", "1"),
        ("v1.0/b.JPG", "image b"),
        ("v1.0/a.seg.png", "mask"),
        ("v1.0/a.jpg", "image a"),
        ("notes", "x"),
        (".hidden.jpg", "x"),
        ("info.json", "{}"),
        // Apart from the other members of its sample.
        ("v1.0/a.cls", " 0\n"),
        ("c.png", "second choice"),
        ("c.jpg", "first choice"),
        ("c.cls", "2"),
    ];
    archive(&folder, "s-0.tar", &first);
    archive(&folder, "s-1.tar", &[("v1.0/b.jpg", "other b"), ("v1.0/b.cls", "1")]);
    let pattern = format!("{}/s-{{0..1}}.tar", folder.path().display());
    let images = WebDataset::open(&pattern).unwrap();
    let found: Vec<_> = (0..images.len()).map(|index| bytes(&images, index)).collect();
    assert_eq!(found, ["image b", "image a", "first choice", "other b"]);
    assert!(images.name(0).ends_with("s-0.tar/v1.0/b.JPG"), "{}", images.name(0));
    assert!(images.read(4, &mut Vec::new()).is_err());
    let images = images.labelled().unwrap();
    assert_eq!(images.labels(), [1, 0, 2, 1]);
    assert_eq!(images.categories().names(), ["0", "1", "2"]);

    // A folder stands for its archives.
    let folder = WebDataset::open(folder.path().to_str().unwrap()).unwrap();
    assert_eq!(folder.fingerprint().unwrap(), images.source().fingerprint().unwrap());
    let classes = Categories::ordered(["x", "y"]).unwrap();
    let error = folder.labelled_as(classes).unwrap_err().to_string();
    assert!(error.ends_with("c.jpg has the label 2, expected 0 to 1"), "{error}");
}

#[test]
fn labels_are_numbers_names_or_fields() {
    let folder = tempfile::tempdir().unwrap();
    let members = [
        ("1.jpg", ""),
        ("1.txt", "dog\n"),
        ("1.json", r#"{"class": 7, "text": "a", "low": -1, "mixed": 1}"#),
        ("2.jpg", ""),
        ("2.txt", "cat"),
        ("2.json", r#"{"class": 2, "text": "b", "mixed": "b"}"#),
    ];
    let path = archive(&folder, "a.tar", &members);
    let labelled = |options: WebDatasetOptions| {
        let images = options.open_shards([&path]).unwrap().labelled();
        images.map(|images| images.labels().to_vec()).map_err(|error| error.to_string())
    };
    let options = WebDatasetOptions::new();
    assert_eq!(labelled(options.clone().text_label(".TXT")).unwrap(), [1, 0]);
    assert_eq!(labelled(options.clone().json_label("json", "class")).unwrap(), [7, 2]);
    assert_eq!(labelled(options.clone().json_label("json", "text")).unwrap(), [0, 1]);
    for (options, expected) in [
        (options.clone(), "1.jpg has no label: its sample has no member .cls"),
        (
            options.clone().number_label("txt"),
            "its member .txt holds \"dog\", which is not a class",
        ),
        (options.clone().json_label("json", "low"), "has no name or class number as \"low\""),
        (options.clone().json_label("txt", "a"), "its member .txt: expected value at line 1"),
        (options.json_label("json", "mixed"), "some labels are names and others are numbers"),
    ] {
        let error = labelled(options).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

/// Compresses an archive, as one stream and as two consecutive ones.
fn gzip(path: &Path, to: &str, streams: usize) -> PathBuf {
    use std::io::Write;

    let whole = std::fs::read(path).unwrap();
    let mut bytes = Vec::new();
    for part in whole.chunks(whole.len().div_ceil(streams)) {
        let mut encoder = flate2::write::GzEncoder::new(bytes, flate2::Compression::fast());
        encoder.write_all(part).unwrap();
        bytes = encoder.finish().unwrap();
    }
    let path = path.with_file_name(to);
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn compressed_archives_are_as_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let long = format!("{}.jpg", "f".repeat(200));
    let members = [
        ("a.jpg", "image a"),
        ("a.cls", "1"),
        ("a.unwanted", &*"x".repeat(3 << 20)),
        ("b.cls", "0"),
        ("b.png", "image b"),
        (&long, "long"),
    ];
    let tar = archive(&folder, "s-0.tar", &members[..5]);
    let plain = open(&tar).unwrap();
    let first = gzip(&tar, "s-1.tar.gz", 1);
    let second = gzip(&archive(&folder, "more.tar", &members), "s-2.tgz", 2);
    let packed = open(&first).unwrap();
    assert_eq!(
        (packed.len(), bytes(&packed, 0), bytes(&packed, 1)),
        (2, bytes(&plain, 0), bytes(&plain, 1))
    );
    assert!(packed.name(0).ends_with("s-1.tar.gz/a.jpg"), "{}", packed.name(0));
    let labelled = packed.labelled().unwrap();
    assert_eq!(labelled.labels(), [1, 0]);
    let mixed = WebDatasetOptions::new().open_shards([&second, &tar, &first]).unwrap();
    let found: Vec<_> = (0..mixed.len()).map(|index| bytes(&mixed, index)).collect();
    assert_eq!(found[2], "long");
    assert_eq!(found[3..], ["image a", "image b", "image a", "image b"]);
    let again = WebDatasetOptions::new().open_shards([&second, &tar, &first]).unwrap();
    assert_eq!(again.fingerprint().unwrap(), mixed.fingerprint().unwrap());

    // A folder stands for all of them.
    std::fs::remove_file(folder.path().join("more.tar")).unwrap();
    let all = WebDataset::open(folder.path().to_str().unwrap()).unwrap();
    assert_eq!(all.len(), 2 + 2 + 3);

    let whole = std::fs::read(&first).unwrap();
    std::fs::write(&first, &whole[..whole.len() / 2]).unwrap();
    let error = open(&first).unwrap_err();
    assert!(error.contains("s-1.tar.gz is damaged or in another format: as gzip: "), "{error}");
}

#[test]
fn members_of_compressed_archives_are_unpacked_in_pieces() {
    let folder = tempfile::tempdir().unwrap();
    let long: String = (0..300_000).map(|number| format!("{number:08}")).collect();
    let tar = archive(&folder, "a.tar", &[("a.jpg", "a"), ("b.jpg", &long), ("c.jpg", "c")]);
    let images = open(&gzip(&tar, "a.tar.gz", 1)).unwrap();
    let found = [0, 1, 2].map(|index| bytes(&images, index));
    assert!(found == ["a".to_owned(), long.clone(), "c".to_owned()]);
    assert_eq!(images.shards.unpacked_bytes(), long.len() as u64 + 2);

    // The tar file ends within the member, the gzip stream is complete.
    File::options().write(true).open(&tar).unwrap().set_len(2 << 20).unwrap();
    let error = open(&gzip(&tar, "a.tar.gz", 1)).unwrap_err();
    let expected = "the member b.jpg has 2400000 bytes, and the archive ends before them";
    assert!(error.ends_with(expected), "{error}");
}

#[test]
fn a_small_archive_cannot_fill_the_temporary_folder() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.tar");
    let mut tar = Builder::new(File::create(&path).unwrap());
    for (name, bytes) in [("a.jpg", 5), ("b.unwanted", 0), ("c.jpg", 300 << 20)] {
        let mut header = Header::new_ustar();
        header.set_path(name).unwrap();
        header.set_size(bytes);
        header.set_cksum();
        tar.append(&header, &b"bytes"[..usize::try_from(bytes).unwrap().min(5)]).unwrap();
    }
    drop(tar);
    // Only the header is read: the announced bytes need not exist.
    let packed = gzip(&path, "a.tar.gz", 1);
    let most = std::fs::metadata(&packed).unwrap().len() * 100 + (256 << 20);
    let error = open(&packed).unwrap_err();
    assert!(
        error.ends_with(&format!(
            "its images and labels have more than {most} bytes up to the member c.jpg, too many for its size; \
             unpack it to a .tar if you trust it"
        )),
        "{error}"
    );
}

#[test]
fn images_with_longer_names_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let members =
        [("0001.input.jpg", "in"), ("0001.cls", "3"), ("0002.seg.png", "no"), ("0002.jpg", "yes")];
    let images = open(&archive(&folder, "a.tar", &members)).unwrap();
    assert_eq!((bytes(&images, 0), bytes(&images, 1)), ("in".to_owned(), "yes".to_owned()));
    assert!(images.name(0).ends_with("a.tar/0001.input.jpg"));

    let two = [("d/1.input.jpg", "in"), ("d/1.target.jpg", "out"), ("d/1.cls", "1")];
    let path = archive(&folder, "b.tar", &two);
    let error = open(&path).unwrap_err();
    let expected = "d/1.input.jpg and d/1.target.jpg are images of one sample; choose one: \
                    `images([\"input.jpg\"])`, or --image-from input.jpg";
    assert!(error.ends_with(expected), "{error}");
    // Whatever the extensions, in both orders, and with a label whose name ends like an image's.
    let members = [("1.rgb.png", "photo"), ("1.mask.jpg", "mask"), ("1.cls", "1")];
    for (order, expected) in [
        ([0, 1, 2], "1.rgb.png and 1.mask.jpg are images of one sample; choose one: "),
        ([2, 1, 0], "1.mask.jpg and 1.rgb.png are images of one sample; choose one: "),
    ] {
        let error = open(&archive(&folder, "c.tar", &order.map(|it| members[it]))).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    let whole = [members[0], members[1], ("1.webp", "whole"), ("1.other.png", "x")];
    for order in [[0, 1, 2, 3], [2, 1, 0, 3], [0, 2, 1, 3]] {
        let images = open(&archive(&folder, "c.tar", &order.map(|it| whole[it]))).unwrap();
        assert_eq!(bytes(&images, 0), "whole");
    }

    let chosen = WebDatasetOptions::new().images(["target.jpg"]).open_shards([&path]).unwrap();
    assert_eq!(bytes(&chosen, 0), "out");
    let error = WebDatasetOptions::new().images(["jpg"]).open_shards([&path]).unwrap_err();
    assert!(error.to_string().contains("there are no images in 1 archive ["), "{error}");
}

#[test]
fn labels_do_not_command_memory() {
    let folder = tempfile::tempdir().unwrap();
    let long = "1".repeat(2 << 20);
    let large = archive(&folder, "a.tar", &[("1.jpg", ""), ("1.cls", &long)]);
    let error = open(&large).unwrap().labelled().unwrap_err().to_string();
    assert!(error.contains("its member .cls has 2097152 bytes, more than 1048576"), "{error}");
    // Such a label of a compressed archive is not even unpacked.
    let compressed = open(&gzip(&large, "a.tar.gz", 1)).unwrap();
    assert_eq!(compressed.shards.unpacked_bytes(), 0);
    let error = compressed.labelled().unwrap_err().to_string();
    assert!(error.contains("its member .cls has 2097152 bytes, more than 1048576"), "{error}");
    let many = archive(&folder, "b.tar", &[("1.jpg", ""), ("1.cls", "9223372036854775807")]);
    let error = open(&many).unwrap().labelled().unwrap_err().to_string();
    assert!(error.contains("the label 9223372036854775807 asks for more classes than"), "{error}");
}

#[test]
fn long_names_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let long = format!("{}/{}.jpg", "d".repeat(120), "f".repeat(200));
    let gnu = open(&archive(&folder, "gnu.tar", &[(&long, "bytes"), ("b.jpg", "b")])).unwrap();
    assert!(gnu.name(0).ends_with(&long));
    assert_eq!((bytes(&gnu, 0), bytes(&gnu, 1)), ("bytes".to_owned(), "b".to_owned()));

    let path = folder.path().join("pax.tar");
    let mut tar = Builder::new(File::create(&path).unwrap());
    tar.append_pax_extensions([("path", long.as_bytes()), ("comment", b"x")]).unwrap();
    let mut header = Header::new_ustar();
    header.set_path("short").unwrap();
    header.set_size(5);
    header.set_cksum();
    tar.append(&header, &b"bytes"[..]).unwrap();
    tar.finish().unwrap();
    let pax = open(&path).unwrap();
    assert_eq!((pax.len(), bytes(&pax, 0)), (1, "bytes".to_owned()));
    assert!(pax.name(0).ends_with(&long));

    let endless = "n".repeat(3 << 20);
    let error = open(&archive(&folder, "endless.tar", &[(&endless, "")])).unwrap_err();
    assert!(error.contains("a name or its attributes have more than 1048576 bytes"), "{error}");
}

#[test]
fn folders_and_links_are_no_images() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.tar");
    let mut tar = Builder::new(File::create(&path).unwrap());
    for (name, kind) in [
        ("d.jpg", EntryType::Directory),
        ("l.jpg", EntryType::Symlink),
        ("h.jpg", EntryType::Link),
        ("p.jpg", EntryType::Fifo),
        ("f.jpg", EntryType::Regular),
    ] {
        let mut header = Header::new_gnu();
        header.set_path(name).unwrap();
        header.set_entry_type(kind);
        header.set_size(0);
        header.set_cksum();
        tar.append(&header, &b""[..]).unwrap();
    }
    tar.finish().unwrap();
    let images = open(&path).unwrap();
    assert_eq!(images.len(), 1);
    assert!(images.name(0).ends_with("f.jpg"));
}

#[test]
fn damaged_archives_say_where() {
    let folder = tempfile::tempdir().unwrap();
    let members = [("a.jpg", "x".repeat(1000)), ("b.jpg", "y".repeat(1000))];
    let members: Vec<(&str, &str)> = members.iter().map(|(name, text)| (*name, &**text)).collect();
    let damaged = |damage: &dyn Fn(&File)| {
        let path = archive(&folder, "a.tar", &members);
        damage(&File::options().write(true).open(&path).unwrap());
        open(&path).unwrap_err()
    };
    // Each member is a header of 512 bytes and 1024 bytes with its padding.
    for (expected, damage) in [
        (
            "after byte 1512: archive header checksum mismatch",
            &(|file: &File| {
                file.write_all_at(b"c", 1536).unwrap();
            }) as &dyn Fn(&File),
        ),
        ("after byte 1512: numeric field was not a number", &|file| {
            file.write_all_at(b"xxxxxxxx", 1536 + 148).unwrap();
        }),
        ("the member b.jpg has 1000 bytes from byte 2048, and the file ends at 2500", &|file| {
            file.set_len(2500).unwrap();
        }),
        ("after byte 1512: failed to read entire block", &|file| file.set_len(1600).unwrap()),
        ("as gzip: ", &|file| file.write_all_at(&[0x1f, 0x8b], 0).unwrap()),
        ("it is compressed by zstd", &|file| {
            file.write_all_at(&[0x28, 0xb5, 0x2f, 0xfd], 0).unwrap();
        }),
        ("there are no images in 1 archive [", &|file| file.set_len(0).unwrap()),
        (
            "the member a.jpg has 8589934591 bytes from byte 512, and the file ends at 4096",
            &|file| {
                let mut header = Header::new_gnu();
                header.set_path("a.jpg").unwrap();
                header.set_size(0o77_777_777_777);
                header.set_cksum();
                file.write_all_at(header.as_bytes(), 0).unwrap();
            },
        ),
        ("after byte 0: size overflow", &|file| {
            let mut header = Header::new_gnu();
            header.set_path("a.jpg").unwrap();
            header.set_size(u64::MAX);
            header.set_cksum();
            file.write_all_at(header.as_bytes(), 0).unwrap();
        }),
    ] {
        let error = damaged(damage);
        assert!(error.contains(expected), "{error}");
    }
    let twice = open(&archive(&folder, "b.tar", &[("a.jpg", ""), ("a.JPG", "")])).unwrap_err();
    assert!(twice.contains("duplicate member a.JPG"), "{twice}");
    let missing = open(Path::new("/nowhere.tar")).unwrap_err();
    assert!(missing.starts_with("cannot read /nowhere.tar: "), "{missing}");
}

#[test]
fn more_archives_than_stay_open_are_read_in_any_order() {
    let folder = tempfile::tempdir().unwrap();
    for shard in 0..300 {
        archive(&folder, &format!("{shard:03}.tar"), &[("a.jpg", &shard.to_string())]);
    }
    let images = WebDataset::open(folder.path().to_str().unwrap()).unwrap();
    for index in [0, 128, 256, 0, 299, 171, 299, 43] {
        assert_eq!(bytes(&images, index), index.to_string());
    }
    assert_eq!(images.len(), 300);

    // An archive that is cut short afterwards is an error of the read.
    File::options().write(true).open(folder.path().join("007.tar")).unwrap().set_len(512).unwrap();
    let error = images.read(7, &mut Vec::new()).unwrap_err();
    assert!(matches!(&error, ImageError::Read { path, .. } if path.ends_with("007.tar")));
}
