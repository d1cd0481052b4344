//! Labels of items, and the functions that find them.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use brigade_rank_env::text::counted;
use brigade_torch::{Error, Result};
use brigade_vision::VisionError;
use brigade_vision::labels::Labeller;

use super::items::Items;

/// The label of an item as a labeller returns it, before a block converts it to a target.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Label {
    /// A class, or a number as text from a table.
    Name(String),
    /// Several classes or none, or the numbers of several columns.
    Names(Vec<String>),
    /// One or several numbers of a regression target.
    Numbers(Vec<f64>),
    /// Path of another file, such as a mask.
    File(PathBuf),
}

/// A value that can be converted to a [`Label`], such as the result of a function of a path: names, lists of names,
/// booleans, numbers, paths, and an `Option` or a `Result` of them. `None` is an error that names the item.
pub trait IntoLabel {
    /// Converts the value to a label, or returns the reason why that is impossible.
    ///
    /// # Errors
    /// Returns the reason as a text.
    fn into_label(self) -> Result<Label, String>;
}

macro_rules! into_label {
    ($($kind:ty, $value:ident => $label:expr;)+) => {
        $(impl IntoLabel for $kind {
            fn into_label(self) -> Result<Label, String> {
                let $value = self;
                Ok($label)
            }
        })+
    };
}

into_label! {
    Label, label => label;
    String, name => Label::Name(name);
    &str, name => Label::Name(name.to_owned());
    bool, name => Label::Name(name.to_string());
    Vec<String>, names => Label::Names(names);
    f64, number => Label::Numbers(vec![number]);
    f32, number => Label::Numbers(vec![number.into()]);
    Vec<f64>, numbers => Label::Numbers(numbers);
    PathBuf, path => Label::File(path);
}

impl<const N: usize> IntoLabel for [f64; N] {
    fn into_label(self) -> Result<Label, String> {
        Ok(Label::Numbers(self.to_vec()))
    }
}

impl<L: IntoLabel> IntoLabel for Option<L> {
    fn into_label(self) -> Result<Label, String> {
        self.ok_or_else(|| "the labeller found none".to_owned())?.into_label()
    }
}

impl<L: IntoLabel, E: Display> IntoLabel for Result<L, E> {
    fn into_label(self) -> Result<Label, String> {
        self.map_err(|error| error.to_string())?.into_label()
    }
}

/// A labeller, which finds the labels of items: fastai's `get_y`. A function of an item's path, such as
/// [`parent_name`], is one:
///
/// ```
/// use std::path::Path;
///
/// use brigade_learn::data::{Items, Label, LabelItems};
///
/// // The pets of Oxford: names of cats begin with a large letter.
/// let is_cat = |path: &Path| {
///     Some(path.file_name()?.to_str()?.starts_with(char::is_uppercase))
/// };
/// let pets = Items::new("pets", ["Bengal_1.jpg", "pug_7.jpg"]);
/// assert_eq!(is_cat.labels(&pets)?, ["true", "false"].map(|name| Label::Name(name.into())));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub trait LabelItems: Send + Sync {
    /// Returns the label of each item.
    ///
    /// # Errors
    /// Fails if an item has no label. The message contains the item.
    fn labels(&self, items: &Items) -> Result<Vec<Label>>;
}

impl<F, L> LabelItems for F
where
    F: Fn(&Path) -> L + Send + Sync,
    L: IntoLabel,
{
    fn labels(&self, items: &Items) -> Result<Vec<Label>> {
        each(items, |path| self(path).into_label())
    }
}

fn each(items: &Items, label: impl Fn(&Path) -> Result<Label, String>) -> Result<Vec<Label>> {
    let of = |index| {
        label(&items.path(index)).map_err(|reason| {
            Error::invalid_argument(format!("{} has no label: {reason}", items.name(index)))
        })
    };
    (0..items.len()).map(of).collect()
}

/// Returns the name of the folder that contains a file: fastai's `parent_label`. `None` for a path without a folder.
#[must_use]
pub fn parent_name(path: &Path) -> Option<String> {
    Some(path.parent()?.file_name()?.to_string_lossy().into_owned())
}

/// Returns a labeller that takes the first group of a regular expression in a file's name: fastai's `from_name_re`. The
/// syntax is that of [`Labeller::regex`].
///
/// ```
/// use brigade_learn::data::{Items, Label, LabelItems, name_regex};
///
/// let pets = Items::new("pets", ["great_pyrenees_173.jpg"]);
/// let labels = name_regex(r"^(.*)_\d+\.jpg$").labels(&pets)?;
/// assert_eq!(labels, [Label::Name("great_pyrenees".into())]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn name_regex(pattern: impl Into<String>) -> Pattern {
    Pattern { pattern: pattern.into(), whole_path: false }
}

