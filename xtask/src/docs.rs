//! `cargo xtask docs`: builds the book in docs/ as HTML with mdBook, with the API reference of all crates.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::env;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

use crate::cargo::{self, Cargo, plain_cargo};
use crate::checkout::Checkout;
use crate::workspace::Workspace;

/// Builds the book, then checks every link of its pages.
pub(crate) fn run(checkout: &Checkout, without_api: bool) -> Result<ExitCode> {
    let mdbook = MdBook::find(checkout)?;
    let target = Workspace::of(checkout)?.target;
    let source = target.join("book-source");
    copy_pages(&checkout.root().join("docs"), &source)?;
    copy_images(&checkout.root().join("docs"), &source)?;

    let book = target.join("book");
    remove(&book)?;
    let mut build = Command::new(mdbook);
    // docs/ is also a package, whose other files do not belong into the book.
    build.arg("build").arg(&source).arg("--dest-dir").arg(&book).env("MDBOOK_BOOK__SRC", PAGES);
    let status = cargo::run(&mut build)?;
    if !status.success() {
        return Ok(cargo::exit_code(status));
    }
    if !without_api {
        let status = cargo::run(&mut document_all(&Cargo::new(checkout)?))?;
        if !status.success() {
            return Ok(cargo::exit_code(status));
        }
        let mut copy = Command::new("cp");
        copy.args(["-R", "--"]).arg(target.join("doc")).arg(book.join(API));
        if !copy.status().context("cannot start cp")?.success() {
            bail!("the API reference could not be copied into the book");
        }
    }

    let broken = broken_links(&book, !without_api)?;
    for link in &broken {
        eprintln!("docs: {link}");
    }
    if !broken.is_empty() {
        eprintln!("docs: {} links lead nowhere", broken.len());
        return Ok(ExitCode::FAILURE);
    }
    eprintln!("docs: {}", checkout.relative(&book.join("index.html")).display());
    Ok(ExitCode::SUCCESS)
}

/// Returns the command for the libraries only: the program `brigade` would overwrite the pages of the library
/// `brigade`.
pub(crate) fn document_all(cargo: &Cargo<'_>) -> Command {
    document(cargo, &["doc", "--workspace", "--lib", "--no-deps"])
}

/// Returns `cargo doc` with warnings as errors.
pub(crate) fn document(cargo: &Cargo<'_>, arguments: &[&str]) -> Command {
    let mut command = cargo.command(arguments);
    match env::var_os("RUSTDOCFLAGS") {
        // The variable replaces the configuration's flags, so they are appended to it.
        Some(mut flags) => {
            flags.push(" -D warnings");
            command.env("RUSTDOCFLAGS", flags);
        }
        // cargo appends them to the run path in .cargo/libtorch.toml.
        None => {
            command.args(["--config", "build.rustdocflags=['-D', 'warnings']"]);
        }
    }
    command
}

/// mdBook, in the version for which the pages were written.
pub(crate) struct MdBook {
    folder: PathBuf,
}

impl MdBook {
    pub(crate) fn of(checkout: &Checkout) -> Self {
        Self { folder: checkout.root().join("tools").join(format!("mdbook-{VERSION}")) }
    }

    fn program(&self) -> PathBuf {
        self.folder.join("bin/mdbook")
    }

    /// Compiles mdBook into an ignored folder of the checkout, so that a user's own installation is kept. Without its
    /// server, whose dependencies are most of the build.
    pub(crate) fn install(&self, checkout: &Checkout) -> Result<()> {
        if self.program().is_file() {
            return Ok(());
        }
        let mut install = plain_cargo(checkout);
        install.args(["install", "mdbook", "--version", VERSION, "--locked"]);
        install.args(["--no-default-features", "--features", "search", "--root"]).arg(&self.folder);
        if cargo::run(&mut install)?.success() {
            return Ok(());
        }
        bail!("cargo cannot install mdBook {VERSION}: its last lines say why")
    }

    /// Returns the installed mdBook, or else that of `PATH` if its pages are the same.
    fn find(checkout: &Checkout) -> Result<PathBuf> {
        let own = Self::of(checkout).program();
        if own.is_file() {
            return Ok(own);
        }
        let version = Command::new("mdbook").arg("--version").output();
        let version = version.map(|it| String::from_utf8_lossy(&it.stdout).into_owned());
        if version.is_ok_and(|it| it.trim() == format!("mdbook v{VERSION}")) {
            return Ok(PathBuf::from("mdbook"));
        }
        bail!("mdBook {VERSION} is not installed: `cargo xtask install docs` installs it")
    }
}

/// Copies the book's settings, and the pages into a folder of their own.
fn copy_pages(docs: &Path, to: &Path) -> Result<()> {
    remove(to)?;
    let pages = to.join(PAGES);
    fs::create_dir_all(&pages).with_context(|| format!("cannot make {}", pages.display()))?;
    let copy = |from: &Path, to: &Path| {
        fs::copy(from, to).map(drop).with_context(|| format!("cannot copy {}", from.display()))
    };
    for name in ["book.toml", "book.css"] {
        copy(&docs.join(name), &to.join(name))?;
    }
    for folder in FOLDERS {
        let (from, to) = (docs.join(folder), pages.join(folder));
        fs::create_dir_all(&to).with_context(|| format!("cannot make {}", to.display()))?;
        for entry in
            fs::read_dir(&from).with_context(|| format!("cannot read {}", from.display()))?
        {
            let path = entry.with_context(|| format!("cannot read {}", from.display()))?.path();
            if let (Some(name), Some("md")) = (path.file_name(), extension(&path)) {
                copy(&path, &to.join(name))?;
            }
        }
    }
    Ok(())
}

fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// Copies the images that pages show, into a folder beside the pages.
fn copy_images(docs: &Path, to: &Path) -> Result<()> {
    let (from, to) = (docs.join("images"), to.join(PAGES).join("images"));
    fs::create_dir_all(&to).with_context(|| format!("cannot make {}", to.display()))?;
    for entry in fs::read_dir(&from).with_context(|| format!("cannot read {}", from.display()))? {
        let entry = entry.with_context(|| format!("cannot read {}", from.display()))?;
        fs::copy(entry.path(), to.join(entry.file_name()))
            .with_context(|| format!("cannot copy {}", entry.path().display()))?;
    }
    Ok(())
}

/// Returns one line for each link of the book's pages whose file or anchor does not exist. Links into the API reference
/// are skipped if it was not built.
fn broken_links(book: &Path, with_api: bool) -> Result<Vec<String>> {
    let mut pages = BTreeMap::new();
    let mut files = Vec::new();
    for folder in FOLDERS.map(|folder| book.join(folder)) {
        let unreadable = || format!("cannot read {}", folder.display());
        for entry in fs::read_dir(&folder).with_context(unreadable)? {
            files.push(entry.with_context(unreadable)?.path());
        }
    }
    for path in files {
        // The page for unknown addresses has links relative to the server's root.
        let is_a_page = extension(&path) == Some("html") && name(&path) != "404.html";
        if is_a_page {
            let text = fs::read_to_string(&path);
            pages.insert(path.clone(), text.with_context(|| path.display().to_string())?);
        }
    }
    let mut places: HashMap<PathBuf, HashSet<String>> = HashMap::new();
    let mut broken = Vec::new();
    for (page, text) in &pages {
        for link in attributes(text, "href") {
            let is_elsewhere = link.contains("://") || link.starts_with("mailto:");
            let is_of_the_api = link.trim_start_matches("../").starts_with(API);
            if is_elsewhere || (!with_api && is_of_the_api) {
                continue;
            }
            let (file, place) = link.split_once('#').unwrap_or((link, ""));
            let folder = page.parent().unwrap_or(book);
            let target = if file.is_empty() { page.clone() } else { normal(&folder.join(file)) };
            if !target.is_file() {
                broken.push(format!("{}: {link}: there is no such file", name(page)));
                continue;
            }
            if place.is_empty() || extension(&target) != Some("html") {
                continue;
            }
            if !places.contains_key(&target) {
                let text = fs::read_to_string(&target).unwrap_or_default();
                let ids = attributes(&text, "id").map(str::to_owned).collect();
                places.insert(target.clone(), ids);
            }
            if !places.get(&target).is_some_and(|ids| ids.contains(place)) {
                broken.push(format!("{}: {link}: the page has no such heading", name(page)));
            }
        }
    }
    Ok(broken)
}

/// Returns the values of an attribute, in the form that mdBook and rustdoc write.
fn attributes<'a>(html: &'a str, attribute: &str) -> impl Iterator<Item = &'a str> {
    let start = format!(" {attribute}=\"");
    let mut rest = html;
    std::iter::from_fn(move || {
        let at = rest.find(&start)? + start.len();
        let (value, after) = rest[at..].split_once('"')?;
        rest = after;
        Some(value)
    })
}

/// Resolves `.` and `..` in a path.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(normal.pop()),
            Component::CurDir => {}
            part => normal.push(part),
        }
    }
    normal
}

fn extension(path: &Path) -> Option<&str> {
    path.extension().and_then(|it| it.to_str())
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

const VERSION: &str = "0.5.4";
/// Folder of the pages, and folder of the API reference in the book.
const PAGES: &str = "pages";
/// The folders of docs/ with pages.
pub(crate) const FOLDERS: [&str; 5] = ["", "concepts", "contributing", "decisions", "reference"];
const API: &str = "api";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_to_files_and_headings_that_are_not_there_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let book = folder.path();
        fs::create_dir(book.join("api")).unwrap();
        fs::write(book.join("api/a.html"), "<h1 id=\"there\">").unwrap();
        fs::write(
            book.join("one.html"),
            "<h2 id=\"here\"> <a href=\"#here\"> <a href=\"two.html#x\"> <a href=\"three.html\"> \
             <a href=\"https://example.org/\"> <a href=\"./api/../api/a.html#there\"> \
             <a href=\"api/b.html\">",
        )
        .unwrap();
        fs::write(book.join("two.html"), "").unwrap();
        for folder in FOLDERS {
            fs::create_dir_all(book.join(folder)).unwrap();
        }
        let decision = "<a href=\"../one.html#here\"> <a href=\"one.html\">";
        fs::write(book.join("decisions/four.html"), decision).unwrap();
        let found = broken_links(book, true).unwrap();
        let wanted = [
            "four.html: one.html: there is no such file",
            "one.html: two.html#x: the page has no such heading",
            "one.html: three.html: there is no such file",
            "one.html: api/b.html: there is no such file",
        ];
        assert_eq!(found, wanted);
        assert_eq!(broken_links(book, false).unwrap().len(), 3);
    }
}
