//! Options of the ranks' output, and the plan that is made from them.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use brigade_rank_env::env;
use brigade_rendezvous::Stream;
use serde::{Deserialize, Serialize};

use super::color::{Color, ColorFacts};
use super::prefix::Prefix;
use super::streams::{LineFilter, LocalRanks, StreamMode, StreamModes};
use crate::LaunchError;

/// Options of the ranks' output. By default all of it goes to the console and none of it into files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputOptions {
    /// Folder in which every job creates a log folder of its own. With `/dev/null`, nothing is kept. Defaults to a
    /// folder for temporary files, where an option needs log files.
    // A path need not be valid UTF-8, which serde requires: it is sent to other hosts separately.
    #[serde(skip)]
    pub log_dir: Option<PathBuf>,
    /// Streams that go into a file and not to the console. Defaults to none.
    pub redirects: Option<StreamModes>,
    /// Streams that go both into a file and to the console. Defaults to none, or to all where `log_dir` is set and no
    /// option selects the streams for files.
    pub tee: Option<StreamModes>,
    /// Local ranks whose output is shown on the console. Defaults to all.
    pub local_ranks_filter: Option<LocalRanks>,
    /// Filter of the stdout lines that are also collected, from all ranks under `tee`, in one file.
    pub duplicate_stdout: Option<LineFilter>,
    /// Filter of the stderr lines that are also collected, from all ranks under `tee`, in one file.
    pub duplicate_stderr: Option<LineFilter>,
    /// Prefix of every output line. Defaults to `TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE`, else `[rank] `.
    pub prefix: Option<Prefix>,
    /// Use of a colour of its own for each rank's prefix.
    pub color: Color,
    /// `true` if the launcher prints no messages of its own, unless the job fails.
    pub quiet: bool,
    /// `true` if the only rank of this host has this process's terminal, as if it had been started without a launcher.
    /// By default it has where stdin, stdout and stderr are a terminal, the job has one rank, and no other output
    /// option is set.
    pub raw: Option<bool>,
}

/// Facts on which the output plan depends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutputFacts {
    /// Facts on which colours depend: terminals and environment variables.
    pub color: ColorFacts,
    /// Value of `TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE`.
    pub prefix: Option<String>,
    /// `true` if stdin is a terminal.
    pub keyboard: bool,
}

impl OutputFacts {
    /// Examines this process's streams and environment.
    #[must_use]
    pub fn gather() -> Self {
        let prefix = std::env::var(env::TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE)
            .ok()
            .filter(|template| !template.is_empty());
        Self { color: ColorFacts::gather(), prefix, keyboard: std::io::stdin().is_terminal() }
    }
}

/// Plan of the ranks' output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputPlan {
    /// Location of the job's log folder.
    pub folder: LogFolder,
    /// Streams that go into a file and not to the console.
    pub redirects: StreamModes,
    /// Streams that go both into a file and to the console.
    pub tee: StreamModes,
    /// Local ranks whose output is shown. With `None`, all.
    pub shown: Option<LocalRanks>,
    /// Filters of the stdout and stderr lines that are also collected in one file each.
    pub duplicate: [Option<LineFilter>; 2],
    /// Prefix of every output line.
    pub prefix: Prefix,
    /// `true` for stdout and stderr if their prefixes are coloured.
    pub color: [bool; 2],
    /// `true` if the launcher prints no messages of its own, unless the job fails.
    pub quiet: bool,
    /// `true` if the only rank has this process's stdin, and its streams that do not go into files.
    pub raw: bool,
}

/// Location of a job's log folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogFolder {
    /// The log folder is created in this folder.
    Under(PathBuf),
    /// The log folder is created among the temporary files and is kept.
    Temporary,
    /// No log files are kept: error files are temporary files, removed when the job ends.
    Ephemeral,
    /// No log folder, because `/dev/null` was given: redirected output is lost, and no error files are written.
    Discard,
}

/// Destinations of one stream of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    pub(crate) console: bool,
    pub(crate) file: bool,
    /// `true` if lines may be copied to the duplicate-output files.
    pub(crate) duplicate: bool,
}

