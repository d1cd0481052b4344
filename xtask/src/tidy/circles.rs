//! Cycles of modules: a lower module must not name a higher one, so that a crate can be read from the bottom and split
//! where it grows.
//!
//! The children of a module form a graph: one points to another if a file in its folder names an item of the other. A
//! name that the parent re-exports counts for the child that has it. Parent and child may name each other, like a file
//! and the files that were split off it. All may name the crate's `error`. Tests are left out.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::Findings;

/// Lists each cycle among the modules of the crates' sources.
pub(super) fn check(sources: &[(String, String)], findings: &mut Findings) {
    let mut crates: BTreeMap<&str, Vec<(Path, &str, &str)>> = BTreeMap::new();
    for (path, contents) in sources {
        let Some((folder, inside)) = path.split_once("/src/") else { continue };
        if let Some(module) = module_of(inside) {
            crates.entry(folder).or_default().push((module, path, contents));
        }
    }
    for (folder, files) in crates {
        let mut modules = BTreeMap::new();
        for (module, path, contents) in files {
            // Syntax errors are left to rustc.
            if let Ok(tokens) = contents.parse::<TokenStream>() {
                let read = Module::read(&module, path, tokens);
                modules.insert(module, read);
            }
        }
        findings.violations.extend(circles(folder, &modules));
    }
}

type Path = Vec<String>;

/// Returns the module of a file below `src`; `None` for tests and for programs, which are crates of their own.
fn module_of(inside: &str) -> Option<Path> {
    let inside = inside.strip_suffix(".rs")?;
    let mut path: Path = inside.split('/').map(str::to_owned).collect();
    if path.iter().any(|part| part == "tests" || part == "bin") {
        return None;
    }
    if path.len() == 1 && (path[0] == "lib" || path[0] == "main") {
        path.clear();
    } else if path.last().is_some_and(|last| last == "mod") {
        path.pop();
    }
    Some(path)
}

/// Names that a module uses.
struct Module<'a> {
    file: &'a str,
    /// Names that the module's `use` declarations import, with their paths.
    imported: BTreeMap<String, Path>,
    /// Absolute paths in this crate, with everything after `crate`.
    named: BTreeSet<Path>,
}

impl<'a> Module<'a> {
    fn read(path: &Path, file: &'a str, tokens: TokenStream) -> Self {
        let mut module = Module { file, imported: BTreeMap::new(), named: BTreeSet::new() };
        module.read_tokens(path, tokens, true);
        module
    }

    /// Reads the tokens of the module `at`, which is the file's own if `is_outermost`.
    fn read_tokens(&mut self, at: &Path, tokens: TokenStream, is_outermost: bool) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut index = 0;
        while index < tokens.len() {
            if is_for_tests(&tokens[index..]) {
                index += length_of_item(&tokens[index..]);
                continue;
            }
            match &tokens[index] {
                TokenTree::Ident(word) if word == "use" => {
                    let end = (index..tokens.len())
                        .find(|end| is_punct(&tokens[*end], ';'))
                        .unwrap_or(tokens.len());
                    let mut found = Vec::new();
                    leaves(&tokens[index + 1..end], &mut Vec::new(), &mut found);
                    for (path, name) in found {
                        let Some(path) = absolute(at, &path, is_outermost) else { continue };
                        self.named.insert(path.clone());
                        if is_outermost {
                            self.imported.insert(name, path);
                        }
                    }
                    index = end;
                }
                TokenTree::Ident(word)
                    if word == "mod"
                        && matches!(tokens.get(index + 2), Some(TokenTree::Group(_))) =>
                {
                    let (TokenTree::Ident(name), TokenTree::Group(body)) =
                        (&tokens[index + 1], &tokens[index + 2])
                    else {
                        index += 1;
                        continue;
                    };
                    let mut inner = at.clone();
                    inner.push(name.to_string());
                    self.read_tokens(&inner, body.stream(), false);
                    index += 2;
                }
                TokenTree::Ident(word) if word == "crate" || word == "super" => {
                    let path = path_from(&tokens[index..]);
                    if path.len() > 1
                        && let Some(path) = absolute(at, &path, false)
                    {
                        self.named.insert(path);
                    }
                    index += 1;
                    // The rest of `super::super::x` is not a path of its own.
                    while tokens.get(index).is_some_and(|it| is_punct(it, ':'))
                        || matches!(tokens.get(index), Some(TokenTree::Ident(word)) if word == "super")
                    {
                        index += 1;
                    }
                    continue;
                }
                TokenTree::Group(group) => self.read_tokens(at, group.stream(), false),
                _ => {}
            }
            index += 1;
        }
    }
}

