//! Classes and their numbers.

use std::collections::{BTreeSet, HashMap};
use std::fmt;

use crate::{ImageError, Result};

/// The classes of a dataset: names, numbered from 0.
///
/// ```
/// use brigade_images::labels::Categories;
///
/// let classes = Categories::sorted(["dog", "cat", "dog"]);
/// assert_eq!(classes.names(), ["cat", "dog"]);
/// assert_eq!((classes.label("dog")?, classes.name(0)), (1, Some("cat")));
/// let error = classes.label("cow").unwrap_err().to_string();
/// assert_eq!(error, "the label \"cow\" is not among the 2 classes: cat, dog");
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Categories {
    names: Vec<String>,
    numbers: HashMap<String, i64>,
}

impl Categories {
    /// Numbers the distinct labels in the order of their bytes: fastai's `Categorize` with names and torchvision's
    /// `find_classes`.
    #[must_use]
    pub fn sorted<L: AsRef<str>>(labels: impl IntoIterator<Item = L>) -> Self {
        let mut distinct = BTreeSet::new();
        for label in labels {
            if !distinct.contains(label.as_ref()) {
                distinct.insert(label.as_ref().to_owned());
            }
        }
        Self::numbering(distinct.into_iter().collect())
    }

    /// Numbers the names in the given order.
    ///
    /// # Errors
    /// Fails if a name occurs twice.
    pub fn ordered<L: Into<String>>(names: impl IntoIterator<Item = L>) -> Result<Self> {
        let mut categories = Self::default();
        for name in names {
            let name = name.into();
            let number = categories.names.len() as i64;
            if let Some(before) = categories.numbers.insert(name.clone(), number) {
                return Err(ImageError::InvalidArgument(format!(
                    "the class {name:?} is both number {before} and number {number}"
                )));
            }
            categories.names.push(name);
        }
        Ok(categories)
    }

    /// Creates `count` classes whose names are their numbers, for labels without names.
    ///
    /// # Errors
    /// Fails if `count` is more than a million, because a wrong label may be any number.
    pub fn numbered(count: usize) -> Result<Self> {
        if count > MAX_NUMBERED {
            return Err(ImageError::InvalidArgument(format!(
                "the labels ask for {count} classes, more than {MAX_NUMBERED}; they seem to be \
                 something else than classes"
            )));
        }
        Ok(Self::numbering((0..count).map(|number| number.to_string()).collect()))
    }

    fn numbering(names: Vec<String>) -> Self {
        let numbers = names.iter().cloned().zip(0..).collect();
        Self { names, numbers }
    }

    /// Returns the number of classes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Returns `true` if there are no classes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Returns the names in the order of their numbers.
    #[must_use]
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns the name of a label, or `None` if there is no such class.
    #[must_use]
    pub fn name(&self, label: i64) -> Option<&str> {
        self.names.get(usize::try_from(label).ok()?).map(String::as_str)
    }

    /// Returns the number of a class by its name, or `None` if there is no such class.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<i64> {
        self.numbers.get(name).copied()
    }

    /// Returns the number of a class by its name.
    ///
    /// # Errors
    /// [`ImageError::UnknownLabel`] if there is no such class.
    pub fn label(&self, name: &str) -> Result<i64> {
        self.get(name).ok_or_else(|| ImageError::UnknownLabel {
            label: name.to_owned(),
            classes: self.len(),
            known: self.some_names(),
        })
    }

    /// Returns a list of the first names for a message.
    fn some_names(&self) -> String {
        let mut list = String::new();
        for (number, name) in self.names.iter().enumerate() {
            if number == 10 || list.len() > 200 {
                list.push_str(", ...");
                break;
            }
            if number > 0 {
                list.push_str(", ");
            }
            list.push_str(name);
        }
        list
    }
}

impl fmt::Debug for Categories {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Categories({}: {})", self.len(), self.some_names())
    }
}

const MAX_NUMBERED: usize = 1_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_belong_together() {
        let classes = Categories::sorted(["b", "a", "é", "B", "a"]);
        assert_eq!(classes.names(), ["B", "a", "b", "é"]);
        for (number, name) in classes.names().iter().enumerate() {
            assert_eq!(classes.label(name).unwrap(), number as i64);
            assert_eq!(classes.name(number as i64), Some(name.as_str()));
        }
        assert_eq!((classes.name(4), classes.name(-1), classes.get("c")), (None, None, None));
    }

    #[test]
    fn an_own_order_has_each_name_once() {
        let classes = Categories::ordered(["dog", "cat"]).unwrap();
        assert_eq!((classes.label("dog").unwrap(), classes.len()), (0, 2));
        let error = Categories::ordered(["a", "b", "a"]).unwrap_err().to_string();
        assert_eq!(error, "the class \"a\" is both number 0 and number 2");
    }

    #[test]
    fn an_unknown_label_names_some_that_are_known() {
        let classes = Categories::numbered(1000).unwrap();
        let error = classes.label("1000").unwrap_err().to_string();
        assert_eq!(
            error,
            "the label \"1000\" is not among the 1000 classes: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ..."
        );
        assert!(Categories::numbered(usize::MAX).is_err());
    }
}
