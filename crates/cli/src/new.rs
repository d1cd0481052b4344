//! `brigade new` and `brigade init`: create a small project that can be trained at once.

mod notebook;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context;
use brigade_libtorch_setup::Project;
use clap::{Args, ValueEnum};
use toml_edit::{DocumentMut, InlineTable, Item, Table, Value};

use crate::config::Usage;
use crate::setup::{self, SourceArgs};
use crate::source::Source;

/// Start a project of your own: a small one that trains at once
///
/// Makes a Cargo package with a network and its training on handwritten digits, which are embedded (or
/// on photographs or texts, which are generated), a test on two ranks, a README, and what Cargo needs
/// to find libtorch, as `brigade setup` does.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct NewArgs {
    /// The folder to make; its last part is the package's name
    #[arg(value_name = "NAME")]
    path: PathBuf,

    #[command(flatten)]
    project: ProjectArgs,
}

/// Make a project in a folder that is there, as `brigade new` makes one in a new folder
///
/// What is in the folder stays: a README and a notebook of the project's name are kept, and lines are added
/// to .gitignore. A folder that has a Cargo package needs `brigade setup` alone.
#[derive(Debug, Args)]
#[command(after_help = INIT_EXAMPLES)]
pub(crate) struct InitArgs {
    /// The folder
    #[arg(value_name = "FOLDER", default_value = ".", hide_default_value = true)]
    path: PathBuf,

    #[command(flatten)]
    project: ProjectArgs,
}

#[derive(Debug, Args)]
struct ProjectArgs {
    /// Name of the package [default: that of the folder]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    /// Program
    #[arg(long, value_name = "NAME", value_enum, default_value_t, hide_default_value = true)]
    template: Template,

    #[command(flatten)]
    libtorch: SourceArgs,

    /// Leave libtorch to a later `brigade setup`
    #[arg(long, conflicts_with_all = ["cuda", "libtorch", "pytorch"])]
    no_setup: bool,

    /// Checkout of Brigade to depend on [default: this one's, or crates.io]
    #[arg(long, value_name = "DIR")]
    brigade: Option<PathBuf>,
}

/// A program to begin with.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Template {
    /// The training loop, on one process or many: what is made unless given
    #[default]
    Loop,
    /// Also mixed precision, accumulation, a schedule, a tracker, and checkpoints that resume
    Complete,
    /// The loop on one process alone, to compare with
    Single,
    /// A resnet18 on a folder of photographs with a folder for each class
    Vision,
    /// An AWD-LSTM on a folder of texts with a folder for each class
    Text,
    /// A Jupyter notebook that trains on two processes, and a program with the same loop
    Notebook,
}

/// Creates a folder with the project, and prints the next steps.
pub(crate) fn run(args: &NewArgs, out: impl Write) -> anyhow::Result<()> {
    let path = &args.path;
    // `brigade new .` can only mean the current folder, and an existing empty folder can be used.
    if path.as_path() == Path::new(".") || is_empty_folder(path) {
        return make(path, "init", &args.project, out);
    }
    if path.is_dir() && !path.join("Cargo.toml").exists() {
        let shown = path.display();
        let text = format!("{shown} exists: run `brigade init {shown}` to create a project in it");
        return Err(Usage(text).into());
    }
    make(path, "new", &args.project, out)
}

/// Creates the project in an existing folder, and prints the next steps.
pub(crate) fn init(args: &InitArgs, out: impl Write) -> anyhow::Result<()> {
    if !args.path.is_dir() {
        let shown = args.path.display();
        let text = format!("there is no folder {shown}: run `brigade new {shown}` to create it");
        return Err(Usage(text).into());
    }
    make(&args.path, "init", &args.project, out)
}

fn is_empty_folder(path: &Path) -> bool {
    fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none())
}