fn is_punct(token: &TokenTree, character: char) -> bool {
    matches!(token, TokenTree::Punct(punct) if punct.as_char() == character)
}

/// Returns `true` if an attribute `#[cfg(test)]`, or one of several conditions with `test` among them, begins here.
fn is_for_tests(tokens: &[TokenTree]) -> bool {
    let [hash, TokenTree::Group(attribute), ..] = tokens else { return false };
    if !is_punct(hash, '#') || attribute.delimiter() != Delimiter::Bracket {
        return false;
    }
    let text = attribute.stream().to_string().replace(' ', "");
    text == "cfg(test)" || text.starts_with("cfg(all(test,")
}

/// Returns the number of tokens of the item that begins here, attributes included.
fn length_of_item(tokens: &[TokenTree]) -> usize {
    let ends = |token: &TokenTree| {
        is_punct(token, ';')
            || matches!(token, TokenTree::Group(group) if group.delimiter() == Delimiter::Brace)
    };
    tokens.iter().position(ends).map_or(tokens.len(), |last| last + 1)
}

/// Returns the names of a path that begins here.
fn path_from(tokens: &[TokenTree]) -> Path {
    let mut path = Vec::new();
    let mut rest = tokens.iter();
    while let Some(TokenTree::Ident(name)) = rest.next() {
        path.push(name.to_string());
        if !(rest.next().is_some_and(|it| is_punct(it, ':'))
            && rest.next().is_some_and(|it| is_punct(it, ':')))
        {
            break;
        }
    }
    path
}

/// Collects the paths of a `use` declaration, each with the name that it gets.
fn leaves(tokens: &[TokenTree], prefix: &mut Path, found: &mut Vec<(Path, String)>) {
    let before = prefix.len();
    for tree in tokens.split(|token| is_punct(token, ',')) {
        let mut alias = None;
        let mut words = tree.iter().peekable();
        while let Some(token) = words.next() {
            match token {
                TokenTree::Ident(word) if word == "as" => {
                    alias = words.next().map(ToString::to_string);
                }
                TokenTree::Ident(word) => prefix.push(word.to_string()),
                TokenTree::Group(group) => {
                    let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                    leaves(&inner, prefix, found);
                    prefix.truncate(before);
                }
                _ => {}
            }
        }
        if prefix.len() > before {
            let mut path = prefix.clone();
            if path.len() > 1 && path.last().is_some_and(|last| last == "self") {
                path.pop();
            }
            if let Some(name) = alias.or_else(|| path.last().cloned()) {
                found.push((path, name));
            }
            prefix.truncate(before);
        }
    }
}

/// Resolves a path of the module `at` from the crate's root; `None` if it is another crate's, as far as the path shows:
/// one without `crate`, `super` or `self` is a child's if `may_be_child`.
fn absolute(at: &Path, path: &[String], may_be_child: bool) -> Option<Path> {
    match path.first()?.as_str() {
        "crate" => Some(path[1..].to_vec()),
        "self" => Some([at, &path[1..]].concat()),
        "super" => {
            let ups = path.iter().take_while(|part| *part == "super").count();
            let kept = at.len().checked_sub(ups)?;
            Some([&at[..kept], &path[ups..]].concat())
        }
        _ => may_be_child.then(|| [at, path].concat()),
    }
}

/// Returns one message for each cycle of a crate.
fn circles(folder: &str, modules: &BTreeMap<Path, Module<'_>>) -> Vec<String> {
    // For each parent: the children that name each other, with the places.
    let mut graphs: BTreeMap<&[String], Graph<'_>> = BTreeMap::new();
    for (at, module) in modules {
        for named in &module.named {
            let named = resolved(named, modules);
            let common = at.iter().zip(&named).take_while(|(one, other)| one == other).count();
            let Some(from) = at.get(common) else { continue };
            let Some((to, _)) = named.get(..=common).and_then(|it| modules.get_key_value(it))
            else {
                continue;
            };
            // Fallible functions return the crate's error, whose variants carry the cause.
            let to = to[common].as_str();
            if to != "error" {
                let edges = graphs.entry(&at[..common]).or_default().entry(from).or_default();
                edges.entry(to).or_insert(module.file);
            }
        }
    }
    let mut found = Vec::new();
    for (parent, graph) in &graphs {
        let mut done: BTreeSet<&str> = BTreeSet::new();
        for start in graph.keys().copied() {
            if done.contains(start) {
                continue;
            }
            let Some(circle) = circle_through(start, graph) else { continue };
            let after = circle.iter().skip(1).chain(&circle[..1]);
            let steps: Vec<String> = circle
                .iter()
                .zip(after)
                .map(|(from, to)| format!("{from} -> {to} ({})", graph[*from][*to]))
                .collect();
            let below = reached(start, graph);
            let knot: Vec<&str> =
                below.into_iter().filter(|other| reached(other, graph).contains(start)).collect();
            let folder = [&[format!("{folder}/src")], *parent].concat().join("/");
            let others = knot.len() - circle.len();
            let more = if others > 0 {
                format!(", and {others} more modules with them")
            } else {
                String::new()
            };
            found.push(format!(
                "{folder}: modules in a circle: {}{more}; move what they share below them",
                steps.join(", ")
            ));
            done.extend(knot);
        }
    }
    found
}

