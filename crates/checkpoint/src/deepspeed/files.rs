//! Files of a DeepSpeed folder.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::file_name::FileName;
use crate::pth::shown;

/// Files that name the newest step, in the order of lookup.
const LATEST: [&str; 2] = ["latest", "latest_universal"];
const SCRIPT: &str = "zero_to_fp32.py";
const STEP: &str = "global_step";
const OPTIMIZER: &str = "_optim_states.pt";
const MODEL: &str = "model_states.pt";
/// Name of the folder with the parameters of a universal checkpoint.
pub(super) const UNIVERSAL: &str = "zero";
/// Maximum length of a folder's name.
const MAX_TAG: u64 = 4096;

/// Returns the folder of a step saved by DeepSpeed: `place` itself, the folder named in its file `latest`, or its only
/// `global_stepN`. `None` if there is none.
///
/// # Errors
/// Fails with [`Error::Unsupported`] for several steps without a file `latest`, and with [`Error::Damaged`] if the
/// folder named there does not exist.
pub fn deepspeed_folder(place: &Path) -> Result<Option<PathBuf>, Error> {
    if has_states(place) {
        return Ok(Some(place.to_owned()));
    }
    let is_deepspeeds = place.join(SCRIPT).is_file();
    for name in LATEST {
        let latest = place.join(name);
        let Ok(file) = File::open(&latest) else { continue };
        let mut tag = String::new();
        let read = file.take(MAX_TAG).read_to_string(&mut tag);
        let tag = FileName::new(tag.trim());
        match (read, tag) {
            (Ok(_), Ok(tag)) if has_states(&place.join(&tag)) => return Ok(Some(place.join(tag))),
            (Ok(_), Ok(tag)) if is_deepspeeds || tag.starts_with(STEP) => {
                let fact = format!(
                    "it names the folder `{}`, which is not there or has no files of DeepSpeed: give the folder of a \
                     step itself",
                    shown(&tag)
                );
                return Err(Error::Damaged { path: latest, fact });
            }
            (Ok(_), Err(error)) if is_deepspeeds => {
                return Err(Error::Damaged { path: latest, fact: error.to_string() });
            }
            _ => {}
        }
    }
    let entries = fs::read_dir(place).into_iter().flatten().flatten();
    let mut steps: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(STEP))
        .map(|entry| entry.path())
        .filter(|path| has_states(path))
        .collect();
    steps.sort();
    if steps.len() > 1 {
        let names: Vec<String> = steps.iter().map(|it| shown(&it.display().to_string())).collect();
        let fact = format!(
            "it has several steps of DeepSpeed and no file `latest`: give one of {}",
            names.join(", ")
        );
        return Err(Error::Unsupported { path: place.to_owned(), fact });
    }
    if steps.is_empty() && is_deepspeeds {
        let fact = format!("it has DeepSpeed's {SCRIPT}, but no folder of a step");
        return Err(Error::Unsupported { path: place.to_owned(), fact });
    }
    Ok(steps.pop())
}

fn has_states(folder: &Path) -> bool {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name())
        .any(|name| name.to_str().is_some_and(|name| name.ends_with(OPTIMIZER) || is_model(name)))
}

fn is_model(name: &str) -> bool {
    name.strip_suffix(MODEL).is_some_and(|start| start.ends_with(['_', '-']))
}

/// Files of a step.
#[derive(Debug)]
pub(super) struct Files {
    pub(super) folder: PathBuf,
    /// Model file with stages 1 and 2, which one rank saves.
    pub(super) whole: Option<PathBuf>,
    /// Model files with stage 3, by rank.
    pub(super) models: BTreeMap<u64, PathBuf>,
    /// Optimizer files, by rank.
    pub(super) optimizers: BTreeMap<u64, PathBuf>,
    pub(super) is_universal: bool,
}

