//! State dictionaries, and the report of comparing one with a model.

use std::fmt;

use brigade_rank_env::text::escaped;
use brigade_torch::Error;
use indexmap::IndexMap;
use tch::Tensor;

use crate::error::ModelError;

/// A state dictionary: the tensors of a model by name, in order. Names are unique.
///
/// ```
/// use brigade_nn::StateDict;
/// use tch::Tensor;
///
/// let mut state = StateDict::new();
/// state.insert("weight", Tensor::from_slice(&[1f32, 2.0]))?;
/// assert_eq!(state.get("weight").map(Tensor::size), Some(vec![2]));
/// assert!(state.insert("weight", Tensor::from(0f32)).is_err());
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct StateDict {
    entries: IndexMap<String, Tensor>,
    /// Key of the dictionary in its file. Empty for a whole file, and without a file.
    key: String,
}

impl StateDict {
    /// Returns an empty state dictionary.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns an empty state dictionary for the tensors at a key of a file.
    pub(crate) fn under(key: String) -> Self {
        Self { key, ..Self::default() }
    }

    /// Returns the key of the dictionary in the `.pth` file from which it was read, with dots between the keys of
    /// nested dictionaries. Empty if it was the whole content of the file, or was not read from a file.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Adds a tensor at the end.
    ///
    /// # Errors
    /// [`crate::ModelError::DuplicateName`] when the name already exists; nothing is changed then.
    pub fn insert(&mut self, name: impl Into<String>, tensor: Tensor) -> Result<(), Error> {
        let name = name.into();
        if self.entries.contains_key(&name) {
            return Err(ModelError::DuplicateName { name }.into());
        }
        self.entries.insert(name, tensor);
        Ok(())
    }

    /// Returns the tensor of this name. `None` if there is no such name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.entries.get(name)
    }

    /// Returns the number of names.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns `true` if the dictionary is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns an iterator over names and tensors, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.entries.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// Returns the names in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Returns a state dictionary with copies of the tensors: a snapshot that training does not change.
    ///
    /// # Errors
    /// [`crate::ModelError::Torch`] if memory runs out for the copies.
    pub fn deep_clone(&self) -> Result<Self, Error> {
        let copy = |(name, tensor): (&String, &Tensor)| {
            let mut copied = tensor.f_empty_like()?;
            copied.f_copy_(tensor)?;
            Ok((name.clone(), copied))
        };
        let copies: Result<_, tch::TchError> =
            tch::no_grad(|| self.entries.iter().map(copy).collect());
        let entries = copies.map_err(ModelError::torch("copy a state dictionary"))?;
        Ok(Self { entries, key: self.key.clone() })
    }

    /// Removes `prefix` from all names if every name begins with it and is longer; otherwise returns the dictionary
    /// unchanged. The prefixes of PyTorch's wrappers are removed by loading.
    #[must_use]
    pub fn strip_prefix(self, prefix: &str) -> Self {
        let longer = |name: &str| name.len() > prefix.len() && name.starts_with(prefix);
        if !self.names().all(longer) {
            return self;
        }
        let strip = |(name, tensor): (String, Tensor)| (name[prefix.len()..].to_owned(), tensor);
        Self { entries: self.entries.into_iter().map(strip).collect(), key: self.key }
    }
}

impl IntoIterator for StateDict {
    type Item = (String, Tensor);
    type IntoIter = indexmap::map::IntoIter<String, Tensor>;

    fn into_iter(self) -> Self::IntoIter {
        self.entries.into_iter()
    }
}

/// Comparison of a state dictionary with a model: the number of tensors that match, and the names that do not.
///
/// ```
/// use brigade_nn::LoadReport;
///
/// let report = LoadReport { loaded: 11, missing: vec!["head.bias".into()], ..Default::default() };
/// assert!(!report.is_complete());
/// assert_eq!(report.to_string(), "11 tensors fit; missing in the weights: head.bias");
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// Number of names of the model that have values in the dictionary.
    pub loaded: usize,
    /// Names of the model that are missing in the dictionary.
    pub missing: Vec<String>,
    /// Names of the dictionary that the model does not have.
    pub unexpected: Vec<String>,
    /// Names whose tensors have different shapes in the model and the dictionary.
    pub mismatched: Vec<ShapeMismatch>,
    /// Key of the dictionary in its file ([`StateDict::key`]).
    pub key: String,
    /// Prefix that was removed from the dictionary's names, such as `module.`. Empty if none was removed.
    pub prefix: String,
    /// Names of the dictionary that do not begin with `prefix`, such as those of a loss, and were ignored because the
    /// whole model matches the other names.
    pub outside: Vec<String>,
}

/// A tensor whose shape in the model and in the weights differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShapeMismatch {
    /// Name of the tensor in the model.
    pub name: String,
    /// Shape of the parameter or buffer in the model.
    pub in_model: Vec<i64>,
    /// Shape of the tensor in the weights.
    pub in_weights: Vec<i64>,
}

impl LoadReport {
    /// Returns `true` if model and dictionary agree in every name and shape.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty() && self.mismatched.is_empty()
    }
}

impl LoadReport {
    /// Returns a description of the changes that were made to the file's contents: the key of the dictionary, the
    /// prefix of the names, and the names that were left out. `None` if the weights were taken unchanged.
    #[must_use]
    pub fn remark(&self) -> Option<String> {
        let mut parts = Vec::new();
        if !self.key.is_empty() {
            parts.push(format!("the weights are those under `{}`", self.key.escape_debug()));
        }
        if !self.prefix.is_empty() {
            parts.push(format!("`{}` was taken off the names", self.prefix.escape_debug()));
        }
        if !self.outside.is_empty() {
            let mut text = "left out, without that prefix: ".to_owned();
            list(&mut text, &self.outside).ok()?;
            parts.push(text);
        }
        if parts.is_empty() { None } else { Some(parts.join("; ")) }
    }
}

