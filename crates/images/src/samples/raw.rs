//! An unencoded image: the bytes that a pack returns instead of an encoded file.

use crate::image::{ImageView, Size};
use crate::{ImageError, Result};

const MAGIC: &[u8; 8] = b"BRIGRAW\x01";
/// Size of the header: magic, width and height.
pub(crate) const HEADER: usize = 16;

/// Writes the header to `buffer`, and returns the room for the pixels after it.
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

/// Returns a view of an unencoded image; `None` if the bytes are something else.
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
