//! Files with one text per line.

use std::io::BufRead;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::{Found, Reader, TextSource, Unread, open_at, to_bool, to_utf8};
use crate::files::io_error;
use crate::{Error, Result};

/// Options of a file with one text per line.
///
/// ```
/// use brigade_tokens::LinesOptions;
///
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("reviews.jsonl");
/// std::fs::write(&path, "{\"review\": \"Fine.\", \"stars\": 5}\n")?;
/// let reviews = LinesOptions::json(["review"]).label_field("stars").open(&path)?;
/// assert_eq!((reviews.text(0)?, reviews.labels().unwrap()), ("Fine.".into(), &["5".into()][..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct LinesOptions {
    /// Names of the fields of a text, if each line is a JSON object.
    json: Option<Vec<String>>,
    label: Option<String>,
    valid: Option<String>,
    keep_blank: bool,
}

impl Default for LinesOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl LinesOptions {
    /// Creates options by which each line, without its end, is a text. Lines that contain only white space are left
    /// out.
    #[must_use]
    pub fn new() -> Self {
        Self { json: None, label: None, valid: None, keep_blank: false }
    }

    /// Creates options by which each line is a JSON object, of which these fields are a text.
    #[must_use]
    pub fn json<F: Into<String>>(fields: impl IntoIterator<Item = F>) -> Self {
        let fields = fields.into_iter().map(Into::into).collect();
        Self { json: Some(fields), ..Self::new() }
    }

    /// Sets the field of the object that contains the label: a string, a number or a Boolean.
    #[must_use]
    pub fn label_field(mut self, field: impl Into<String>) -> Self {
        self.label = Some(field.into());
        self
    }

    /// Sets the field of the object that marks validation texts.
    #[must_use]
    pub fn valid_field(mut self, field: impl Into<String>) -> Self {
        self.valid = Some(field.into());
        self
    }

    /// Sets whether lines that contain only white space are texts. With JSON they never are. Defaults to `false`.
    #[must_use]
    pub fn keep_blank(mut self, keep: bool) -> Self {
        self.keep_blank = keep;
        self
    }

    /// Opens a file, and reads all of it once to find the labels and the positions of lines.
    ///
    /// # Errors
    /// Fails if the file cannot be read, has no texts, a line is not UTF-8 or not JSON, or a field is missing.
    pub fn open(&self, path: impl AsRef<Path>) -> Result<TextSource> {
        let path = path.as_ref();
        if self.json.is_none() && (self.label.is_some() || self.valid.is_some()) {
            return Err(Error::InvalidArgument(
                "lines of plain text have no label and no is_valid; use `LinesOptions::json`, or `with_labels`"
                    .into(),
            ));
        }
        if self.json.as_ref().is_some_and(Vec::is_empty) {
            return Err(Error::InvalidArgument("a text has one field at least".into()));
        }
        let mut lines = Lines::open(path, self, Line { offset: 0, number: 1 })?;
        let (mut labels, mut is_valid, mut places) = (Vec::new(), Vec::new(), Vec::new());
        while let Some((place, text)) = lines.next_line()? {
            let object = lines.parse(place, text)?;
            if let Parsed::Object(object) = &object {
                if let Some(field) = &self.label {
                    labels.push(value_of(path, place, object, field)?);
                }
                if let Some(field) = &self.valid {
                    let text = value_of(path, place, object, field)?;
                    is_valid.push(to_bool(&text).ok_or_else(|| Error::Row {
                        path: path.into(),
                        line: place.number,
                        detail: format!("field {field:?} has {text:?}, expected true or false"),
                    })?);
                }
            }
            lines.fields(place, object)?;
            places.push(place);
        }
        if places.is_empty() {
            let detail = "it has no lines that are not blank".to_owned();
            return Err(Error::NoTexts { name: path.display().to_string(), detail });
        }
        let found = Found {
            len: places.len(),
            fields: self.json.as_ref().map_or(1, Vec::len),
            labels: self.label.as_ref().map(|_| labels),
            is_valid: self.valid.as_ref().map(|_| is_valid),
        };
        Ok(TextSource::new(TextLines { path: path.into(), options: self.clone(), places }, found))
    }
}

/// Position of a line.
#[derive(Clone, Copy, Debug)]
struct Line {
    offset: u64,
    number: u64,
}

/// Iterator over the lines of a file from a position on.
struct Lines<'a> {
    path: &'a Path,
    options: &'a LinesOptions,
    reader: std::io::BufReader<std::fs::File>,
    next: Line,
}

