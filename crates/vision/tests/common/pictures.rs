//! A source of pictures in memory.

use std::borrow::Cow;
use std::sync::atomic::{AtomicUsize, Ordering};

use brigade_vision::source::ImageSource;
use brigade_vision::{Image, ImageError};

/// PNG files of several sizes; the label of each is its number.
pub(crate) struct Pictures {
    files: Vec<Vec<u8>>,
    reads: AtomicUsize,
}

impl Pictures {
    pub(crate) fn new(count: usize) -> Self {
        let files = (0..count).map(|number| png(&picture(number))).collect();
        Self { files, reads: AtomicUsize::new(0) }
    }

    /// Makes some of them text files.
    pub(crate) fn with_broken(mut self, broken: &[usize]) -> Self {
        for number in broken {
            self.files[*number] = b"no picture at all".to_vec();
        }
        self
    }

    /// How many were read since the last call.
    pub(crate) fn reads(&self) -> usize {
        self.reads.swap(0, Ordering::Relaxed)
    }

    pub(crate) fn labels(&self) -> Vec<i64> {
        (0..self.files.len() as i64).collect()
    }
}

impl ImageSource for Pictures {
    fn len(&self) -> usize {
        self.files.len()
    }

    fn read(&self, index: usize, buffer: &mut Vec<u8>) -> Result<(), ImageError> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        buffer.clone_from(&self.files[index]);
        Ok(())
    }

    fn name(&self, index: usize) -> Cow<'_, str> {
        format!("picture-{index}.png").into()
    }
}

/// Waves of its own for each number.
pub(crate) fn picture(number: usize) -> Image {
    let (width, height) = (30 + number as u32 * 7 % 31, 30 + number as u32 * 5 % 23);
    let value = |x: u32, y: u32, channel: usize| {
        let (x, y) = (f64::from(x) / (2 + channel) as f64, f64::from(y) / 4.0);
        let wave = (x + number as f64).sin() + (y * (1.0 + number as f64 / 9.0)).cos();
        (127.0 + 60.0 * wave) as u8
    };
    let pixels = (0..height)
        .flat_map(|y| (0..width).flat_map(move |x| (0..3).map(move |c| value(x, y, c))))
        .collect();
    Image::new(width, height, pixels).unwrap()
}

fn png(image: &Image) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, image.width(), image.height());
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.write_header().unwrap().write_image_data(image.pixels()).unwrap();
    bytes
}
