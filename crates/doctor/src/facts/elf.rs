//! Reader of ELF files: the libraries that a program or library needs, and where they may be.

use std::fs::File;
use std::io;
use std::path::Path;

use object::Endianness;
use object::elf::{self, FileHeader64};
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader, SectionTable};
use object::read::{ReadCache, ReadRef, StringTable};

/// Dynamic section of a 64-bit ELF file, as text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Elf {
    /// Processor architecture of the file.
    pub(super) machine: u16,
    /// Dynamic loader that a program names. Libraries name none.
    pub(super) interpreter: Option<String>,
    /// Names of the libraries that it needs.
    pub(super) needed: Vec<String>,
    /// Folders that are searched before LD_LIBRARY_PATH (RPATH, deprecated).
    pub(super) rpath: Option<String>,
    /// Folders that are searched after LD_LIBRARY_PATH (RUNPATH).
    pub(super) runpath: Option<String>,
    /// Symbol versions that it needs, by library.
    pub(super) needed_versions: Vec<(String, Vec<String>)>,
    /// Symbol versions that it defines.
    pub(super) versions: Vec<String>,
    /// Build ID of the linker, in hexadecimal.
    pub(super) build_id: Option<String>,
}

impl Elf {
    /// Reads an ELF file. Only the parts that are needed are read: some libraries have gigabytes.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or is not a valid ELF file.
    pub(super) fn read(path: &Path) -> io::Result<Self> {
        let cache = ReadCache::new(File::open(path)?);
        parse(&cache).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// Returns `true` if this host's processors can run it.
    pub(super) fn fits_this_machine(&self) -> bool {
        THIS_MACHINE.is_none_or(|machine| machine == self.machine)
    }
}

fn parse<'data, R: ReadRef<'data>>(data: R) -> object::read::Result<Elf> {
    let header = FileHeader64::<Endianness>::parse(data)?;
    let endian = header.endian()?;
    let mut found = Elf { machine: header.e_machine(endian).0, ..Elf::default() };
    for segment in header.program_headers(endian, data)? {
        if let Some(interpreter) = segment.interpreter(endian, data)? {
            found.interpreter = Some(text(interpreter));
        }
    }
    let sections = header.sections(endian, data)?;
    let dynamic = sections.dynamic_table(endian, data)?;
    for entry in &dynamic {
        let value = || dynamic.string(entry).map(text);
        match entry.tag {
            elf::DT_NEEDED => found.needed.push(value()?),
            elf::DT_RPATH => found.rpath = Some(value()?),
            elf::DT_RUNPATH => found.runpath = Some(value()?),
            _ => {}
        }
    }
    read_versions(&mut found, &sections, endian, data)?;
    found.build_id = build_id(&sections, endian, data)?;
    Ok(found)
}

type Sections<'data, R> = SectionTable<'data, FileHeader64<Endianness>, R>;

fn read_versions<'data, R: ReadRef<'data>>(
    found: &mut Elf,
    sections: &Sections<'data, R>,
    endian: Endianness,
    data: R,
) -> object::read::Result<()> {
    if let Some((needs, link)) = sections.gnu_verneed(endian, data)? {
        let strings: StringTable<'data, R> = sections.strings(endian, data, link)?;
        for need in needs {
            let (need, versions) = need?;
            let file = text(need.file(endian, strings)?);
            let versions = versions
                // Missing weak versions do not count: the loader only warns.
                .filter(|needed| {
                    needed.as_ref().map_or(true, |need| need.vna_flags.get(endian).0 & WEAK == 0)
                })
                .map(|needed| needed?.name(endian, strings).map(text))
                .collect::<object::read::Result<Vec<String>>>()?;
            found.needed_versions.push((file, versions));
        }
    }
    if let Some((definitions, link)) = sections.gnu_verdef(endian, data)? {
        let strings: StringTable<'data, R> = sections.strings(endian, data, link)?;
        for definition in definitions {
            // The first name is the version's own; the others are those that it includes.
            if let Some(own) = definition?.1.next()? {
                found.versions.push(text(own.name(endian, strings)?));
            }
        }
    }
    Ok(())
}

fn build_id<'data, R: ReadRef<'data>>(
    sections: &Sections<'data, R>,
    endian: Endianness,
    data: R,
) -> object::read::Result<Option<String>> {
    for section in sections.iter() {
        let Some(mut notes) = section.notes(endian, data)? else { continue };
        while let Some(note) = notes.next()? {
            if note.name() == elf::ELF_NOTE_GNU && note.n_type(endian) == elf::NT_GNU_BUILD_ID {
                return Ok(Some(hexadecimal(note.desc())));
            }
        }
    }
    Ok(None)
}

pub(super) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Flag `VER_FLG_WEAK` of a version.
const WEAK: u16 = 2;
const THIS_MACHINE: Option<u16> = if cfg!(target_arch = "x86_64") {
    Some(elf::EM_X86_64.0)
} else if cfg!(target_arch = "aarch64") {
    Some(elf::EM_AARCH64.0)
} else {
    None
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_test_is_an_elf_file() {
        let elf = Elf::read(&std::env::current_exe().unwrap()).unwrap();
        assert!(elf.fits_this_machine());
        assert!(elf.needed.iter().any(|name| name.starts_with("libc.")), "{elf:?}");
        if cfg!(target_env = "gnu") {
            assert!(elf.interpreter.is_some());
            let libc = elf.needed_versions.iter().find(|(file, _)| file.starts_with("libc."));
            assert!(libc.unwrap().1.iter().any(|version| version.starts_with("GLIBC_2")));
        }
    }

    #[test]
    fn other_files_are_not() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for bytes in [&b""[..], b"#!/bin/sh\n", b"\x7fELF", &[0x7f; 4096]] {
            std::fs::write(file.path(), bytes).unwrap();
            assert!(Elf::read(file.path()).is_err());
        }
        // A program of which a copy broke off.
        let whole = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        for length in [64, 1000, whole.len() / 2] {
            std::fs::write(file.path(), &whole[..length]).unwrap();
            assert!(Elf::read(file.path()).is_err(), "{length} bytes");
        }
    }
}
