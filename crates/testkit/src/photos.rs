//! Generated JPEG files with the statistics of photographs.

use std::fs;
use std::io;
use std::path::Path;
use std::thread;

use jpeg_encoder::{ColorType, Encoder, SamplingFactor};

/// Generated set of JPEG files that replaces photographs in tests.
///
/// Each image has the properties that make photographs costly to decode and hard to classify: texture with the same
/// energy in every octave (amplitudes fall as 1/f), objects of all sizes that hide one another and so make edges,
/// shading, sensor noise, several sizes and aspect ratios, and 1.2 to 2 bits per pixel. Its class is the form and the
/// surface of a few large objects among many small ones, with a weak tendency of their colour, so that a network learns
/// it, but not in its first steps.
///
/// The same arguments give the same bytes on every machine: all arithmetic is integer arithmetic.
///
/// ```
/// use brigade_testkit::Photos;
///
/// let folder = tempfile::tempdir()?;
/// Photos::new(2, 3).write(folder.path())?;
/// assert!(folder.path().join("train/disc/0002.jpg").is_file());
/// assert!(folder.path().join("val/square/0000.jpg").is_file());
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Photos {
    classes: usize,
    per_class: usize,
    seed: u64,
    sizes: Vec<(u16, u16)>,
}

/// Forms of the classes' objects. The second five classes have stripes.
const FORMS: [Form; 5] = [Form::Disc, Form::Square, Form::Triangle, Form::Ring, Form::Cross];

const NAMES: [&str; 10] = [
    "disc",
    "square",
    "triangle",
    "ring",
    "cross",
    "striped_disc",
    "striped_square",
    "striped_triangle",
    "striped_ring",
    "striped_cross",
];

/// Colour that each class tends to, as Cb and Cr around 0.
const TENDENCIES: [(i32, i32); 10] = [
    (-28, 22),
    (26, -18),
    (-24, -14),
    (14, 26),
    (-6, -28),
    (30, 4),
    (-30, 2),
    (4, 30),
    (22, 18),
    (-16, 26),
];

/// Widths and heights that cameras and websites use.
const SIZES: [(u16, u16); 8] = [
    (500, 375),
    (500, 333),
    (375, 500),
    (500, 375),
    (480, 360),
    (333, 500),
    (640, 427),
    (400, 400),
];

/// JPEG quality, from 1 to 100.
const QUALITY: u8 = 88;

impl Photos {
    /// Creates a set of `per_class` training images per class and a fifth as many validation images, at least one, in
    /// `classes` classes (at most 10).
    #[must_use]
    pub fn new(classes: usize, per_class: usize) -> Self {
        let classes = classes.clamp(1, NAMES.len());
        Self { classes, per_class, seed: 0, sizes: SIZES.to_vec() }
    }

    /// Sets the seed. Defaults to 0.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Sets one size in pixels for all images. By default there are several sizes around 500 x 375.
    #[must_use]
    pub fn size(mut self, width: u16, height: u16) -> Self {
        self.sizes = vec![(width.max(1), height.max(1))];
        self
    }