impl OutputPlan {
    /// Computes the plan from options and facts. A pure function.
    ///
    /// # Errors
    /// An option selects local ranks none of which this host, with `nproc` ranks, has.
    ///
    /// ```
    /// use brigade_launch::{OutputFacts, OutputOptions, OutputPlan, StreamModes, StreamMode};
    /// let options = OutputOptions { log_dir: Some("logs".into()), ..OutputOptions::default() };
    /// let plan = OutputPlan::resolve(&options, &OutputFacts::default(), 2)?;
    /// assert_eq!(plan.tee, StreamModes::All(StreamMode::BOTH));
    /// # Ok::<(), brigade_launch::LaunchError>(())
    /// ```
    pub fn resolve(
        options: &OutputOptions,
        facts: &OutputFacts,
        nproc: usize,
    ) -> Result<Self, LaunchError> {
        let first = |modes: &Option<StreamModes>| modes.as_ref().and_then(StreamModes::first);
        let lowest = |ranks: &LocalRanks| ranks.0.first().copied();
        for (option, named) in [
            ("redirects", first(&options.redirects)),
            ("tee", first(&options.tee)),
            ("local-ranks-filter", options.local_ranks_filter.as_ref().and_then(lowest)),
        ] {
            // A list may be meant for a larger host; one without any effect is a mistake.
            if let Some(rank) = named.filter(|rank| *rank >= nproc) {
                return Err(LaunchError::NoSuchLocalRank { option, rank, nproc });
            }
        }

        let duplicate = [options.duplicate_stdout.clone(), options.duplicate_stderr.clone()];
        let modes = |given: &Option<StreamModes>| given.clone().unwrap_or(StreamModes::NONE);
        let (redirects, mut tee) = (modes(&options.redirects), modes(&options.tee));
        let wants_files = options.log_dir.is_some() || duplicate.iter().any(Option::is_some);
        if options.redirects.is_none() && options.tee.is_none() && wants_files {
            tee = StreamModes::All(StreamMode::BOTH);
        }
        let folder = match &options.log_dir {
            Some(path) if path == Path::new("/dev/null") => LogFolder::Discard,
            Some(path) => LogFolder::Under(path.clone()),
            None if redirects.is_none() && tee.is_none() => LogFolder::Ephemeral,
            None => LogFolder::Temporary,
        };
        let changes = Self::changes(options, &tee);
        let raw = match (options.raw, changes) {
            (Some(true), _) if nproc > 1 => {
                return Err(LaunchError::Raw {
                    reason: format!("{nproc} ranks cannot share one terminal: use --nproc 1"),
                });
            }
            (Some(true), Some((flag, what))) => {
                return Err(LaunchError::Raw { reason: format!("--{flag} {what}") });
            }
            (Some(raw), _) => raw,
            (None, changes) => {
                nproc == 1
                    && changes.is_none()
                    && redirects.is_none()
                    && facts.prefix.is_none()
                    && facts.keyboard
                    && facts.color.terminal == [true; 2]
            }
        };
        let from_environment = || {
            let template = facts.prefix.as_deref()?;
            // Any text is a template.
            template.parse().ok()
        };
        Ok(Self {
            folder,
            redirects,
            tee,
            shown: options.local_ranks_filter.clone(),
            duplicate,
            prefix: options.prefix.clone().or_else(from_environment).unwrap_or_default(),
            color: options.color.resolve(facts.color),
            quiet: options.quiet,
            raw,
        })
    }

    /// Returns an option that requires the output to be read by this process, and its effect, if there is one.
    fn changes(options: &OutputOptions, tee: &StreamModes) -> Option<(&'static str, &'static str)> {
        let copies = "writes to a file what is shown, which the launcher then has to see: use \
                      --redirects";
        let duplicates = options.duplicate_stdout.is_some() || options.duplicate_stderr.is_some();
        if duplicates {
            Some(("duplicate-stdout-filters and --duplicate-stderr-filters", copies))
        } else if !tee.is_none() {
            Some((if options.tee.is_some() { "tee" } else { "log-dir" }, copies))
        } else if options.prefix.is_some() {
            Some(("prefix", "puts something before each line"))
        } else if options.local_ranks_filter.is_some() {
            Some(("local-ranks-filter", "hides ranks"))
        } else {
            None
        }
    }

    /// Returns `true` if a rank has this process's own stream for this one.
    pub(crate) fn passes_through(&self, local_rank: usize, stream: Stream) -> bool {
        self.raw && !self.route(local_rank, stream).file
    }

