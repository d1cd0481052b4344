//! Flags that select the program.

use std::ffi::OsString;

use brigade_config::Variables;
use brigade_launch::{CargoKind, CargoTarget, Program, ProgramError};
use clap::Args;

#[derive(Debug, Args)]
#[command(next_help_heading = "What to run")]
pub(super) struct ProgramArgs {
    /// Run PROGRAM as a Python module, with `python -u -m`
    #[arg(short, long, requires = "command", hide_short_help = true)]
    module: bool,

    /// Run PROGRAM as it is, even if its name ends in .py
    ///
    /// Without this flag, such a program runs as `python -u PROGRAM`, with the Python of PYTHON_EXEC, VIRTUAL_ENV, the
    /// environment in which brigade is installed, or PATH
    #[arg(long, alias = "no_python", conflicts_with = "module", hide_short_help = true)]
    #[arg(requires = "command")]
    no_python: bool,

    /// Build this binary with Cargo, once, and run it
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    #[arg(conflicts_with_all = ["module", "no_python", "example"])]
    bin: Option<String>,

    /// Build this example with Cargo, once, and run it
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    #[arg(conflicts_with_all = ["module", "no_python"])]
    example: Option<String>,

    /// Package of the binary or example
    #[arg(short, long, value_name = "NAME", hide_short_help = true)]
    package: Option<String>,

    /// Build the project's binary with optimizations, as --profile release
    #[arg(long, conflicts_with = "profile")]
    release: bool,

    /// Profile to build with
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    profile: Option<String>,

    /// Features to build with
    #[arg(long, value_name = "FEATURE,..", value_delimiter = ',', hide_short_help = true)]
    features: Vec<String>,

    /// Program, or Python script [default: the Cargo project's binary]
    ///
    /// A path, a name that is looked up in PATH, or a Python script (*.py). Arguments are passed on unchanged, except
    /// that ${local_rank} is replaced. Defaults to the binary of the Cargo project in this folder, as with `cargo run`;
    /// what begins with - behind -- is its first argument
    // A single list: with two arguments, clap would consume a first `--` after the program.
    #[arg(trailing_var_arg = true, value_names = ["PROGRAM", "ARGS"], num_args = 0.., display_order = 0)]
    command: Vec<OsString>,
}

impl ProgramArgs {
    /// Returns `true` if the program has to be built first.
    pub(super) fn is_cargo(&self) -> bool {
        self.is_named_by_flags() || (!self.module && !self.no_python && self.has_arguments_alone())
    }

    /// Returns `true` if there is no program among the words: none at all, or arguments of the project's program behind
    /// `--`.
    fn has_arguments_alone(&self) -> bool {
        self.command.first().is_none_or(|word| word.as_encoded_bytes().starts_with(b"-"))
    }

    fn is_named_by_flags(&self) -> bool {
        self.bin.is_some()
            || self.example.is_some()
            || self.package.is_some()
            || self.release
            || self.profile.is_some()
            || !self.features.is_empty()
    }

    /// Returns the program and its arguments as at the end of the command line.
    pub(super) fn words(&self) -> &[OsString] {
        &self.command
    }

    /// Returns the program to run.
    ///
    /// # Errors
    /// Fails if neither a program nor a target was named, and the Cargo project has no binary of its own.
    pub(super) fn program(&self, variables: &Variables) -> Result<Program, ProgramError> {
        if self.is_cargo() {
            let target = match (&self.bin, &self.example) {
                (Some(name), _) => CargoTarget::bin(name),
                (None, Some(name)) => {
                    CargoTarget { kind: CargoKind::Example, ..CargoTarget::bin(name) }
                }
                (None, None) => CargoTarget::default_binary(self.package.as_deref())?,
            };
            let release = self.release.then(|| "release".to_owned());
            return Ok(Program::Cargo(CargoTarget {
                package: self.package.clone(),
                profile: self.profile.clone().or(release),
                features: self.features.clone(),
                ..target
            }));
        }
        let name = self.command.first().cloned().unwrap_or_default();
        // torchrun's variables for its flags, if the flags are not given.
        let is_on = |name| variables.value(name).is_some_and(|value| value == "1");
        let is_said = self.module || self.no_python;
        Ok(if self.module || (!is_said && is_on("PET_MODULE")) {
            Program::Module(name)
        } else if self.no_python || is_on("PET_NO_PYTHON") {
            Program::Executable(name)
        } else {
            Program::Auto(name)
        })
    }

    /// Returns the arguments of the program.
    pub(super) fn arguments(&self) -> &[OsString] {
        self.command.get(usize::from(!self.is_cargo())..).unwrap_or_default()
    }
}
