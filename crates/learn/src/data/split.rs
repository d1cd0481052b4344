//! Splits of items into training and validation.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use brigade_rank_env::text::counted;
use brigade_sampling::{Sampler, Shuffle};
use brigade_torch::{Error, Result};
use brigade_vision::VisionError;
use brigade_vision::labels::Split;

use super::items::Items;
use super::labels::Label;

/// A rule that splits items into training and validation: fastai's splitters.
pub trait SplitItems: Send + Sync {
    /// Splits the items. Random draws must depend only on `seed`, which is the same on all ranks. `labels` returns the
    /// label of each item.
    ///
    /// # Errors
    /// Fails when the items cannot be divided.
    fn split(
        &self,
        items: &Items,
        labels: &dyn Fn() -> Result<Vec<Label>>,
        seed: u64,
    ) -> Result<Split>;

    /// Returns `true` if a split without validation items is intended, as for [`no_split`].
    fn may_lack_validation(&self) -> bool {
        false
    }
}

type Rule = dyn Fn(&Items, &dyn Fn() -> Result<Vec<Label>>, u64) -> Result<Split> + Send + Sync;

/// A rule that splits items, made by the functions of this module.
pub struct Splitter {
    rule: Box<Rule>,
    seed: Option<u64>,
    may_lack_validation: bool,
}

impl Splitter {
    fn new(
        rule: impl Fn(&Items, &dyn Fn() -> Result<Vec<Label>>, u64) -> Result<Split>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        Self { rule: Box::new(rule), seed: None, may_lack_validation: false }
    }

    fn of_items(rule: impl Fn(&Items) -> Result<Split> + Send + Sync + 'static) -> Self {
        Self::new(move |items, _, _| rule(items))
    }

    /// Sets the seed of a random split, in place of the data block's. Has no effect on other splitters.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }
}

impl std::fmt::Debug for Splitter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Splitter").field("seed", &self.seed).finish_non_exhaustive()
    }
}

impl SplitItems for Splitter {
    fn split(
        &self,
        items: &Items,
        labels: &dyn Fn() -> Result<Vec<Label>>,
        seed: u64,
    ) -> Result<Split> {
        (self.rule)(items, labels, self.seed.unwrap_or(seed))
    }

    fn may_lack_validation(&self) -> bool {
        self.may_lack_validation
    }
}

/// One or several names of folders, any of which matches.
pub trait FolderNames {
    /// Returns the names of the folders.
    fn names(self) -> Vec<String>;
}

impl FolderNames for &str {
    fn names(self) -> Vec<String> {
        vec![self.to_owned()]
    }
}

impl<const N: usize> FolderNames for [&str; N] {
    fn names(self) -> Vec<String> {
        self.map(str::to_owned).to_vec()
    }
}

/// Splits by the name of the folder above the one that contains a file: fastai's `GrandparentSplitter`, whose names are
/// `train` and `valid`. Files elsewhere are in neither part.
///
/// ```
/// use brigade_learn::data::{Items, SplitItems, grandparent};
///
/// let items = Items::new("dogs", ["train/pug/1.jpg", "val/pug/2.jpg", "test/3.jpg"]);
/// let split = grandparent("train", ["val", "valid"]).split(&items, &|| Ok(Vec::new()), 0)?;
/// assert_eq!((split.train, split.valid), (vec![0], vec![1]));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn grandparent(train: impl FolderNames, valid: impl FolderNames) -> Splitter {
    let (train, valid) = (train.names(), valid.names());
    Splitter::of_items(move |items| {
        let mut split = Split::default();
        let mut met = BTreeSet::new();
        for index in 0..items.len() {
            let path = items.path(index);
            let folder = path.parent().and_then(Path::parent).and_then(Path::file_name);
            let Some(folder) = folder.map(|name| name.to_string_lossy().into_owned()) else {
                continue;
            };
            if train.contains(&folder) {
                split.train.push(index);
            } else if valid.contains(&folder) {
                split.valid.push(index);
            }
            met.insert(folder);
        }
        for (part, names) in [(&split.train, &train), (&split.valid, &valid)] {
            if part.is_empty() {
                let met: Vec<String> = met.into_iter().take(10).collect();
                return Err(Error::invalid_argument(format!(
                    "none of {} is in a folder of a folder named {}; the folders above those of \
                     the items are {met:?}: name them in grandparent(train, valid), or split otherwise",
                    counted(items.len(), "item"),
                    names.join(" or ")
                )));
            }
        }
        Ok(split)
    })
}

