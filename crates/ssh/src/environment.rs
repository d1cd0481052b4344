//! Environment variables that are passed to the other hosts.
//!
//! By a list and not all of them: `PATH`, `HOME` and their kin are each host's own.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use brigade_rank_env::env;

use crate::{LocalFacts, RemoteError};

/// Request of the user for an environment variable of the hosts: a value of `--env-pass`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EnvRequest {
    /// `NAME`: the variable with its value in this environment. With a star at the end, all variables whose names begin
    /// with that text.
    Pass(String),
    /// `NAME=value`: the variable with this value.
    Set(String, OsString),
}

impl EnvRequest {
    /// Parses a value of `--env-pass`.
    ///
    /// ```
    /// use brigade_ssh::EnvRequest;
    /// assert_eq!(EnvRequest::parse("WANDB_*".as_ref()), Ok(EnvRequest::Pass("WANDB_*".into())));
    /// let set = EnvRequest::Set("A".into(), "b=c".into());
    /// assert_eq!(EnvRequest::parse("A=b=c".as_ref()), Ok(set));
    /// assert!(EnvRequest::parse("A B".as_ref()).is_err());
    /// ```
    ///
    /// # Errors
    /// The text is not a variable. The error describes the valid syntax.
    pub fn parse(text: &OsStr) -> Result<Self, String> {
        let bytes = text.as_bytes();
        let (name, value) = match bytes.iter().position(|byte| *byte == b'=') {
            Some(at) => (&bytes[..at], Some(&bytes[at + 1..])),
            None => (bytes, None),
        };
        let name = str::from_utf8(name).map_err(|_| EXPECTED.to_owned())?;
        let stem = match value {
            Some(_) => name,
            None => name.strip_suffix('*').unwrap_or(name),
        };
        if stem.is_empty() || !stem.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
            return Err(EXPECTED.to_owned());
        }
        if is_ranks_own(name) {
            return Err(format!(
                "{name} is set by the launcher, with a different value for each rank"
            ));
        }
        if env::LAUNCHERS_OWN.contains(&name) {
            return Err(format!(
                "{name} is read by the launcher and not passed to the ranks: set it where the launcher \
                 runs"
            ));
        }
        Ok(match value {
            Some(value) => Self::Set(name.to_owned(), OsString::from_vec(value.to_vec())),
            None => Self::Pass(name.to_owned()),
        })
    }
}

/// Environment variables that are passed to the other hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ForwardedVariables {
    /// Names and values of the variables.
    pub variables: Vec<(OsString, OsString)>,
    /// DeepSpeed's files that have set any of the variables, with the variables' names.
    pub files: Vec<VariableFile>,
}

/// DeepSpeed environment file with variables for the hosts, which is read although no option names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VariableFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Names of the variables that the hosts get from the file.
    pub names: Vec<String>,
}

/// Chooses the environment variables that are passed to other hosts: those on the list [`FORWARDED`], then those of
/// DeepSpeed's files, then those that the user requests. The last one takes precedence.
///
/// # Errors
/// The user requests a variable that is not set, or a line of a file is not a variable.
pub fn forwarded_variables(
    requests: &[EnvRequest],
    facts: &LocalFacts,
) -> Result<ForwardedVariables, RemoteError> {
    let LocalFacts { variables: here, deepspeed_files: files, .. } = facts;
    let named = |wanted: &str| {
        let wanted = wanted.to_owned();
        here.iter().filter(move |(name, _)| {
            let Some(name) = name.to_str() else { return false };
            match wanted.strip_suffix('*') {
                Some(start) => {
                    let is_kept = is_ranks_own(name) || env::LAUNCHERS_OWN.contains(&name);
                    name.starts_with(start) && !is_kept
                }
                None => name == wanted,
            }
        })
    };
    // Each with the number of the file that it is from.
    let mut chosen: BTreeMap<OsString, (OsString, Option<usize>)> = BTreeMap::new();
    for (name, value) in FORWARDED.iter().flat_map(|it| named(it)) {
        let is_of_devices = name.to_str().is_some_and(brigade_hardware::is_visibility_variable);
        if !is_of_devices && !NOT_FORWARDED.iter().any(|it| name == it) {
            chosen.insert(name.clone(), (value.clone(), None));
        }
    }
    for (number, (path, text)) in files.iter().enumerate() {
        for (name, value) in read_file(path, text)? {
            chosen.insert(name.into(), (value.into(), Some(number)));
        }
    }
    for request in requests {
        match request {
            EnvRequest::Set(name, value) => {
                chosen.insert(name.into(), (value.clone(), None));
            }
            EnvRequest::Pass(name) => {
                let mut found = named(name).peekable();
                if found.peek().is_none() && !name.ends_with('*') {
                    return Err(RemoteError::NoVariable { name: name.clone() });
                }
                chosen.extend(found.map(|(name, value)| (name.clone(), (value.clone(), None))));
            }
        }
    }
    let of_file = |number: usize| -> Vec<String> {
        let of_it = chosen.iter().filter(|(_, (_, file))| *file == Some(number));
        of_it.map(|(name, _)| name.to_string_lossy().into_owned()).collect()
    };
    let used = files
        .iter()
        .enumerate()
        .map(|(number, (path, _))| VariableFile { path: path.clone(), names: of_file(number) });
    let files = used.filter(|it| !it.names.is_empty()).collect();
    let variables = chosen.into_iter().map(|(name, (value, _))| (name, value)).collect();
    Ok(ForwardedVariables { variables, files })
}

