//! Files compared with what was written, on several threads.
//!
//! Read piece by piece and not through a memory map: with a map, a file that another process cuts
//! short would end this one by a signal.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crc32fast::Hasher;

use super::file::FileFacts;
use crate::error::Error;

/// Compares a file with what was written.
///
/// # Errors
/// [`Error::Damaged`] when it differs; [`Error::Io`].
pub fn verify_file(path: &Path, facts: &FileFacts) -> Result<(), Error> {
    verify_files(&[(path.to_owned(), facts)]).pop().map_or(Ok(()), Err)
}

/// The faults of the files, one for each, in their order. Large files are shared out among the
/// threads: the checksum of a whole follows from those of its parts.
pub(super) fn verify_files(files: &[(PathBuf, &FileFacts)]) -> Vec<Error> {
    let opened: Vec<Result<File, Error>> =
        files.iter().map(|(path, facts)| open(path, facts)).collect();
    // One after another as threads ask: a list would be as long as the largest size that a manifest claims.
    let parts = files.iter().enumerate().filter(|(number, _)| opened[*number].is_ok());
    let parts = parts.flat_map(|(number, (_, facts))| {
        let begins = (0..facts.bytes).step_by(PART_BYTES);
        begins.map(move |begin| (number, begin, PART_BYTES.min((facts.bytes - begin) as usize)))
    });
    let (parts, sums) = (Mutex::new(parts.enumerate()), Mutex::new(Vec::new()));
    let work = || {
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            let next = parts.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((place, (number, begin, bytes))) = next else { return };
            let Ok(file) = &opened[number] else { continue };
            let path = &files[number].0;
            let sum = sum(file, begin, bytes, &mut piece).map_err(Error::io("read", path));
            sums.lock().unwrap_or_else(PoisonError::into_inner).push((place, number, sum));
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let whole: u64 = files.iter().fold(0, |sum, (_, facts)| sum.saturating_add(facts.bytes));
    let threads = threads.min(MAX_THREADS).min(whole.div_ceil(PART_BYTES as u64) as usize);
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // When one cannot start, the others do its part.
            let _ = std::thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    let mut sums = sums.into_inner().unwrap_or_else(PoisonError::into_inner);
    sums.sort_unstable_by_key(|(place, _, _)| *place);
    let mut wholes: Vec<Result<Hasher, Error>> =
        opened.into_iter().map(|file| file.map(|_| Hasher::new())).collect();
    for (_, number, sum) in sums {
        match (&mut wholes[number], sum) {
            (Ok(whole), Ok(sum)) => whole.combine(&sum),
            (whole @ Ok(_), Err(error)) => *whole = Err(error),
            (Err(_), _) => {}
        }
    }
    let compared = wholes.into_iter().zip(files).map(|(whole, (path, facts))| {
        let found = format!("{:08x}", whole?.finalize());
        if found == facts.crc32 {
            return Ok(());
        }
        Err(Error::Damaged { path: path.clone(), fact: checksum_fact(&found, &facts.crc32) })
    });
    compared.filter_map(Result::err).collect()
}

pub(super) fn checksum_fact(found: &str, expected: &str) -> String {
    format!("its checksum is {found}, it was written with {expected}")
}

fn open(path: &Path, facts: &FileFacts) -> Result<File, Error> {
    let file = File::open(path).map_err(Error::io("read", path))?;
    let bytes = file.metadata().map_err(Error::io("read", path))?.len();
    if bytes != facts.bytes {
        let fact = format!("it has {bytes} bytes, it was written with {}", facts.bytes);
        return Err(Error::Damaged { path: path.to_owned(), fact });
    }
    Ok(file)
}

fn sum(file: &File, mut at: u64, mut left: usize, piece: &mut [u8]) -> std::io::Result<Hasher> {
    let mut crc = Hasher::new();
    while left > 0 {
        let now = left.min(piece.len());
        file.read_exact_at(&mut piece[..now], at)?;
        crc.update(&piece[..now]);
        (at, left) = (at + now as u64, left - now);
    }
    Ok(crc)
}

/// What a thread takes at a time.
const PART_BYTES: usize = 16 << 20;
/// Small, so that the checksum reads what the system has just copied while it is in the processor's
/// nearest caches: pieces of 128 kB took 1.8 times as long.
const PIECE_BYTES: usize = 64 << 10;
/// More than memory feeds.
const MAX_THREADS: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_file_has_the_checksum_of_the_whole() {
        let folder = tempfile::tempdir().unwrap();
        let (large, small) = (folder.path().join("large"), folder.path().join("small"));
        let mut bytes: Vec<u8> = (0..2 * PART_BYTES + 77).map(|i| (i % 253) as u8).collect();
        std::fs::write(&large, &bytes).unwrap();
        std::fs::write(&small, "").unwrap();
        let (of_large, of_small) =
            (FileFacts::of(&large, false).unwrap(), FileFacts::of(&small, false).unwrap());
        assert_eq!(of_large.crc32, format!("{:08x}", crc32fast::hash(&bytes)));
        let both = || verify_files(&[(small.clone(), &of_small), (large.clone(), &of_large)]);
        assert!(both().is_empty());
        for place in [0, PART_BYTES, 2 * PART_BYTES + 76] {
            bytes[place] ^= 1;
            std::fs::write(&large, &bytes).unwrap();
            assert_eq!(both().len(), 1, "byte {place}");
            bytes[place] ^= 1;
        }
        std::fs::write(&large, &bytes[1..]).unwrap();
        assert!(both()[0].to_string().contains("it has"), "{:?}", both());
        std::fs::remove_file(&small).unwrap();
        assert_eq!(both().len(), 2);
    }
}
