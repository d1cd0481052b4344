//! Images that a run has logged, from the folder beside its file.

use std::fs;
use std::path::Path;

use super::record::Record;

/// Images of one name.
#[derive(Debug)]
pub(super) struct Pictures {
    pub(super) name: String,
    pub(super) shown: Vec<Picture>,
    /// Reasons why other images are missing, as sentences.
    pub(super) notes: Vec<String>,
}

#[derive(Debug)]
pub(super) struct Picture {
    pub(super) step: Option<u64>,
    pub(super) bytes: Vec<u8>,
}

/// Reads the last images of each name.
pub(super) fn of_run(run: &Path, record: &Record) -> Vec<Pictures> {
    let folder = run.with_extension("images");
    let mut left = MOST_BYTES;
    let mut all = Vec::new();
    for (name, files) in &record.pictures {
        let mut pictures = Pictures { name: name.clone(), shown: Vec::new(), notes: Vec::new() };
        let earlier = files.len().saturating_sub(MOST_OF_NAME);
        if earlier > 0 {
            pictures.notes.push(format!("{earlier} earlier ones are left out."));
        }
        for (step, file) in &files[earlier..] {
            match read(&folder.join(file), left) {
                Ok(bytes) => {
                    left -= bytes.len() as u64;
                    pictures.shown.push(Picture { step: *step, bytes });
                }
                Err(reason) => pictures.notes.push(format!("{file} is left out: {reason}.")),
            }
        }
        all.push(pictures);
    }
    all
}

/// Reads a PNG file of at most this size.
fn read(path: &Path, most: u64) -> Result<Vec<u8>, String> {
    // Links are not followed: a run from elsewhere could choose a file that is put into the page.
    let facts = fs::symlink_metadata(path).map_err(|error| error.to_string())?;
    if !facts.is_file() {
        return Err("it is not a plain file".to_owned());
    }
    if facts.len() > most {
        return Err(format!("a page holds {} MB of pictures", MOST_BYTES >> 20));
    }
    let bytes = fs::read(path).map_err(|error| error.to_string())?;
    // The file may have grown.
    if !bytes.starts_with(b"\x89PNG\r\n\x1a\n") || bytes.len() as u64 > most {
        return Err("it is not a PNG file".to_owned());
    }
    Ok(bytes)
}

/// Maximum size of all images in one page, in bytes.
const MOST_BYTES: u64 = 20 << 20;
/// Maximum number of images of each name: the last ones.
const MOST_OF_NAME: usize = 12;
