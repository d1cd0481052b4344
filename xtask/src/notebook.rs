//! `cargo xtask notebook`: starts Jupyter with the Rust kernel, and the notebooks of examples/notebooks.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use brigade_test_needs::evcxr;
use clap::Args;
use serde_json::Value;

use crate::cargo::{self, Cargo, plain_cargo};
use crate::checkout::Checkout;
use crate::python_environment::Environment;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Run the notebooks from a fresh kernel each, without a browser, into target/notebooks
    #[arg(long)]
    execute: bool,
    /// Only install Jupyter and the kernel
    #[arg(long, conflicts_with = "execute")]
    setup: bool,
    /// Notebooks to run [default: all of examples/notebooks]
    #[arg(value_name = "FILE", requires = "execute")]
    notebooks: Vec<PathBuf>,
}

/// Installs Jupyter and the kernel if they are missing, and opens or runs the notebooks.
pub(crate) fn run(checkout: &Checkout, options: &Options) -> Result<ExitCode> {
    let began = Instant::now();
    let jupyter = Environment::of_notebooks(checkout);
    if !(jupyter.is_installed() && has_evcxr(&root(checkout))) {
        eprintln!(
            "Jupyter comes from PyPI (some 150 MB) and evcxr {EVCXR} is compiled, both into {FOLDER}/: about 10 \
             minutes on 2 cores, once"
        );
    }
    jupyter.install()?;
    install_evcxr(checkout)?;
    install_kernel(checkout, &jupyter)?;
    eprintln!("notebook: the kernel is ready after {:.0} s", began.elapsed().as_secs_f64());
    if options.setup {
        return Ok(ExitCode::SUCCESS);
    }
    let notebooks = checkout.root().join("examples/notebooks");
    if !options.execute {
        let mut open = Command::new(jupyter.program("jupyter"));
        open.arg("notebook").arg(&notebooks);
        return Ok(cargo::exit_code(cargo::run(&mut open)?));
    }
    let mut files = options.notebooks.clone();
    if files.is_empty() {
        files = all_notebooks(&notebooks)?;
    }
    eprintln!(
        "notebook: the first notebook compiles what it depends on where that was not done before: about 5 minutes \
         on 2 cores"
    );
    execute(checkout, &jupyter, &files)
}

fn execute(checkout: &Checkout, jupyter: &Environment, files: &[PathBuf]) -> Result<ExitCode> {
    let folder = checkout.root().join("target/notebooks");
    // Without this setting Jupyter treats a cell that panics as done, and runs the next one.
    let settings = folder.join("evcxr");
    fs::create_dir_all(&settings)
        .and_then(|()| fs::write(settings.join("init.evcxr"), ":preserve_vars_on_panic 0\n"))
        .with_context(|| format!("cannot write into {}", settings.display()))?;
    let mut code = ExitCode::SUCCESS;
    for file in files {
        let began = Instant::now();
        let mut convert = Command::new(jupyter.program("jupyter"));
        // nbconvert alone reports that a cell failed, but neither the reason nor the output.
        convert.args(["nbconvert", "--to", "notebook", "--execute", "--allow-errors"]);
        convert.args(["--log-level", "WARN"]);
        convert.arg(format!("--ExecutePreprocessor.timeout={CELL_SECONDS}"));
        convert.arg("--output-dir").arg(&folder).arg(file);
        convert.env("EVCXR_CONFIG_DIR", &settings);
        let status = cargo::run(&mut convert)?;
        let (name, seconds) = (file.display(), began.elapsed().as_secs_f64());
        let failure = if status.success() {
            let ran = folder.join(file.file_name().context("the notebook has no name")?);
            failure(&ran)?
        } else {
            Some("jupyter's message is above".to_owned())
        };
        if let Some(failure) = failure {
            eprintln!("error: {name} failed after {seconds:.0} s: {failure}");
            code = ExitCode::FAILURE;
        } else {
            eprintln!("notebook: {name} ran in {seconds:.0} s");
        }
    }
    Ok(code)
}

/// Returns the first failed cell of a notebook, with all of its output.
fn failure(path: &Path) -> Result<Option<String>> {
    let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let notebook: Value = serde_json::from_slice(&text)
        .with_context(|| format!("{} is not a notebook", path.display()))?;
    let cells = notebook["cells"].as_array().into_iter().flatten();
    for cell in cells {
        let outputs = || cell["outputs"].as_array().into_iter().flatten();
        if outputs().any(|it| it["output_type"] == "error") {
            let given =
                outputs().flat_map(|it| [joined(&it["text"], ""), joined(&it["traceback"], "\n")]);
            let given: Vec<String> = given.filter(|it| !it.is_empty()).collect();
            return Ok(Some(format!("\n{}\n\n{}", joined(&cell["source"], ""), given.join("\n"))));
        }
    }
    Ok(None)
}

/// Joins a text, which a notebook may store as a list of lines.
fn joined(text: &Value, between: &str) -> String {
    match text {
        Value::String(text) => text.clone(),
        Value::Array(lines) => {
            lines.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(between)
        }
        _ => String::new(),
    }
}

fn all_notebooks(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|it| it == "ipynb") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn root(checkout: &Checkout) -> PathBuf {
    checkout.root().join(FOLDER)
}

/// cargo writes the list when a program is complete.
fn has_evcxr(root: &Path) -> bool {
    let listed = format!("\"evcxr_jupyter {EVCXR} ");
    root.join("bin/evcxr_jupyter").is_file()
        && fs::read_to_string(root.join(".crates.toml")).is_ok_and(|it| it.contains(&listed))
}

/// Compiles the kernel for Rust if it is missing.
pub(crate) fn install_evcxr(checkout: &Checkout) -> Result<()> {
    let root = root(checkout);
    if has_evcxr(&root) {
        return Ok(());
    }
    let mut install = plain_cargo(checkout);
    install.args(["install", "--locked", "evcxr_jupyter", "--version", EVCXR, "--root"]).arg(root);
    if !cargo::run(&mut install)?.success() {
        bail!("cargo cannot install evcxr_jupyter {EVCXR}: its last lines say why");
    }
    Ok(())
}

/// Registers the kernel with this Jupyter alone.
fn install_kernel(checkout: &Checkout, jupyter: &Environment) -> Result<()> {
    let cargo = Cargo::new(checkout)?;
    let mut install =
        cargo.command(&["run", "--quiet", "-p", "brigade-cli", "--", "kernel", "install"]);
    install.arg("--prefix").arg(jupyter.folder());
    install.arg("--evcxr").arg(evcxr());
    if !cargo::run(&mut install)?.success() {
        bail!("`brigade kernel install` failed");
    }
    Ok(())
}

/// Folder of all installations, in the checkout.
const FOLDER: &str = "notebooks-env";
const EVCXR: &str = "0.22.0";
/// Time limit of a cell in seconds: the first one compiles.
const CELL_SECONDS: u32 = 1800;
