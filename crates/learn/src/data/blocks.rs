//! Blocks: descriptions of the model's input and of the target of an item.

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;

use brigade_rank_env::text::counted;
use brigade_torch::{Error, Result};
use serde::{Deserialize, Serialize};

use super::items::Items;
use super::labels::Label;

/// Returns the block of RGB images as the model's input, `[n, 3, h, w]`: fastai's `ImageBlock`.
#[must_use]
pub fn images() -> ImageBlock {
    ImageBlock { grey: false }
}

/// Returns the block of grayscale images as the model's input, `[n, 1, h, w]`: fastai's `ImageBlock(PILImageBW)`.
#[must_use]
pub fn grey_images() -> ImageBlock {
    ImageBlock { grey: true }
}

/// The block of images as the model's input. Made by [`images`] or [`grey_images`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageBlock {
    pub(super) grey: bool,
}

/// Returns the block of targets that are one class for each item, as class numbers `i64` `[n]`: fastai's
/// `CategoryBlock`. The classes are the labels of the training items, sorted.
#[must_use]
pub fn categories() -> CategoryBlock {
    CategoryBlock { vocabulary: None, sorted: true, unknown: false }
}

/// Returns the block of targets that are any number of classes for each item, as `f32` `[n, classes]` of 0 and 1:
/// fastai's `MultiCategoryBlock`. The classes are the labels of the training items, sorted.
#[must_use]
pub fn multi_categories() -> MultiCategoryBlock {
    MultiCategoryBlock(categories())
}

/// Returns the block of targets that are a segmentation mask for each image, as class numbers `i64` `[n, h, w]`:
/// fastai's `MaskBlock`. Labels are the paths of the masks, whose pixels are indices into `codes`, or 255 for no class.
/// Such pixels are -100 in the targets, which losses and metrics ignore.
pub fn masks<S: Into<String>>(codes: impl IntoIterator<Item = S>) -> MaskBlock {
    MaskBlock { codes: codes.into_iter().map(Into::into).collect() }
}

/// Returns the block of targets that are one or several numbers for each item, as `f32` `[n]` or `[n, numbers]`:
/// fastai's `RegressionBlock`.
#[must_use]
pub fn numbers() -> NumberBlock {
    NumberBlock
}

/// Returns the block of targets that are points on each image, as `f32` `[n, points, 2]` with coordinates from -1
/// (left, top) to 1 (right, bottom): fastai's `PointBlock`. Labels are numbers x, y, x, y, … in pixels from the upper
/// left corner of the file's image; points are transformed with it.
#[must_use]
pub fn points() -> PointBlock {
    PointBlock
}

/// The block of targets that are one class for each item. Made by [`categories`].
#[derive(Clone, Debug)]
pub struct CategoryBlock {
    vocabulary: Option<Vec<String>>,
    sorted: bool,
    unknown: bool,
}

impl CategoryBlock {
    /// Sets the classes and their order. Defaults to the labels of the training items.
    #[must_use]
    pub fn vocabulary<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.vocabulary = Some(names.into_iter().map(Into::into).collect());
        self
    }

    /// Sets whether classes found in the data are sorted, or kept in the order of the training items. Defaults to
    /// `true`.
    #[must_use]
    pub fn sorted(mut self, sorted: bool) -> Self {
        self.sorted = sorted;
        self
    }

    /// Sets whether the class `#na#` is added as number 0, for labels that do not occur in training (fastai's
    /// `add_na`). Without it, such a label is an error.
    #[must_use]
    pub fn unknown(mut self, unknown: bool) -> Self {
        self.unknown = unknown;
        self
    }

    fn vocabulary_of<'a>(&self, labels: impl Iterator<Item = &'a String>) -> Vocabulary {
        let mut names: Vec<String> = match (&self.vocabulary, self.sorted) {
            (Some(names), _) => names.clone(),
            (None, true) => labels.collect::<BTreeSet<_>>().into_iter().cloned().collect(),
            (None, false) => {
                let mut met = BTreeSet::new();
                labels.filter(|label| met.insert(*label)).cloned().collect()
            }
        };
        if self.unknown && names.first().is_none_or(|first| first != UNKNOWN) {
            names.insert(0, UNKNOWN.to_owned());
        }
        let numbers = names.iter().cloned().zip(0..).collect();
        Vocabulary { names, numbers, unknown: self.unknown, given: self.vocabulary.is_some() }
    }
}