    /// Returns the names of the classes, in order.
    #[must_use]
    pub fn classes(&self) -> &'static [&'static str] {
        &NAMES[..self.classes]
    }

    /// Returns the number of validation images per class.
    #[must_use]
    pub fn validation_per_class(&self) -> usize {
        (self.per_class / 5).max(1)
    }

    /// Returns one image as the bytes of a JPEG file.
    #[must_use]
    pub fn jpeg(&self, class: usize, index: usize) -> Vec<u8> {
        let mut rng = Rng::new(self.seed, class as u64, index as u64);
        let (width, height) = self.sizes[rng.below(self.sizes.len() as u32) as usize];
        let pixels = Scene::new(&mut rng, class % NAMES.len(), width, height).render();
        let mut bytes = Vec::new();
        let mut encoder = Encoder::new(&mut bytes, QUALITY);
        encoder.set_sampling_factor(SamplingFactor::R_4_2_0);
        encoder
            .encode(&pixels, width, height, ColorType::Ycbcr)
            .expect("a picture with sides above 0 in a vector can be encoded");
        bytes
    }

    /// Writes `train/CLASS/0000.jpg` and so on, and `val/CLASS/…`, on two threads.
    ///
    /// # Errors
    /// Fails when a folder or a file cannot be written.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        let mut files = Vec::new();
        for (class, name) in self.classes().iter().enumerate() {
            let parts = [
                ("train", 0, self.per_class),
                ("val", self.per_class, self.validation_per_class()),
            ];
            for (part, first, count) in parts {
                let folder = folder.join(part).join(name);
                fs::create_dir_all(&folder)?;
                let file = |n| (folder.join(format!("{n:04}.jpg")), class, first + n);
                files.extend((0..count).map(file));
            }
        }
        let halves = files.split_at(files.len() / 2);
        thread::scope(|scope| {
            let write = |files: &[(_, usize, usize)]| {
                files.iter().try_for_each(|(path, class, index): &(std::path::PathBuf, _, _)| {
                    fs::write(path, self.jpeg(*class, *index))
                })
            };
            let other = scope.spawn(move || write(halves.1));
            write(halves.0)?;
            other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

#[derive(Clone, Copy, Debug)]
enum Form {
    Disc,
    Square,
    Triangle,
    Ring,
    Cross,
}

/// Object in front of those painted before it. Lengths are in pixels.
#[derive(Debug)]
struct Object {
    form: Form,
    centre: (i32, i32),
    /// Half of its extent along its own axes.
    half: (i32, i32),
    /// Direction and length of the first axis.
    axis: (i32, i32, i32),
    /// Y, Cb and Cr, the last two around 0.
    colour: (i32, i32, i32),
    /// Increase of the luma from one end of the first axis to its middle.
    shade: i32,
    /// Period and strength of the stripes.
    stripes: Option<(i32, i32)>,
    /// Strength of the texture on it, in 64ths.
    texture: i32,
}

struct Scene {
    width: i32,
    height: i32,
    background: (i32, i32, i32),
    objects: Vec<Object>,
    /// Seed of texture and sensor noise.
    noise: u64,
}

/// Pixel before texture is added.
#[derive(Clone, Copy)]
struct Surface {
    luma: i32,
    chroma: (i32, i32),
    texture: i32,
}

impl Scene {
    fn new(rng: &mut Rng, class: usize, width: u16, height: u16) -> Self {
        let (width, height) = (i32::from(width), i32::from(height));
        let side = width.min(height);
        let background = (rng.between(70, 170), rng.between(-18, 18), rng.between(-18, 18));
        let anywhere = |rng: &mut Rng| (rng.between(0, width), rng.between(0, height));
        let mut objects = Vec::new();
        // Half sizes fall off as the square of the size, as in photographs.
        for _ in 0..rng.between(40, 70) {
            let largest = side / 4;
            let half = (largest * 6 / rng.between(6, largest.max(7))).max(3);
            let form = FORMS[rng.below(5) as usize];
            let centre = anywhere(rng);
            let colour = (rng.between(25, 230), rng.between(-34, 34), rng.between(-34, 34));
            let stripes = (rng.below(4) == 0).then(|| (rng.between(4, 12), rng.between(8, 24)));
            objects.push(Object::new(rng, form, centre, half, colour, stripes));
        }
        let (cb, cr) = TENDENCIES[class];
        for _ in 0..rng.between(2, 3) {
            let half = (side * rng.between(16, 28) / 100).max(1);
            let colour =
                (rng.between(50, 205), cb + rng.between(-26, 26), cr + rng.between(-26, 26));
            let stripes = (class >= FORMS.len()).then(|| (rng.between(6, 14), rng.between(14, 30)));
            let form = FORMS[class % FORMS.len()];
            let part = |rng: &mut Rng, length: i32| length * rng.between(20, 80) / 100;
            let centre = (part(rng, width), part(rng, height));
            objects.push(Object::new(rng, form, centre, half, colour, stripes));
        }
        // A few small ones in front of them.
        for _ in 0..rng.between(4, 10) {
            let form = FORMS[rng.below(5) as usize];
            let colour = (rng.between(25, 230), rng.between(-34, 34), rng.between(-34, 34));
            let half = rng.between(4, (side / 14).max(5));
            let centre = anywhere(rng);
            objects.push(Object::new(rng, form, centre, half, colour, None));
        }
        Self { width, height, background, objects, noise: rng.next() }
    }

    /// Returns Y, Cb, Cr of each pixel, row by row.
    fn render(&self) -> Vec<u8> {
        let (width, height) = (self.width as usize, self.height as usize);
        let (luma, cb, cr) = self.background;
        let mut surfaces = vec![Surface { luma, chroma: (cb, cr), texture: 64 }; width * height];
        for object in &self.objects {
            object.paint(&mut surfaces, self.width, self.height);
        }
        let texture = self.texture();
        // A lens: the luma of edges is spread over three pixels each way.
        let sharp: Vec<i32> = surfaces
            .iter()
            .zip(&texture)
            .map(|(surface, texture)| 16 * surface.luma + texture * surface.texture / 64)
            .collect();
        let soft = blurred(&sharp, width, height);
        let mut pixels = Vec::with_capacity(3 * width * height);
        for (at, (surface, luma)) in surfaces.iter().zip(soft).enumerate() {
            let grain = (hash(self.noise, at as u64, 99) % 5) as i32 - 2;
            let byte = |value: i32| value.clamp(0, 255) as u8;
            pixels.push(byte(luma / 16 + grain));
            pixels.push(byte(128 + surface.chroma.0 + texture[at] / 160));
            pixels.push(byte(128 + surface.chroma.1 - texture[at] / 200));
        }
        pixels
    }

    /// Returns, in 16ths of a grey level, noise with the same energy in each octave: values at the corners of a grid
    /// with smooth interpolation, for grids of 2 to 128 pixels.
    fn texture(&self) -> Vec<i32> {
        let (width, height) = (self.width as usize, self.height as usize);
        let mut sum = vec![0; width * height];
        for octave in 1..8 {
            let cell = 1 << octave;
            let columns = width / cell + 2;
            // Interpolation weight of a position in a cell, in 256ths.
            let weights: Vec<i32> = (0..cell as i32)
                .map(|place| {
                    let t = 256 * place / cell as i32;
                    (t * t * (768 - 2 * t)) >> 16
                })
                .collect();
            let corner = |column: usize, row: usize| {
                let key = (row as u64) << 32 | column as u64;
                (hash(self.noise, key, octave) % 257) as i32 - 128
            };
            for (y, row) in sum.chunks_exact_mut(width).enumerate() {
                let weight = weights[y % cell];
                let line: Vec<i32> = (0..columns)
                    .map(|column| {
                        let (above, below) =
                            (corner(column, y / cell), corner(column, y / cell + 1));
                        256 * above + (below - above) * weight
                    })
                    .collect();
                for (x, value) in row.iter_mut().enumerate() {
                    let (left, right) = (line[x / cell], line[x / cell + 1]);
                    let level = left + (right - left) / 256 * weights[x % cell];
                    *value += (level * STRENGTH) >> 16;
                }
            }
        }
        sum
    }
}

/// Twice the maximum of one octave of texture, in 16ths of a grey level.
const STRENGTH: i32 = 320;

impl Object {
    fn new(
        rng: &mut Rng,
        form: Form,
        centre: (i32, i32),
        half: i32,
        colour: (i32, i32, i32),
        stripes: Option<(i32, i32)>,
    ) -> Self {
        let (x, y) = (rng.between(-64, 64), rng.between(-64, 64));
        let length = i32::try_from((x * x + y * y).unsigned_abs().isqrt()).unwrap_or(i32::MAX);
        Self {
            form,
            centre,
            half: (half, half * rng.between(60, 100) / 100 + 1),
            axis: if length == 0 { (1, 0, 1) } else { (x, y, length) },
            colour,
            shade: rng.between(-30, 30),
            stripes,
            texture: rng.between(16, 110),
        }
    }

    fn paint(&self, surfaces: &mut [Surface], width: i32, height: i32) {
        let reach = 3 * self.half.0.max(self.half.1) / 2 + 1;
        let (left, right) = ((self.centre.0 - reach).max(0), (self.centre.0 + reach).min(width));
        let (top, bottom) = ((self.centre.1 - reach).max(0), (self.centre.1 + reach).min(height));
        for y in top..bottom {
            for x in left..right {
                let (dx, dy) = (x - self.centre.0, y - self.centre.1);
                let (ax, ay, length) = self.axis;
                let (u, v) = ((dx * ax + dy * ay) / length, (dy * ax - dx * ay) / length);
                if !self.form.contains(u, v, self.half) {
                    continue;
                }
                let mut luma = self.colour.0 + self.shade * u / self.half.0;
                if let Some((period, strength)) = self.stripes {
                    luma += if u.div_euclid(period) % 2 == 0 { strength } else { -strength };
                }
                surfaces[(y * width + x) as usize] =
                    Surface { luma, chroma: (self.colour.1, self.colour.2), texture: self.texture };
            }
        }
    }
}

impl Form {
    /// Returns `true` if a point, given along the axes of the form from its centre, is inside.
    fn contains(self, u: i32, v: i32, (a, b): (i32, i32)) -> bool {
        let in_box = u.abs() <= a && v.abs() <= b;
        let in_disc = |percent: i64| {
            let (u, v) = (i64::from(u) * i64::from(b), i64::from(v) * i64::from(a));
            let limit = i64::from(a) * i64::from(b) * percent / 100;
            u * u + v * v <= limit * limit
        };
        match self {
            Self::Disc => in_disc(100),
            Self::Square => in_box,
            Self::Triangle => v.abs() <= b && 2 * b * u.abs() <= a * (b - v),
            Self::Ring => in_disc(100) && !in_disc(55),
            Self::Cross => in_box && (3 * u.abs() <= a || 3 * v.abs() <= b),
        }
    }
}

/// Convolves the values with the kernel 1, 2, 1 along both axes; the border is repeated.
fn blurred(values: &[i32], width: usize, height: usize) -> Vec<i32> {
    let mut across = Vec::with_capacity(values.len());
    for row in values.chunks_exact(width) {
        across
            .extend((0..width).map(|x| {
                (row[x.saturating_sub(1)] + 2 * row[x] + row[(x + 1).min(width - 1)]) / 4
            }));
    }
    let at = |x: usize, y: usize| across[y * width + x];
    (0..height)
        .flat_map(|y| {
            let (above, below) = (y.saturating_sub(1), (y + 1).min(height - 1));
            (0..width).map(move |x| (at(x, above) + 2 * at(x, y) + at(x, below)) / 4)
        })
        .collect()
}

/// SplitMix64: a pseudo-random generator with a 64-bit seed.
struct Rng(u64);

impl Rng {
    fn new(seed: u64, class: u64, index: u64) -> Self {
        Self(hash(seed, class, index))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.0)
    }

    fn below(&mut self, limit: u32) -> u32 {
        (self.next() >> 32) as u32 % limit
    }

    /// Returns a number from `low` to `high`, both inclusive.
    fn between(&mut self, low: i32, high: i32) -> i32 {
        low + self.below((high - low).unsigned_abs() + 1).cast_signed()
    }
}

fn hash(a: u64, b: u64, c: u64) -> u64 {
    mixed(mixed(mixed(a) ^ b).wrapping_add(c.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

fn mixed(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_bytes_on_every_machine() {
        let photos = Photos::new(10, 1);
        let sums: Vec<u32> =
            [(0, 0), (4, 7), (9, 100)].map(|(c, i)| crc32fast::hash(&photos.jpeg(c, i))).into();
        assert_eq!(sums, DIGESTS);
        assert_ne!(photos.seed(1).jpeg(0, 0), Photos::new(10, 1).jpeg(0, 0));
    }

    const DIGESTS: [u32; 3] = [734_100_206, 1_316_709_916, 2_599_479_353];

    #[test]
    fn as_many_bits_in_a_pixel_as_photographs_have() {
        let photos = Photos::new(10, 1).size(500, 375);
        for class in 0..10 {
            let bits = 8.0 * photos.jpeg(class, 0).len() as f64 / (500.0 * 375.0);
            assert!((1.2..2.0).contains(&bits), "class {class}: {bits:.2} bits in a pixel");
        }
    }

    #[test]
    fn sides_may_be_small() {
        for (width, height) in [(1, 1), (3, 2), (16, 9)] {
            assert!(!Photos::new(1, 1).size(width, height).jpeg(0, 0).is_empty());
        }
    }

    /// The mean image of each class, on 8 x 8 cells, predicts the class better than chance, and far from perfectly.
    #[test]
    fn classes_differ_but_not_in_their_mean_image() {
        let features = |class: usize, index: usize| -> Vec<f64> {
            let mut rng = Rng::new(5, class as u64, index as u64);
            let pixels = Scene::new(&mut rng, class, 128, 96).render();
            let mut cells = vec![0.0; 8 * 8 * 3];
            for (at, value) in pixels.iter().enumerate() {
                let (x, y) = (at / 3 % 128 / 16, at / 3 / 128 / 12);
                cells[(y * 8 + x) * 3 + at % 3] += f64::from(*value) / (16.0 * 12.0);
            }
            cells
        };
        let mean = |class: usize| -> Vec<f64> {
            let mut sum = vec![0.0; 8 * 8 * 3];
            for index in 0..40 {
                for (sum, value) in sum.iter_mut().zip(features(class, index)) {
                    *sum += value / 40.0;
                }
            }
            sum
        };
        let means: Vec<_> = (0..10).map(mean).collect();
        let distance =
            |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum() };
        let mut right = 0;
        for class in 0..10 {
            for index in 40..60 {
                let own = features(class, index);
                let nearest = (0..10).min_by(|a, b| {
                    distance(&means[*a], &own).total_cmp(&distance(&means[*b], &own))
                });
                right += usize::from(nearest == Some(class));
            }
        }
        // Of 200, with 20 by chance.
        assert!((30..120).contains(&right), "{right} of 200");
    }
}
