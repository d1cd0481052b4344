//! Commands in the book, as this program would parse them.

#[path = "../tests/it/book/pages.rs"]
mod pages;

use clap::Parser;

use crate::Cli;

/// Returns the arguments after the program's name, up to a pipe or a redirection of the shell.
fn words(line: &str) -> Option<Vec<String>> {
    let words = shlex::split(line).unwrap_or_else(|| panic!("its quotes do not match: {line}"));
    let at = words.iter().position(|word| word == "brigade" || word.ends_with("/brigade"))?;
    // Another program's argument, as in `cargo build -p ...`, does not start this program.
    let is_started = at == 0 || words[0] == "srun";
    let of_the_shell =
        |word: &String| word == "|" || word.trim_start_matches(char::is_numeric).starts_with('>');
    let own = words.into_iter().skip(at).take_while(|word| !of_the_shell(word));
    is_started.then(|| own.collect())
}

#[test]
fn the_commands_of_the_book_are_understood() {
    let mut read = 0;
    for page in pages::pages() {
        let typed =
            page.blocks("console").flat_map(str::lines).filter_map(|it| it.strip_prefix("$ "));
        let listed: Vec<String> = page.blocks("sh").map(|it| it.replace("\\\n", " ")).collect();
        let listed = listed.iter().flat_map(|block| block.lines());
        for line in listed.chain(typed) {
            let Some(words) = words(line) else { continue };
            if let Err(error) = Cli::try_parse_from(&words) {
                panic!("{}: {line}: {error}", page.name);
            }
            read += 1;
        }
    }
    assert!(read > 50, "{read} commands");
}
