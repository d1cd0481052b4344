//! Images in tar archives.

mod index;
mod shards;

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use brigade_rank_env::text::counted;
use serde_json::Value;

use self::index::{Rules, ShardIndex};
use self::shards::{Shards, Span, Unpacked};
use super::paths;
use crate::image_source::{Fingerprint, Hasher, IMAGE_EXTENSIONS, ImageSource, Names, no_image};
use crate::labels::{Categories, Labelled};
use crate::{ImageError, Result};

/// Images in tar archives, in the layout of the Python package `webdataset`: members whose names are equal up to the
/// first dot of the file name are one sample, such as `n01440764/12.jpg` and `n01440764/12.cls`. The extension after
/// that dot is the kind of the member; its case does not matter.
///
/// An archive that is compressed by gzip (`.tar.gz`, `.tgz`) is unpacked when it is opened, its images and labels only,
/// into a file without a name in the system's temporary folder (`TMPDIR`). Each process has such a file, as large as
/// the images, until it ends. If that is too much, `gunzip` the archives once. An archive whose images and labels take
/// more than 256 MiB plus a hundred times its own size is an error.
///
/// The archives are files of this host. Opening them reads only the headers of their members, 512 bytes each; images
/// are then read at their positions, in any order, without unpacking. In memory an image takes about 60 bytes and its
/// name. The members of one sample may be apart, which `webdataset` does not allow. Samples without an image are left
/// out.
///
/// ```
/// use brigade_images::source::{ImageSource, WebDataset};
///
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// # for shard in 0..2 {
/// #     let mut tar = tar::Builder::new(std::fs::File::create(folder.join(format!("train-{shard:03}.tar")))?);
/// #     let mut header = tar::Header::new_gnu();
/// #     for (name, bytes) in [("a.jpg", "JPEG"), ("a.cls", "4\n")] {
/// #         header.set_size(bytes.len() as u64);
/// #         tar.append_data(&mut header, name, bytes.as_bytes())?;
/// #     }
/// #     tar.finish()?;
/// # }
/// # let folder = folder.display();
/// let images = WebDataset::open(format!("{folder}/train-{{000..001}}.tar"))?;
/// assert_eq!(images.name(1), format!("{folder}/train-001.tar/a.jpg"));
/// let images = images.labelled()?;
/// assert_eq!(images.labels(), [4, 4]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct WebDataset {
    shards: Shards,
    names: Names,
    images: Vec<Place>,
    /// Positions of the labels, until they are read.
    labels: Vec<Option<Span>>,
    label: LabelMember,
}

/// Position of an image.
#[derive(Clone, Copy, Debug)]
struct Place {
    shard: u32,
    span: Span,
}

impl WebDataset {
    /// Opens archives by the rules of [`WebDatasetOptions::new`].
    ///
    /// `pattern` is the path of an archive, or of several with braces: `{000..146}` is a range, and `{train,extra}` a
    /// list, as in a shell. The path of a folder stands for all files in it whose names end in `.tar`, `.tar.gz` or
    /// `.tgz`, in the order of bytes.
    ///
    /// # Errors
    /// Returns the same errors as [`WebDatasetOptions::open`].
    pub fn open(pattern: impl AsRef<str>) -> Result<Self> {
        WebDatasetOptions::new().open(pattern)
    }

    /// Reads the labels. The classes are the distinct labels, sorted; if labels are numbers, the names of the classes
    /// are the numbers from 0 to the largest label.
    ///
    /// # Errors
    /// Fails if a sample has no label, or one that cannot be read as the requested kind.
    pub fn labelled(mut self) -> Result<Labelled<Self>> {
        let labels = self.read_labels()?;
        let (categories, labels) = match labels {
            Labels::Names(names) => {
                let categories = Categories::sorted(&names);
                let labels = names.iter().map(|name| categories.label(name));
                let labels = labels.collect::<Result<_>>()?;
                (categories, labels)
            }
            Labels::Numbers(numbers) => {
                let largest = numbers.iter().max().copied().unwrap_or_default();
                let count = usize::try_from(largest).unwrap_or_default().saturating_add(1);
                // A few bytes may contain any number; there are rarely more classes than images, and then few.
                let limit = MOST_UNSEEN.max(numbers.len());
                if count > limit {
                    return Err(ImageError::InvalidArgument(format!(
                        "the label {largest} asks for more classes than the limit of {limit}; it \
                         seems to be something else than a class. If it is one, give the classes: \
                         `labelled_as(Categories::numbered(…)?)`"
                    )));
                }
                (Categories::numbered(count)?, numbers)
            }
        };
        Labelled::new(self, labels, categories)
    }

    /// Reads the labels, which are names or numbers of the given classes.
    ///
    /// # Errors
    /// Returns the same errors as [`labelled`](Self::labelled), and fails if a label is not a class.
    pub fn labelled_as(mut self, categories: Categories) -> Result<Labelled<Self>> {
        let labels = match self.read_labels()? {
            Labels::Names(names) => {
                names.iter().map(|name| categories.label(name)).collect::<Result<_>>()?
            }
            Labels::Numbers(numbers) => numbers,
        };
        Labelled::new(self, labels, categories)
    }

