//! Comparison of decoding with Pillow, on unusual images that `tests/golden/decode/make.py` has made with it, and on
//! damaged ones.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use brigade_images::decode::{DecodeOptions, Decoder};
use brigade_images::{Image, ImageError, Region, Size};
use brigade_test_needs::{Need, needs};
use serde::Deserialize;

/// Results of Pillow.
#[derive(Deserialize)]
struct Expected {
    pillow: String,
    images: BTreeMap<String, Pixels>,
}

#[derive(Deserialize)]
struct Pixels {
    size: [u32; 2],
    crc32: u32,
    /// Size and checksum after the EXIF orientation is applied.
    turned: ([u32; 2], u32),
    /// For a JPEG, size and checksum at fractions of the size.
    #[serde(rename = "1/2")]
    half: Option<([u32; 2], u32)>,
    #[serde(rename = "1/4")]
    quarter: Option<([u32; 2], u32)>,
    #[serde(rename = "1/8")]
    eighth: Option<([u32; 2], u32)>,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/decode")
}

fn expected(folder: &Path) -> Expected {
    let text = fs::read_to_string(folder.join("expected.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn decoder() -> Decoder {
    Decoder::new(DecodeOptions::new())
}

fn summary(image: &Image) -> ([u32; 2], u32) {
    ([image.width(), image.height()], crc32fast::hash(image.pixels()))
}

/// Checks that all images of a folder are decoded with Pillow's results.
fn compare(folder: &Path) {
    let expected = expected(folder);
    assert!(expected.images.len() > 50);
    let mut wrong = Vec::new();
    for (name, pixels) in &expected.images {
        let bytes = fs::read(folder.join(name)).unwrap();
        let mut check = |what: &str, found: ([u32; 2], u32), wanted: ([u32; 2], u32)| {
            if found != wanted {
                wrong.push(format!("{name}, {what}: {found:?}, not {wanted:?}"));
            }
        };
        let image = decoder().decode_new(name, &bytes).unwrap();
        check("whole", summary(&image), (pixels.size, pixels.crc32));
        let turning = DecodeOptions::new().exif_orientation(true);
        let mut turning = Decoder::new(turning);
        let turned = turning.decode_new(name, &bytes).unwrap();
        check("turned", summary(&turned), pixels.turned);
        assert_eq!(turning.header(name, &bytes).unwrap().size, turned.size());
        let parts = [(2, pixels.half), (4, pixels.quarter), (8, pixels.eighth)];
        for (part, wanted) in parts {
            let Some(wanted) = wanted else { continue };
            let least = Size::new(image.width() / part, image.height() / part);
            let mut scaled = Image::new(1, 1, vec![0; 3]).unwrap();
            let whole = Region::whole(image.size());
            decoder().decode_region(name, &bytes, whole, Some(least), &mut scaled).unwrap();
            check(&format!("1/{part}"), summary(&scaled), wanted);
        }
    }
    assert!(wrong.is_empty(), "not as Pillow {}:\n{}", expected.pillow, wrong.join("\n"));
}

#[needs()]
fn as_pillow_reads_them() {
    compare(&folder());
}

/// PyTorch is installed with torchvision, and that with Pillow.
#[needs(Pytorch)]
fn peer_as_this_machines_pillow_reads_larger_ones() {
    let made = tempfile::tempdir().unwrap();
    let python = brigade_test_needs::python(Need::Pytorch).unwrap();
    let output =
        Command::new(python).arg(folder().join("make.py")).arg(made.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    compare(made.path());
}

/// A JPEG in which some bytes are replaced, and Pillow's pixels of it; `None` if Pillow rejects it.
type Damage = (String, usize, usize, String, Option<u32>);

#[needs()]
fn damaged_jpegs_are_read_as_pillow_reads_them() {
    let text = fs::read_to_string(folder().join("damaged.json")).unwrap();
    let damages: Vec<Damage> = serde_json::from_str(&text).unwrap();
    let (mut wrong, mut warned, mut refused) = (Vec::new(), 0, 0);
    // A progressive file with a scan that refines bits that no scan before contained.
    let mut only_here = 0;
    for (name, at, gone, new, wanted) in &damages {
        let whole = fs::read(folder().join(name)).unwrap();
        let new: Vec<u8> = (0..new.len() / 2)
            .map(|place| u8::from_str_radix(&new[2 * place..2 * place + 2], 16).unwrap())
            .collect();
        let bytes = [&whole[..*at], &new, &whole[at + gone..]].concat();
        let mut decoder = decoder();
        let found = decoder.decode_new(name, &bytes);
        let crc = found.as_ref().ok().map(|image| crc32fast::hash(image.pixels()));
        if name == "progressive.jpg" && wanted.is_none() && crc.is_some() {
            only_here += 1;
        } else if crc != *wanted {
            wrong.push(format!(
                "{name} {at} {gone} {new:x?}: {crc:?}, not {wanted:?}; {:?}",
                found.err()
            ));
        } else if decoder.warning().is_some() {
            warned += 1;
        } else if wanted.is_none() {
            refused += 1;
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), damages.len(), wrong.join("\n"));
    assert_eq!((warned, refused, only_here), (102, 84, 1));
}

#[needs()]
fn a_region_is_a_part_of_the_whole() {
    let mut decoder = decoder();
    let mut target = Image::new(1, 1, vec![0; 3]).unwrap();
    for name in expected(&folder()).images.keys() {
        let bytes = fs::read(folder().join(name)).unwrap();
        let whole = decoder.decode_new(name, &bytes).unwrap();
        let Size { width, height } = whole.size();
        for step in 0..40 {
            let (left, top) = (step * 7 % width, step * 5 % height);
            let region = Region {
                left,
                top,
                width: 1 + step * 13 % (width - left),
                height: 1 + step * 3 % (height - top),
            };
            let place = decoder.decode_region(name, &bytes, region, None, &mut target).unwrap();
            assert_eq!((place.width, place.height), (region.width.into(), region.height.into()));
            for y in 0..region.height {
                for x in 0..region.width {
                    assert_eq!(
                        target.pixel(place.left as u32 + x, place.top as u32 + y),
                        whole.pixel(left + x, top + y),
                        "{name}: {region}, pixel {x}, {y}"
                    );
                }
            }
        }
    }
}

/// Also at a fraction of the size, and with the orientation.
#[needs()]
fn a_scaled_region_is_a_part_of_the_scaled_whole() {
    let mut target = Image::new(1, 1, vec![0; 3]).unwrap();
    let mut whole = target.clone();
    for name in ["420.jpg", "422.jpg", "progressive.jpg", "exif5.jpg", "exif6.jpg", "cmyk.jpg"] {
        let bytes = fs::read(folder().join(name)).unwrap();
        let mut decoder = Decoder::new(DecodeOptions::new().exif_orientation(true));
        let size = decoder.header(name, &bytes).unwrap().size;
        let region = |size| Region { left: 8, top: 8, ..Region::whole(size) };
        let least = Size::new(size.width / 2, size.height / 2);
        decoder.decode_region(name, &bytes, Region::whole(size), Some(least), &mut whole).unwrap();
        let part = Region { left: 8, top: 24, ..region(Size::new(32, 16)) };
        let place =
            decoder.decode_region(name, &bytes, part, Some(Size::new(16, 8)), &mut target).unwrap();
        assert_eq!((place.width, place.height), (16.0, 8.0), "{name}");
        assert!(place.left + place.width <= target.width().into());
        assert!(place.top + place.height <= target.height().into());
        if place.left.fract() != 0.0 || place.top.fract() != 0.0 {
            // After a rotation, half a pixel may be left over at the other side.
            continue;
        }
        for (x, y) in [(0, 0), (15, 0), (0, 7), (15, 7), (7, 3)] {
            let found = target.pixel(place.left as u32 + x, place.top as u32 + y);
            assert_eq!(found, whole.pixel(4 + x, 12 + y), "{name}: {x}, {y}");
        }
    }
}

fn refusal(name: &str, bytes: &[u8]) -> String {
    decoder().decode_new(name, bytes).unwrap_err().to_string()
}

#[needs()]
fn what_is_not_an_image() {
    assert_eq!(refusal("a.jpg", b""), "cannot decode a.jpg: the file is empty");
    assert_eq!(
        refusal("b.jpg", b"hello, world\n"),
        "cannot decode b.jpg: it begins with \"hello, world\", which is not a JPEG, PNG, WebP, BMP, \
         GIF, TIFF or PNM file"
    );
    assert_eq!(
        refusal("d.avif", b"\0\0\0\x20ftypavif\0\0\0\0"),
        "cannot decode d.avif: it is AVIF, which is not read; convert it: `magick mogrify -format png \
         *.avif`"
    );
    let jp2 = b"\0\0\0\x0cjP  \r\n\x87\n\0\0\0\x14ftypjp2 ";
    assert!(refusal("e.jp2", jp2).contains("it is JPEG 2000, which is not read; convert it"));
    assert!(refusal("f.j2k", b"\xff\x4f\xff\x51\0").contains("it is JPEG 2000"));
    assert!(refusal("g.heic", b"\0\0\0\x18ftypheic\0\0\0\0").contains("it is HEIF"));
    assert!(refusal("c.jpg", b"\xff\xd8\xff").starts_with("cannot decode c.jpg: as JPEG: "));
}

#[needs()]
fn a_cut_file_is_an_error_or_an_image() {
    for name in expected(&folder()).images.keys() {
        let bytes = fs::read(folder().join(name)).unwrap();
        for part in 1..20 {
            let cut = &bytes[..bytes.len() * part / 20];
            if let Err(error) = decoder().decode_new(name, cut) {
                assert!(matches!(error, ImageError::Decode { .. }), "{name}: {error}");
            }
        }
        // Without its second half, no file is complete.
        if bytes.len() > 1000 && !name.contains("animated") {
            assert!(decoder().decode_new(name, &bytes[..bytes.len() / 2]).is_err(), "{name}");
        }
    }
}

#[needs()]
fn a_damaged_file_is_an_error_or_an_image() {
    for name in expected(&folder()).images.keys() {
        let bytes = fs::read(folder().join(name)).unwrap();
        for step in 0..60_usize {
            let mut damaged = bytes.clone();
            let at = step * 7919 % bytes.len();
            damaged[at] ^= 1 << (step % 8);
            if let Err(error) = decoder().decode_new(name, &damaged) {
                assert!(!error.to_string().contains("panicked"), "{name}, byte {at}: {error}");
            }
        }
    }
}

#[needs()]
fn sizes_beyond_the_limit() {
    let bytes = fs::read(folder().join("rgb.png")).unwrap();
    let error = Decoder::new(DecodeOptions::new().max_pixels(1000)).decode_new("a.png", &bytes);
    assert_eq!(
        error.unwrap_err().to_string(),
        "a.png has 83 x 59 pixels, more than the limit of 1000 in all; leave it out, or raise \
         `max_pixels`"
    );
}

/// Headers that announce more pixels than the file can contain do not cause allocations.
#[needs()]
fn headers_that_promise_too_much() {
    // Height and width in the frame header of a JPEG.
    let mut jpeg = fs::read(folder().join("420.jpg")).unwrap();
    let at = jpeg.windows(2).position(|it| it == b"\xff\xc0").unwrap();
    jpeg[at + 5..at + 9].copy_from_slice(&[0x2e, 0xe0, 0x2e, 0xe0]);
    let mut png = fs::read(folder().join("rgb.png")).unwrap();
    png[16..24].copy_from_slice(&[0, 0, 0x2e, 0xe0, 0, 0, 0x2e, 0xe0]);
    let crc = crc32fast::hash(&png[12..29]);
    png[29..33].copy_from_slice(&crc.to_be_bytes());
    let mut bmp = fs::read(folder().join("rgb.bmp")).unwrap();
    bmp[18..26].copy_from_slice(&[0xe0, 0x2e, 0, 0, 0xe0, 0x2e, 0, 0]);
    for kind in [3, 5, 6] {
        for maximum in [255, 65_535] {
            let pnm = format!("P{kind} 4294967295 4294967295 {maximum} 0");
            let error = refusal("a.ppm", pnm.as_bytes());
            assert!(
                error.contains("are too few for the 4294967295 x 4294967295 pixels"),
                "{error}"
            );
        }
    }
    for (name, bytes) in [("a.jpg", jpeg), ("a.png", png), ("a.bmp", bmp)] {
        let error = refusal(name, &bytes);
        assert!(
            error.contains("are too few for the 12000 x 12000 pixels of its header"),
            "{error}"
        );
    }
}

/// Builds a TIFF file of one image, whose tags have one number each except for the positions of its strips or tiles,
/// which are all those of `data`.
fn tiff(tags: &[(u16, u32)], tiles: u32, data: &[u8]) -> Vec<u8> {
    let (start, length) = (8 + 4 * tiles + 4 * tiles, data.len() as u32);
    let directory = start + length;
    let mut bytes = [&b"II*\0"[..], &directory.to_le_bytes()].concat();
    for number in [start, length] {
        bytes.extend(number.to_le_bytes().repeat(tiles as usize));
    }
    bytes.extend(data);
    bytes.extend((tags.len() as u16 + 2).to_le_bytes());
    let (offsets, lengths) = if tiles == 1 { (start, length) } else { (8, 8 + 4 * tiles) };
    let one = tags.iter().map(|(tag, value)| (*tag, 1, *value));
    for (tag, count, value) in one.chain([(324, tiles, offsets), (325, tiles, lengths)]) {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(4_u16.to_le_bytes());
        bytes.extend([count, value].map(u32::to_le_bytes).concat());
    }
    bytes.extend([0; 4]);
    bytes
}

/// The part of a tile outside of the image costs memory and time as well.
#[needs()]
fn tiles_that_are_too_large_or_overlap() {
    let grey = |width, height, compression, tile: [u32; 2]| {
        [
            (256, width),
            (257, height),
            (258, 8),
            (259, compression),
            (262, 1),
            (322, tile[0]),
            (323, tile[1]),
        ]
    };
    let lzw = tiff(&grey(1, 1000, 5, [4_294_967, 1000]), 1, &[0; 2000]);
    let error = refusal("a.tif", &lzw);
    let expected = "its tiles have 4294967 x 1000 pixels, more than the 4096 x 4096 that are read of a \
                    picture of 1 x 1000";
    assert!(error.ends_with(expected), "{error}");
    let high = tiff(&grey(1, 1000, 1, [1, 5000]), 1, &[0; 5000]);
    assert!(refusal("a.tif", &high).contains("its tiles have 1 x 5000 pixels"));

    let row: Vec<u8> = (0..4096).map(|place| (place / 16) as u8).collect();
    let overlapping = tiff(&grey(64, 64, 1, [4096, 1]), 64, &row);
    assert!(refusal("a.tif", &overlapping).ends_with("its strips or tiles overlap"));
    let whole = decoder().decode_new("a.tif", &tiff(&grey(64, 1, 1, [4096, 1]), 1, &row)).unwrap();
    assert_eq!((whole.size(), whole.pixel(63, 0)), (Size::new(64, 1), Some([3; 3])));

    // A JPEG may contain the whole tile, a part of which is in the image, and no more.
    let jpeg = fs::read(folder().join("444.jpg")).unwrap();
    let Size { width, height } = decoder().header("a.jpg", &jpeg).unwrap().size;
    let tile = |rows, tile_rows| {
        let mut tags = grey(width, rows, 7, [width, tile_rows]).to_vec();
        tags[4].1 = 6;
        tags.insert(5, (277, 3));
        tiff(&tags, 1, &jpeg)
    };
    let part = decoder().decode_new("a.tif", &tile(height - 5, height)).unwrap();
    assert_eq!(part.size(), Size::new(width, height - 5));
    let error = refusal("a.tif", &tile(height - 5, height - 1));
    let found = format!("of {width} x {} pixels has {width} x {height} as JPEG", height - 5);
    assert!(error.ends_with(&found), "{error}");
}

/// Tables are read again for each strip or tile.
#[needs()]
fn jpeg_tables_that_are_too_large() {
    let refused = |height: u32, tiles: u32, data: &[u8], tables: usize| {
        let tags = [
            (256, 1),
            (257, height),
            (258, 8),
            (259, 7),
            (262, 1),
            (322, 1),
            (323, height / tiles),
            (347, 8),
        ];
        let mut bytes = tiff(&tags, tiles, data);
        let tag = [347_u16.to_le_bytes(), 4_u16.to_le_bytes()].concat();
        let at = bytes.windows(4).rposition(|entry| entry == tag).unwrap() + 4;
        bytes[at..at + 4].copy_from_slice(&(tables as u32 / 4).to_le_bytes());
        refusal("a.tif", &bytes)
    };
    let one = refused(1, 1, &[0; 80_000], 70_000);
    let expected = "its JPEG tables have 70000 bytes, too many for a picture in 1 piece";
    assert!(one.ends_with(expected), "{one}");
    let many = refused(1000, 1000, &[0; 8], 4000);
    let expected = "its JPEG tables have 4000 bytes, too many for a picture in 1000 pieces";
    assert!(many.ends_with(expected), "{many}");
    let sound = refused(1, 1, &[0; 80_000], 60_000);
    assert!(!sound.contains("tables"), "{sound}");
}

#[needs()]
fn a_region_outside_is_refused() {
    let bytes = fs::read(folder().join("rgb.png")).unwrap();
    let region = Region { left: 80, top: 0, width: 4, height: 1 };
    let mut target = Image::new(1, 1, vec![0; 3]).unwrap();
    let error = decoder().decode_region("a.png", &bytes, region, None, &mut target).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the region of 4 x 1 at column 80, row 0 is not in a.png, which has 83 x 59 pixels"
    );
}
