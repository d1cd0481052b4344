//! Replaces `${local_rank}` in arguments, as torchrun does.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// Returns the argument with the number in place of every `${local_rank}`. All other text is unchanged.
pub(crate) fn with_local_rank(arg: &OsStr, local_rank: usize) -> OsString {
    let mut rest = arg.as_bytes();
    let mut out = Vec::with_capacity(rest.len());
    while let Some(at) = rest.windows(MACRO.len()).position(|part| part == MACRO) {
        out.extend_from_slice(&rest[..at]);
        out.extend_from_slice(local_rank.to_string().as_bytes());
        rest = &rest[at + MACRO.len()..];
    }
    out.extend_from_slice(rest);
    OsString::from_vec(out)
}

const MACRO: &[u8] = b"${local_rank}";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_exact_text_is_replaced() {
        let table: [(&[u8], &[u8]); 9] = [
            (b"", b""),
            (b"--out=log-${local_rank}.txt", b"--out=log-12.txt"),
            (b"${local_rank}${local_rank}", b"1212"),
            (b"${local_rank", b"${local_rank"),
            (b"$${local_rank}", b"$12"),
            (
                b"$local_rank ${LOCAL_RANK} ${local_rank }",
                b"$local_rank ${LOCAL_RANK} ${local_rank }",
            ),
            (b"${rank} $$", b"${rank} $$"),
            (b"\xff${local_rank}\xff", b"\xff12\xff"),
            (b"${${local_rank}}", b"${12}"),
        ];
        for (arg, expected) in table {
            assert_eq!(with_local_rank(OsStr::from_bytes(arg), 12), OsStr::from_bytes(expected));
        }
    }
}