/// Validates with a share of the items, drawn at random: fastai's `RandomSplitter`. The seed is the data block's,
/// which all ranks agree on, unless [`Splitter::seed`] sets one.
#[must_use]
pub fn random_split(share: f64) -> Splitter {
    Splitter::new(move |items, _, seed| {
        Ok(Split::random(items.len(), share, seed).map_err(VisionError::from)?)
    })
}

/// Validates with the items of these indices, in the getter's order: fastai's `IndexSplitter`.
pub fn index_split(valid: impl IntoIterator<Item = usize>) -> Splitter {
    let valid: Vec<usize> = valid.into_iter().collect();
    Splitter::of_items(move |items| {
        Ok(Split::by_indices(items.len(), valid.iter().copied()).map_err(VisionError::from)?)
    })
}

/// Validates with the items for which the mask is true: fastai's `MaskSplitter`.
pub fn mask_split(valid: impl IntoIterator<Item = bool>) -> Splitter {
    let valid: Vec<bool> = valid.into_iter().collect();
    Splitter::of_items(move |items| {
        if valid.len() != items.len() {
            return Err(Error::invalid_argument(format!(
                "a mask of {} cannot split {}; give one for each, in the getter's order",
                counted(valid.len(), "value"),
                counted(items.len(), "item")
            )));
        }
        Ok(by(items, |index| valid.get(index).copied().unwrap_or_default()))
    })
}

/// Validates with the items for whose path the function returns `true`: fastai's `FuncSplitter`.
pub fn function_split(is_valid: impl Fn(&Path) -> bool + Send + Sync + 'static) -> Splitter {
    Splitter::of_items(move |items| Ok(by(items, |index| is_valid(&items.path(index)))))
}

/// Validates with the files that a text file lists, one per line: fastai's `FileSplitter`. A line is the end of a path;
/// the text file is in the data set's folder.
pub fn file_split(file: impl Into<PathBuf>) -> Splitter {
    let file = file.into();
    Splitter::of_items(move |items| {
        let list = items.root().join(&file);
        Ok(Split::by_list(&items.source(), list).map_err(VisionError::from)?)
    })
}

/// Validates with the items whose column is `true` or `1`, case-insensitively: fastai's `ColSplitter`, whose column is
/// `is_valid`.
#[expect(clippy::needless_pass_by_value, reason = "a name or a number, as it is written")]
pub fn column_split(column: impl ToString) -> Splitter {
    let column = column.to_string();
    Splitter::of_items(move |items| {
        let is_valid = |index| match items.cell(index, &column)?.to_ascii_lowercase().as_str() {
            "true" | "1" => Ok(true),
            "false" | "0" | "" => Ok(false),
            other => Err(Error::invalid_argument(format!(
                "{} has {other:?} in the column {column:?}, expected true or false; column_values_split \
                 takes other values",
                items.name(index)
            ))),
        };
        let is_valid = (0..items.len()).map(is_valid).collect::<Result<Vec<bool>>>()?;
        Ok(by(items, |index| is_valid.get(index).copied().unwrap_or_default()))
    })
}

/// Validates with the items whose column has one of these values: fastai's `ColSplitter(on=…)`.
#[expect(clippy::needless_pass_by_value, reason = "a name or a number, as it is written")]
pub fn column_values_split<V: ToString>(
    column: impl ToString,
    values: impl IntoIterator<Item = V>,
) -> Splitter {
    let column = column.to_string();
    let values: Vec<String> = values.into_iter().map(|value| value.to_string()).collect();
    Splitter::of_items(move |items| {
        let is_valid = |index| {
            let cell = items.cell(index, &column)?;
            Ok(values.iter().any(|value| value == cell))
        };
        let is_valid = (0..items.len()).map(is_valid).collect::<Result<Vec<bool>>>()?;
        Ok(by(items, |index| is_valid.get(index).copied().unwrap_or_default()))
    })
}