type Graph<'a> = BTreeMap<&'a str, BTreeMap<&'a str, &'a str>>;

/// Returns the modules that can be reached from `start`; `start` itself only if it is on a cycle.
fn reached<'a>(start: &str, graph: &Graph<'a>) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut queue = vec![start];
    while let Some(at) = queue.pop() {
        for to in graph.get(at).into_iter().flat_map(BTreeMap::keys).copied() {
            if found.insert(to) {
                queue.push(to);
            }
        }
    }
    found
}

/// Follows re-exports: a path whose name the module imports stands for the imported one.
fn resolved(path: &Path, modules: &BTreeMap<Path, Module<'_>>) -> Path {
    let mut path = path.clone();
    // Chains of re-exports end; a cycle of imports would not compile.
    for _ in 0..8 {
        let Some((length, target)) = (0..path.len()).find_map(|length| {
            let module = modules.get(&path[..length])?;
            if modules.contains_key(&path[..=length]) {
                return None;
            }
            let target = module.imported.get(&path[length])?;
            (target[..] != path[..=length]).then_some((length, target))
        }) else {
            break;
        };
        path = [&target[..], &path[length + 1..]].concat();
    }
    path
}

/// Returns the shortest cycle through `start`.
fn circle_through<'a>(start: &'a str, graph: &Graph<'a>) -> Option<Vec<&'a str>> {
    let mut came_from: BTreeMap<&str, &str> = BTreeMap::new();
    let mut queue = VecDeque::from([start]);
    while let Some(at) = queue.pop_front() {
        for to in graph.get(at).into_iter().flat_map(BTreeMap::keys).copied() {
            if to == start {
                let mut circle = vec![at];
                while let Some(previous) = circle.last().and_then(|last| came_from.get(last)) {
                    circle.push(previous);
                }
                circle.reverse();
                return Some(circle);
            }
            if !came_from.contains_key(to) {
                came_from.insert(to, at);
                queue.push_back(to);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn violations(files: &[(&str, &str)]) -> Vec<String> {
        let sources: Vec<_> =
            files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect();
        let mut findings = Findings::default();
        check(&sources, &mut findings);
        findings.violations
    }

    #[test]
    fn siblings_that_name_each_other_are_a_circle() {
        let found = violations(&[
            ("crates/x/src/lib.rs", "mod a; mod b; mod c;"),
            ("crates/x/src/a.rs", "use crate::b::B; struct A;"),
            ("crates/x/src/b.rs", "mod inner;"),
            ("crates/x/src/b/inner.rs", "fn f() { let _ = super::super::a::A; }"),
            ("crates/x/src/c.rs", "use crate::{a::A, b::{self, B}};"),
        ]);
        assert_eq!(
            found,
            ["crates/x/src: modules in a circle: a -> b (crates/x/src/a.rs), b -> a \
              (crates/x/src/b/inner.rs); move what they share below them"]
        );
    }

    #[test]
    fn a_name_that_the_parent_re_exports_is_the_childs() {
        let files = |root| {
            violations(&[
                ("crates/x/src/lib.rs", root),
                ("crates/x/src/a.rs", "use crate::{Renamed, elsewhere::B};"),
                ("crates/x/src/b.rs", "fn f() -> crate::A {}"),
            ])
        };
        let with = "mod a; mod b; pub use a::A; pub(crate) use b::B as Renamed;";
        assert_eq!(files(with).len(), 1);
        assert_eq!(files("mod a; mod b; struct A; struct Renamed;"), [""; 0]);
    }

    #[test]
    fn parents_tests_and_other_crates_do_not_count() {
        let found = violations(&[
            ("crates/x/src/lib.rs", "mod a; mod b; struct Root; fn f() { a::g(); b::g(); }"),
            ("crates/x/src/a.rs", "use crate::Root; #[cfg(test)] mod tests { use crate::b::B; }"),
            ("crates/x/src/b.rs", "use crate::a::A; /// [`crate::a`]\nuse a_crate::b;"),
            ("crates/x/src/a/tests.rs", "use crate::b::B;"),
            ("crates/y/src/b.rs", "use crate::a::A;"),
        ]);
        assert_eq!(found, [""; 0]);
    }
}
