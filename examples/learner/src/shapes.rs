//! Generated images of shapes, each with a mask of the same size.

use std::fs::{self, File};
use std::io::BufWriter;
use std::ops::Range;
use std::path::Path;

use anyhow::Context;
use fastrand::Rng;

use crate::whole;

/// The classes of the pixels: their numbers in a mask are their places here.
pub const SHAPES: [&str; 3] = ["background", "disc", "square"];

/// Height and width of a generated image.
const SIDE: u32 = 96;

/// Writes `images/0000.png`, `masks/0000.png` and so on, and the names of the classes into `codes.txt`; a folder
/// that is there stays. The same arguments give the same bytes.
///
/// # Errors
/// When a file cannot be written.
pub fn write_shapes(folder: &Path, images: usize) -> anyhow::Result<()> {
    whole(folder, |folder| {
        for part in ["images", "masks"] {
            fs::create_dir_all(folder.join(part))?;
        }
        fs::write(folder.join("codes.txt"), SHAPES.join("\n"))?;
        for number in 0..images {
            let Scene { image, mask } = Scene::draw(&mut Rng::with_seed(number as u64));
            let file = |part: &str| folder.join(part).join(format!("{number:04}.png"));
            write_png(&file("images"), png::ColorType::Rgb, &image)?;
            write_png(&file("masks"), png::ColorType::Grayscale, &mask)?;
        }
        Ok(())
    })
}

fn write_png(path: &Path, color: png::ColorType, pixels: &[u8]) -> anyhow::Result<()> {
    let failed = || format!("cannot write {}", path.display());
    let file = File::create(path).with_context(failed)?;
    let mut encoder = png::Encoder::new(BufWriter::new(file), SIDE, SIDE);
    encoder.set_color(color);
    encoder.write_header()?.write_image_data(pixels).with_context(failed)
}

/// An image and its mask, row by row.
struct Scene {
    image: Vec<u8>,
    mask: Vec<u8>,
}

impl Scene {
    /// A noisy dark plane with one to four brighter shapes, the later ones over the earlier ones. Colours do not tell
    /// what a shape is.
    fn draw(random: &mut Rng) -> Self {
        let pixels = (SIDE * SIDE) as usize;
        let mut scene = Self { image: Vec::with_capacity(3 * pixels), mask: vec![0; pixels] };
        let plane = color(40..120, random);
        for _ in 0..pixels {
            scene.image.extend(noisy(plane, random));
        }
        for _ in 0..random.u32(1..=4) {
            let (class, color) = (random.u8(1..=2), color(130..230, random));
            let radius = random.u32(8..=20).cast_signed();
            let [x, y] = [(); 2].map(|()| random.u32(0..SIDE).cast_signed());
            for (index, class_of_pixel) in scene.mask.iter_mut().enumerate() {
                let dx = index as i32 % SIDE.cast_signed() - x;
                let dy = index as i32 / SIDE.cast_signed() - y;
                let inside = match class {
                    1 => dx * dx + dy * dy <= radius * radius,
                    _ => dx.abs().max(dy.abs()) <= radius * 7 / 8,
                };
                if inside {
                    *class_of_pixel = class;
                    scene.image[3 * index..][..3].copy_from_slice(&noisy(color, random));
                }
            }
        }
        scene
    }
}

fn color(range: Range<u8>, random: &mut Rng) -> [u8; 3] {
    [(); 3].map(|()| random.u8(range.clone()))
}

fn noisy(color: [u8; 3], random: &mut Rng) -> [u8; 3] {
    color.map(|channel| channel - 20 + random.u8(0..40))
}
