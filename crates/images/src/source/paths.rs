//! Patterns that stand for several paths, as in a shell.

use std::fs;
use std::path::{Path, PathBuf};

use crate::{ImageError, Result};

/// Returns the files of a pattern: those of a folder with one of these endings, in the order of bytes, or the paths to
/// which its braces expand.
pub(super) fn of_pattern(pattern: &str, endings: &[&str]) -> Result<Vec<PathBuf>> {
    let folder = Path::new(pattern);
    if !folder.is_dir() {
        return Ok(expand(pattern)?.into_iter().map(PathBuf::from).collect());
    }
    let failed = |cause| ImageError::Read { path: folder.into(), cause };
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        if endings.iter().any(|ending| name.ends_with(ending.as_bytes())) {
            paths.push(path);
        }
    }
    paths.sort_unstable();
    Ok(paths)
}

/// Expands `{000..010}`, `{0..100..10}` and `{a,b}`, the first brace slowest. Numbers are as wide as the wider end of a
/// range that begins with a zero. Other braces are kept as they are.
fn expand(pattern: &str) -> Result<Vec<String>> {
    let mut expanded = Vec::new();
    // Pairs of the expanded text and the rest of the pattern; the last is next.
    let mut pending = vec![(String::new(), pattern.to_owned())];
    while let Some((mut done, rest)) = pending.pop() {
        let Some((before, inside, after)) = first_braces(&rest) else {
            done.push_str(&rest);
            expanded.push(done);
            continue;
        };
        done.push_str(before);
        let choices = choices(inside);
        if pending.len() + expanded.len() + choices.as_ref().map_or(0, Choices::len) > MAX_PATHS {
            return Err(ImageError::InvalidArgument(format!(
                "{pattern} stands for more than {MAX_PATHS} paths"
            )));
        }
        match choices {
            Some(Choices::Range { first, last, step, width }) => {
                let count = first.abs_diff(last) / step;
                for number in (0..=count).rev() {
                    let number =
                        if first <= last { first + number * step } else { first - number * step };
                    pending.push((format!("{done}{number:0width$}"), after.to_owned()));
                }
            }
            Some(Choices::List(list)) => {
                let alternatives = list.iter().rev();
                pending.extend(alternatives.map(|one| (done.clone(), format!("{one}{after}"))));
            }
            None => {
                done.push('{');
                pending.push((done, format!("{inside}}}{after}")));
            }
        }
    }
    Ok(expanded)
}

/// Splits at the first brace that is closed: the text before, inside and after it.
fn first_braces(text: &str) -> Option<(&str, &str, &str)> {
    let mut open = Vec::new();
    let mut first: Option<(usize, usize)> = None;
    for (place, byte) in text.bytes().enumerate() {
        match byte {
            b'{' => open.push(place),
            b'}' => {
                let Some(start) = open.pop() else { continue };
                if first.is_none_or(|(before, _)| start < before) {
                    first = Some((start, place));
                }
                if open.is_empty() {
                    break;
                }
            }
            _ => {}
        }
    }
    let (start, end) = first?;
    Some((text.get(..start)?, text.get(start + 1..end)?, text.get(end + 1..)?))
}

enum Choices<'a> {
    Range { first: u64, last: u64, step: u64, width: usize },
    List(Vec<&'a str>),
}

impl Choices<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Range { first, last, step, .. } => {
                usize::try_from(first.abs_diff(*last) / step).unwrap_or(usize::MAX / 2)
            }
            Self::List(list) => list.len(),
        }
    }
}

/// Parses the inside of braces into a range or a list.
fn choices(inside: &str) -> Option<Choices<'_>> {
    let mut parts = inside.split("..");
    if let (Some(first), Some(last), step, None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    {
        let number =
            |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse());
        let step = step.map_or(Some(Ok(1)), number);
        if let (Some(Ok(from)), Some(Ok(to)), Some(Ok(step @ 1..))) =
            (number(first), number(last), step)
        {
            let padded = [first, last].iter().any(|end| end.len() > 1 && end.starts_with('0'));
            let width = if padded { first.len().max(last.len()) } else { 0 };
            return Some(Choices::Range { first: from, last: to, step, width });
        }
    }
    let mut depth = 0_usize;
    let list: Vec<&str> = inside
        .split(|character| {
            match character {
                '{' => depth += 1,
                '}' => depth = depth.saturating_sub(1),
                _ => {}
            }
            character == ',' && depth == 0
        })
        .collect();
    (list.len() > 1).then_some(Choices::List(list))
}

const MAX_PATHS: usize = 1_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn braces_count_and_list_as_in_a_shell() {
        for (pattern, expected) in [
            ("a.tar", "a.tar"),
            ("s-{8..11}.tar", "s-8.tar s-9.tar s-10.tar s-11.tar"),
            ("s-{008..011}", "s-008 s-009 s-010 s-011"),
            ("{3..1}", "3 2 1"),
            ("{0..10..4}", "0 4 8"),
            ("{0..1}-{a,b}", "0-a 0-b 1-a 1-b"),
            ("x{a,b{0..1},}y", "xay xb0y xb1y xy"),
            ("{a}", "{a}"),
            ("{a{0..1}}", "{a0} {a1}"),
            ("{a..c}", "{a..c}"),
            ("{..}{0..1..0}", "{..}{0..1..0}"),
            ("{x{0..1}", "{x0 {x1"),
            ("}{", "}{"),
            ("{é,ü}", "é ü"),
        ] {
            assert_eq!(expand(pattern).unwrap().join(" "), expected, "{pattern}");
        }
    }

    #[test]
    fn too_many_paths_are_refused() {
        for pattern in ["{0..9999999}", "{0..18446744073709551615}", "{0..999}{0..999}{0..999}"] {
            let error = expand(pattern).unwrap_err().to_string();
            assert_eq!(error, format!("{pattern} stands for more than 1000000 paths"));
        }
        assert_eq!(expand("{0..99999999999999999999}").unwrap().len(), 1);
    }
}
