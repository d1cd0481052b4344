//! Search for state dictionaries in a saved value.
//!
//! Programs save a model's weights alone, or in a dictionary together with the epoch, the optimizer and settings
//! (`{"model": {…}, "epoch": 3}`), or nested more deeply. One rule finds them for everything that loads or converts
//! weights.

use std::borrow::Cow;
use std::fmt::Write;
use std::path::Path;

use super::{PthFile, StoredTensor, shown};
use crate::dtype::Dtype;
use crate::error::Error;
use crate::value::Value;

type Tree = Value<StoredTensor>;

/// A state dictionary found in a file.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredStateDict {
    /// Keys from the file's top to the dictionary, joined by dots. Empty if it is the whole file.
    pub key: String,
    /// Names and tensors of the dictionary, in order.
    pub tensors: Vec<(String, StoredTensor)>,
    /// Contents of the file that are not tensors of the dictionary. One line each, with the key.
    pub left_out: Vec<String>,
}

impl PthFile {
    /// Finds the model's weights: the file's only state dictionary, or the one at `key`.
    ///
    /// A state dictionary is a dictionary of tensors by name. It may contain other values, as long as they are not more
    /// than the tensors. If it contains dictionaries with tensors, those are the state dictionaries. States of
    /// optimizers and of random generators, and Lightning's other entries, are not state dictionaries unless `key`
    /// names them.
    ///
    /// `key` consists of the keys of nested dictionaries and the indices of lists, joined by dots (`model.state_dict`).
    /// It may also name a dictionary around the weights.
    ///
    /// ```no_run
    /// let file = brigade_checkpoint::pth::PthFile::open("checkpoint.ckpt")?;
    /// let weights = file.state_dict(None)?;
    /// println!("{} tensors under `{}`", weights.tensors.len(), weights.key); // under `state_dict`
    /// # Ok::<(), brigade_checkpoint::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`PthFile::value`], and [`Error::NoStateDict`], [`Error::SeveralStateDicts`] or
    /// [`Error::NoSuchKey`].
    pub fn state_dict(&self, key: Option<&str>) -> Result<StoredStateDict, Error> {
        choose(self.path(), &self.value()?, key)
    }
}

fn choose(path: &Path, root: &Tree, key: Option<&str>) -> Result<StoredStateDict, Error> {
    let start = match key {
        None => Some((root, String::new())),
        Some(key) => descend(root, key).map(|value| (value, key.to_owned())),
    };
    let Some((start, at)) = start.filter(|(value, _)| key.is_none() || value.as_dict().is_some())
    else {
        return Err(Error::NoSuchKey {
            path: path.to_owned(),
            key: key.unwrap_or_default().to_owned(),
            keys: found_in(root, ""),
        });
    };
    let (key, dictionary) = only(path, start, at, key.is_some())?;
    Ok(collect(root, "", key, dictionary))
}

/// Finds the weights in a value of a file that the user has chosen, by the rule of [`PthFile::state_dict`]. `at` is the
/// key of the value. Contents outside of the value are not reported.
pub(crate) fn weights_under(path: &Path, value: &Tree, at: &str) -> Result<StoredStateDict, Error> {
    let (key, dictionary) = only(path, value, at.to_owned(), true)?;
    Ok(collect(value, at, key, dictionary))
}

/// Returns the only state dictionary in `start`, with its key.
fn only<'v>(
    path: &Path,
    start: &'v Tree,
    at: String,
    named: bool,
) -> Result<(String, &'v Tree), Error> {
    let mut found = Vec::new();
    find(start, &at, named, &mut found);
    match (found.pop(), found.is_empty()) {
        (Some(one), true) => Ok(one),
        (Some(last), false) => {
            found.push(last);
            let keys = found.iter().map(|(key, _)| key.clone()).collect();
            Err(Error::SeveralStateDicts { path: path.to_owned(), keys })
        }
        // A model without parameters.
        (None, _) if start.as_dict().is_some_and(<[_]>::is_empty) => Ok((at, start)),
        (None, _) => Err(Error::NoStateDict { path: path.to_owned(), found: describe(start) }),
    }
}

