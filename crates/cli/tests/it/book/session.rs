//! Sessions of a page: commands with their output. The tests of `examples/templates` include this file by its path.

/// Command of a session with its output.
pub(crate) struct Step<'a> {
    pub(crate) command: &'a str,
    pub(crate) answer: Vec<&'a str>,
}

/// Returns the commands of a session, each after `$ `.
pub(crate) fn steps(session: &str) -> Vec<Step<'_>> {
    let mut steps: Vec<Step<'_>> = Vec::new();
    for line in session.lines() {
        match (line.strip_prefix("$ "), steps.last_mut()) {
            (Some(command), _) => steps.push(Step { command, answer: Vec::new() }),
            (None, Some(step)) => step.answer.push(line),
            (None, None) => panic!("a session that begins with no command:\n{session}"),
        }
    }
    steps
}

/// Returns `true` if the lines match the wanted ones, in which `...` stands for any number of lines; others are
/// compared by `same`.
pub(crate) fn fits<T: AsRef<str>>(wanted: &[T], found: &[T], same: fn(&str, &str) -> bool) -> bool {
    match wanted {
        [] => found.is_empty(),
        [dots, rest @ ..] if dots.as_ref() == "..." => {
            (0..=found.len()).any(|at| fits(rest, &found[at..], same))
        }
        [first, rest @ ..] => {
            found.first().is_some_and(|line| same(first.as_ref(), line.as_ref()))
                && fits(rest, &found[1..], same)
        }
    }
}
