//! Files that trackers write.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use crate::{Image, Result, Stamp, TrackError};

/// Opens a file of lines to append to, without the incomplete last line of a killed run.
pub(crate) fn append(path: &Path) -> Result<File> {
    let mut file = OpenOptions::new()
        .create(true)
        .read(true)
        .append(true)
        .open(path)
        .map_err(TrackError::file("cannot open", path))?;
    cut_half_line(&mut file).map_err(TrackError::file("cannot continue", path))?;
    Ok(file)
}

/// Cuts off the bytes after the last end of line. The file is in append mode, so the next line follows.
fn cut_half_line(file: &mut File) -> std::io::Result<()> {
    let length = file.metadata()?.len();
    let mut end = length;
    let mut block = [0; 4096];
    while end > 0 {
        let begin = end.saturating_sub(block.len() as u64);
        let part = &mut block[..(end - begin) as usize];
        file.seek(SeekFrom::Start(begin))?;
        file.read_exact(part)?;
        if let Some(newline) = part.iter().rposition(|&byte| byte == b'\n') {
            end = begin + newline as u64 + 1;
            break;
        }
        end = begin;
    }
    if end < length { file.set_len(end) } else { Ok(()) }
}

/// Writes the image as a PNG file and returns its path.
pub(crate) fn write_image(folder: &Path, name: &str, image: &Image, at: Stamp) -> Result<PathBuf> {
    fs::create_dir_all(folder).map_err(TrackError::file("cannot make the folder", folder))?;
    let name: String = name
        .chars()
        .map(|letter| if letter.is_alphanumeric() || "-_.".contains(letter) { letter } else { '_' })
        .collect();
    let step = at.step.map_or_else(|| format!("{:.6}", at.seconds()), |step| step.to_string());
    let path = folder.join(format!("{name}-{step}.png"));
    fs::write(&path, image.png()?).map_err(TrackError::file("cannot write", &path))?;
    Ok(path)
}