/// fastai's name of the class for labels that training lacks.
const UNKNOWN: &str = "#na#";

/// The block of targets that are any number of classes for each item. Made by [`multi_categories`].
#[derive(Clone, Debug)]
pub struct MultiCategoryBlock(CategoryBlock);

impl MultiCategoryBlock {
    /// Sets the classes and their order. Defaults to the labels of the training items.
    #[must_use]
    pub fn vocabulary<S: Into<String>>(self, names: impl IntoIterator<Item = S>) -> Self {
        Self(self.0.vocabulary(names))
    }

    /// Sets whether the class `#na#` is added as number 0, for labels that do not occur in training. Defaults to
    /// `false`: such a label is an error.
    #[must_use]
    pub fn unknown(self, unknown: bool) -> Self {
        Self(self.0.unknown(unknown))
    }
}

/// The block of targets that are a segmentation mask for each image. Made by [`masks`].
#[derive(Clone, Debug)]
pub struct MaskBlock {
    codes: Vec<String>,
}

/// The block of targets that are numbers for each item. Made by [`numbers`].
#[derive(Clone, Copy, Debug)]
pub struct NumberBlock;

/// The block of targets that are points on each image. Made by [`points`].
#[derive(Clone, Copy, Debug)]
pub struct PointBlock;

/// The block of a data set's targets: one of those of this module.
#[derive(Clone, Debug)]
pub struct TargetBlock(Block);

#[derive(Clone, Debug)]
enum Block {
    Category(CategoryBlock),
    MultiCategory(CategoryBlock),
    Mask(MaskBlock),
    Numbers,
    Points,
}

impl From<CategoryBlock> for TargetBlock {
    fn from(block: CategoryBlock) -> Self {
        Self(Block::Category(block))
    }
}

impl From<MultiCategoryBlock> for TargetBlock {
    fn from(block: MultiCategoryBlock) -> Self {
        Self(Block::MultiCategory(block.0))
    }
}

impl From<MaskBlock> for TargetBlock {
    fn from(block: MaskBlock) -> Self {
        Self(Block::Mask(block))
    }
}

impl From<NumberBlock> for TargetBlock {
    fn from(_: NumberBlock) -> Self {
        Self(Block::Numbers)
    }
}

impl From<PointBlock> for TargetBlock {
    fn from(_: PointBlock) -> Self {
        Self(Block::Points)
    }
}

/// Form of a kind of targets, as a codec writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum TargetKind {
    Category,
    MultiCategory,
    Mask,
    Numbers,
    Points,
}

/// Targets of a list of items.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Targets {
    Classes(Vec<i64>),
    /// Rows of this many numbers; 0 if each item has one number that is not a row.
    Rows(Vec<f32>, usize),
    Masks(Vec<PathBuf>),
    Points(Vec<Vec<[f64; 2]>>),
}

/// Encoder of labels as targets, with the classes and widths found in the training items.
#[derive(Clone, Debug)]
pub(super) struct Encoder {
    pub(super) kind: TargetKind,
    vocabulary: Vocabulary,
    /// Number of values per item, for targets that are numbers.
    width: usize,
}

#[derive(Clone, Debug, Default)]
struct Vocabulary {
    names: Vec<String>,
    numbers: HashMap<String, i64>,
    unknown: bool,
    given: bool,
}

