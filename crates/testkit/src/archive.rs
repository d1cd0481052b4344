//! Archives in the format of `torch.save`, with contents that no program would write.

/// Returns a zip archive of these entries in the folder `w`, stored without compression, with valid checksums.
///
/// # Panics
/// Panics for more than 65535 entries, or 4 GiB.
#[must_use]
pub fn archive(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let small = |number: usize| u16::try_from(number).expect("an archive of a test is small");
    let number = |number: usize| u32::try_from(number).expect("an archive of a test is small");
    let (mut bytes, mut directory) = (Vec::new(), Vec::new());
    for (name, content) in entries {
        let name = format!("w/{name}");
        let (crc, size) = (crc32fast::hash(content), number(content.len()));
        let offset = number(bytes.len());
        let common = |out: &mut Vec<u8>| {
            out.extend([0u8; 8]); // flags, method, time and date
            for field in [crc, size, size] {
                out.extend(field.to_le_bytes());
            }
            out.extend(small(name.len()).to_le_bytes());
            out.extend([0u8; 2]); // extra
        };
        bytes.extend(b"PK\x03\x04\x00\x00");
        common(&mut bytes);
        bytes.extend(name.as_bytes());
        bytes.extend(*content);
        directory.extend(b"PK\x01\x02\x00\x00\x00\x00");
        common(&mut directory);
        directory.extend([0u8; 10]); // comment, disk, attributes
        directory.extend(offset.to_le_bytes());
        directory.extend(name.as_bytes());
    }
    let (offset, size) = (number(bytes.len()), number(directory.len()));
    bytes.extend(directory);
    bytes.extend(b"PK\x05\x06\x00\x00\x00\x00");
    for _ in 0..2 {
        bytes.extend(small(entries.len()).to_le_bytes());
    }
    bytes.extend(size.to_le_bytes());
    bytes.extend(offset.to_le_bytes());
    bytes.extend([0u8; 2]);
    bytes
}