/// Returns a labeller that takes the first group of a regular expression in a file's whole path: fastai's
/// `RegexLabeller` and `from_path_re`.
pub fn path_regex(pattern: impl Into<String>) -> Pattern {
    Pattern { pattern: pattern.into(), whole_path: true }
}

/// A labeller that matches a regular expression. Made by [`name_regex`] or [`path_regex`].
#[derive(Clone, Debug)]
pub struct Pattern {
    pattern: String,
    whole_path: bool,
}

impl LabelItems for Pattern {
    fn labels(&self, items: &Items) -> Result<Vec<Label>> {
        let rule = if self.whole_path { Labeller::path_regex } else { Labeller::regex };
        let labeller = rule(&self.pattern).map_err(VisionError::from)?;
        let label = |index| {
            let found = labeller.label(&items.path(index)).map_err(VisionError::from)?;
            Ok(Label::Name(found))
        };
        (0..items.len()).map(label).collect()
    }
}

/// Returns a labeller that calls a function of a file's name: fastai's `from_name_func`.
pub fn name_function<L: IntoLabel + 'static>(
    function: impl Fn(&str) -> L + Send + Sync + 'static,
) -> impl LabelItems {
    move |path: &Path| {
        function(&path.file_name().unwrap_or_default().to_string_lossy()).into_label()
    }
}

/// Returns a labeller that reads a column of the items' table, by name or by number from 0: fastai's `ColReader`.
#[expect(clippy::needless_pass_by_value, reason = "a name or a number, as it is written")]
pub fn column(column: impl ToString) -> Column {
    Column { columns: vec![column.to_string()], separator: None }
}

/// Returns a labeller that reads several columns of the items' table, such as the numbers of a regression.
pub fn columns<C: ToString>(columns: impl IntoIterator<Item = C>) -> Column {
    let columns = columns.into_iter().map(|column| column.to_string()).collect();
    Column { columns, separator: None }
}

/// A labeller that reads one or several columns of a table. Made by [`column()`] or [`columns`].
#[derive(Clone, Debug)]
pub struct Column {
    columns: Vec<String>,
    separator: Option<String>,
}

impl Column {
    /// Sets the separator between the labels of an item that may have several: fastai's `label_delim`. An empty cell
    /// means no labels. Defaults to none: each cell is one label.
    #[must_use]
    pub fn separator(mut self, separator: impl Into<String>) -> Self {
        self.separator = Some(separator.into());
        self
    }
}

impl LabelItems for Column {
    fn labels(&self, items: &Items) -> Result<Vec<Label>> {
        let label = |index| {
            let cells: Result<Vec<&str>> =
                self.columns.iter().map(|column| items.cell(index, column)).collect();
            Ok(match (&*cells?, &self.separator) {
                ([cell], None) => Label::Name((*cell).to_owned()),
                (cells, None) => Label::Names(cells.iter().map(|&cell| cell.to_owned()).collect()),
                (cells, Some(separator)) => {
                    let parts = cells.iter().flat_map(|cell| cell.split(separator.as_str()));
                    let parts = parts.map(str::trim).filter(|part| !part.is_empty());
                    Label::Names(parts.map(str::to_owned).collect())
                }
            })
        };
        (0..items.len()).map(label).collect()
    }
}

/// Returns a labeller for a list of labels, one for each item that the getter finds, in its order.
pub fn label_list<L: IntoLabel>(labels: impl IntoIterator<Item = L>) -> LabelList {
    LabelList(labels.into_iter().map(IntoLabel::into_label).collect())
}

/// A labeller for a list of labels. Made by [`label_list`].
#[derive(Clone, Debug)]
pub struct LabelList(Vec<Result<Label, String>>);

impl LabelItems for LabelList {
    fn labels(&self, items: &Items) -> Result<Vec<Label>> {
        let label = |index| match self.0.get(items.number(index)) {
            Some(Ok(label)) => Ok(label.clone()),
            Some(Err(reason)) => Err(Error::invalid_argument(format!(
                "{} has no label: {reason}",
                items.name(index)
            ))),
            None => Err(Error::invalid_argument(format!(
                "{} is item {}, beyond {}; give one for each item, in the same order",
                items.name(index),
                items.number(index),
                counted(self.0.len(), "label")
            ))),
        };
        (0..items.len()).map(label).collect()
    }
}
