//! Errors of a command line as one line: several hosts may print them at once.

use clap::Error;
use clap::error::ErrorKind;

/// Returns the line for an error; `None` for an answer that is not an error, or is a page of help.
pub(crate) fn line(error: &Error) -> Option<String> {
    match error.kind() {
        ErrorKind::DisplayHelp
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
        | ErrorKind::DisplayVersion => None,
        ErrorKind::MissingRequiredArgument => {
            Some(format!("{}; --help has examples", shortened(&error.render().to_string())))
        }
        _ => Some(shortened(&error.render().to_string())),
    }
}

/// Shortens clap's message to the error and the first piece of advice, without the usage.
fn shortened(text: &str) -> String {
    let mut paragraphs = text.split("\n\n");
    let words = |it: &str| it.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut line = words(paragraphs.next().unwrap_or_default());
    if let Some(fault) = line.strip_prefix("error: ") {
        line = fault.to_owned();
    }
    let mut advice =
        paragraphs.flat_map(str::lines).filter_map(|it| it.trim().strip_prefix("tip: "));
    match advice.next() {
        Some(advice) => format!("{line}; {}", words(advice)),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fault_and_the_first_advice() {
        let table = [
            (
                "error: unexpected argument '--nprc' found\n\n  tip: a similar argument exists: \
                 '--nproc'\n  tip: to pass '--nprc' as a value, use '-- --nprc'\n\nUsage: x\n\nFor more\n",
                "unexpected argument '--nprc' found; a similar argument exists: '--nproc'",
            ),
            (
                "error: the following required arguments were not provided:\n  <PROGRAM>...\n\nUsage: x\n",
                "the following required arguments were not provided: <PROGRAM>...",
            ),
            (
                "error: invalid value '0' for '--nproc <N>': expected 1\n\nFor more information\n",
                "invalid value '0' for '--nproc <N>': expected 1",
            ),
        ];
        for (text, expected) in table {
            assert_eq!(shortened(text), expected);
        }
    }
}
