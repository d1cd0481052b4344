//! Pages of the book that are made of the tables of the code: settings, environment variables, the command line.
//!
//! After an intended change, `UPDATE_GOLDEN=1 cargo nextest run -p brigade-cli reference::` rewrites them. A published
//! package has no book, and then there is nothing to compare.

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

use brigade_config::{Setting, TABLE, TABLES};
use brigade_rank_env::env::{self as contract, SetBy};
use brigade_rank_env::scheduler;

use crate::help::short_pages;

/// Compares a page of docs/reference with what it should be, or writes it.
fn compare(name: &str, page: &str) {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    if !docs.is_dir() {
        return;
    }
    let file = docs.join("reference").join(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, page).unwrap();
    }
    let expected = fs::read_to_string(&file)
        .unwrap_or_else(|error| panic!("cannot read {}: {error}", file.display()));
    assert!(
        expected == page,
        "docs/reference/{name} is not that of the code: run `UPDATE_GOLDEN=1 cargo nextest run -p \
         brigade-cli reference::`"
    );
}

const NOTE: &str =
    "<!-- Written by `UPDATE_GOLDEN=1 cargo nextest run -p brigade-cli reference::`. -->";

/// Returns the text as a cell of a table: outside of code, nothing in it has a meaning in Markdown.
fn cell(text: &str) -> String {
    let mut is_code = false;
    let mut cell = String::new();
    for letter in text.chars() {
        match letter {
            '`' => is_code = !is_code,
            '|' => cell.push('\\'),
            '*' | '_' | '<' | '[' if !is_code => cell.push('\\'),
            _ => {}
        }
        cell.push(letter);
    }
    cell
}

fn code(text: &str) -> String {
    if text.is_empty() { String::new() } else { cell(&format!("`{text}`")) }
}

fn codes(names: impl IntoIterator<Item = String>) -> String {
    names.into_iter().map(|name| code(&name)).collect::<Vec<_>>().join(", ")
}

/// Returns the meaning of a setting, with the names that other launchers have for it.
fn meaning(setting: &Setting) -> String {
    let mut meaning = cell(&setting.meaning());
    if !meaning.ends_with(['.', ']']) {
        meaning.push('.');
    }
    let flags = setting.also.iter().map(|name| format!("--{name}"));
    let names = codes(flags.chain(setting.variables.iter().map(|&name| name.to_owned())));
    if !names.is_empty() {
        write!(meaning, " Also {names}.").unwrap();
    }
    meaning
}

#[test]
fn settings_are_those_of_the_table() {
    let mut page = format!(
        "# Settings\n\n{NOTE}\n\n\
         All settings of a launch, in the order of a settings file. A setting is taken from its flag, else from its \
         variable, else from the settings file, else it has its default. `brigade launch --explain` prints every \
         value and its source.\n\n\
         | Form | Example |\n|---|---|\n\
         | Flag of `brigade launch`, `brigade emit` and `brigade test` | `--max-restarts 3` |\n\
         | Variable | `BRIGADE_MAX_RESTARTS=3` |\n\
         | Settings file, in the table `[failure]` | `max-restarts = 3` |\n\n\
         A Boolean setting has a flag without a value, and one that turns it off: `--sync`, `--no-sync`. `brigade \
         config` makes a settings file by questions, `brigade config default` without any. The file is the one that \
         `--config` or `BRIGADE_CONFIG` names, else `brigade/config.toml` in `~/.config` (`XDG_CONFIG_HOME`), else \
         that of Accelerate.\n\n\
         \"Also\" names flags and variables of torchrun, Accelerate and others with the same meaning.\n"
    );
    for table in TABLES {
        write!(page, "\n## `[{}]`\n\n{}\n\n", table.name, table.meaning.trim()).unwrap();
        page.push_str("| Setting | Value | Default | Meaning |\n|---|---|---|---|\n");
        for setting in TABLE.iter().filter(|it| it.table == table.name) {
            let (name, value) = (code(setting.name), code(setting.value_name));
            let default = code(setting.default.unwrap_or_default());
            writeln!(page, "| {name} | {value} | {default} | {} |", meaning(setting)).unwrap();
        }
    }
    page.push_str(
        "\n## `[accelerate]`\n\n\
         Arguments of `accelerate launch` for FSDP, DeepSpeed, Megatron-LM, axes of parallelism and fp8, under their \
         own names. FSDP and DeepSpeed are for Rust programs, too, the rest is for Python programs. [From FSDP and \
         DeepSpeed](../from-fsdp-and-deepspeed.md) says what becomes of each.\n\n\
         ## `[env]`\n\n\
         Variables for every rank, by name. The flag is `--env NAME=VALUE`.\n",
    );
    compare("settings.md", &page);
}

