//! An image without encoding: what a pack gives in place of a file's bytes.

use crate::image::{ImageView, Size};
use crate::{ImageError, Result};

const MAGIC: &[u8; 8] = b"BRIGRAW\x01";
/// Magic, width and height.
pub(crate) const HEADER: usize = 16;

/// Makes `buffer` hold the header and room for the pixels, and lends that room.
pub(crate) fn begin(size: Size, buffer: &mut Vec<u8>) -> Option<&mut [u8]> {
    let bytes = size.bytes()?.checked_add(HEADER)?;
    buffer.clear();
    buffer.try_reserve(bytes).ok()?;
    buffer.extend(MAGIC);
    buffer.extend(size.width.to_le_bytes());
    buffer.extend(size.height.to_le_bytes());
    buffer.resize(bytes, 0);
    buffer.get_mut(HEADER..)
}

/// Sees bytes as an image without encoding; `None` when they are something else.
pub(crate) fn view<'a>(name: &str, bytes: &'a [u8]) -> Option<Result<ImageView<'a>>> {
    let (header, pixels) = bytes.split_at_checked(HEADER)?;
    let [width, height] = match header.strip_prefix(MAGIC)?.as_chunks::<4>().0 {
        [width, height] => [width, height].map(|bytes| u32::from_le_bytes(*bytes)),
        _ => return None,
    };
    Some(ImageView::new(Size::new(width, height), pixels).map_err(|error| ImageError::Decode {
        name: name.to_owned(),
        detail: format!("an image of a pack: {error}"),
    }))
}