fn make(path: &Path, command: &str, args: &ProjectArgs, mut out: impl Write) -> anyhow::Result<()> {
    let brigade = Source::new(args.brigade.as_deref())?;
    make_package(path, command, args.name.as_deref())?;
    let project = Project::at(&fs::canonicalize(path)?);
    let Filled { name, kept } = fill(project.root(), args.template, &brigade)?;
    writeln!(out, "made {}: {}", path.display(), args.template.description())?;
    writeln!(out, "{}", brigade.description())?;
    for file in kept {
        writeln!(out, "kept the existing {file}")?;
    }
    if args.no_setup {
        writeln!(out, "`brigade setup` in it finds or fetches libtorch")?;
    } else {
        let ready = setup::set_up(&project, &args.libtorch, &mut out);
        ready.with_context(|| {
            let path = path.display();
            format!("the project was created without libtorch: run `brigade setup` in {path}")
        })?;
    }
    writeln!(out, "\nNext:")?;
    let is_here = path == Path::new(".");
    if !is_here {
        writeln!(out, "  cd {}", path.display())?;
    }
    if matches!(args.template, Template::Notebook) {
        for line in jupyter(&name).lines() {
            writeln!(out, "  {line}")?;
        }
        writeln!(out, "{name}.ipynb is the notebook; see README.md.")?;
        return Ok(());
    }
    let release = args.template.release();
    writeln!(out, "  cargo run{release}")?;
    if !matches!(args.template, Template::Single) {
        writeln!(out, "  brigade launch --nproc 2{release}")?;
    }
    let program = if is_here { PathBuf::new() } else { path.to_owned() }.join("src/main.rs");
    writeln!(out, "{} is the program; see README.md.", program.display())?;
    Ok(())
}

/// Creates an empty package with cargo, which checks the name, chooses the edition, and detects workspaces and
/// repositories.
fn make_package(path: &Path, command: &str, name: Option<&str>) -> anyhow::Result<()> {
    let setup = "run `brigade setup` in it to set up an existing project";
    let shown = path.display();
    if command == "init"
        && let Some(file) = adopted(path, name).into_iter().find(|file| path.join(file).exists())
    {
        let is_project = if file == "Cargo.toml" { setup } else { "move it away first" };
        let text = format!("{shown} has a {file}, and nothing was written; {is_project}");
        return Err(Usage(text).into());
    }
    let mut cargo = Command::new("cargo");
    cargo.args([command, "--quiet", "--bin"]).arg(path).stdin(Stdio::null());
    if let Some(name) = name {
        cargo.args(["--name", name]);
    }
    let output = cargo.output().context("cannot start cargo, which makes the package")?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let reason = text.lines().next().unwrap_or("cargo new fails");
    let reason = reason.strip_prefix("error: ").unwrap_or(reason);
    let hint = match command {
        // In cargo's errors about names the remedy is on another line.
        _ if text.contains("--name") => "; give the package another name with --name".to_owned(),
        "new" if path.exists() => format!("; {setup}"),
        _ => String::new(),
    };
    Err(Usage(format!("{reason}{hint}")).into())
}

/// Returns files that make `cargo init` fail, or that it would use as the package's sources instead of creating
/// src/main.rs.
fn adopted(path: &Path, name: Option<&str>) -> Vec<String> {
    let mut files = ["Cargo.toml", "src/main.rs", "src/lib.rs", "main.rs", "lib.rs"]
        .map(str::to_owned)
        .to_vec();
    // As cargo derives the name: without following links.
    let folder = std::path::absolute(path).ok();
    let folder = folder.as_deref().and_then(Path::file_name).map(|it| it.to_string_lossy());
    if let Some(name) = name.or(folder.as_deref()) {
        files.extend([format!("{name}.rs"), format!("src/{name}.rs")]);
    }
    files
}

/// Result of [`fill`].
struct Filled {
    /// Name of the package.
    name: String,
    /// Existing files that were kept.
    kept: Vec<String>,
}

/// Writes the template over the empty package.
fn fill(root: &Path, template: Template, brigade: &Source) -> anyhow::Result<Filled> {
    let manifest = root.join("Cargo.toml");
    let text = read(&manifest)?;
    let mut document: DocumentMut =
        text.parse().context("cargo has written a malformed Cargo.toml")?;
    let name = document["package"]["name"].as_str().context("the package has no name")?.to_owned();
    document["dependencies"] = table(template.dependencies(brigade));
    document["dev-dependencies"] = table(template.dev_dependencies(brigade));
    if document.get("dev-dependencies").and_then(Item::as_table).is_some_and(Table::is_empty) {
        document.remove("dev-dependencies");
    }
    document["features"] = table(vec![("cuda", features("brigade/cuda"))]);
    if let Some(table) = document["features"].as_table_mut() {
        table.decor_mut().set_prefix(CUDA);
    }
    let mut text = document.to_string();
    if !is_in_a_workspace(root) {
        text.push_str(PROFILE);
    }
    write(&manifest, &text)?;
    write(&root.join("src/main.rs"), template.program())?;
    let mut kept = Vec::new();
    let mut write_or_keep = |file: String, text: &str| {
        let path = root.join(&file);
        if path.exists() {
            kept.push(file);
            return Ok(());
        }
        write(&path, text)
    };
    write_or_keep("README.md".to_owned(), &template.readme(&name))?;
    if matches!(template, Template::Notebook) {
        let dependency = document["dependencies"]["brigade"].to_string();
        let text = notebook::of_program(&name, dependency.trim(), template.program());
        write_or_keep(format!("{name}.ipynb"), &text)?;
    }
    // If cargo has created the file, there is a repository.
    let ignored = root.join(".gitignore");
    if ignored.is_file() {
        let mut text = read(&ignored)?;
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        write(&ignored, &format!("{text}{}", template.made()))?;
    }
    Ok(Filled { name, kept })
}

