//! The book holds together: its summary, its links, the commands and messages that it quotes.
//!
//! That `brigade` understands its commands, and answers as the book shows, are tests of the package `brigade-cli`;
//! those of `cargo xtask` are read by a test of `xtask`.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};

pub(crate) fn docs() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

pub(crate) fn root() -> &'static Path {
    docs().parent().unwrap()
}

/// The text of each page, by its file's name.
fn pages() -> BTreeMap<String, String> {
    let mut pages = BTreeMap::new();
    for folder in ["", "concepts", "contributing", "decisions", "reference"] {
        for entry in fs::read_dir(docs().join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|it| it == "md") {
                let name = path.strip_prefix(docs()).unwrap().to_str().unwrap().to_owned();
                pages.insert(name, fs::read_to_string(path).unwrap());
            }
        }
    }
    pages
}

/// What these tests look at in a page.
#[derive(Default)]
struct Page {
    links: Vec<String>,
    /// The places that a link can name, as mdBook makes them of headings.
    places: HashSet<String>,
    /// Headings with their code, whose backticks are kept.
    headings: Vec<String>,
    /// Language and text.
    blocks: Vec<(String, String)>,
}

impl Page {
    fn read(text: &str) -> Self {
        let mut page = Self::default();
        let (mut heading, mut marked, mut block) = (None::<String>, String::new(), None);
        for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
            match event {
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    page.links.push(dest_url.to_string());
                }
                Event::Start(Tag::Heading { .. }) => {
                    heading = Some(String::new());
                }
                Event::End(TagEnd::Heading(_)) => {
                    let place = place(&heading.take().unwrap());
                    assert!(page.places.insert(place.clone()), "there are two headings #{place}");
                    page.headings.push(std::mem::take(&mut marked));
                }
                Event::Start(Tag::CodeBlock(CodeBlockKind::Fenced(language))) => {
                    block = Some((language.to_string(), String::new()));
                }
                Event::End(TagEnd::CodeBlock) => page.blocks.extend(block.take()),
                Event::Text(text) => {
                    if let Some((_, contents)) = &mut block {
                        contents.push_str(&text);
                    } else if let Some(heading) = &mut heading {
                        heading.push_str(&text);
                        marked.push_str(&text);
                    }
                }
                Event::Code(code) => {
                    if let Some(heading) = &mut heading {
                        heading.push_str(&code);
                        marked.push_str(&format!("`{code}`"));
                    }
                }
                _ => {}
            }
        }
        page
    }
}

/// The identifier that mdBook, and those that show Markdown in repositories, give a heading.
fn place(heading: &str) -> String {
    let kept = heading.trim().chars().filter_map(|letter| match letter {
        ' ' => Some('-'),
        letter if letter.is_alphanumeric() || matches!(letter, '-' | '_') => Some(letter),
        _ => None,
    });
    kept.flat_map(char::to_lowercase).collect()
}

#[test]
fn the_summary_has_every_page_once() {
    let pages = pages();
    let summary = Page::read(&pages["SUMMARY.md"]).links;
    let listed: BTreeSet<&str> = summary.iter().map(String::as_str).collect();
    assert_eq!(listed.len(), summary.len(), "a page is listed twice");
    let there: BTreeSet<&str> =
        pages.keys().map(String::as_str).filter(|name| *name != "SUMMARY.md").collect();
    assert_eq!(listed, there);
}

#[test]
fn links_lead_somewhere() {
    let mut texts = pages();
    let read = |name: &str| fs::read_to_string(root().join(name)).unwrap();
    let outside =
        ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"]
            .map(|name| (format!("../{name}"), read(name)));
    texts.extend(outside);
    let pages: BTreeMap<PathBuf, Page> =
        texts.iter().map(|(name, text)| (normal(&docs().join(name)), Page::read(text))).collect();
    let mut looked_at = 0;
    for (path, page) in &pages {
        for link in page.links.iter().filter(|link| !link.contains("://")) {
            let from = path.file_name().unwrap().display();
            let (file, place) = link.split_once('#').unwrap_or((link, ""));
            if let Some(item) = file.trim_start_matches("../").strip_prefix("api/") {
                assert!(is_documented(item), "{from}: {link}: there is no such item");
                continue;
            }
            let target = match file {
                "" => path.clone(),
                file => normal(&path.parent().unwrap().join(file)),
            };
            assert!(target.is_file(), "{from}: {link}: there is no such file");
            if path.starts_with(docs()) {
                let is_in_the_book = target.starts_with(docs());
                assert!(is_in_the_book, "{from}: {link}: the file is not a part of the book");
            }
            if !place.is_empty() {
                let has_it = pages.get(&target).is_some_and(|page| page.places.contains(place));
                assert!(has_it, "{from}: {link}: there is no such heading");
            }
            looked_at += 1;
        }
    }
    assert!(looked_at > 60, "{looked_at} links");
}

