//! Padding: pixels that are added around an image.

use serde::{Deserialize, Serialize};

use crate::ImageView;

/// Content of the pixels that are added around an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PadMode {
    /// A fixed colour: torchvision's `constant`; fastai's `Zeros` with black.
    Constant([u8; 3]),
    /// The nearest pixel: torchvision's `edge`, fastai's `Border`.
    Edge,
    /// The image mirrored at its last pixel, which is not repeated: torchvision's `reflect`, fastai's `Reflection`.
    Reflect,
    /// The image mirrored behind its last pixel, which is repeated: torchvision's `symmetric`.
    Symmetric,
}

impl PadMode {
    /// Padding with black pixels.
    pub const ZEROS: Self = Self::Constant([0; 3]);
}

/// Writes the image with pixels added on its sides (left, top, right, bottom) to `out`.
pub(super) fn pad(
    image: ImageView<'_>,
    [left, top, right, bottom]: [u32; 4],
    mode: PadMode,
    out: &mut [u8],
) {
    let size = image.size();
    let columns = sources(left, size.width, right, mode);
    let rows = sources(top, size.height, bottom, mode);
    let colour = if let PadMode::Constant(colour) = mode { colour } else { [0; 3] };
    let stride = 3 * size.columns();
    for (source, out) in rows.iter().zip(out.chunks_exact_mut(3 * columns.len().max(1))) {
        let row = source
            .and_then(|row| image.pixels().get(row * stride..(row + 1) * stride))
            .map_or(&[][..], |row| row.as_chunks::<3>().0);
        for (source, out) in columns.iter().zip(out.as_chunks_mut::<3>().0) {
            *out = source.and_then(|column| row.get(column).copied()).unwrap_or(colour);
        }
    }
}

/// Returns, for each position of a padded side, the position in the image from which its pixel is taken; `None` for the
/// colour of the padding.
fn sources(before: u32, side: u32, after: u32, mode: PadMode) -> Vec<Option<usize>> {
    let side = i64::from(side);
    let source = |place: i64| match mode {
        _ if (0..side).contains(&place) => Some(place),
        PadMode::Constant(_) => None,
        PadMode::Edge => Some(place.clamp(0, side - 1)),
        // A side of one pixel mirrors to itself.
        PadMode::Reflect if side == 1 => Some(0),
        PadMode::Reflect => {
            let place = place.rem_euclid(2 * side - 2);
            Some(place.min(2 * side - 2 - place))
        }
        PadMode::Symmetric => {
            let place = place.rem_euclid(2 * side);
            Some(place.min(2 * side - 1 - place))
        }
    };
    (-i64::from(before)..side + i64::from(after))
        .map(|place| source(place).and_then(|place| usize::try_from(place).ok()))
        .collect()
}
