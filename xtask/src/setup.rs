//! `cargo xtask setup`: which libtorch this checkout is built with, fetched where there is none.
//!
//! After it a plain `cargo build`, `cargo test` or `cargo run` finds libtorch with nothing exported:
//! the folder is named in .cargo/libtorch.toml, which .cargo/config.toml includes.

use std::env;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use brigade_setup::{Cache, Kind, Libtorch, Origin, Pins, Project, RunPath, Wanted};

use crate::checkout::Checkout;

/// The command itself: sets up and says what there is.
pub(crate) fn run(checkout: &Checkout, cuda: bool, pins: Option<&Path>) -> Result<ExitCode> {
    let pins = pins.map_or_else(Pins::embedded, Pins::read)?;
    let kind = if cuda { Kind::Cuda } else { Kind::Cpu };
    let libtorch = set_up(checkout, kind, &pins)?;
    eprintln!("{}", libtorch.description());
    Ok(ExitCode::SUCCESS)
}

/// The same for the commands that need libtorch: quiet when there is nothing to do.
pub(crate) fn ensure(checkout: &Checkout) -> Result<Libtorch> {
    let libtorch = set_up(checkout, Kind::Cpu, &Pins::embedded()?)?;
    if let Origin::Named(_) = libtorch.origin() {
        eprintln!("{}", libtorch.description());
    }
    Ok(libtorch)
}

fn set_up(checkout: &Checkout, kind: Kind, pins: &Pins) -> Result<Libtorch> {
    let cache = Cache::of_user()?;
    let project = Project::at(checkout.root());
    let configured = project.libtorch()?;
    // `cargo run`, which started this program, puts what .cargo/libtorch.toml says into its
    // environment: that is not what the user says there.
    let by_user = Wanted::by_environment().filter(|wanted| match wanted {
        Wanted::Folder { path, .. } => configured.as_ref() != Some(path) && !cache.contains(path),
        _ => true,
    });
    if let Some(wanted) = by_user {
        let libtorch = Libtorch::find_or_fetch(&wanted, &cache, pins)?;
        project.configure_doc_tests(&libtorch)?;
        return Ok(libtorch);
    }
    let wanted = match configured {
        // `brigade setup --libtorch` in this checkout.
        Some(path) if !cache.contains(&path) => {
            Wanted::Folder { path, named: ".cargo/libtorch.toml".to_owned() }
        }
        _ => Wanted::Fetched(kind),
    };
    let libtorch = Libtorch::find_or_fetch(&wanted, &cache, pins)?;
    // The packages' build scripts set the run path of all but doc tests. Flags for rustc would have
    // cargo build this program anew.
    project.configure(&libtorch, RunPath::DocTests)?;
    Ok(libtorch)
}

/// `LIBTORCH` as a child of this program should see it: not at all where it comes from
/// .cargo/libtorch.toml. A cargo that finds it in both places takes that for a change, and builds tch
/// anew, which takes minutes.
pub(crate) fn is_repeated(checkout: &Checkout) -> bool {
    let configured = Project::at(checkout.root()).libtorch().ok().flatten();
    configured.is_some() && configured == env::var_os("LIBTORCH").map(PathBuf::from)
}