fn normal(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf())
}

/// Whether a file of the API reference will be there: `brigade_train/struct.Accelerator.html`, or that of a module.
fn is_documented(item: &str) -> bool {
    let (name, file) = item.split_once('/').unwrap();
    let folder = if name == "brigade" { name } else { name.strip_prefix("brigade_").unwrap() };
    let folder = root().join("crates").join(folder).join("src");
    let (module, file) = file.rsplit_once('/').unwrap_or(("", file));
    if file == "index.html" {
        let module = folder.join(module);
        return module.is_dir() || module.with_extension("rs").is_file();
    }
    let declaration = file.strip_suffix(".html").unwrap().replace('.', " ");
    let starts = ["<", " ", ":", "(", ";"].map(|end| format!("pub {declaration}{end}"));
    sources(&folder).iter().any(|(_, text)| starts.iter().any(|start| text.contains(start)))
}

/// All Rust files below a folder.
fn sources(folder: &Path) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|it| it == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            found.push((path, text));
        }
    }
    found
}

#[test]
fn every_rust_block_is_compiled() {
    let compiled = include_str!("../../lib.rs");
    for (name, text) in pages() {
        let page = Page::read(&text);
        let mut blocks =
            page.blocks.iter().filter(|(language, _)| language.starts_with("rust")).peekable();
        let is_compiled = compiled.contains(&format!("\"{name}\""));
        assert_eq!(blocks.peek().is_some(), is_compiled, "docs/lib.rs and {name}");
        for (language, block) in blocks {
            let known = ["rust", "rust,no_run"].contains(&language.as_str());
            assert!(known, "{name}: a block of {language}:\n{block}");
        }
    }
}

/// Blocks have one of these languages, so that no command hides in a block that no test reads.
#[test]
fn every_block_is_of_a_known_kind() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    for (name, text) in pages().into_iter().chain([("README.md".to_owned(), readme)]) {
        for (language, block) in Page::read(&text).blocks {
            let known = ["sh", "console", "text", "toml", "python", "rust", "rust,no_run"];
            assert!(
                known.contains(&language.as_str()),
                "{name}: a block of `{language}`:\n{block}"
            );
            let shell = block.lines().any(|line| {
                ["$ ", "brigade ", "cargo "].iter().any(|start| line.starts_with(start))
            });
            let is_read = ["sh", "console", "toml"].contains(&language.as_str());
            assert!(is_read || !shell, "{name}: commands in a block of `{language}`:\n{block}");
        }
    }
}

