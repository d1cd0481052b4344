//! The list of checks.

mod collectives;
mod training;

use brigade::prelude::Accelerator;

/// Named check of one function.
pub(crate) struct Check {
    pub(crate) name: &'static str,
    pub(crate) run: fn(&Accelerator) -> anyhow::Result<Verdict>,
}

/// Outcome of a check that did not fail.
pub(crate) enum Verdict {
    Passed,
    /// The check needs something that this run does not have.
    Skipped(&'static str),
}

/// All checks. A check comes after those whose functions it uses.
pub(crate) const CHECKS: &[Check] = &[
    Check { name: "places in the world", run: collectives::places },
    Check {
        name: "all_reduce: sum, mean, product, min, max, bitwise",
        run: collectives::all_reduce,
    },
    Check { name: "broadcast, reduce", run: collectives::broadcast_and_reduce },
    Check { name: "all_gather, gather, scatter", run: collectives::gather_and_scatter },
    Check { name: "reduce_scatter", run: collectives::reduce_scatter },
    Check { name: "all_to_all, even and uneven", run: collectives::all_to_all },
    Check { name: "send, recv", run: collectives::send_and_recv },
    Check { name: "barrier, monitored barrier", run: collectives::barriers },
    Check { name: "objects: broadcast, all_gather, gather", run: collectives::objects },
    Check { name: "a sub-group", run: collectives::subgroup },
    Check { name: "32 MiB through all_reduce", run: collectives::large },
    Check { name: "training: all ranks together equal one", run: training::step },
    Check { name: "metrics: every sample exactly once", run: training::metrics },
    Check { name: "weights: save, load, compare", run: training::weights },
    Check { name: "a checkpoint that resumes", run: training::checkpoint },
];