fn read_file(path: &Path, text: &str) -> Result<Vec<(String, String)>, RemoteError> {
    let mut variables = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let wrong = |expected: String| RemoteError::EnvironmentFile {
            path: path.to_owned(),
            line: i + 1,
            found: line.to_owned(),
            expected,
        };
        match EnvRequest::parse(line.as_ref()) {
            Ok(EnvRequest::Set(name, value)) => {
                variables.push((name, value.to_string_lossy().into_owned()));
            }
            Ok(EnvRequest::Pass(_)) => return Err(wrong("expected NAME=VALUE".to_owned())),
            Err(reason) => return Err(wrong(reason)),
        }
    }
    Ok(variables)
}

/// Set by the agent for each rank: its place in the job.
fn is_ranks_own(name: &str) -> bool {
    env::TABLE.iter().any(|variable| variable.name == name)
}

/// Names of the environment variables that are always passed to the hosts: those that programs for distributed training
/// read. It begins with DeepSpeed's list. It contains those of Brigade's variables that programs read; the others are
/// for the launcher on this host.
pub const FORWARDED: &[&str] = &[
    "BRIGADE_FUSED",
    "BRIGADE_KEEP_MEMORY",
    "BRIGADE_SHARED_MEMORY",
    "CUDA_*",
    "GLOO_*",
    "KMP_*",
    "LD_LIBRARY_PATH",
    "LIBTORCH",
    "LIBTORCH_*",
    "MKL_*",
    "NCCL_*",
    "OMP_*",
    "PYTHON*",
    "PYTORCH_*",
    "RUST_*",
    "TORCH_*",
    "UCX_*",
];
/// Each host has devices of its own, and its own places for CUDA and Python. DeepSpeed leaves the
/// devices out, too. The secrets stay with the launcher.
const NOT_FORWARDED: &[&str] = &[
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_ROOT",
    "PYTHONHOME",
    env::BRIGADE_RDZV_SECRET,
    env::BRIGADE_ETCD_PASSWORD,
];
const EXPECTED: &str = "expected NAME, NAME=VALUE, or NAMES*";

#[cfg(test)]
mod tests {
    use super::*;