/// Variables that are neither settings nor part of the contract with the ranks. A test of the book compares those of
/// Brigade with the source.
const LAUNCHERS: &[(&str, &str)] = &[
    ("BRIGADE_CONFIG", "settings file, where `--config` does not name one"),
    (
        contract::BRIGADE_RDZV_SECRET,
        "secret of a job on several hosts ([How hosts form a job](../concepts/hosts.md)); not passed on to the ranks",
    ),
    (contract::BRIGADE_ETCD_PASSWORD, "password of the etcd user; not passed on to the ranks"),
    (
        contract::BRIGADE_HOST_ROOT,
        "folder that replaces `/` where devices, network cards and the kernel's log are looked for, in a container",
    ),
    (
        contract::TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE,
        "torchrun's variable for the prefix of each line, where the setting `prefix` has no value",
    ),
    (
        "PYTHON_EXEC",
        "Python for scripts; else that of `VIRTUAL_ENV`, of the environment of `brigade`, or of `PATH`",
    ),
    (
        "DS_ENV_FILE",
        "DeepSpeed's name of the file with variables for all hosts. Defaults to `.deepspeed_env`",
    ),
    ("NO_COLOR", "no colours, where the setting `color` is `auto`"),
    ("CLICOLOR_FORCE", "colours without a terminal, where the setting `color` is `auto`"),
    (
        "XDG_CACHE_HOME",
        "parent of the folder `brigade` for libtorch, the self-test, notebooks, compiled C++ and compiled GPU kernels. Defaults to \
         `~/.cache`",
    ),
    (
        "XDG_CONFIG_HOME",
        "parent of the folder `brigade` with the settings file. Defaults to `~/.config`",
    ),
];

const PROGRAMS: &[(&str, &str)] = &[
    (contract::ACCELERATE_USE_CPU, "`1`: trains on the CPU although the host has a GPU"),
    (
        "BRIGADE_FUSED",
        "`0`: GPU operations use libtorch's kernels, not Brigade's; `-cross_entropy,-norm_relu`: those two do; \
         `-epilogues`: products have no epilogues",
    ),
    (
        "BRIGADE_OBJECT_CACHE",
        "read by cargo builds: folder for Brigade's compiled C++; empty: compiles it in each project. Defaults to \
         `objects` in the cache folder",
    ),
    (
        "BRIGADE_KEEP_MEMORY",
        "`0`: leaves the allocators of the process as they are, so that freed memory is not kept",
    ),
    (
        "BRIGADE_SHARED_MEMORY",
        "`0`: collectives among the ranks of one host use TCP, not shared memory",
    ),
    ("BRIGADE_PROGRAM", "path of the command `brigade`, with which a notebook starts its ranks"),
    ("OMP_NUM_THREADS", "threads of a rank; `brigade launch` sets it where it is not set"),
    ("MKL_CBWR", "mode of MKL, instead of the reproducible one that the Accelerator sets"),
    ("GLOO_SOCKET_IFNAME", "interfaces that Gloo uses, separated by commas"),
    ("HF_HOME, HF_HUB_CACHE", "place of Hugging Face's cache of weights"),
    (
        "HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE",
        "address of Hugging Face's hub, the user's token, and no requests",
    ),
    ("MLFLOW_TRACKING_URI", "address of the MLflow server for the tracker `Mlflow`"),
];

