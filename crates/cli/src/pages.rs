//! `brigade completions` and `brigade man`: generated from the same definitions as the help.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, Command};
use clap_complete::Shell;
use clap_mangen::Man;

/// Print a shell's completion script
#[derive(Debug, Args)]
#[command(after_help = COMPLETIONS)]
pub(crate) struct CompletionsArgs {
    /// Shell [default: that of $SHELL]
    #[arg(value_enum)]
    shell: Option<Shell>,
}

/// Print the manual page, or write all of them
#[derive(Debug, Args)]
#[command(after_help = MAN)]
pub(crate) struct ManArgs {
    /// Command of the page: `launch`, `explain shards`
    #[arg(value_name = "COMMAND", conflicts_with = "out_dir")]
    command: Vec<String>,

    /// Write the pages of all commands into this folder
    #[arg(long, value_name = "DIR")]
    out_dir: Option<PathBuf>,
}

/// Prints the completion script.
pub(crate) fn completions(cli: &Command, args: &CompletionsArgs) -> anyhow::Result<u8> {
    let shell = args.shell.or_else(Shell::from_env).context(
        "cannot detect the shell: SHELL is not one that completions exist for; name one, as in `brigade \
         completions bash`",
    )?;
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut for_users(cli), NAME, &mut script);
    print(&script)
}

/// Returns the command line without hidden commands, which clap_complete would offer.
fn for_users(cli: &Command) -> Command {
    let commands = cli.get_subcommands().filter(|it| !it.is_hide_set()).map(for_users);
    let mut visible = Command::new(cli.get_name().to_owned())
        .args(cli.get_arguments().cloned())
        .subcommands(commands)
        .disable_help_subcommand(cli.is_disable_help_subcommand_set());
    if let Some(about) = cli.get_about() {
        visible = visible.about(about.clone());
    }
    if let Some(version) = cli.get_version() {
        visible = visible.version(version.to_owned());
    }
    visible
}

/// Prints or writes the manual pages.
pub(crate) fn man(mut cli: Command, args: &ManArgs) -> anyhow::Result<u8> {
    // Fills in what the help shows: names of nested commands and inherited options.
    cli.build();
    let mut pages = Vec::new();
    collect(&cli, NAME, &mut pages);
    if let Some(folder) = &args.out_dir {
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot make folder {}", folder.display()))?;
        for (name, command) in pages {
            let file = folder.join(format!("{name}.1"));
            fs::write(&file, render(&name, command)?)
                .with_context(|| format!("cannot write {}", file.display()))?;
        }
        return Ok(0);
    }
    let wanted =
        [NAME.to_owned()].iter().chain(&args.command).cloned().collect::<Vec<_>>().join("-");
    let page = pages.iter().find(|(name, _)| *name == wanted).with_context(|| {
        let names: Vec<_> = pages.iter().map(|(name, _)| name.replace('-', " ")).collect();
        format!("there is no command `{}`; there are: {}", args.command.join(" "), names.join(", "))
    })?;
    print(&render(&page.0, page.1)?)
}

/// Prints the same text as `--version`.
pub(crate) fn version(cli: &Command) -> anyhow::Result<u8> {
    print(cli.render_long_version().as_bytes())
}

fn collect<'a>(command: &'a Command, name: &str, pages: &mut Vec<(String, &'a Command)>) {
    pages.push((name.to_owned(), command));
    for inner in command.get_subcommands() {
        // `help` is clap's own, and its page would only repeat the others' names.
        if !inner.is_hide_set() && inner.get_name() != "help" {
            collect(inner, &format!("{name}-{}", inner.get_name()), pages);
        }
    }
}

fn render(name: &str, command: &Command) -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    Man::new(command.clone()).title(name.to_uppercase()).render(&mut page)?;
    Ok(page)
}

/// Prints the bytes. A closed pipe (`| head`) is not an error.
fn print(bytes: &[u8]) -> anyhow::Result<u8> {
    match io::stdout().lock().write_all(bytes) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(0),
        written => Ok(written.map(|()| 0)?),
    }
}

const NAME: &str = "brigade";

/// The version, the commit where it is known, and the target that this program was built for.
pub(crate) const VERSION: &str =
    concat!(env!("CARGO_PKG_VERSION"), " (", env!("LAUNCHER_BUILD"), ")");

const COMPLETIONS: &str = "\
Examples:
  brigade completions bash > ~/.local/share/bash-completion/completions/brigade
  brigade completions zsh > \"${fpath[1]}/_brigade\"
  brigade completions fish > ~/.config/fish/completions/brigade.fish";

const MAN: &str = "\
Examples:
  brigade man launch | man -l -
  brigade man --out-dir ~/.local/share/man/man1";
