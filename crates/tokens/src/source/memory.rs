//! Texts in memory.

use super::{Found, Reader, TextSource, Unread};
use crate::{Error, Result};

/// Fields of all texts, concatenated.
#[derive(Debug)]
struct Rows {
    fields: Vec<String>,
    each: usize,
}

/// Creates a source of rows with the same number of fields each.
pub(super) fn open<const FIELDS: usize>(
    rows: impl Iterator<Item = [String; FIELDS]>,
) -> Result<TextSource> {
    let fields: Vec<String> = rows.flatten().collect();
    if fields.is_empty() {
        return Err(Error::NoTexts { name: "the list".into(), detail: "it is empty".into() });
    }
    let found = Found { len: fields.len() / FIELDS, fields: FIELDS, labels: None, is_valid: None };
    Ok(TextSource::new(Rows { fields, each: FIELDS }, found))
}

impl Reader for Rows {
    fn read_all(&self) -> Result<Box<dyn Iterator<Item = Result<Unread>> + Send + '_>> {
        Ok(Box::new(self.fields.chunks(self.each).map(|row| Ok(Unread::Fields(row.to_vec())))))
    }

    fn read(&self, index: usize) -> Result<Unread> {
        let row = self.fields.chunks(self.each).nth(index).unwrap_or_default();
        Ok(Unread::Fields(row.to_vec()))
    }

    fn name(&self, index: usize) -> String {
        format!("text {index}")
    }
}