/// Collects the tensors of a state dictionary, and reports what else is in `root`, whose key is `at`.
fn collect(root: &Tree, at: &str, key: String, dictionary: &Tree) -> StoredStateDict {
    let (mut tensors, mut left_out) = (Vec::new(), Lines::default());
    beside(root, at, dictionary, &mut left_out);
    for (name, value) in dictionary.as_dict().unwrap_or_default() {
        match (name, value) {
            (Value::Str(name), Value::Tensor(tensor)) => {
                tensors.push((name.clone(), tensor.clone()));
            }
            (name, value) => left_out.add(&key, name, value),
        }
    }
    StoredStateDict { key, tensors, left_out: left_out.all() }
}

/// Returns the value at `key`, whose parts may contain dots.
fn descend<'v>(value: &'v Tree, key: &str) -> Option<&'v Tree> {
    let item = |key: &str| match value {
        Value::List(items) | Value::Tuple(items) => items.get(key.parse::<usize>().ok()?),
        Value::Dict(entries) => entries.iter().rev().find_map(|(known, value)| match known {
            Value::Str(known) if known == key => Some(value),
            Value::Int(known) if key.parse() == Ok(*known) => Some(value),
            _ => None,
        }),
        _ => None,
    };
    item(key).or_else(|| {
        let dots = key.match_indices('.');
        dots.map(|(dot, _)| (&key[..dot], &key[dot + 1..]))
            .find_map(|(first, rest)| descend(item(first)?, rest))
    })
}

/// Finds the state dictionaries in `value`, with their keys. `named` means that the user has chosen it.
fn find<'v>(value: &'v Tree, at: &str, named: bool, found: &mut Vec<(String, &'v Tree)>) {
    let Some(entries) = value.as_dict() else { return };
    let is_optimizer = value.get("param_groups").is_some() && value.get("state").is_some();
    if is_optimizer && !named {
        return;
    }
    let before = found.len();
    for (key, value) in entries {
        if let Value::Str(name) = key
            && !BESIDE.contains(&name.as_str())
            && !name.ends_with(EXTRA_STATE)
            && value.as_dict().is_some()
            // Limited because each has its full path as a key.
            && at.len() + name.len() < MAX_KEY_BYTES
            && found.len() < MAX_FOUND
        {
            find(value, &below(at, key), false, found);
        }
    }
    let tensors = || entries.iter().filter_map(|(_, value)| value.as_tensor());
    let count = tensors().count();
    let others = entries.iter().filter(|(key, value)| match (key, value) {
        (Value::Str(name), value) => {
            !matches!(value, Value::Tensor(_) | Value::None) && !name.ends_with(EXTRA_STATE)
        }
        _ => true,
    });
    // PyTorch stores the states of its generators as vectors of bytes.
    let is_random =
        tensors().all(|tensor| tensor.storage.dtype == Dtype::U8 && tensor.size.len() == 1);
    let is_state_dict = count > 0 && others.count() <= count && (named || !is_random);
    if found.len() == before && is_state_dict && found.len() < MAX_FOUND {
        found.push((at.to_owned(), value));
    }
}

/// Reports the values next to the path to `chosen`, one line each, the nearest first.
fn beside(root: &Tree, at: &str, chosen: &Tree, lines: &mut Lines) {
    let Some(way) = way_to(root, chosen) else { return };
    let (mut value, mut at) = (root, at.to_owned());
    let mut levels = Vec::with_capacity(way.len());
    for place in way.into_iter().rev() {
        let Some((key, inner)) = children(value).nth(place) else { return };
        let next = below(&at, &key);
        levels.push((value, std::mem::replace(&mut at, next), place));
        value = inner;
    }
    for (value, at, place) in levels.into_iter().rev() {
        for (other, (key, value)) in children(value).enumerate() {
            if other != place {
                lines.add(&at, &key, value);
            }
        }
    }
}

/// Returns the positions on the path from `value` to `chosen`, the last first.
fn way_to(value: &Tree, chosen: &Tree) -> Option<Vec<usize>> {
    if std::ptr::eq(value, chosen) {
        return Some(Vec::new());
    }
    children(value).enumerate().find_map(|(place, (_, inner))| {
        let mut way = way_to(inner, chosen)?;
        way.push(place);
        Some(way)
    })
}

