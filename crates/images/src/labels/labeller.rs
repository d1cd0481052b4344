//! Labels from the names of images.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use regex_lite::Regex;

use super::{LabelTable, ends};
use crate::{ImageError, Result};

/// A rule that finds the label of an image in its path.
///
/// ```
/// use std::path::Path;
///
/// use brigade_images::labels::Labeller;
///
/// let image = Path::new("pets/images/great_pyrenees_173.jpg");
/// assert_eq!(Labeller::parent().label(image)?, "images");
/// assert_eq!(Labeller::regex(r"^(.*)_\d+")?.label(image)?, "great_pyrenees");
/// let is_cat = |image: &Path| {
///     let name = image.file_name()?.to_str()?;
///     Some(name.starts_with(char::is_uppercase).to_string())
/// };
/// assert_eq!(Labeller::function(is_cat).label(image)?, "false");
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
pub struct Labeller(Rule);

enum Rule {
    Parent,
    Name(Regex),
    Path(Regex),
    Function(Box<Function>),
    Table(HashMap<String, String>),
}

type Function = dyn Fn(&Path) -> Option<String> + Send + Sync;

impl Labeller {
    /// Creates a rule by which the label is the name of the folder that contains the image: fastai's `parent_label`.
    #[must_use]
    pub fn parent() -> Self {
        Self(Rule::Parent)
    }

    /// Creates a rule by which the label is the first group of a regular expression in the file's name: fastai's
    /// `from_name_re`.
    ///
    /// The expression may match anywhere in the name, as with Python's `re.search`. The syntax is that of the crate
    /// `regex-lite`: Python's without look-around and back references, and classes such as `\d` and `\w` are those of
    /// ASCII.
    ///
    /// # Errors
    /// Fails if the expression is invalid or has no group.
    pub fn regex(pattern: &str) -> Result<Self> {
        compile(pattern).map(|regex| Self(Rule::Name(regex)))
    }

    /// Creates a rule by which the label is the first group of a regular expression in the whole path, with `/` between
    /// folders: fastai's `RegexLabeller` and `from_path_re`. The syntax is that of [`regex`](Self::regex).
    ///
    /// # Errors
    /// Returns the same errors as [`regex`](Self::regex).
    pub fn path_regex(pattern: &str) -> Result<Self> {
        compile(pattern).map(|regex| Self(Rule::Path(regex)))
    }

    /// Creates a rule by which the label is the result of a function of the path. `None` is an error with the image's
    /// name.
    #[must_use]
    pub fn function(function: impl Fn(&Path) -> Option<String> + Send + Sync + 'static) -> Self {
        Self(Rule::Function(Box::new(function)))
    }

    /// Creates a rule that looks up the label in a table, by the longest suffix of the path that the table contains:
    /// `cats/1.jpg` before `1.jpg`.
    #[must_use]
    pub fn table(table: &LabelTable) -> Self {
        let rows = table.rows().map(|(name, label)| (name.to_owned(), label.to_owned()));
        Self(Rule::Table(rows.collect()))
    }

    /// Returns the label of the image at `path`.
    ///
    /// # Errors
    /// [`ImageError::NoLabel`] if the rule does not find one.
    pub fn label(&self, path: &Path) -> Result<String> {
        let text = path.to_string_lossy();
        let file_name = || path.file_name().unwrap_or_default().to_string_lossy();
        let found = match &self.0 {
            Rule::Parent => {
                let parent = path.parent().and_then(Path::file_name);
                parent.map(|name| name.to_string_lossy().into_owned())
            }
            Rule::Name(regex) => first_group(regex, &file_name()),
            Rule::Path(regex) => first_group(regex, &text),
            Rule::Function(function) => function(path),
            Rule::Table(table) => ends(&text).find_map(|end| table.get(end)).cloned(),
        };
        found.ok_or_else(|| ImageError::NoLabel {
            name: text.into_owned(),
            detail: match &self.0 {
                Rule::Parent => "it is in no folder".to_owned(),
                Rule::Name(regex) => format!("its name does not match `{regex}`"),
                Rule::Path(regex) => format!("its path does not match `{regex}`"),
                Rule::Function(_) => "the function did not give one".to_owned(),
                Rule::Table(table) => format!("it is not in the table of {} names", table.len()),
            },
        })
    }
}

impl fmt::Debug for Labeller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Rule::Parent => f.write_str("Labeller(parent)"),
            Rule::Name(regex) => write!(f, "Labeller(name `{regex}`)"),
            Rule::Path(regex) => write!(f, "Labeller(path `{regex}`)"),
            Rule::Function(_) => f.write_str("Labeller(function)"),
            Rule::Table(table) => write!(f, "Labeller(table of {})", table.len()),
        }
    }
}

fn compile(pattern: &str) -> Result<Regex> {
    let refused =
        |why: String| ImageError::InvalidArgument(format!("`{pattern}` cannot find labels: {why}"));
    let regex = Regex::new(pattern).map_err(|error| refused(error.to_string()))?;
    if regex.captures_len() < 2 {
        return Err(refused("it has no group; put what is the label into parentheses".to_owned()));
    }
    Ok(regex)
}

fn first_group(regex: &Regex, text: &str) -> Option<String> {
    Some(regex.captures(text)?.get(1)?.as_str().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_searched_for_in_name_or_path() {
        let path = Path::new("data_7/n01_3/cat_12.jpg");
        let label = |labeller: Result<Labeller>| labeller.unwrap().label(path).unwrap();
        assert_eq!(label(Labeller::regex(r"([^/]+)_\d+")), "cat");
        assert_eq!(label(Labeller::path_regex(r"([^/]+)_\d+")), "data");
        assert_eq!(label(Labeller::path_regex(r"/([^/]+)_\d+\.jpg$")), "cat");
        assert_eq!(label(Ok(Labeller::parent())), "n01_3");
    }

    #[test]
    fn an_image_without_a_label_is_named() {
        let path = Path::new("a/b.jpg");
        for (labeller, expected) in [
            (
                Labeller::regex(r"(\d)").unwrap(),
                r"a/b.jpg has no label: its name does not match `(\d)`",
            ),
            (Labeller::path_regex("(c)?b").unwrap(), "its path does not match"),
            (Labeller::function(|_| None), "the function did not give one"),
        ] {
            let error = labeller.label(path).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        let error = Labeller::parent().label(Path::new("b.jpg")).unwrap_err().to_string();
        assert_eq!(error, "b.jpg has no label: it is in no folder");
    }

    #[test]
    fn expressions_that_find_no_label_are_refused() {
        let error = Labeller::regex("cat").unwrap_err().to_string();
        assert!(error.contains("`cat` cannot find labels: it has no group"), "{error}");
        assert!(Labeller::regex("(cat").unwrap_err().to_string().contains("`(cat` cannot"));
    }

    #[test]
    fn the_longest_end_in_a_table_counts() {
        let table = LabelTable::new([("1.jpg", "short"), ("cats/1.jpg", "long")]);
        let labeller = Labeller::table(&table);
        assert_eq!(labeller.label(Path::new("/data/cats/1.jpg")).unwrap(), "long");
        assert_eq!(labeller.label(Path::new("/data/bobcats/1.jpg")).unwrap(), "short");
        let error = labeller.label(Path::new("/data/2.jpg")).unwrap_err().to_string();
        assert!(error.contains("not in the table of 2 names"), "{error}");
    }
}