/// Writes the first of several names, and the number of the others.
fn list(out: &mut impl fmt::Write, names: &[String]) -> fmt::Result {
    let (shown, rest) = names.split_at(names.len().min(NAMES_SHOWN));
    write!(out, "{}", escaped(shown.join(", ")))?;
    if rest.is_empty() { Ok(()) } else { write!(out, " and {} more", rest.len()) }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.loaded == 1 { "tensor fits" } else { "tensors fit" };
        write!(f, "{} {plural}", self.loaded)?;
        let mismatched: Vec<_> = self.mismatched.iter().map(ToString::to_string).collect();
        for (title, names) in [
            ("missing in the weights", &self.missing),
            ("unexpected in the weights", &self.unexpected),
            ("different in shape", &mismatched),
        ] {
            if !names.is_empty() {
                write!(f, "; {title}: ")?;
                list(f, names)?;
            }
        }
        self.remark().map_or(Ok(()), |remark| write!(f, "; {remark}"))
    }
}

impl ShapeMismatch {
    /// Returns an explanation if the weights have more rows than the model and their number suggests a padded
    /// vocabulary: Megatron-LM pads it to a multiple of 128 for each tensor rank. `None` otherwise.
    ///
    /// ```
    /// use brigade_nn::ShapeMismatch;
    ///
    /// let mismatch = |rows| ShapeMismatch {
    ///     name: "wte.weight".into(), in_model: vec![50257, 768], in_weights: vec![rows, 768],
    /// };
    /// assert!(mismatch(50304).padding().unwrap().starts_with("47 rows of padding"));
    /// assert_eq!(mismatch(50300).padding(), None);
    /// ```
    #[must_use]
    pub fn padding(&self) -> Option<String> {
        let (own, width) = self.in_model.split_first()?;
        let (theirs, their_width) = self.in_weights.split_first()?;
        let more = theirs - own;
        let is_padding = more > 0 && more < *own && theirs % VOCABULARY_MULTIPLE == 0;
        (is_padding && width == their_width).then(|| {
            format!(
                "{more} rows of padding, if they are a vocabulary that another program has padded to a multiple of \
                 {VOCABULARY_MULTIPLE}, as Megatron-LM does"
            )
        })
    }
}

impl fmt::Display for ShapeMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, in_model, in_weights } = self;
        write!(f, "{name} ({in_model:?} in the model, {in_weights:?} in the weights")?;
        match (self.padding(), in_weights.first()) {
            (Some(padding), Some(rows)) => {
                write!(f, ": {padding}: build the model with vocab_size {rows})")
            }
            _ => write!(f, ")"),
        }
    }
}

/// Megatron-LM pads a vocabulary to a multiple of this number times the number of tensor ranks.
const VOCABULARY_MULTIPLE: i64 = 128;

/// Maximum number of names in a message: a wrong file differs in every name of a large model.
const NAMES_SHOWN: usize = 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_names_every_difference() {
        let report = LoadReport {
            loaded: 1,
            missing: vec!["a".into(), "b".into()],
            unexpected: (0..23).map(|i| format!("x{i}")).collect(),
            mismatched: vec![ShapeMismatch {
                name: "head.weight".into(),
                in_model: vec![10, 64],
                in_weights: vec![1000, 64],
            }],
            ..Default::default()
        };
        let text = report.to_string();
        assert!(text.starts_with("1 tensor fits; missing in the weights: a, b; unexpected"));
        assert!(text.contains("x19 and 3 more;"));
        assert!(text.ends_with("head.weight ([10, 64] in the model, [1000, 64] in the weights)"));
        let report = LoadReport {
            loaded: 2,
            key: "state_dict".into(),
            prefix: "model.".into(),
            outside: vec!["loss.weight".into()],
            ..Default::default()
        };
        assert!(report.is_complete());
        assert_eq!(
            report.to_string(),
            "2 tensors fit; the weights are those under `state_dict`; `model.` was taken off the names; left out, \
             without that prefix: loss.weight"
        );
    }

    #[test]
    fn padding_of_a_vocabulary_is_named() {
        let told = |own: i64, theirs: i64| {
            let (in_model, in_weights) = (vec![own, 8], vec![theirs, 8]);
            ShapeMismatch { name: "wte.weight".into(), in_model, in_weights }.to_string()
        };
        let padded = told(101, 128);
        assert!(
            padded
                .starts_with("wte.weight ([101, 8] in the model, [128, 8] in the weights: 27 rows"),
            "{padded}"
        );
        assert!(
            padded.ends_with("as Megatron-LM does: build the model with vocab_size 128)"),
            "{padded}"
        );
        // Fewer rows, another multiple, and far more rows cannot be padding.
        for (own, theirs) in [(128, 101), (101, 120), (10, 128)] {
            assert!(told(own, theirs).ends_with("in the weights)"));
        }
    }

    #[test]
    fn a_prefix_goes_only_when_all_names_have_it() {
        let with = |names: &[&str]| {
            let mut state = StateDict::new();
            for name in names {
                state.insert(*name, Tensor::from(0f32)).unwrap();
            }
            state
        };
        let names = |state: StateDict| state.names().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(names(with(&["module.a", "module.b"]).strip_prefix("module.")), ["a", "b"]);
        assert_eq!(names(with(&["module.a", "b"]).strip_prefix("module.")), ["module.a", "b"]);
        assert_eq!(names(with(&["module."]).strip_prefix("module.")), ["module."]);
        assert!(with(&[]).strip_prefix("module.").is_empty());
    }
}
