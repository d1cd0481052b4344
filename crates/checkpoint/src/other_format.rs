//! Descriptions of files found in place of weights: other formats, archives around weights, texts.

use std::fmt::Write;

/// Describes an unknown file of `length` bytes by its first bytes, and what to do about it.
pub(crate) fn describe(start: &[u8], length: u64) -> String {
    if start.is_empty() {
        return "it is empty; download or copy it again".to_owned();
    }
    if start.starts_with(LFS) {
        return format!(
            "it is a Git LFS pointer{}; run `git lfs pull` in its repository",
            lfs_size(start)
        );
    }
    let begins = |(at, magic, _): &&(usize, &[u8], &str)| {
        start.get(*at..).is_some_and(|rest| rest.starts_with(magic))
    };
    if let Some((.., what)) = MAGIC.iter().find(begins) {
        return format!("it is {what}");
    }
    // The first fields of a model in protobuf: the version of the format, and the program that wrote it.
    if let [0x08, 3..=20, 0x12, ..] = start {
        return "it is a model in ONNX; take the safetensors or .pth file that it was exported from"
            .to_owned();
    }
    match text(start, length) {
        Some(text) => {
            let lowered = text.trim_start().to_ascii_lowercase();
            let kind = match lowered.as_bytes() {
                [b'<', b'?', b'x', ..] => "XML",
                [b'<', ..] => "a page of HTML",
                [b'{' | b'[', ..] => "JSON",
                _ => "text",
            };
            let mut shown = String::new();
            for letter in text.trim().chars().take(MAX_SHOWN) {
                // Writing to a string does not fail.
                let _ = write!(shown, "{}", letter.escape_debug());
            }
            let more = if text.trim().chars().nth(MAX_SHOWN).is_some() { "…" } else { "" };
            format!(
                "it is {kind}, which a server may have sent in place of the file: \"{shown}{more}\"; download it \
                 again"
            )
        }
        None => format!("it begins with the bytes {:02x?}", &start[..start.len().min(9)]),
    }
}

/// Returns the start as text, without a letter that is cut off at its end. `None` for binary data.
fn text(start: &[u8], length: u64) -> Option<&str> {
    let text = match std::str::from_utf8(start) {
        Ok(text) => text,
        Err(error) if error.error_len().is_none() && (start.len() as u64) < length => {
            std::str::from_utf8(&start[..error.valid_up_to()]).ok()?
        }
        Err(_) => return None,
    };
    let control = |letter: char| letter.is_control() && !letter.is_ascii_whitespace();
    (!text.trim().is_empty() && !text.contains(control)).then_some(text)
}

/// Returns the size in a Git LFS pointer, as in ` to 268 bytes`.
fn lfs_size(pointer: &[u8]) -> String {
    let text = String::from_utf8_lossy(pointer);
    let size = text.lines().find_map(|line| line.strip_prefix("size ")?.trim().parse::<u64>().ok());
    size.map_or_else(String::new, |size| format!(" to {size} bytes"))
}

const LFS: &[u8] = b"version https://git-lfs.github.com/spec/";
/// Maximum number of characters shown of a text.
const MAX_SHOWN: usize = 60;
/// Number of bytes that [`describe`] needs.
pub(crate) const START_BYTES: usize = 512;
/// Offset of a magic number, the number, and a description of the format.
const MAGIC: [(usize, &[u8], &str); 12] = [
    (
        0,
        b"\x1f\x8b",
        "compressed with gzip; unpack it first (`gunzip`, or `tar xzf` for an archive)",
    ),
    (0, b"BZh", "compressed with bzip2; unpack it first (`bunzip2`, or `tar xjf` for an archive)"),
    (0, b"\xfd7zXZ\0", "compressed with xz; unpack it first (`unxz`, or `tar xJf` for an archive)"),
    (0, b"\x28\xb5\x2f\xfd", "compressed with Zstandard; unpack it first (`unzstd`)"),
    (0, b"\x04\x22\x4d\x18", "compressed with LZ4; unpack it first (`unlz4`)"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive; unpack it first (`7z x`)"),
    (0, b"Rar!", "a RAR archive; unpack it first (`unrar x`)"),
    (0, b"PK\x05\x06", "an empty zip archive; download or copy it again"),
    (
        0,
        b"\x89HDF\r\n\x1a\n",
        "an HDF5 file, as Keras writes it; save the weights as safetensors there",
    ),
    (0, b"GGUF", "a GGUF file of llama.cpp; take the safetensors files that it was made of"),
    (0, b"\x93NUMPY", "an array of NumPy; save it with safetensors.numpy.save_file"),
    (257, b"ustar", "a tar archive; unpack it first (`tar xf`)"),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn of(start: &[u8]) -> String {
        describe(start, start.len() as u64)
    }

    #[test]
    fn what_is_not_weights_is_named_with_a_remedy() {
        let pointer =
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 267954768\n";
        assert_eq!(
            of(pointer),
            "it is a Git LFS pointer to 267954768 bytes; run `git lfs pull` in its repository"
        );
        assert!(of(b"").contains("is empty"));
        assert!(of(b"\x1f\x8b\x08\0").contains("gunzip"));
        assert!(of(&[b"\0".repeat(257).as_slice(), b"ustar\0"].concat()).contains("tar xf"));
        let page = of(b"\n<!DOCTYPE html><html>404 \xe2\x80\xa8</html>");
        assert!(page.contains("a page of HTML") && page.contains("<!DOCTYPE html>"), "{page}");
        assert!(of(b"<?xml version='1.0'?><Error>").contains("is XML"));
        let json = of(b"{\"error\":\"Invalid username or password.\"}");
        assert!(json.contains("is JSON") && json.contains("Invalid username"), "{json}");
        assert!(of(b"Entry not found").contains("is text"));
        assert!(of(b"\x08\x08\x12\x07pytorch\x1a\x052.3.1:").contains("ONNX"));
        assert_eq!(of(b"\x00\x01\x02"), "it begins with the bytes [00, 01, 02]");
    }

    #[test]
    fn texts_are_shown_short_and_without_escape_sequences() {
        let long = "é".repeat(300);
        assert!(describe(&long.as_bytes()[..511], 600).contains('…'));
        assert!(
            of(&long.as_bytes()[..511]).contains("begins with the bytes"),
            "half a letter ends it"
        );
        assert!(of(b"a \x1b[31m").contains("begins with the bytes"));
        assert!(of(b"two\nlines").contains("two\\nlines"));
    }
}
