//! Batch scripts for Slurm.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use brigade_rank_env::env::BRIGADE_RDZV_SECRET;

use super::{EmitError, JobFile};

pub(super) fn script(job: &JobFile) -> Result<String, EmitError> {
    let mut directives = vec![("job-name", job.name()?)];
    let (min, max) = (job.nodes.start(), job.nodes.end());
    let nodes = if min == max { min.to_string() } else { format!("{min}-{max}") };
    directives.push(("nodes", nodes));
    directives.push(("ntasks-per-node", "1".to_owned()));
    directives.extend(job.cpus.map(|cpus| ("cpus-per-task", cpus.to_string())));
    directives.extend(job.gpus.map(|gpus| ("gpus-per-node", gpus.to_string())));
    directives.extend(job.time_limit.map(|limit| ("time", clock(limit))));
    for (name, value) in [("partition", &job.partition), ("account", &job.account)] {
        if let Some(value) = value {
            directives.push((name, word(name, value)?));
        }
    }
    // Sent to the steps, and so to the launchers, which pass it on; not to the batch shell, which it would end before
    // them.
    let warning = job.shutdown_timeout + SCHEDULERS_SHARE;
    directives.push(("signal", format!("TERM@{}", warning.as_secs())));

    let mut script = "#!/bin/bash\n# Submit with: sbatch FILE\n".to_owned();
    for (name, value) in directives {
        // Writing to a string cannot fail.
        let _ = writeln!(script, "#SBATCH --{name}={value}");
    }
    script.push('\n');
    for (name, value) in &job.env {
        let _ = writeln!(script, "export {name}={}", quoted(value.as_ref())?);
    }
    if !job.env.is_empty() {
        script.push('\n');
    }
    if job.guard().is_some() {
        // srun passes it on; ranks do not get it. `export A=$(...)` would hide a failure.
        let _ = writeln!(
            script,
            "# Made for each run: the launchers authenticate each other with it.\n\
             {BRIGADE_RDZV_SECRET}=$(openssl rand -hex 32) || exit 1\n\
             export {BRIGADE_RDZV_SECRET}\n"
        );
    }
    let _ = writeln!(
        script,
        "# {} s before the time limit Slurm sends SIGTERM to every process of a step, and the launchers\n\
         # pass it on: a rank may get it twice, and what a rank has started gets it, too.",
        warning.as_secs()
    );
    script.push_str("# One launcher on each host. They find each other in Slurm's variables.\n");
    if job.image.is_some() {
        script.push_str(
            "# The plugin Pyxis starts it in a container. Brigade's docs/containers.md says how to build\n\
             # the image.\n",
        );
    }
    script.push_str("srun --ntasks-per-node=1 --kill-on-bad-exit=1");
    if let Some(cpus) = job.cpus {
        // Since Slurm 22.05 srun does not inherit it from the job.
        let _ = write!(script, " --cpus-per-task={cpus}");
    }
    if let Some(image) = &job.image {
        // The folder of sbatch has the same path in the container, so that a job finds its files and leaves its logs
        // there.
        let _ = write!(
            script,
            " --container-image={} --container-mounts=\"$PWD:$PWD\" --container-workdir=\"$PWD\"",
            quoted(image.as_ref())?
        );
    }
    for word in job.launch() {
        let _ = write!(script, " {}", quoted(word)?);
    }
    script.push('\n');
    Ok(script)
}

/// Quotes a word for bash, byte by byte.
fn quoted(word: &OsStr) -> Result<String, EmitError> {
    let unfit = |problem| EmitError::Unfit {
        what: "the word",
        text: word.to_string_lossy().into_owned(),
        problem,
    };
    let bytes = shlex::bytes::try_quote(word.as_bytes())
        .map_err(|_| unfit("has a zero byte, which no argument can have"))?;
    match String::from_utf8(bytes.into_owned()) {
        Ok(text) => Ok(text),
        // Notation of bash, so that the file remains valid text.
        Err(_) => Ok(word.as_bytes().iter().fold("$'".to_owned(), |mut text, byte| {
            let _ = write!(text, "\\x{byte:02x}");
            text
        }) + "'"),
    }
}

/// Checks a name in a directive, which Slurm reads up to the first blank.
fn word(what: &'static str, text: &str) -> Result<String, EmitError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.,+@".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return Ok(text.to_owned());
    }
    let problem = "is not a name that Slurm takes: letters, digits and -_.,+@ make one";
    Err(EmitError::Unfit { what, text: text.to_owned(), problem })
}

/// Formats a duration: `1-02:00:30`.
fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    let (days, hours) = (seconds / 86_400, seconds / 3600 % 24);
    let clock = format!("{hours:02}:{:02}:{:02}", seconds / 60 % 60, seconds % 60);
    if days > 0 { format!("{days}-{clock}") } else { clock }
}

/// Slurm may be late by half a minute, and kills that long after the limit.
const SCHEDULERS_SHARE: Duration = Duration::from_secs(30);
