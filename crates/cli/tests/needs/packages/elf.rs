//! What a program needs to be loaded.

use std::fs;
use std::path::Path;

/// Needs of a 64-bit program in the ELF format, in little-endian byte order.
#[derive(Debug, PartialEq)]
pub(super) struct Loading {
    /// `true` if the kernel starts a dynamic loader for it.
    pub(super) has_interpreter: bool,
    /// Number of shared libraries that it names.
    pub(super) libraries: usize,
}

/// Returns the number of the processor that a program is for.
pub(super) fn machine(program: &Path) -> u16 {
    let bytes = contents(program);
    u16::from_le_bytes([bytes[18], bytes[19]])
}

fn contents(program: &Path) -> Vec<u8> {
    let bytes = fs::read(program).unwrap();
    assert_eq!(bytes[..6], *b"\x7fELF\x02\x01", "{}", program.display());
    bytes
}

impl Loading {
    pub(super) fn of(program: &Path) -> Self {
        let bytes = contents(program);
        let number = |at: usize, size: usize| {
            let bytes = bytes[at..at + size].iter().rev();
            bytes.fold(0_usize, |number, byte| (number << 8) | usize::from(*byte))
        };
        let (headers, size, count) = (number(32, 8), number(54, 2), number(56, 2));
        assert!(count > 0, "{} has no program headers", program.display());
        let mut loading = Self { has_interpreter: false, libraries: 0 };
        for header in (0..count).map(|index| headers + index * size) {
            match number(header, 4) {
                PT_INTERP => loading.has_interpreter = true,
                PT_DYNAMIC => {
                    let (start, length) = (number(header + 8, 8), number(header + 32, 8));
                    let tags = (0..length / 16).map(|index| number(start + index * 16, 8));
                    let tags = tags.take_while(|tag| *tag != DT_NULL);
                    loading.libraries += tags.filter(|tag| *tag == DT_NEEDED).count();
                }
                _ => {}
            }
        }
        loading
    }
}

/// Number of aarch64.
pub(super) const AARCH64: u16 = 183;

const PT_DYNAMIC: usize = 2;
const PT_INTERP: usize = 3;
const DT_NULL: usize = 0;
const DT_NEEDED: usize = 1;