    /// Opens the archives now, at most [`shards::MAX_OPEN`] of them, so that they can be read after they are deleted.
    #[cfg(feature = "parquet")]
    pub(super) fn hold_open(&self) -> Result<()> {
        self.shards.hold_open()
    }

    /// Reads the label of each image, and drops the positions of the labels.
    fn read_labels(&mut self) -> Result<Labels> {
        let (mut names, mut numbers) = (Vec::new(), Vec::new());
        let mut buffer = Vec::new();
        for (index, span) in std::mem::take(&mut self.labels).into_iter().enumerate() {
            let no_label = |detail| ImageError::NoLabel { name: self.name(index).into(), detail };
            let (Some(span), Some(place)) = (span, self.images.get(index)) else {
                return Err(no_label(format!(
                    "its sample has no member .{}",
                    self.label.extension
                )));
            };
            if span.bytes > MAX_LABEL_BYTES {
                let bytes = span.bytes;
                let error = format!("its member .{} has {bytes} bytes", self.label.extension);
                return Err(no_label(format!("{error}, more than {MAX_LABEL_BYTES}")));
            }
            self.shards.read(place.shard, span, &self.name(index), &mut buffer)?;
            match self.label.parse(&buffer).map_err(no_label)? {
                Label::Name(name) => names.push(name),
                Label::Number(number) => numbers.push(number),
            }
            if !names.is_empty() && !numbers.is_empty() {
                return Err(no_label("some labels are names and others are numbers".to_owned()));
            }
        }
        Ok(if names.is_empty() { Labels::Numbers(numbers) } else { Labels::Names(names) })
    }
}

impl ImageSource for WebDataset {
    fn len(&self) -> usize {
        self.images.len()
    }

    fn read(&self, index: usize, buffer: &mut Vec<u8>) -> Result<()> {
        let place = self.images.get(index).ok_or_else(|| no_image(index, self.len()))?;
        self.shards.read(place.shard, place.span, &self.name(index), buffer)
    }

    /// Returns the version of the archive at the time when it was opened.
    fn version(&self, index: usize) -> u64 {
        self.images.get(index).map_or(0, |place| self.shards.version(place.shard))
    }

    fn name(&self, index: usize) -> Cow<'_, str> {
        let shard = self.images.get(index).and_then(|place| self.shards.path(place.shard));
        let member = String::from_utf8_lossy(self.names.get(index).unwrap_or_default());
        format!("{}/{member}", shard.unwrap_or_else(|| Path::new("")).display()).into()
    }

    /// Hashes the names of the archives without their folders, their sizes, and the name, position and size of each
    /// image.
    fn fingerprint(&self) -> Result<Fingerprint> {
        let mut hasher = Hasher::new("webdataset");
        self.shards.hash(&mut hasher);
        for (name, Place { shard, span }) in self.names.iter().zip(&self.images) {
            hasher.bytes(name);
            hasher.number(u64::from(*shard));
            // The position of an image of a compressed archive depends on when it was unpacked.
            hasher.number(if self.shards.is_unpacked(*shard) { 0 } else { span.offset });
            hasher.number(span.bytes);
        }
        Ok(hasher.finish())
    }
}

/// Options to read tar archives: the members that are images and labels.
///
/// ```
/// use brigade_images::source::WebDatasetOptions;
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("0.tar");
/// # let mut tar = tar::Builder::new(std::fs::File::create(&path)?);
/// # let mut header = tar::Header::new_gnu();
/// # for (name, bytes) in [("a.rgb.png", "PNG"), ("a.json", r#"{"species": "cat"}"#)] {
/// #     header.set_size(bytes.len() as u64);
/// #     tar.append_data(&mut header, name, bytes.as_bytes())?;
/// # }
/// # tar.into_inner()?;
/// let options = WebDatasetOptions::new().images(["rgb.png"]).json_label("json", "species");
/// let images = options.open_shards([&path])?.labelled()?;
/// assert_eq!(images.categories().names(), ["cat"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct WebDatasetOptions {
    images: Vec<String>,
    /// `true` if the caller has set the extensions of images.
    named: bool,
    label: LabelMember,
}

impl Default for WebDatasetOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl WebDatasetOptions {
    /// Creates options that read members with [`IMAGE_EXTENSIONS`] as images and the numbers in members `.cls` as
    /// labels. In a sample without such a member, the image is the one whose name ends in a dot and one of these
    /// extensions, such as `0001.input.jpg`.
    #[must_use]
    pub fn new() -> Self {
        Self {
            images: IMAGE_EXTENSIONS.map(str::to_owned).to_vec(),
            named: false,
            label: LabelMember { extension: "cls".to_owned(), kind: Kind::Number },
        }
    }

    /// Sets which members are images, by the part of their names after the first dot. If a sample has several, the
    /// first of this list is used. Defaults to [`IMAGE_EXTENSIONS`].
    #[must_use]
    pub fn images<E: AsRef<str>>(mut self, extensions: impl IntoIterator<Item = E>) -> Self {
        self.images = extensions.into_iter().map(|text| extension(text.as_ref())).collect();
        self.named = true;
        self
    }

