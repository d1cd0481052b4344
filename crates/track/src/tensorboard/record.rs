//! TFRecord: the framing of events in a file.

/// Appends `data` with its length before it and masked checksums (CRC-32C) after both:
/// `u64 length, u32 crc(length), data, u32 crc(data)`, little-endian.
pub(super) fn frame(data: &[u8], out: &mut Vec<u8>) {
    let length = (data.len() as u64).to_le_bytes();
    out.extend_from_slice(&length);
    out.extend_from_slice(&masked(&length).to_le_bytes());
    out.extend_from_slice(data);
    out.extend_from_slice(&masked(data).to_le_bytes());
}

/// TensorFlow's mask: a CRC of data that contain CRCs is weak.
fn masked(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_the_one_of_rfc_3720_and_its_mask_tensorflows() {
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
        // The first bytes of any file of TensorBoard: a record of 24 bytes.
        let mut out = Vec::new();
        frame(&[0; 24], &mut out);
        assert_eq!(out[..12], [0x18, 0, 0, 0, 0, 0, 0, 0, 0xa3, 0x7f, 0x4b, 0x22]);
        assert_eq!(out.len(), 8 + 4 + 24 + 4);
    }
}
