//! Dictionaries and lists, built from their flattened entries.

use std::collections::BTreeMap;

use indexmap::IndexMap;

use crate::file_tensor::FileTensor;
use crate::pth::DcpKey;
use crate::value::Value;

/// A dictionary that is being built.
#[derive(Default)]
pub(super) struct Tree(IndexMap<String, Branch>);

enum Branch {
    Leaf(Value<FileTensor>),
    Dict(Tree),
    List(BTreeMap<u64, Self>),
}

impl Tree {
    /// Inserts a value at its keys.
    ///
    /// Fails if another value is in the way.
    pub(super) fn insert(
        &mut self,
        keys: &[DcpKey],
        value: Value<FileTensor>,
    ) -> Result<(), String> {
        let [DcpKey::Name(first), rest @ ..] = keys else {
            return Err("its outermost key is not the key of a dictionary".into());
        };
        if rest.is_empty() {
            return match self.0.insert(first.clone(), Branch::Leaf(value)) {
                None => Ok(()),
                Some(_) => Err(two()),
            };
        }
        let branch = self.0.entry(first.clone()).or_insert_with(|| Branch::of(rest));
        branch.insert(rest, value)
    }

    /// Returns the finished dictionary.
    ///
    /// Fails for a list that lacks an item.
    pub(super) fn into_value(self) -> Result<Value<FileTensor>, String> {
        let entries = self.0.into_iter();
        let entries = entries.map(|(key, branch)| Ok((Value::Str(key), branch.into_value()?)));
        Ok(Value::Dict(entries.collect::<Result<_, String>>()?))
    }
}

impl Branch {
    /// Returns an empty container for a value with these remaining keys.
    fn of(keys: &[DcpKey]) -> Self {
        match keys {
            [DcpKey::Index(_), ..] => Self::List(BTreeMap::new()),
            _ => Self::Dict(Tree::default()),
        }
    }

    fn insert(&mut self, keys: &[DcpKey], value: Value<FileTensor>) -> Result<(), String> {
        match (self, keys) {
            (Self::Dict(tree), [DcpKey::Name(_), ..]) => tree.insert(keys, value),
            (Self::List(items), [DcpKey::Index(index)]) => {
                match items.insert(*index, Self::Leaf(value)) {
                    None => Ok(()),
                    Some(_) => Err(two()),
                }
            }
            (Self::List(items), [DcpKey::Index(index), rest @ ..]) => {
                items.entry(*index).or_insert_with(|| Self::of(rest)).insert(rest, value)
            }
            _ => Err(two()),
        }
    }

    fn into_value(self) -> Result<Value<FileTensor>, String> {
        match self {
            Self::Leaf(value) => Ok(value),
            Self::Dict(tree) => tree.into_value(),
            Self::List(items) => {
                if let Some((place, _)) = (0..).zip(items.keys()).find(|(place, at)| place != *at) {
                    return Err(format!("a list lacks its item {place}"));
                }
                let items = items.into_values().map(Self::into_value);
                Ok(Value::List(items.collect::<Result<_, String>>()?))
            }
        }
    }
}

fn two() -> String {
    "two values have the same keys, or one lies in the other".into()
}
