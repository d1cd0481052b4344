//! Statistics of a set of images: sizes, formats, broken files, mean and standard deviation of the colours.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::decode::{DecodeOptions, ImageFormat};
use crate::samples::SampleReader;
use crate::source::ImageSource;
use crate::transforms::Compose;
use crate::{ImageError, Result, Size};

/// Statistics of a set of images: sizes, formats, broken images, and the mean and standard deviation of each colour.
///
/// ```
/// use brigade_images::ImageStats;
/// use brigade_images::source::ImageFiles;
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// # let mut bmp = b"BM\x3a\0\0\0\0\0\0\0\x36\0\0\0\x28\0\0\0\x01\0\0\0\x01\0\0\0\x01\0\x18\0".to_vec();
/// # bmp.resize(54, 0);
/// # bmp.extend([255, 0, 51, 0]); // blue, green, red
/// # std::fs::write(folder.join("one.bmp"), bmp)?;
/// # std::fs::write(folder.join("notes.jpg"), "no image")?;
///
/// let stats = ImageStats::of(&ImageFiles::find(folder)?)?;
/// assert_eq!(stats.sizes.len(), 1);
/// assert_eq!(stats.broken[0].0, 0); // notes.jpg
/// assert_eq!(stats.mean, [0.2, 0.0, 1.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct ImageStats {
    /// Size of each image that can be read, in the order of the source.
    pub sizes: Vec<Size>,
    /// Number of images of each format, by its name.
    pub formats: BTreeMap<String, usize>,
    /// Indices of the images that cannot be read, with the reasons.
    pub broken: Vec<(usize, String)>,
    /// Indices of the images that are damaged and can be read nevertheless, with the reasons: JPEG files that libjpeg
    /// reads with a warning.
    pub damaged: Vec<(usize, String)>,
    /// Mean of red, green and blue over all pixels, from 0 to 1: the mean for `Normalize`.
    pub mean: [f64; 3],
    /// Standard deviation of red, green and blue over all pixels: the standard deviation for `Normalize`.
    pub std: [f64; 3],
}

/// Sums of one thread.
#[derive(Default)]
struct Sums {
    sizes: Vec<(usize, Size)>,
    formats: BTreeMap<String, usize>,
    broken: Vec<(usize, String)>,
    damaged: Vec<(usize, String)>,
    pixels: u64,
    values: [u64; 3],
    /// A byte's square has 16 bits, so that this is exact for 2^112 pixels.
    squares: [u128; 3],
}

impl ImageStats {
    /// Decodes all images of a source, with one thread per core.
    ///
    /// # Errors
    /// Fails if a thread panics. An image that cannot be read is not an error.
    pub fn of<S: ImageSource + ?Sized>(source: &S) -> Result<Self> {
        let threads = thread::available_parallelism().map_or(1, NonZero::get);
        Self::with(source, &DecodeOptions::default(), threads, |_| {})
    }

    /// Decodes all images of a source with `options` and `threads` threads, and calls `progress` with the number of
    /// finished images, from any of the threads.
    ///
    /// # Errors
    /// Returns the same errors as [`of`](Self::of).
    pub fn with<S: ImageSource + ?Sized>(
        source: &S,
        options: &DecodeOptions,
        threads: usize,
        progress: impl Fn(usize) + Sync,
    ) -> Result<Self> {
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let work = || {
            let mut reader = SampleReader::new(options);
            let mut sums = Sums::default();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= source.len() {
                    return sums;
                }
                sums.add(source, &mut reader, index);
                progress(done.fetch_add(1, Ordering::Relaxed) + 1);
            }
        };
        let parts: Vec<thread::Result<Sums>> = thread::scope(|scope| {
            let threads: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(work)).collect();
            threads.into_iter().map(thread::ScopedJoinHandle::join).collect()
        });
        let mut all = Sums::default();
        for part in parts {
            let part = part.map_err(|_| {
                ImageError::InvalidArgument("a thread that reads images has panicked".into())
            })?;
            all.merge(part);
        }
        Ok(all.finish())
    }

    /// Returns the smallest, the median and the largest of the widths, and of the heights; `None` if no image can be
    /// read.
    #[must_use]
    pub fn spread(&self) -> Option<([u32; 3], [u32; 3])> {
        let of = |side: fn(&Size) -> u32| {
            let mut sides: Vec<u32> = self.sizes.iter().map(side).collect();
            sides.sort_unstable();
            Some([*sides.first()?, *sides.get(sides.len() / 2)?, *sides.last()?])
        };
        Some((of(|size| size.width)?, of(|size| size.height)?))
    }
}

impl Sums {
    fn add<S: ImageSource + ?Sized>(
        &mut self,
        source: &S,
        reader: &mut SampleReader,
        index: usize,
    ) {
        let image = reader.read_whole(source, index, &Compose::new());
        if let Err(error) = image {
            self.broken.push((index, error.to_string()));
            return;
        }
        if let Some(warning) = reader.warning() {
            self.damaged.push((index, warning.to_owned()));
        }
        let format = ImageFormat::of(reader.buffer());
        let format = format.map_or_else(|| "pack".to_owned(), |format| format.to_string());
        *self.formats.entry(format).or_default() += 1;
        let (view, _) = reader.image();
        self.sizes.push((index, view.size()));
        self.pixels += view.size().pixels();
        // In chunks whose sums of values fit 32 bits.
        for part in view.pixels().chunks(3 * 65_536) {
            let (mut values, mut squares) = ([0_u32; 3], [0_u64; 3]);
            for pixel in part.as_chunks::<3>().0 {
                for ((value, square), byte) in values.iter_mut().zip(&mut squares).zip(pixel) {
                    *value += u32::from(*byte);
                    *square += u64::from(u32::from(*byte) * u32::from(*byte));
                }
            }
            for channel in 0..3 {
                self.values[channel] += u64::from(values[channel]);
                self.squares[channel] += u128::from(squares[channel]);
            }
        }
    }

    fn merge(&mut self, other: Self) {
        self.sizes.extend(other.sizes);
        self.broken.extend(other.broken);
        self.damaged.extend(other.damaged);
        for (format, count) in other.formats {
            *self.formats.entry(format).or_default() += count;
        }
        self.pixels += other.pixels;
        for channel in 0..3 {
            self.values[channel] += other.values[channel];
            self.squares[channel] += other.squares[channel];
        }
    }

    fn finish(mut self) -> ImageStats {
        self.sizes.sort_unstable_by_key(|(index, _)| *index);
        self.broken.sort_unstable_by_key(|(index, _)| *index);
        self.damaged.sort_unstable_by_key(|(index, _)| *index);
        let pixels = self.pixels.max(1) as f64;
        let mean = self.values.map(|sum| sum as f64 / pixels);
        let std = std::array::from_fn(|channel| {
            let variance = self.squares[channel] as f64 / pixels - mean[channel].powi(2);
            variance.max(0.0).sqrt() / 255.0
        });
        ImageStats {
            sizes: self.sizes.into_iter().map(|(_, size)| size).collect(),
            formats: self.formats,
            broken: self.broken,
            damaged: self.damaged,
            mean: mean.map(|mean| mean / 255.0),
            std,
        }
    }
}