    pub(crate) fn route(&self, local_rank: usize, stream: Stream) -> Route {
        let redirected = self.redirects.of(local_rank).has(stream);
        let teed = self.tee.of(local_rank).has(stream);
        let shown = self.shown.as_ref().is_none_or(|shown| shown.contains(local_rank));
        Route { console: shown && (teed || !redirected), file: redirected || teed, duplicate: teed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> OutputOptions {
        OutputOptions::default()
    }

    fn resolve(options: &OutputOptions) -> OutputPlan {
        OutputPlan::resolve(options, &OutputFacts::default(), 4).unwrap()
    }

    #[test]
    fn which_streams_go_where() {
        let modes = |text: &str| Some(text.parse::<StreamModes>().unwrap());
        let logs = || Some(PathBuf::from("logs"));
        // options, rank 1's stdout: console, file, duplicate; folder
        type Case = (OutputOptions, [bool; 3], LogFolder);
        let table: [Case; 9] = [
            (options(), [true, false, false], LogFolder::Ephemeral),
            (
                OutputOptions { log_dir: logs(), ..options() },
                [true, true, true],
                LogFolder::Under("logs".into()),
            ),
            (
                OutputOptions { log_dir: logs(), tee: modes("0"), ..options() },
                [true, false, false],
                LogFolder::Under("logs".into()),
            ),
            (
                OutputOptions { redirects: modes("3"), ..options() },
                [false, true, false],
                LogFolder::Temporary,
            ),
            (
                OutputOptions { redirects: modes("3"), tee: modes("1:1"), ..options() },
                [true, true, true],
                LogFolder::Temporary,
            ),
            (
                OutputOptions { tee: modes("0:3,1:2"), ..options() },
                [true, false, false],
                LogFolder::Temporary,
            ),
            (
                OutputOptions {
                    log_dir: logs(),
                    local_ranks_filter: "0".parse().ok(),
                    ..options()
                },
                [false, true, true],
                LogFolder::Under("logs".into()),
            ),
            (
                OutputOptions { log_dir: Some("/dev/null".into()), ..options() },
                [true, true, true],
                LogFolder::Discard,
            ),
            (
                OutputOptions { duplicate_stderr: "error".parse().ok(), ..options() },
                [true, true, true],
                LogFolder::Temporary,
            ),
        ];
        for (options, [console, file, duplicate], folder) in table {
            let plan = resolve(&options);
            assert_eq!(
                plan.route(1, Stream::Stdout),
                Route { console, file, duplicate },
                "{options:?}"
            );
            assert_eq!(plan.folder, folder, "{options:?}");
        }
    }

    #[test]
    fn a_list_without_effect_is_refused() {
        let refuse = |options: OutputOptions| {
            OutputPlan::resolve(&options, &OutputFacts::default(), 2).unwrap_err().to_string()
        };
        assert_eq!(
            refuse(OutputOptions { tee: "2:3,7:1".parse().ok(), ..options() }),
            "--tee names local rank 2, but this host has only local ranks 0 to 1"
        );
        assert_eq!(
            refuse(OutputOptions { local_ranks_filter: "9".parse().ok(), ..options() }),
            "--local-ranks-filter names local rank 9, but this host has only local ranks 0 to 1"
        );
        let pasted = OutputOptions { local_ranks_filter: "0,9".parse().ok(), ..options() };
        assert!(OutputPlan::resolve(&pasted, &OutputFacts::default(), 2).is_ok());
    }

    #[test]
    fn when_the_terminal_is_passed_through() {
        let terminal = OutputFacts {
            color: ColorFacts { terminal: [true; 2], ..ColorFacts::default() },
            keyboard: true,
            prefix: None,
        };
        let raw = |options: &OutputOptions, facts: &OutputFacts, nproc| {
            OutputPlan::resolve(options, facts, nproc).map(|plan| plan.raw)
        };
        let logs = || OutputOptions { log_dir: Some("logs".into()), ..options() };
        let redirected = || OutputOptions { redirects: "3".parse().ok(), ..options() };
        let asked = |options: OutputOptions| OutputOptions { raw: Some(true), ..options };
        for (options, facts, nproc, expected) in [
            (options(), terminal.clone(), 1, true),
            (options(), terminal.clone(), 2, false),
            (options(), OutputFacts { keyboard: false, ..terminal.clone() }, 1, false),
            (options(), OutputFacts { prefix: Some("x".into()), ..terminal.clone() }, 1, false),
            (options(), OutputFacts::default(), 1, false),
            (logs(), terminal.clone(), 1, false),
            (redirected(), terminal.clone(), 1, false),
            (OutputOptions { raw: Some(false), ..options() }, terminal.clone(), 1, false),
            (asked(options()), OutputFacts::default(), 1, true),
            (asked(redirected()), OutputFacts::default(), 1, true),
        ] {
            assert_eq!(raw(&options, &facts, nproc).unwrap(), expected, "{options:?} {facts:?}");
        }
        let refuse = |options: OutputOptions, nproc| {
            raw(&asked(options), &terminal, nproc).unwrap_err().to_string()
        };
        assert!(refuse(options(), 4).ends_with("4 ranks cannot share one terminal: use --nproc 1"));
        let tee = OutputOptions { tee: "3".parse().ok(), ..options() };
        for (options, flag) in [
            (logs(), "--log-dir"),
            (tee, "--tee"),
            (OutputOptions { prefix: "x".parse().ok(), ..options() }, "--prefix"),
        ] {
            let refused = refuse(options, 1);
            assert!(refused.starts_with("--raw connects the rank to the terminal"), "{refused}");
            assert!(refused.contains(flag), "{refused}");
        }
        let plan = OutputPlan::resolve(&asked(redirected()), &terminal, 1).unwrap();
        assert!(!plan.passes_through(0, Stream::Stdout));
    }

    #[test]
    fn the_prefix_of_the_environment_gives_way_to_the_option() {
        let facts = OutputFacts { prefix: Some("<$rank>".to_owned()), ..OutputFacts::default() };
        let prefix = |options: &OutputOptions, facts: &OutputFacts| {
            OutputPlan::resolve(options, facts, 1).unwrap().prefix.to_string()
        };
        assert_eq!(prefix(&options(), &facts), "<$rank>");
        assert_eq!(prefix(&options(), &OutputFacts::default()), "[${rank}] ");
        let given = OutputOptions { prefix: "own".parse().ok(), ..options() };
        assert_eq!(prefix(&given, &facts), "own");
    }
}
