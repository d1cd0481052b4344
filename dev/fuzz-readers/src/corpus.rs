//! Initial inputs of the fuzzer: named regressions as files, and the inputs of libFuzzer, in one archive per target.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;

use crate::Target;

/// Inputs by name.
type Inputs = BTreeMap<String, Vec<u8>>;

/// Returns the stored inputs of a target with their paths, those of `fuzz/regressions/` first.
///
/// # Errors
/// Fails if a file cannot be read, or is not an archive.
pub fn corpus(target: &Target) -> Result<Vec<(PathBuf, Vec<u8>)>> {
    let (folder, archive) = (regressions(target), archive(target));
    let named = files(&folder)?.into_iter().map(|(name, input)| (folder.join(name), input));
    let packed = packed(&archive)?.into_iter().map(|(name, input)| (archive.join(name), input));
    Ok(named.chain(packed).collect())
}

/// Writes the stored inputs of a target into a folder, for libFuzzer.
///
/// # Errors
/// Fails if an input cannot be read or written.
pub fn unpack(target: &Target, folder: &Path) -> Result<()> {
    for inputs in [packed(&archive(target))?, files(&regressions(target))?] {
        for (name, input) in inputs {
            let path = folder.join(name);
            fs::write(&path, input).with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    Ok(())
}

/// Writes `fuzz/corpus/TARGET.tar.gz` from the files of a folder, without those of `fuzz/regressions/TARGET/`. An
/// archive with the same content is left as it is.
///
/// # Errors
/// Fails if a file cannot be read, or the archive cannot be written.
pub fn pack(target: &Target, folder: &Path) -> Result<()> {
    let (mut inputs, archive) = (files(folder)?, archive(target));
    let named = files(&regressions(target))?;
    inputs.retain(|name, _| !named.contains_key(name));
    if inputs == packed(&archive)? {
        return Ok(());
    }
    let bytes = pack_inputs(&inputs)?;
    fs::write(&archive, bytes).with_context(|| format!("cannot write {}", archive.display()))
}

fn regressions(target: &Target) -> PathBuf {
    Path::new(FOLDER).join("regressions").join(target.name)
}

fn archive(target: &Target) -> PathBuf {
    Path::new(FOLDER).join("corpus").join(format!("{}.tar.gz", target.name))
}

fn files(folder: &Path) -> Result<Inputs> {
    let read = || {
        let mut inputs = Inputs::new();
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            inputs.insert(name, fs::read(entry.path())?);
        }
        anyhow::Ok(inputs)
    };
    read().with_context(|| format!("cannot read the inputs in {}", folder.display()))
}

/// Returns the inputs in an archive; none if the target has no archive yet.
fn packed(archive: &Path) -> Result<Inputs> {
    if !archive.exists() {
        return Ok(Inputs::new());
    }
    let read = || unpack_inputs(File::open(archive)?);
    read().with_context(|| format!("cannot read the inputs in {}", archive.display()))
}

fn unpack_inputs(archive: impl Read) -> Result<Inputs> {
    let mut inputs = Inputs::new();
    for entry in tar::Archive::new(GzDecoder::new(archive)).entries()? {
        let mut entry = entry?;
        let name = entry.path()?.file_name().context("a member has no name")?.to_owned();
        let mut input = Vec::new();
        entry.read_to_end(&mut input)?;
        inputs.insert(name.to_string_lossy().into_owned(), input);
    }
    Ok(inputs)
}

/// Packs inputs. Equal inputs give equal bytes, at any time and on any machine.
fn pack_inputs(inputs: &Inputs) -> Result<Vec<u8>> {
    let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::best()));
    for (name, input) in inputs {
        let mut header = tar::Header::new_ustar();
        header.set_size(input.len() as u64);
        header.set_mode(0o644);
        // The other fields are 0.
        archive.append_data(&mut header, name, input.as_slice())?;
    }
    Ok(archive.into_inner()?.finish()?)
}

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz");

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::targets;

    fn names(folder: &str) -> BTreeSet<String> {
        let entries = fs::read_dir(Path::new(FOLDER).join(folder)).expect("folder of inputs");
        entries.map(|it| it.expect("entry").file_name().to_string_lossy().into_owned()).collect()
    }

    /// `cargo xtask fuzz` finds the targets by their folders.
    #[test]
    #[cfg(feature = "libtorch")]
    fn each_target_has_a_folder_and_each_folder_a_target() {
        let known: BTreeSet<String> = targets().iter().map(|it| it.name.to_owned()).collect();
        assert_eq!(names("regressions"), known);
        let archives = names("corpus");
        let packed: BTreeSet<String> = archives
            .iter()
            .filter_map(|name| name.strip_suffix(".tar.gz"))
            .map(str::to_owned)
            .collect();
        assert_eq!(packed.difference(&known).next(), None);
    }

    /// Names by libFuzzer do not describe the input.
    #[test]
    fn regressions_have_telling_names() {
        for target in targets() {
            for (name, _) in files(&regressions(target)).expect("inputs") {
                let is_hash = name.len() == 40 && name.bytes().all(|it| it.is_ascii_hexdigit());
                assert!(!is_hash, "fuzz/regressions/{}/{name}: say what it is", target.name);
            }
        }
    }

    #[test]
    fn an_archive_gives_back_its_inputs_and_the_same_inputs_the_same_archive() {
        for target in targets() {
            let inputs = packed(&archive(target)).expect("archive");
            let archive = pack_inputs(&inputs).expect("archive");
            assert_eq!(unpack_inputs(archive.as_slice()).expect("archive"), inputs);
            assert_eq!(pack_inputs(&inputs).expect("archive"), archive);
        }
    }
}