#[test]
fn variables_are_those_of_the_tables() {
    let mut page = format!(
        "# Environment variables\n\n{NOTE}\n\n\
         Variables that `brigade` and programs with Brigade read or set.\n\n\
         ## Set for each rank\n\n\
         `brigade launch` sets these for each rank. A program reads them from any launcher that sets them.\n\n\
         | Variable | Set by | Meaning |\n|---|---|---|\n"
    );
    for variable in contract::TABLE {
        let set_by = match variable.set_by {
            SetBy::Everyone => "torchrun, Brigade",
            SetBy::Torchrun => "torchrun",
            SetBy::Brigade => "Brigade",
        };
        let name = code(variable.name);
        writeln!(page, "| {name} | {set_by} | {} |", cell(variable.meaning)).unwrap();
    }
    page.push_str(
        "\n## Settings\n\n\
         Each [setting](settings.md) has a variable of Brigade's. Of the names in a line, the first that is set \
         and not empty counts.\n\n\
         | Variable | Setting |\n|---|---|\n",
    );
    for setting in TABLE {
        let names = codes(setting.variables.iter().map(|&name| name.to_owned()));
        let also = if names.is_empty() { names } else { format!(". Also {names}") };
        let summary = cell(setting.summary());
        writeln!(page, "| {} | {summary}{also} |", code(&setting.variable())).unwrap();
    }
    for (heading, rows) in [("Read by the launcher", LAUNCHERS), ("Read by programs", PROGRAMS)] {
        write!(page, "\n## {heading}\n\n| Variable | Meaning |\n|---|---|\n").unwrap();
        for (names, meaning) in rows {
            let names = codes(names.split(", ").map(str::to_owned));
            writeln!(page, "| {names} | {meaning} |").unwrap();
        }
    }
    page.push_str(
        "\n## Read from schedulers\n\n\
         Where a scheduler or `mpirun` has started the program, these give its place in the job.\n\n\
         | Variable | Set by | Meaning |\n|---|---|---|\n",
    );
    for variable in scheduler::TABLE {
        let (name, meaning) = (code(variable.name), cell(variable.meaning));
        writeln!(page, "| {name} | {} | {meaning} |", variable.set_by).unwrap();
    }
    compare("environment.md", &page);
}

#[test]
fn the_command_line_is_that_of_the_program() {
    let mut page = format!(
        "# Command line\n\n{NOTE}\n\n\
         The answer of each command to `--help`. `-h` prints a shorter one. `brigade man` writes the same as manual \
         pages, `brigade completions` as completions of a shell. [Settings](settings.md) lists the flags of a launch \
         with their variables and their names in torchrun and Accelerate.\n"
    );
    let mut commands = Vec::new();
    short_pages(&[], &mut commands);
    commands.sort();
    for (command, _) in commands {
        // Its `--help` repeats that of `brigade launch`.
        let is_short = command.len() == 2 && command[0] == "emit";
        let flag = if is_short { "-h" } else { "--help" };
        let mut brigade = Command::new(env!("CARGO_BIN_EXE_brigade"));
        // As wide as a page of the book.
        let output = brigade.args(&command).arg(flag).env("COLUMNS", "90").output().unwrap();
        let help = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{command:?}: {help}");
        let name = format!("brigade {}", command.join(" "));
        let name = name.trim_end();
        let level = "#".repeat((command.len() + 1).clamp(2, 3));
        let lines: Vec<&str> = help.lines().map(str::trim_end).collect();
        let help = lines.join("\n");
        write!(page, "\n{level} `{name}`\n\n").unwrap();
        if is_short {
            page.push_str("Its usual options. It takes the others of [`brigade launch`](#brigade-launch), too.\n\n");
        }
        write!(page, "```text\n{}\n```\n", help.trim_end()).unwrap();
    }
    compare("command-line.md", &page);
}