impl Vocabulary {
    fn number(&self, label: &str, item: impl FnOnce() -> String) -> Result<i64> {
        if let Some(number) = self.numbers.get(label) {
            return Ok(*number);
        }
        if self.unknown {
            return Ok(0);
        }
        let some: Vec<&str> = self.names.iter().take(10).map(String::as_str).collect();
        let more = if self.names.len() > some.len() { ", …" } else { "" };
        let classes = format!("{}{more}", some.join(", "));
        let item = item();
        Err(Error::invalid_argument(if self.given {
            format!(
                "the label {label:?} of {item} is not in the vocabulary that was given: {classes}"
            )
        } else {
            format!(
                "the label {label:?} of {item} is not in the training set, whose classes are {classes}; \
                 put an item of it there, leave it out, or use .unknown(true) or .vocabulary([…]) of the \
                 target's block"
            )
        }))
    }
}

impl TargetBlock {
    /// Makes the encoder from the training items.
    pub(super) fn encoder(&self, items: &Items, labels: &[Label]) -> Result<Encoder> {
        let mut encoder =
            Encoder { kind: TargetKind::Numbers, vocabulary: Vocabulary::default(), width: 0 };
        match &self.0 {
            Block::Category(block) => {
                encoder.kind = TargetKind::Category;
                let names = labels.iter().enumerate().map(|(index, label)| match label {
                    Label::Name(name) => Ok(name),
                    other => Err(wrong(items, index, other, "one class")),
                });
                let names = names.collect::<Result<Vec<&String>>>()?;
                encoder.vocabulary = block.vocabulary_of(names.into_iter());
            }
            Block::MultiCategory(block) => {
                encoder.kind = TargetKind::MultiCategory;
                let names = labels.iter().enumerate().map(|(index, label)| match label {
                    Label::Name(name) => Ok(std::slice::from_ref(name)),
                    Label::Names(names) => Ok(names.as_slice()),
                    other => Err(wrong(items, index, other, "classes")),
                });
                let names = names.collect::<Result<Vec<&[String]>>>()?;
                encoder.vocabulary = block.vocabulary_of(names.into_iter().flatten());
                if encoder.vocabulary.names.is_empty() {
                    return Err(Error::invalid_argument(format!(
                        "none of {} has a label; look at the labeller and its separator",
                        counted(items.len(), "training item")
                    )));
                }
            }
            Block::Mask(block) => {
                encoder.kind = TargetKind::Mask;
                if !(2..=255).contains(&block.codes.len()) {
                    return Err(Error::invalid_argument(format!(
                        "masks have 2 to 255 classes, found {}",
                        counted(block.codes.len(), "code")
                    )));
                }
                encoder.vocabulary.names.clone_from(&block.codes);
            }
            Block::Numbers | Block::Points => {
                if matches!(self.0, Block::Points) {
                    encoder.kind = TargetKind::Points;
                }
                if let Some(first) = labels.first() {
                    encoder.width = numbers_of(items, 0, first)?.len();
                }
            }
        }
        if let (TargetKind::Category, [only]) = (encoder.kind, encoder.vocabulary.names.as_slice())
        {
            return Err(Error::invalid_argument(format!(
                "the training set ({}) has the single label {only:?}, but a classifier needs at least two classes; \
                 look at the labeller, as {} has this label",
                counted(items.len(), "item"),
                items.name(0)
            )));
        }
        Ok(encoder)
    }
}

impl Encoder {
    /// Returns the names of the classes, if there are classes.
    pub(super) fn classes(&self) -> Option<&[String]> {
        let counts = matches!(self.kind, TargetKind::Numbers | TargetKind::Points);
        (!counts).then_some(&self.vocabulary.names)
    }