/// Commands that are not those of `brigade` and `cargo xtask`: cargo's name packages that there are, and the
/// others are known here.
#[test]
fn other_commands_are_known() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let workspace = fs::read_to_string(root().join("Cargo.lock")).unwrap();
    // What `cargo xtask bench newcomer-project` runs.
    let newcomer = fs::read_to_string(root().join("bench/src/newcomer.rs")).unwrap();
    let notebook = fs::read_to_string(root().join("xtask/src/notebook.rs")).unwrap();
    // Whose README has it.
    let new = fs::read_to_string(root().join("crates/cli/src/new.rs")).unwrap();
    for (name, text) in pages().into_iter().chain([("README.md".to_owned(), readme)]) {
        for (language, block) in Page::read(&text).blocks {
            if language != "sh" {
                continue;
            }
            for line in block.replace("\\\n", " ").lines() {
                let command = line.split('#').next().unwrap().trim();
                let words: Vec<&str> = command.split_whitespace().collect();
                let is_known = match words[..] {
                    [] | ["cd", _] | ["cargo", "xtask", ..] => true,
                    ["cargo", "build", "--release", ref packages @ ..] if !packages.is_empty() => {
                        packages.chunks(2).all(|pair| {
                            let named = format!("name = \"{}\"", pair[1]);
                            pair[0] == "-p" && workspace.contains(&named)
                        })
                    }
                    // What `cargo xtask notebook` runs.
                    ["python3", "-m", "venv", "notebooks", ..] => true,
                    ["notebooks/bin/jupyter", "lab"] => true,
                    ["cargo", "install", "--locked", "evcxr_jupyter", "--version", version] => {
                        notebook.contains(&format!("\"{version}\""))
                    }
                    ["cargo", "run", "--features", "cuda"] => new.contains(command),
                    ["cargo", ..] => newcomer.contains(&format!("\"{command}\"")),
                    // A test of the packages does this (crates/cli/tests/needs/packages.rs).
                    ["pip", "install", "target/dist/brigade-*_x86_64.whl"] => true,
                    ["pip", "uninstall", "brigade"] => true,
                    ["python", "-m", "brigade", "launch", ..] => true,
                    ["srun", "--ntasks-per-node=1", "brigade", ..] => true,
                    ["export", "BRIGADE_ETCD_PASSWORD=..."] => true,
                    // The archive of `cargo xtask gpu --pack`; a test of its runner parses the options.
                    ["python3", "-m", "tarfile", "-e", "brigade-gpu.tar.xz"] => true,
                    ["python3", "brigade-gpu/run.py", ..] => true,
                    // Its own tests in `examples/text` run it with these options.
                    ["target/release/text_generate", ..] => true,
                    // A run of another host, in its terminal or through a pipe.
                    ["ssh", "-t", _, "brigade", "watch", _] => true,
                    ["ssh", _, "tail", "-n", "+1", "-F", _, "|", "brigade", "watch", "-"] => true,
                    [program, ..] => {
                        program == "brigade"
                            || program == "target/release/brigade"
                            || program == "target/release/fashion_mnist"
                    }
                };
                assert!(is_known, "{name}: {line}");
            }
        }
    }
}

/// Variable that parts of Brigade set for each other.
const INTERNAL: &str = "BRIGADE_NOTEBOOK_CALL";

#[test]
fn every_variable_of_brigade_is_in_the_reference() {
    let page = &pages()["reference/environment.md"];
    let (mut looked_at, mut missing) = (BTreeSet::new(), BTreeSet::new());
    for (path, text) in sources(&root().join("crates")) {
        let parts: Vec<_> = path.iter().filter_map(|part| part.to_str()).collect();
        let is_of_tests = parts.iter().any(|part| ["tests", "tests.rs"].contains(part));
        if is_of_tests || !parts.contains(&"src") {
            continue;
        }
        let code = text.split("#[cfg(test)]").next().unwrap();
        for literal in code.split('"').filter(|it| it.starts_with("BRIGADE_")) {
            let is_a_name = literal.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
            let is_a_prefix = literal.ends_with('_') || literal == "BRIGADE_REQUIRE";
            let is_of_tests = literal.starts_with("BRIGADE_TEST_");
            if !is_a_name || is_a_prefix || is_of_tests || literal == INTERNAL {
                continue;
            }
            looked_at.insert(literal.to_owned());
            if !page.contains(&format!("`{literal}`")) {
                missing.insert(literal.to_owned());
            }
        }
    }
    assert!(looked_at.len() > 10, "{looked_at:?}");
    assert!(missing.is_empty(), "crates/cli/tests/it/reference.rs has no row for {missing:?}");
}

#[test]
fn quoted_messages_are_in_the_source() {
    let all: String = sources(&root().join("crates"))
        .into_iter()
        .filter(|(path, _)| path.components().any(|part| part.as_os_str() == "src"))
        .map(|(_, text)| joined(&text))
        .collect();
    let page = Page::read(&pages()["troubleshooting.md"]);
    let (mut quoted, mut missing) = (0, Vec::new());
    for heading in page.headings.iter().filter(|heading| heading.starts_with('`')) {
        for message in heading.split('`').skip(1).step_by(2) {
            for part in message.split('…') {
                // What stands before and after a name may be a part of another literal.
                let fixed = part.trim().trim_matches([':', ',', ';', '(', ')']).trim();
                if !all.contains(fixed) {
                    missing.push(format!("no source has `{fixed}` of `{message}`"));
                }
            }
            let longest = message.split('…').map(str::len).max();
            assert!(longest >= Some(8), "`{message}` is not specific");
            quoted += 1;
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
    assert!(quoted > 50, "{quoted} messages");
}

/// A source's text with its string literals in one line each.
fn joined(text: &str) -> String {
    let mut parts = text.split("\\\n");
    let first = parts.next().unwrap().to_owned();
    parts.fold(first, |text, part| text + part.trim_start())
}