/// Validates with the last share of the items, for data in order of time: fastai's `EndSplitter`.
#[must_use]
pub fn end_split(share: f64) -> Splitter {
    Splitter::of_items(move |items| {
        check_share(share, share)?;
        let first = items.len() - (share * items.len() as f64) as usize;
        Ok(by(items, |index| index >= first))
    })
}

/// Validates with a share of the items of each label, drawn at random: fastai's `TrainTestSplitter(stratify=…)`. The
/// parts have the labels in the same shares, as nearly as whole items allow, so that labels of few items are not all in
/// one part.
///
/// ```
/// use brigade_learn::data::{Items, LabelItems, SplitItems, parent_name, stratified_split};
///
/// let files = (0..20).map(|n| format!("{}/{n}.jpg", if n < 15 { "cat" } else { "dog" }));
/// let items = Items::new("pets", files);
/// let split = stratified_split(0.2).split(&items, &|| parent_name.labels(&items), 7)?;
/// assert_eq!(split.valid.iter().filter(|index| **index < 15).count(), 3);
/// assert_eq!(split.valid.len(), 4);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[must_use]
pub fn stratified_split(share: f64) -> Splitter {
    Splitter::new(move |items, labels, seed| {
        check_share(share, share)?;
        let mut groups: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for (index, label) in labels()?.iter().enumerate() {
            groups.entry(format!("{label:?}")).or_default().push(index);
        }
        // Whole items first, then one more for the groups with the largest remainders.
        let exact = |group: &Vec<usize>| share * group.len() as f64;
        let mut counts: Vec<usize> = groups.values().map(|group| exact(group) as usize).collect();
        let missing = (share * items.len() as f64).round() as usize;
        let missing = missing.saturating_sub(counts.iter().sum());
        let mut by_rest: Vec<usize> = (0..groups.len()).collect();
        let rests: Vec<f64> = groups.values().map(|group| exact(group).fract()).collect();
        by_rest.sort_by(|a, b| rests[*b].total_cmp(&rests[*a]));
        for place in by_rest.into_iter().take(missing) {
            counts[place] += 1;
        }
        let mut is_valid = vec![false; items.len()];
        for (place, (group, count)) in groups.values().zip(counts).enumerate() {
            for drawn in Shuffle::new(group.len(), seed).order(place as u64).iter().take(count) {
                is_valid[group[*drawn]] = true;
            }
        }
        Ok(by(items, |index| is_valid[index]))
    })
}

/// Trains and validates with random shares of the items and leaves out the rest, for quick experiments: fastai's
/// `RandomSubsetSplitter`.
#[must_use]
pub fn subset_split(train: f64, valid: f64) -> Splitter {
    Splitter::new(move |items, _, seed| {
        check_share(train, train + valid - f64::EPSILON)?;
        check_share(valid, valid)?;
        let mut order = Shuffle::new(items.len(), seed).order(0);
        let count = |share: f64| (share * items.len() as f64) as usize;
        let mut rest = order.split_off(count(train));
        rest.truncate(count(valid));
        order.sort_unstable();
        rest.sort_unstable();
        Ok(Split { train: order, valid: rest })
    })
}

/// Trains with all items and validates with none.
#[must_use]
pub fn no_split() -> Splitter {
    let all = |items: &Items| Ok(Split { train: (0..items.len()).collect(), valid: Vec::new() });
    Splitter { may_lack_validation: true, ..Splitter::of_items(all) }
}

fn by(items: &Items, is_valid: impl Fn(usize) -> bool) -> Split {
    let (valid, train) = (0..items.len()).partition(|index| is_valid(*index));
    Split { train, valid }
}

fn check_share(share: f64, sum: f64) -> Result<()> {
    if share > 0.0 && sum < 1.0 {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "a share of {share} of the items cannot be split off, expected more than 0, and less than 1 in all"
    )))
}