/// Iterates over the entries of a dictionary, or the items of a list under their indices.
fn children(value: &Tree) -> impl Iterator<Item = (Cow<'_, Tree>, &Tree)> {
    let entries = value.as_dict().unwrap_or_default().iter();
    let items = value.as_items().unwrap_or_default().iter().enumerate();
    let items = items.map(|(index, item)| (Cow::Owned(Value::Int(index as i64)), item));
    entries.map(|(key, value)| (Cow::Borrowed(key), value)).chain(items)
}

/// Messages about values that are left out, limited in number.
#[derive(Default)]
struct Lines {
    lines: Vec<String>,
    more: usize,
}

impl Lines {
    fn add(&mut self, at: &str, key: &Tree, value: &Tree) {
        if self.lines.len() < MAX_FOUND {
            self.lines.push(line(&below(at, key), value));
        } else {
            self.more += 1;
        }
    }

    fn all(mut self) -> Vec<String> {
        if self.more > 0 {
            self.lines.push(format!("{} more values, which are not among the weights", self.more));
        }
        self.lines
    }
}

/// Returns the keys of all state dictionaries in a value. An empty key stands for the value itself.
fn found_in(value: &Tree, at: &str) -> Vec<String> {
    let mut found = Vec::new();
    find(value, at, false, &mut found);
    found.into_iter().map(|(key, _)| key).collect()
}

fn below(at: &str, key: &Tree) -> String {
    let key = match key {
        Value::Str(name) => Cow::Borrowed(name.as_str()),
        Value::Int(number) => Cow::Owned(number.to_string()),
        key => Cow::Owned(format!("({})", key.describe())),
    };
    if at.is_empty() { key.into_owned() } else { format!("{at}.{key}") }
}

/// Returns a message about a value that is not among the weights.
fn line(key: &str, value: &Tree) -> String {
    let what = match value {
        Value::Int(number) => format!("the integer {number}"),
        Value::Float(number) => format!("the number {number}"),
        Value::Str(text) if text.len() <= MAX_TEXT => format!("the text {text:?}"),
        Value::Foreign(name) => format!("an object of Python (`{}`)", shown(name)),
        value => value.describe().to_owned(),
    };
    format!("`{}`: {what}, which is not among the weights", shown(key))
}

/// Describes a value without a state dictionary, with its first entries.
fn describe(value: &Tree) -> String {
    let object = |name: &str| {
        format!(
            "an object of Python (`{}`), of which nothing was executed: in Python, save its \
             `state_dict()` instead",
            shown(name)
        )
    };
    let entries = match value {
        Value::Foreign(name) => return object(name),
        Value::Dict(entries) => entries,
        value => return value.describe().to_owned(),
    };
    let mut text = "a dictionary of".to_owned();
    for (place, (key, value)) in entries.iter().take(MAX_KEYS).enumerate() {
        let comma = if place == 0 { "" } else { "," };
        let key = below("", key);
        let what = match value {
            Value::Foreign(name) => object(name),
            value => value.describe().to_owned(),
        };
        let _ = write!(text, "{comma} `{}` ({what})", shown(&key));
    }
    if entries.len() > MAX_KEYS {
        let _ = write!(text, " and {} more", entries.len() - MAX_KEYS);
    }
    text
}

/// Keys that do not contain a model: hyperparameters with tensors in them, optimizers, and Lightning's other entries.
const BESIDE: [&str; 11] = [
    "hyper_parameters",
    "datamodule_hyper_parameters",
    "hparams",
    "callbacks",
    "loops",
    "optimizer",
    "optimizer_state",
    "optimizer_state_dict",
    "optimizer_states",
    "lr_schedulers",
    "rng_state",
];
/// Suffix of the names under which a module saves values other than tensors (`Module.get_extra_state`).
const EXTRA_STATE: &str = "_extra_state";
const MAX_TEXT: usize = 60;
/// Maximum length of a key, longer than those of real state dictionaries.
const MAX_KEY_BYTES: usize = 1000;
/// Maximum number of state dictionaries to find, and of messages about contents left out.
const MAX_FOUND: usize = 1000;
const MAX_KEYS: usize = 5;