    fn choose_from(
        requests: &[&str],
        here: &[(&str, &str)],
        files: &[(&str, &str)],
    ) -> Result<String, String> {
        let requests: Vec<_> =
            requests.iter().map(|it| EnvRequest::parse(it.as_ref()).unwrap()).collect();
        let facts = LocalFacts {
            variables: here.iter().map(|(n, v)| (n.into(), v.into())).collect(),
            deepspeed_files: files.iter().map(|(p, t)| (p.into(), (*t).to_owned())).collect(),
            ..LocalFacts::default()
        };
        let chosen = forwarded_variables(&requests, &facts).map_err(|error| error.to_string())?;
        let lines =
            chosen.variables.iter().map(|(n, v)| format!("{}={}", n.display(), v.display()));
        Ok(lines.collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn the_list() {
        let here = [
            ("PATH", "/bin"),
            ("HOME", "/root"),
            ("NCCL_DEBUG", "INFO"),
            ("OMP_NUM_THREADS", "4"),
            ("PYTHONPATH", "src"),
            ("LD_LIBRARY_PATH", "/lib"),
            ("CUDA_VISIBLE_DEVICES", "0"),
            ("CUDA_LAUNCH_BLOCKING", "1"),
            ("LIBTORCH", "/t"),
            ("TORCHELASTIC_RUN_ID", "outer"),
            ("BRIGADE_STORE_FD", "3"),
            ("BRIGADE_HOSTS", "node1:4"),
            ("BRIGADE_CONFIG", "job.toml"),
            ("BRIGADE_SHARED_MEMORY", "0"),
            ("CUDA_HOME", "/usr/local/cuda"),
            ("PYTHONHOME", "/opt/python"),
            ("RANK", "1"),
            ("BRIGADE_RDZV_SECRET", "known to the launchers"),
            ("BRIGADE_ETCD_PASSWORD", "known to the launchers"),
        ];
        assert_eq!(choose_from(&["BRIGADE_R*"], &here, &[]), choose_from(&[], &here, &[]));
        assert_eq!(
            choose_from(&[], &here, &[]).unwrap(),
            "BRIGADE_SHARED_MEMORY=0 CUDA_LAUNCH_BLOCKING=1 LD_LIBRARY_PATH=/lib LIBTORCH=/t \
             NCCL_DEBUG=INFO OMP_NUM_THREADS=4 PYTHONPATH=src"
        );
        assert_eq!(
            choose_from(&["CUDA_VISIBLE_DEVICES"], &here[6..7], &[]).unwrap(),
            "CUDA_VISIBLE_DEVICES=0"
        );
    }

    #[test]
    fn the_last_wins() {
        let here = [("NCCL_DEBUG", "INFO"), ("W_A", "1"), ("W_B", "2")];
        let files = [("home", "# mine\nNCCL_DEBUG=WARN\nA=x=y \n"), ("here", "\nA=z\n")];
        assert_eq!(choose_from(&[], &here, &files).unwrap(), "A=z NCCL_DEBUG=WARN");
        assert_eq!(
            choose_from(&["A=1", "NCCL_DEBUG", "W_*", "W_B="], &here, &files).unwrap(),
            "A=1 NCCL_DEBUG=INFO W_A=1 W_B="
        );
        assert_eq!(choose_from(&["X_*"], &here, &[]).unwrap(), "NCCL_DEBUG=INFO");
    }

    #[test]
    fn files_that_are_used_are_named() {
        let file = |path: &str, text: &str| (PathBuf::from(path), text.to_owned());
        let facts = LocalFacts {
            variables: vec![("NCCL_DEBUG".into(), "INFO".into())],
            deepspeed_files: vec![
                file("home", "A=1\nB=1\n"),
                file("here", "B=2\nC=2\n"),
                file("none", "# x\n"),
            ],
            ..LocalFacts::default()
        };
        let requests = [EnvRequest::parse("C=3".as_ref()).unwrap()];
        let chosen = forwarded_variables(&requests, &facts).unwrap();
        let used = |path: &str, names: &[&str]| VariableFile {
            path: path.into(),
            names: names.iter().map(|it| (*it).to_owned()).collect(),
        };
        assert_eq!(chosen.files, [used("home", &["A"]), used("here", &["B"])]);
    }

    #[test]
    fn mistakes() {
        assert_eq!(
            choose_from(&["TOKEN"], &[], &[]).unwrap_err(),
            "--env-pass TOKEN: this environment has no such variable; set one with --env TOKEN=VALUE"
        );
        assert_eq!(
            choose_from(&[], &[], &[(".deepspeed_env", "A=1\nexport B=2\n")]).unwrap_err(),
            ".deepspeed_env, line 2: `export B=2`: expected NAME, NAME=VALUE, or NAMES*"
        );
        assert_eq!(
            choose_from(&[], &[], &[(".deepspeed_env", "A\n")]).unwrap_err(),
            ".deepspeed_env, line 1: `A`: expected NAME=VALUE"
        );
        let error = |text: &str| EnvRequest::parse(text.as_ref()).unwrap_err();
        let kept = error("BRIGADE_RDZV_SECRET=x");
        assert!(
            kept.starts_with("BRIGADE_RDZV_SECRET is read by the launcher and not passed"),
            "{kept}"
        );
        assert_eq!(
            error("RANK=3"),
            "RANK is set by the launcher, with a different value for each rank"
        );
        for text in ["", "=a", "A B=c", "*=a", "A*=b", "ä"] {
            assert_eq!(error(text), EXPECTED, "{text:?}");
        }
    }
}