/// Returns the commands by which Jupyter opens the project's notebook.
fn jupyter(name: &str) -> String {
    format!(
        "python3 -m venv jupyter && jupyter/bin/pip install notebook\n\
         cargo install --locked evcxr_jupyter\n\
         brigade kernel install --prefix jupyter\n\
         jupyter/bin/jupyter notebook {name}.ipynb\n"
    )
}

/// Returns `true` if another package's manifest defines the profiles: cargo ignores those of a member, with a warning.
fn is_in_a_workspace(root: &Path) -> bool {
    let manifests = root.ancestors().skip(1).map(|folder| folder.join("Cargo.toml"));
    manifests.filter_map(|it| fs::read_to_string(it).ok()).any(|it| it.contains("[workspace"))
}

/// Comment above the project's feature.
const CUDA: &str = "
# `cargo run --features cuda` for GPUs, after `brigade setup --cuda`. The program then runs on the CPU where there is
# no GPU.
";

/// Profiles that save a first build about a minute of processor time. Calls of tensor operations take as long with
/// `opt-level` 1 (and 50 ns more with 0).
const PROFILE: &str = "
# Backtraces name the lines of dependencies; a debugger does not show their variables.
[profile.dev.package.\"*\"]
debug = \"line-tables-only\"
[profile.dev.package.torch-sys]
debug = false

# A third of a first build. tch and torch-sys only pass calls on to libtorch; zstd and bzip2 are not used.
[profile.release.package.tch]
opt-level = 1
[profile.release.package.torch-sys]
opt-level = 1
[profile.release.package.zstd-sys]
opt-level = 0
[profile.release.package.bzip2-sys]
opt-level = 0
";

fn table(entries: Vec<(&str, Value)>) -> Item {
    let mut table = Table::new();
    for (name, value) in entries {
        table.insert(name, Item::Value(value));
    }
    Item::Table(table)
}

fn read(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

impl Template {
    fn description(self) -> &'static str {
        match self {
            Self::Loop => "the training loop, on one process or many",
            Self::Complete => "a training run with checkpoints that resume",
            Self::Single => "the training loop on one process",
            Self::Vision => "an image classifier for a folder of photographs",
            Self::Text => "a classifier for a folder of texts",
            Self::Notebook => "a notebook that trains on two processes",
        }
    }

    fn program(self) -> &'static str {
        match self {
            Self::Loop => include_str!("../templates/loop.rs"),
            Self::Complete => include_str!("../templates/complete.rs"),
            Self::Single => include_str!("../templates/single.rs"),
            Self::Vision => include_str!("../templates/vision.rs"),
            Self::Text => include_str!("../templates/text.rs"),
            Self::Notebook => include_str!("../templates/notebook.rs"),
        }
    }

    /// Returns the program's output files, for `.gitignore`.
    fn made(self) -> &'static str {
        match self {
            Self::Loop | Self::Complete | Self::Single => "/model.safetensors\n/run\n",
            Self::Vision => "/model.safetensors\n/photos\n",
            Self::Text => "/model.pth\n/reviews\n",
            Self::Notebook => "/jupyter\n.ipynb_checkpoints\n",
        }
    }

    fn dependencies(self, brigade: &Source) -> Vec<(&'static str, Value)> {
        let with = |version: &str, feature: &str| {
            let mut table = InlineTable::new();
            table.insert("version", version.into());
            table.insert("features", features(feature));
            Value::InlineTable(table)
        };
        match self {
            Self::Loop | Self::Single => vec![("brigade", brigade.of("brigade"))],
            Self::Notebook => vec![("brigade", brigade.of_with("brigade", "notebook"))],
            Self::Complete => vec![
                ("brigade", brigade.of("brigade")),
                ("clap", with("4", "derive")),
                ("serde", with("1", "derive")),
            ],
            Self::Vision => vec![
                ("anyhow", "1".into()),
                ("brigade", brigade.of_with("brigade", "vision")),
                ("brigade-testkit", brigade.of_with("testkit", "photos")),
                ("clap", with("4", "derive")),
            ],
            Self::Text => vec![
                ("anyhow", "1".into()),
                ("brigade", brigade.of_with("brigade", "text")),
                ("brigade-testkit", brigade.of("testkit")),
                ("clap", with("4", "derive")),
            ],
        }
    }

    fn dev_dependencies(self, brigade: &Source) -> Vec<(&'static str, Value)> {
        let testkit = || ("brigade-testkit", brigade.of("testkit"));
        match self {
            Self::Loop => vec![testkit()],
            Self::Complete => vec![testkit(), ("tempfile", "3".into())],
            Self::Single | Self::Notebook => Vec::new(),
            Self::Vision | Self::Text => vec![("tempfile", "3".into())],
        }
    }

    fn readme(self, name: &str) -> String {
        let what = match self {
            Self::Vision => "a resnet18 on a folder of photographs",
            Self::Text => "an AWD-LSTM on a folder of texts",
            _ => "a small network on handwritten digits",
        };
        let mut text = format!(
            "# {name}\n\nTrains {what}, with [Brigade](https://docs.rs/brigade).\n\n```sh\n"
        );
        if matches!(self, Self::Notebook) {
            text.push_str(&format!(
                "{}```\n\nThe kernel \"Rust (Brigade)\" is evcxr with the libtorch of this folder. The \
                 first cell compiles Brigade, which takes minutes once. The function of the notebook is a \
                 program, too:\n\n```sh\n",
                jupyter(name)
            ));
        }
        let release = self.release();
        let one = format!("cargo run{release}");
        text.push_str(&format!("{one:<37} # one process\n"));
        if !matches!(self, Self::Single) {
            let two = format!("brigade launch --nproc 2{release}");
            text.push_str(&format!("{two:<37} # two, with the gradients averaged\n"));
        }
        if matches!(self, Self::Complete) {
            text.push_str(
                "brigade launch --nproc 2 -- --resume                  # goes on after a stop\n\
                 brigade launch --nproc 2 --mixed-precision bf16\n\
                 brigade checkpoint inspect run/checkpoints/checkpoint_5\n",
            );
        }
        if matches!(self, Self::Vision) {
            text.push_str(
                "cargo run --release -- --data FOLDER  # train/ and valid/, with a folder for each class\n\
                 brigade data stats photos             # classes, sizes, broken files\n\
                 brigade data show photos --transforms random-resized-crop=96,flip\n",
            );
        }
        if matches!(self, Self::Text) {
            text.push_str(
                "cargo run --release -- --data FOLDER  # train/ and valid/, with a folder for each class\n\
                 cargo run --release -- --text \"Not a bad film.\"\n",
            );
        }
        text.push_str(&format!("cargo test{release}\n```\n\n"));
        if release.is_empty() {
            text.push_str(
                "With `--release` the first build takes about three times as long. libtorch computes at the same \
                 speed without it; code in Rust that reads or changes data is many times faster with it.\n\n",
            );
        }
        let gpu = format!("cargo run{release} --features cuda");
        text.push_str(&format!(
            "On another machine, `brigade setup` in this folder finds or fetches libtorch first: \
             `.cargo/libtorch.toml`, which it writes, is true of one machine and not in the repository.\n\n\
             For GPUs:\n\n```sh\n\
             brigade setup --cuda                  # libtorch for CUDA: 3.6 GB on disk\n\
             {gpu:<37} # on the CPU where there is no GPU\n```\n",
        ));
        text
    }

    /// Returns the flag for builds with optimisation if the project needs them: if images or texts are decoded and
    /// changed in Rust. Where libtorch does nearly all of the work, it would only make the first build longer.
    fn release(self) -> &'static str {
        match self {
            Self::Vision | Self::Text => " --release",
            Self::Single | Self::Loop | Self::Complete | Self::Notebook => "",
        }
    }
}

/// Returns a list of one feature.
fn features(name: &str) -> Value {
    Value::Array([name].into_iter().collect())
}

const EXAMPLES: &str = "\
Examples:
  brigade new digits
  brigade new digits --template complete
  brigade new photos --template vision
  brigade new reviews --template text
  brigade new digits --template notebook
  brigade new digits --libtorch /opt/libtorch";

const INIT_EXAMPLES: &str = "\
Examples:
  brigade init
  brigade init experiments/digits --template complete
  brigade init --name digits";
