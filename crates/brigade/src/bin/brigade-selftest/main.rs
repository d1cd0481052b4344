//! Program of `brigade test`, run by the configured processes: every collective, a training step, metrics and weights,
//! each compared with the expected result. Rank 0 prints the results.
//!
//! It also runs alone and under torchrun, like every program built with Brigade.

#![allow(clippy::print_stdout)] // the program's answer

mod checks;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use brigade::prelude::*;
use brigade_rank_env::text::counted;
use checks::{CHECKS, Check, Verdict};

/// Time limit: long enough for a loaded machine, short enough that a user notices a firewall.
const LIMIT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() == Some("--facts") {
        println!("{}", facts());
        return ExitCode::SUCCESS;
    }
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("brigade test: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the device type that this program was built for and the GPUs that it can use, as one line of JSON, for the
/// runner of GPU tests.
fn facts() -> serde_json::Value {
    let (gpus, reason) = match brigade_torch::cuda_devices() {
        Ok(gpus) => (gpus, None),
        Err(reason) => (0, Some(reason.to_string())),
    };
    serde_json::json!({
        "built_for": brigade_torch::libtorch_version(),
        "cuda_compiled": brigade_torch::cuda_compiled(),
        "gpus": gpus,
        "reason": reason,
    })
}

/// Returns `true` when all checks passed on all ranks.
fn run() -> anyhow::Result<bool> {
    let accelerator =
        Accelerator::builder().timeout(LIMIT).build().context("the ranks cannot meet")?;
    let world = accelerator.processes().world();
    accelerator.println(format!(
        "{} on {}, device {:?}",
        counted(world.world_size, "process"),
        counted(world.num_nodes, "host"),
        accelerator.device()
    ));
    let mut failed = 0;
    for check in CHECKS {
        failed += usize::from(!passes(&accelerator, check)?);
    }
    match failed {
        0 => accelerator.println(format!("{} passed", counted(CHECKS.len(), "check"))),
        _ => {
            let checks = counted(CHECKS.len(), "check");
            accelerator.println(format!("{failed} of {checks} failed"));
        }
    }
    Ok(failed == 0)
}

/// Runs one check on all ranks. Rank 0 prints the result.
fn passes(accelerator: &Accelerator, check: &Check) -> anyhow::Result<bool> {
    let verdict = (check.run)(accelerator);
    let mine = match &verdict {
        Ok(Verdict::Passed) => Ok(None),
        Ok(Verdict::Skipped(why)) => Ok(Some((*why).to_owned())),
        Err(error) => Err(format!("{error:#}")),
    };
    // When this fails the group is broken, and so are all further checks.
    let all = accelerator.processes().gather_object(mine).with_context(|| match verdict {
        Err(error) => format!("{}: {error:#}", check.name),
        Ok(_) => format!("{}: another rank failed", check.name),
    })?;

    let mut reasons: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (rank, answer) in all.iter().enumerate() {
        if let Err(reason) = answer {
            reasons.entry(reason).or_default().push(rank);
        }
    }
    if reasons.is_empty() {
        match &all[0] {
            Ok(Some(why)) => accelerator.println(format!("skipped  {}: {why}", check.name)),
            _ => accelerator.println(format!("ok       {}", check.name)),
        }
        return Ok(true);
    }
    for (reason, ranks) in reasons {
        let ranks: Vec<_> = ranks.iter().map(ToString::to_string).collect();
        accelerator.println(format!(
            "FAILED   {}: rank {}: {reason}",
            check.name,
            ranks.join(", ")
        ));
    }
    Ok(false)
}