    /// Makes the targets of items.
    pub(super) fn encode(&self, items: &Items, labels: &[Label]) -> Result<Targets> {
        let labels = labels.iter().enumerate();
        match self.kind {
            TargetKind::Category => {
                let class = |(index, label): (usize, &Label)| match label {
                    Label::Name(name) => self.vocabulary.number(name, || items.name(index)),
                    other => Err(wrong(items, index, other, "one class")),
                };
                Ok(Targets::Classes(labels.map(class).collect::<Result<_>>()?))
            }
            TargetKind::MultiCategory => {
                let width = self.vocabulary.names.len();
                let mut rows = vec![0.0; width * items.len()];
                for ((index, label), row) in labels.zip(rows.chunks_exact_mut(width.max(1))) {
                    let names = match label {
                        Label::Name(name) => std::slice::from_ref(name),
                        Label::Names(names) => names,
                        other => return Err(wrong(items, index, other, "classes")),
                    };
                    for name in names {
                        let number = self.vocabulary.number(name, || items.name(index))?;
                        if let Some(cell) = row.get_mut(number as usize) {
                            *cell = 1.0;
                        }
                    }
                }
                Ok(Targets::Rows(rows, width))
            }
            TargetKind::Numbers => {
                let mut rows = Vec::with_capacity(self.width * items.len());
                for (index, label) in labels {
                    let numbers = numbers_of(items, index, label)?;
                    if numbers.len() != self.width {
                        return Err(Error::invalid_argument(format!(
                            "{} has {} as its target, the first training item {}",
                            items.name(index),
                            counted(numbers.len(), "number"),
                            self.width
                        )));
                    }
                    rows.extend(numbers.into_iter().map(|number| number as f32));
                }
                Ok(Targets::Rows(rows, if self.width == 1 { 0 } else { self.width }))
            }
            TargetKind::Points => {
                let points = |(index, label): (usize, &Label)| {
                    let numbers = numbers_of(items, index, label)?;
                    match numbers.as_chunks::<2>() {
                        (points, []) if numbers.len() == self.width => Ok(points.to_vec()),
                        _ => Err(Error::invalid_argument(format!(
                            "{} has {} as its points, expected x and y of each, {} in all",
                            items.name(index),
                            counted(numbers.len(), "number"),
                            self.width.next_multiple_of(2)
                        ))),
                    }
                };
                Ok(Targets::Points(labels.map(points).collect::<Result<_>>()?))
            }
            TargetKind::Mask => {
                let path = |(index, label): (usize, &Label)| {
                    let path = match label {
                        Label::File(path) => items.root().join(path),
                        Label::Name(name) => items.root().join(name),
                        other => return Err(wrong(items, index, other, "the path of a mask")),
                    };
                    if path.is_file() {
                        Ok(path)
                    } else {
                        Err(Error::invalid_argument(format!(
                            "{} has no mask: {} is not there; look at the labeller",
                            items.name(index),
                            path.display()
                        )))
                    }
                };
                Ok(Targets::Masks(labels.map(path).collect::<Result<_>>()?))
            }
        }
    }
}

fn numbers_of(items: &Items, index: usize, label: &Label) -> Result<Vec<f64>> {
    let parse = |text: &String| {
        text.trim().parse::<f64>().map_err(|_| {
            Error::invalid_argument(format!(
                "{} has {text:?} as its target, expected a number",
                items.name(index)
            ))
        })
    };
    let numbers = match label {
        Label::Numbers(numbers) => numbers.clone(),
        Label::Name(text) => vec![parse(text)?],
        Label::Names(texts) => texts.iter().map(parse).collect::<Result<_>>()?,
        Label::File(_) => return Err(wrong(items, index, label, "numbers")),
    };
    if numbers.is_empty() || numbers.iter().any(|number| !number.is_finite()) {
        return Err(Error::invalid_argument(format!(
            "{} has {numbers:?} as its target, expected finite numbers",
            items.name(index)
        )));
    }
    Ok(numbers)
}

fn wrong(items: &Items, index: usize, label: &Label, expected: &str) -> Error {
    let (found, advice) = match label {
        Label::Name(_) => ("one name", "numbers() and points() take numbers, masks(codes) paths"),
        Label::Names(_) => ("a list of names", "multi_categories() takes such lists"),
        Label::Numbers(_) => {
            ("numbers", "numbers() takes them as they are; for classes make text of them")
        }
        Label::File(_) => ("a path", "masks(codes) takes paths; for classes make text of it"),
    };
    Error::invalid_argument(format!(
        "the labeller gives {found} for {}, and the target's block expects {expected}: {advice}",
        items.name(index)
    ))
}
