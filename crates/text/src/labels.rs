//! Labels of texts.

use std::collections::{BTreeSet, HashMap};

use brigade_torch::{Error, Result};
use serde::{Deserialize, Serialize};

/// Target that losses and metrics ignore: PyTorch's `ignore_index`.
pub const IGNORED: i64 = -100;

/// The names of classes, numbered from 0: fastai's `CategoryMap`.
///
/// ```
/// use brigade_text::Categories;
///
/// let classes = Categories::of(["pos", "neg", "pos"])?;
/// assert_eq!(classes.names(), ["neg", "pos"]);
/// assert_eq!(classes.number("pos")?, 1);
/// let error = classes.number("neutral").unwrap_err().to_string();
/// assert!(error.starts_with("the label \"neutral\" is not among the classes neg, pos"));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct Categories {
    names: Vec<String>,
    numbers: HashMap<String, i64>,
}

impl Categories {
    /// Creates categories from the labels of texts: the distinct labels, sorted.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] if there are no labels.
    pub fn of<S: Into<String>>(labels: impl IntoIterator<Item = S>) -> Result<Self> {
        let names: BTreeSet<String> = labels.into_iter().map(Into::into).collect();
        Self::new(names)
    }

    /// Creates categories with these names, in the given order.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] if the list is empty or contains a name twice.
    pub fn new<S: Into<String>>(names: impl IntoIterator<Item = S>) -> Result<Self> {
        let names: Vec<String> = names.into_iter().map(Into::into).collect();
        let mut numbers = HashMap::with_capacity(names.len());
        for (name, number) in names.iter().zip(0..) {
            if numbers.insert(name.clone(), number).is_some() {
                return Err(Error::invalid_argument(format!(
                    "duplicate class {name:?}; give each name once"
                )));
            }
        }
        if names.is_empty() {
            return Err(Error::invalid_argument(
                "there is no class: none of the texts has a label; look at the column or the folders of the labels",
            ));
        }
        Ok(Self { names, numbers })
    }

    /// Returns the names in the order of their numbers.
    #[must_use]
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns the number of a class.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for a name that is not among the classes.
    pub fn number(&self, label: &str) -> Result<i64> {
        self.numbers.get(label).copied().ok_or_else(|| {
            let some: Vec<&str> = self.names.iter().take(10).map(String::as_str).collect();
            let more = if self.names.len() > some.len() { ", …" } else { "" };
            Error::invalid_argument(format!(
                "the label {label:?} is not among the classes {}{more}: put a text of it among those to train with, \
                 or give the classes",
                some.join(", ")
            ))
        })
    }

    /// Returns a multi-hot row: 1 for each class in `labels`, 0 for the others.
    ///
    /// # Errors
    /// Returns the same errors as [`number`](Self::number).
    pub fn row<'a>(&self, labels: impl IntoIterator<Item = &'a str>) -> Result<Vec<f32>> {
        let mut row = vec![0.0; self.names.len()];
        for label in labels {
            let number = self.number(label)?;
            if let Some(cell) = row.get_mut(number as usize) {
                *cell = 1.0;
            }
        }
        Ok(row)
    }
}

impl TryFrom<Vec<String>> for Categories {
    type Error = Error;

    fn try_from(names: Vec<String>) -> Result<Self> {
        Self::new(names)
    }
}

impl From<Categories> for Vec<String> {
    fn from(categories: Categories) -> Self {
        categories.names
    }
}
