//! `cargo xtask setup`: which libtorch this checkout is built with, fetched where there is none.
//!
//! After it a plain `cargo build`, `cargo test` or `cargo run` finds libtorch with nothing exported:
//! the folder is named in .cargo/libtorch.toml, which .cargo/config.toml includes.

mod cargo_config;
mod fetch;
mod given;
mod install;
mod pins;
mod pip_log;
mod python;

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;

pub(crate) use self::given::Given;
use self::install::State;
use self::pins::{Kind, Pins};
use crate::checkout::Checkout;

/// The libtorch that cargo will build with.
#[derive(Debug)]
pub(crate) enum Libtorch {
    /// Ours, in libtorch/.
    Fetched,
    /// The user's, by LIBTORCH or LIBTORCH_USE_PYTORCH.
    Given(Given),
}

impl Libtorch {
    /// What cargo must be given besides what .cargo/libtorch.toml says.
    pub(crate) fn environment(&self) -> Vec<(&'static str, OsString)> {
        match self {
            Self::Fetched => Vec::new(),
            Self::Given(given) => given.environment(),
        }
    }
}

/// The command itself: sets up and says what there is.
pub(crate) fn run(checkout: &Checkout, cuda: bool) -> Result<ExitCode> {
    let wanted = if cuda { Kind::Cuda } else { Kind::Cpu };
    match set_up(checkout, wanted)? {
        Libtorch::Given(_) => {} // said already
        Libtorch::Fetched => {
            let pins = Pins::read(checkout)?;
            eprintln!("libtorch {} is ready in libtorch/", pins.libtorch_version());
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The same for the commands that need libtorch: quiet when there is nothing to do.
pub(crate) fn ensure(checkout: &Checkout) -> Result<Libtorch> {
    set_up(checkout, Kind::Cpu)
}

fn set_up(checkout: &Checkout, wanted: Kind) -> Result<Libtorch> {
    if let Some(given) = Given::from_environment(checkout)? {
        given.announce(checkout);
        if !checkout.libtorch().exists() {
            cargo_config::write(checkout, &cargo_config::for_given(&given)?)?;
        }
        return Ok(Libtorch::Given(given));
    }
    let pins = Pins::read(checkout)?;
    if install::state(checkout, &pins, wanted)? != State::Ready {
        fetch::fetch(checkout, &pins, wanted)?;
    }
    // Each time, though it rarely changes: the checkout may have been moved, and the file names
    // its folder.
    cargo_config::write(checkout, &cargo_config::for_fetched(checkout)?)?;
    Ok(Libtorch::Fetched)
}
