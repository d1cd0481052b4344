//! Commands of the README and of the book in docs/, which are outside of this package: a published package has none,
//! and then there is nothing to test.

use std::fs;
use std::path::Path;

/// Page of the book, with its name for messages.
pub(crate) struct Page {
    pub(crate) name: String,
    text: String,
}

/// Returns README.md and the pages of docs/.
pub(crate) fn pages() -> Vec<Page> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folders = ["", "concepts", "contributing", "reference"];
    let folders =
        folders.into_iter().filter_map(|it| fs::read_dir(root.join("docs").join(it)).ok());
    let docs = folders.flatten().map(|entry| entry.unwrap().path());
    let files = docs.chain([root.join("README.md")]);
    let files =
        files.filter(|path| path.is_file() && path.extension().is_some_and(|it| it == "md"));
    let page = |path: std::path::PathBuf| Page {
        name: path.strip_prefix(&root).unwrap().display().to_string(),
        text: fs::read_to_string(&path).unwrap(),
    };
    files.map(page).collect()
}

impl Page {
    /// Returns the contents of the page's blocks of this language.
    pub(crate) fn blocks<'a>(&'a self, language: &str) -> impl Iterator<Item = &'a str> {
        let start = format!("```{language}\n");
        self.text.split("\n```\n").filter_map(move |part| {
            let at = part.rfind(&start)?;
            Some(&part[at + start.len()..])
        })
    }
}