    /// Reads labels from members that contain a number, such as `cls`, which `webdataset` decodes in the same way.
    /// `cls` is the default.
    #[must_use]
    pub fn number_label(mut self, member: &str) -> Self {
        self.label = LabelMember { extension: extension(member), kind: Kind::Number };
        self
    }

    /// Reads labels from members that contain a name, such as `txt`.
    #[must_use]
    pub fn text_label(mut self, member: &str) -> Self {
        self.label = LabelMember { extension: extension(member), kind: Kind::Text };
        self
    }

    /// Reads labels from a field of members that contain a JSON object: a name or a number.
    #[must_use]
    pub fn json_label(mut self, member: &str, field: &str) -> Self {
        self.label =
            LabelMember { extension: extension(member), kind: Kind::Json(field.to_owned()) };
        self
    }

    /// Opens the archives of a pattern; see [`WebDataset::open`].
    ///
    /// # Errors
    /// Fails if an archive cannot be read, is damaged, is compressed by another method than gzip, becomes too large
    /// when it is unpacked, or ends before one of its members does; if there are no images; or if a sample has several
    /// images and none was chosen by [`images`](Self::images).
    pub fn open(&self, pattern: impl AsRef<str>) -> Result<WebDataset> {
        self.open_shards(paths::of_pattern(pattern.as_ref(), &[".tar", ".tar.gz", ".tgz"])?)
    }

    /// Opens archives by their paths.
    ///
    /// # Errors
    /// Returns the same errors as [`open`](Self::open).
    pub fn open_shards<P: Into<PathBuf>>(
        &self,
        paths: impl IntoIterator<Item = P>,
    ) -> Result<WebDataset> {
        let paths: Vec<PathBuf> = paths.into_iter().map(Into::into).collect();
        let rules = Rules { images: &self.images, named: self.named, label: &self.label.extension };
        let unpacked = Unpacked::default();
        let indices = index::all(&paths, &rules, &unpacked)?;
        let (mut names, mut images, mut labels) = (Names::default(), Vec::new(), Vec::new());
        let (mut facts, mut without_image) = (Vec::with_capacity(paths.len()), 0);
        for (shard, index) in (0_u32..).zip(indices) {
            let ShardIndex { facts: of_shard, samples, incomplete } = index;
            facts.push(of_shard);
            without_image += incomplete;
            for sample in samples {
                names.push(&sample.name);
                images.push(Place { shard, span: sample.image });
                labels.push(sample.label);
            }
        }
        if images.is_empty() {
            let shards: Vec<_> = paths.iter().take(3).map(|path| path.display()).collect();
            return Err(ImageError::InvalidArgument(format!(
                "there are no images in {} {shards:?}: looked for members that end in .{}",
                counted(paths.len(), "archive"),
                self.images.join(", .")
            )));
        }
        if without_image > 0 {
            tracing::warn!(samples = without_image, "left out samples without an image");
        }
        let shards = Shards::new(paths, facts, unpacked.into_file());
        Ok(WebDataset { shards, names, images, labels, label: self.label.clone() })
    }
}

/// Maximum number of classes if it is more than the number of images.
const MOST_UNSEEN: usize = 100_000;

/// The member of a sample that contains its label, and the kind of the label.
#[derive(Clone, Debug)]
struct LabelMember {
    extension: String,
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    Number,
    Text,
    /// Name of the field of an object.
    Json(String),
}

enum Label {
    Name(String),
    Number(i64),
}

enum Labels {
    Names(Vec<String>),
    Numbers(Vec<i64>),
}

impl LabelMember {
    /// Parses a member. The error is the reason why it cannot be used as a label.
    fn parse(&self, bytes: &[u8]) -> Result<Label, String> {
        let text = || {
            let text = std::str::from_utf8(bytes).map(str::trim);
            text.map_err(|_| format!("its member .{} is not text", self.extension))
        };
        match &self.kind {
            Kind::Text => Ok(Label::Name(text()?.to_owned())),
            Kind::Number => {
                let text = text()?;
                let number = text.parse().ok().filter(|number| *number >= 0).map(Label::Number);
                number.ok_or_else(|| {
                    let some: String = text.chars().take(20).collect();
                    format!("its member .{} holds {some:?}, which is not a class", self.extension)
                })
            }
            Kind::Json(field) => {
                let object: Value = serde_json::from_slice(bytes)
                    .map_err(|error| format!("its member .{}: {error}", self.extension))?;
                let found = object.get(field);
                let number = found.and_then(Value::as_i64).filter(|number| *number >= 0);
                let name = found.and_then(Value::as_str).map(|name| Label::Name(name.to_owned()));
                number.map(Label::Number).or(name).ok_or_else(|| {
                    let member = &self.extension;
                    format!("its member .{member} has no name or class number as {field:?}")
                })
            }
        }
    }
}

fn extension(text: &str) -> String {
    text.trim_start_matches('.').to_ascii_lowercase()
}

/// Maximum size of a member with a label, in bytes.
const MAX_LABEL_BYTES: u64 = 1 << 20;

#[cfg(test)]
mod tests;