/// Line that was read.
enum Parsed {
    Text(String),
    Object(Map<String, Value>),
}

impl<'a> Lines<'a> {
    fn open(path: &'a Path, options: &'a LinesOptions, from: Line) -> Result<Self> {
        Ok(Self { path, options, reader: open_at(path, from.offset)?, next: from })
    }

    /// Reads up to the next line that is a text.
    fn next_line(&mut self) -> Result<Option<(Line, Vec<u8>)>> {
        loop {
            let mut bytes = Vec::new();
            let read = self.reader.read_until(b'\n', &mut bytes).map_err(io_error(self.path))?;
            if read == 0 {
                return Ok(None);
            }
            let place = self.next;
            self.next = Line { offset: place.offset + read as u64, number: place.number + 1 };
            if bytes.ends_with(b"\n") {
                bytes.pop();
            }
            if bytes.ends_with(b"\r") {
                bytes.pop();
            }
            let keep = self.options.keep_blank && self.options.json.is_none();
            if keep || !bytes.trim_ascii().is_empty() {
                return Ok(Some((place, bytes)));
            }
        }
    }

    fn parse(&self, place: Line, bytes: Vec<u8>) -> Result<Parsed> {
        let text = to_utf8(bytes, || format!("{}, line {}", self.path.display(), place.number))?;
        if self.options.json.is_none() {
            return Ok(Parsed::Text(text));
        }
        serde_json::from_str(&text).map(Parsed::Object).map_err(|error| Error::Row {
            path: self.path.into(),
            line: place.number,
            detail: format!("it is not a JSON object: {error}"),
        })
    }

    fn fields(&self, place: Line, parsed: Parsed) -> Result<Vec<String>> {
        match parsed {
            Parsed::Text(text) => Ok(vec![text]),
            Parsed::Object(mut object) => {
                let fields = self.options.json.as_deref().unwrap_or_default();
                let mut texts = Vec::with_capacity(fields.len());
                for field in fields {
                    match object.get_mut(field).map(Value::take) {
                        Some(Value::String(text)) => texts.push(text),
                        Some(_) => {
                            return Err(
                                self.refuse(place, format!("field {field:?} is not a text"))
                            );
                        }
                        None => return Err(self.refuse(place, no_field(field, &object))),
                    }
                }
                Ok(texts)
            }
        }
    }

    fn refuse(&self, place: Line, detail: String) -> Error {
        Error::Row { path: self.path.into(), line: place.number, detail }
    }
}

/// Converts a field to a text: a string, a number, or a Boolean.
fn value_of(path: &Path, place: Line, object: &Map<String, Value>, field: &str) -> Result<String> {
    let detail = match object.get(field) {
        Some(Value::String(text)) => return Ok(text.clone()),
        Some(value @ (Value::Number(_) | Value::Bool(_))) => return Ok(value.to_string()),
        Some(_) => format!("field {field:?} is neither a text nor a number nor a truth value"),
        None => no_field(field, object),
    };
    Err(Error::Row { path: path.into(), line: place.number, detail })
}

fn no_field(field: &str, object: &Map<String, Value>) -> String {
    let fields: Vec<&String> = object.keys().collect();
    format!("it has no field {field:?}; its fields are {fields:?}")
}

/// Reader of a file with one text per line.
#[derive(Debug)]
struct TextLines {
    path: PathBuf,
    options: LinesOptions,
    places: Vec<Line>,
}

impl Reader for TextLines {
    fn read_all(&self) -> Result<Box<dyn Iterator<Item = Result<Unread>> + Send + '_>> {
        let mut lines = Lines::open(&self.path, &self.options, Line { offset: 0, number: 1 })?;
        Ok(Box::new(std::iter::from_fn(move || {
            let line = lines.next_line().transpose()?;
            let fields = line.and_then(|(place, text)| {
                let parsed = lines.parse(place, text)?;
                lines.fields(place, parsed)
            });
            Some(fields.map(Unread::Fields))
        })))
    }

    fn read(&self, index: usize) -> Result<Unread> {
        let place = self.places.get(index).copied().unwrap_or(Line { offset: 0, number: 1 });
        let mut lines = Lines::open(&self.path, &self.options, place)?;
        let Some((place, text)) = lines.next_line()? else {
            return Err(lines.refuse(place, "it is not there any more".into()));
        };
        let parsed = lines.parse(place, text)?;
        lines.fields(place, parsed).map(Unread::Fields)
    }

    fn name(&self, index: usize) -> String {
        let line = self.places.get(index).map_or(0, |place| place.number);
        format!("{}, line {line}", self.path.display())
    }
}