impl Files {
    /// Lists the files of a step.
    ///
    /// # Errors
    /// Fails with [`Error::Unsupported`] for files of model parallelism, of pipelines and of experts, or with
    /// [`Error::Io`].
    pub(super) fn of(folder: &Path) -> Result<Self, Error> {
        let mut files = Self {
            folder: folder.to_owned(),
            whole: None,
            models: BTreeMap::new(),
            optimizers: BTreeMap::new(),
            is_universal: false,
        };
        let entries = fs::read_dir(folder).map_err(Error::io("read", folder))?;
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut names: Vec<String> =
            names.filter(|name| name.ends_with(OPTIMIZER) || is_model(name)).collect();
        names.sort();
        for name in names {
            let path = folder.join(&name);
            if let Some(fact) = refusal(&name) {
                return Err(Error::Unsupported { path, fact: fact.to_owned() });
            }
            let (by_rank, rank) = match (rank(&name, OPTIMIZER), rank(&name, "_model_states.pt")) {
                (Some(rank), _) => (&mut files.optimizers, rank),
                (None, Some(rank)) => (&mut files.models, rank),
                (None, None) if name == "mp_rank_00_model_states.pt" => {
                    files.whole = Some(path);
                    continue;
                }
                (None, None) => {
                    let fact = "its name is not one that DeepSpeed's ZeRO gives its files";
                    return Err(Error::Unsupported { path, fact: fact.to_owned() });
                }
            };
            if let Some(other) = by_rank.insert(rank, path) {
                let fact =
                    format!("{name} is of the same rank: two runs have saved into this folder");
                return Err(Error::Unsupported { path: other, fact });
            }
        }
        files.is_universal = files.optimizers.is_empty() && folder.join(UNIVERSAL).is_dir();
        Ok(files)
    }

    /// Returns the error for a missing file.
    pub(super) fn missing(&self, name: &str, why: &str) -> Error {
        Error::Damaged {
            path: self.folder.clone(),
            fact: format!("{name} is missing: {why}; copy the files of all ranks into the folder"),
        }
    }
}

/// Parses the rank in `[bf16_]zero_pp_rank_3_mp_rank_00` before `ending`.
fn rank(name: &str, ending: &str) -> Option<u64> {
    let name = name.strip_suffix(ending)?.strip_suffix("_mp_rank_00")?;
    let name = name.strip_prefix("bf16_").or_else(|| name.strip_prefix("fp16_")).unwrap_or(name);
    name.strip_prefix("zero_pp_rank_")?.parse().ok()
}

/// Returns the reason why a file cannot be read if its name shows an unsupported feature.
fn refusal(name: &str) -> Option<&'static str> {
    if name.starts_with("layer_") && name.contains("-model_") {
        return Some(
            "it is a layer of DeepSpeed's PipelineModule, which is not read: gather the weights in the run that saved \
             them",
        );
    }
    if name.contains("expert_") || name.starts_with("expp_rank_") {
        return Some(
            "it has the experts of a mixture of DeepSpeed's MoE, which are not read: gather the weights in the run \
             that saved them",
        );
    }
    let (_, model_rank) = name.split_once("mp_rank_")?;
    if !model_rank.starts_with("00_") {
        return Some(TENSOR_PARALLEL);
    }
    None
}

/// Reason why weights cut by tensor parallelism cannot be read.
pub(super) const TENSOR_PARALLEL: &str = "it was saved by a run with tensor or pipeline parallelism and \
                                          does not record how parameters are divided: gather the weights \
                                          in the run that saved them";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_the_rank_of_their_file() {
        assert_eq!(rank("bf16_zero_pp_rank_12_mp_rank_00_optim_states.pt", OPTIMIZER), Some(12));
        assert_eq!(rank("zero_pp_rank_0_mp_rank_00_optim_states.pt", OPTIMIZER), Some(0));
        assert_eq!(rank("zero_pp_rank_0_mp_rank_01_optim_states.pt", OPTIMIZER), None);
        assert_eq!(rank("mp_rank_00_optim_states.pt", OPTIMIZER), None);
        for name in
            ["layer_03-model_00-model_states.pt", "layer_1_expert_2_mp_rank_00_model_states.pt"]
        {
            assert!(is_model(name) && refusal(name).is_some(), "{name}");
        }
        assert!(refusal("mp_rank_01_model_states.pt").is_some());
        assert!(refusal("mp_rank_00_model_states.pt").is_none());
        assert!(!is_model("model_states.pt") && !is_model("model_states.pth"));
    }
}
