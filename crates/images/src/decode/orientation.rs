//! Orientation of stored images.

use image::metadata;

use crate::image::{CropBox, Image, ImageView, NoMemory, Region, Size};

/// Rotation and mirroring that brings stored pixels upright: the eight values of EXIF's tag `Orientation`.
///
/// ```
/// use brigade_images::Size;
/// use brigade_images::decode::Orientation;
///
/// let upright = Orientation::of_exif(6).unwrap();
/// assert_eq!(upright, Orientation::Rotate90);
/// assert_eq!(upright.size_after(Size::new(640, 480)), Size::new(480, 640));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Orientation {
    /// Value 1: unchanged.
    #[default]
    Normal,
    /// Value 2: mirrored, left to right.
    MirrorHorizontal,
    /// Value 3: rotated by 180 degrees.
    Rotate180,
    /// Value 4: mirrored, top to bottom.
    MirrorVertical,
    /// Value 5: transposed; columns become rows.
    Transpose,
    /// Value 6: rotated by 90 degrees, clockwise.
    Rotate90,
    /// Value 7: transposed, and rows and columns reversed.
    Transverse,
    /// Value 8: rotated by 90 degrees, counter-clockwise.
    Rotate270,
}

impl Orientation {
    /// Returns the orientation of a value of the EXIF tag, from 1 to 8, or `None` for another value.
    #[must_use]
    pub fn of_exif(value: u8) -> Option<Self> {
        Some(match value {
            1 => Self::Normal,
            2 => Self::MirrorHorizontal,
            3 => Self::Rotate180,
            4 => Self::MirrorVertical,
            5 => Self::Transpose,
            6 => Self::Rotate90,
            7 => Self::Transverse,
            8 => Self::Rotate270,
            _ => return None,
        })
    }

    /// Returns the orientation in a block of EXIF data, if it contains one.
    pub(super) fn in_exif(data: &[u8]) -> Option<Self> {
        let data = data.strip_prefix(b"Exif\0\0").unwrap_or(data);
        Self::of_exif(metadata::Orientation::from_exif_chunk(data)?.to_exif())
    }

    /// Returns `true` if rows become columns.
    fn swaps(self) -> bool {
        matches!(self, Self::Transpose | Self::Rotate90 | Self::Transverse | Self::Rotate270)
    }

    /// Returns whether columns and rows are reversed, before rows become columns.
    fn reverses(self) -> (bool, bool) {
        match self {
            Self::Normal | Self::Transpose => (false, false),
            Self::MirrorHorizontal | Self::Rotate270 => (true, false),
            Self::MirrorVertical | Self::Rotate90 => (false, true),
            Self::Rotate180 | Self::Transverse => (true, true),
        }
    }

    /// Returns the size of an image of `size` after the orientation is applied.
    #[must_use]
    pub fn size_after(self, size: Size) -> Size {
        if self.swaps() { Size::new(size.height, size.width) } else { size }
    }

    /// Returns the size of a stored image that has `size` after the orientation is applied.
    pub(super) fn size_before(self, size: Size) -> Size {
        self.size_after(size)
    }

    /// Returns the stored position of a region of an upright image of `size`.
    pub(super) fn region_before(self, region: Region, size: Size) -> Region {
        let Region { left, top, width, height } = region;
        let (region, size) = if self.swaps() {
            let region = Region { left: top, top: left, width: height, height: width };
            (region, Size::new(size.height, size.width))
        } else {
            (region, size)
        };
        let (columns, rows) = self.reverses();
        let Region { mut left, mut top, width, height } = region;
        if columns {
            left = size.width - left - width;
        }
        if rows {
            top = size.height - top - height;
        }
        Region { left, top, width, height }
    }

    /// Returns the upright position of a part of a stored image of `size`.
    pub(super) fn crop_after(self, part: CropBox, size: Size) -> CropBox {
        let (columns, rows) = self.reverses();
        let CropBox { mut left, mut top, width, height } = part;
        if columns {
            left = f64::from(size.width) - left - width;
        }
        if rows {
            top = f64::from(size.height) - top - height;
        }
        if self.swaps() {
            CropBox { left: top, top: left, width: height, height: width }
        } else {
            CropBox { left, top, width, height }
        }
    }

    /// Applies the orientation, and writes the result to `target`.
    pub(super) fn apply(self, image: ImageView<'_>, target: &mut Image) -> Result<(), NoMemory> {
        let size = image.size();
        let out = target.reset(self.size_after(size))?;
        let (columns, rows) = (size.columns(), size.rows());
        let (reverse_columns, reverse_rows) = self.reverses();
        let row_of = |y: usize| if reverse_rows { rows - 1 - y } else { y };
        let column_of = |x: usize| if reverse_columns { columns - 1 - x } else { x };
        let pixels = image.pixels();
        let width = if self.swaps() { rows } else { columns };
        for (y, row) in out.chunks_exact_mut(3 * width.max(1)).enumerate() {
            for (x, to) in row.chunks_exact_mut(3).enumerate() {
                let (x, y) = if self.swaps() { (y, x) } else { (x, y) };
                let start = 3 * (row_of(y) * columns + column_of(x));
                to.copy_from_slice(&pixels[start..start + 3]);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Orientation; 8] = [
        Orientation::Normal,
        Orientation::MirrorHorizontal,
        Orientation::Rotate180,
        Orientation::MirrorVertical,
        Orientation::Transpose,
        Orientation::Rotate90,
        Orientation::Transverse,
        Orientation::Rotate270,
    ];

    /// The value of each pixel is its number.
    fn image(width: u32, height: u32) -> Image {
        let pixels = (0..width * height).flat_map(|n| [n as u8; 3]).collect();
        Image::new(width, height, pixels).unwrap()
    }

    fn turned(orientation: Orientation, image: &Image) -> Vec<u8> {
        let mut out = Image::scratch();
        orientation.apply(image.view(), &mut out).unwrap();
        out.pixels().iter().step_by(3).copied().collect()
    }

    #[test]
    fn as_exif_means_them() {
        // 0 1 2
        // 3 4 5
        let image = image(3, 2);
        let expected: [[u8; 6]; 8] = [
            [0, 1, 2, 3, 4, 5],
            [2, 1, 0, 5, 4, 3],
            [5, 4, 3, 2, 1, 0],
            [3, 4, 5, 0, 1, 2],
            [0, 3, 1, 4, 2, 5],
            [3, 0, 4, 1, 5, 2],
            [5, 2, 4, 1, 3, 0],
            [2, 5, 1, 4, 0, 3],
        ];
        for (value, expected) in (1..).zip(expected) {
            assert_eq!(turned(Orientation::of_exif(value).unwrap(), &image), expected, "{value}");
        }
        assert!(Orientation::of_exif(0).is_none() && Orientation::of_exif(9).is_none());
    }

    #[test]
    fn regions_are_where_their_pixels_are() {
        let image = image(5, 4);
        for orientation in ALL {
            let mut all = Image::scratch();
            orientation.apply(image.view(), &mut all).unwrap();
            let region = Region { left: 1, top: 0, width: 2, height: 3 };
            let mut wanted = Image::scratch();
            all.view().crop_into(region, &mut wanted).unwrap();

            let before = orientation.region_before(region, all.size());
            let (mut stored, mut found) = (Image::scratch(), Image::scratch());
            image.view().crop_into(before, &mut stored).unwrap();
            orientation.apply(stored.view(), &mut found).unwrap();
            assert_eq!(found, wanted, "{orientation:?}");
            assert_eq!(orientation.crop_after(before.into(), image.size()), region.into());
        }
    }
}
