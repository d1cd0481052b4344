//! `brigade data`: describes a folder of images, shows transformed samples, and packs the folder into one file.

mod grid;
mod pack;
mod show;
mod stats;

use std::env;
use std::fs;
use std::io::{self, IsTerminal, Write};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use brigade_images::labels::{Labelled, Labeller};
use brigade_images::source::{
    ImageFiles, ImageFolder, ImageFolderOptions, ImageSource, ParquetOptions, WebDatasetOptions,
};
use brigade_images::{ImageError, PackedImages};
use brigade_rank_env::text::escaped;
use clap::{Args, Subcommand};
use parking_lot::Mutex;

use crate::config::Usage;

#[derive(Debug, Subcommand)]
pub(crate) enum Data {
    Show(show::ShowArgs),
    Stats(stats::StatsArgs),
    Pack(pack::PackArgs),
}

/// Writes the answer to `out`. A reader that closes the pipe ends the answer without an error.
pub(crate) fn run(question: &Data, mut out: impl Write) -> anyhow::Result<()> {
    let answer = match question {
        Data::Show(args) => args.run()?,
        Data::Stats(args) => args.run()?,
        Data::Pack(args) => args.run()?,
    };
    match out.write_all(answer.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => Ok(written?),
    }
}

/// Where images and their labels come from.
#[derive(Debug, Args)]
struct SourceArgs {
    /// Folder, pack, tar shards (`{00..09}.tar`) or tables (`.parquet`)
    ///
    /// A folder contains one folder per class, or `train` and `valid` (or `val`, `validation`, `test`) with one folder
    /// per class each, or only tables or shards. Shards may be compressed (`.tar.gz`). The images of tables are copied
    /// into the temporary folder (`TMPDIR`) until the command ends.
    #[arg(value_name = "FOLDER|FILE")]
    images: String,

    /// Class from each file's name: the first group of a regular expression
    #[arg(long, value_name = "REGEX")]
    label: Option<String>,

    /// Images: a member of shards (`input.jpg`) or a column [default: image]
    ///
    /// By default, in tar shards, the member of each sample with the extension of an image.
    #[arg(long, value_name = "NAME")]
    image_from: Option<String>,

    /// Classes: a member (`txt`, `json:FIELD`) or a column [default: label]
    ///
    /// Defaults to the member `cls` for tar shards. Members that `webdataset` decodes as numbers (cls, cls2, class,
    /// count, index, inx, id) contain class numbers, others contain names.
    #[arg(long, value_name = "NAME")]
    label_from: Option<String>,
}

type Images = Labelled<Box<dyn ImageSource>>;

/// Part of a set of images, with its name if there are several.
struct Part {
    name: Option<&'static str>,
    images: Images,
}

impl SourceArgs {
    /// Opens the images: one set, or separate ones for training and validation.
    fn open(&self) -> anyhow::Result<Vec<Part>> {
        let path = Path::new(&self.images);
        let parts = self.parts(path).map_err(|error| match error {
            // The user can fix the arguments; the other errors are in the files.
            ImageError::InvalidArgument(_) | ImageError::NoLabel { .. } => {
                anyhow::Error::from(Usage(error.to_string()))
            }
            error => error.into(),
        })?;
        if let Some(empty) = parts.iter().find(|part| part.images.is_empty()) {
            let name = empty.name.map_or_else(String::new, |name| format!("{name} of "));
            return Err(Usage(format!("{name}{} holds no images", self.images)).into());
        }
        Ok(parts)
    }

    fn parts(&self, path: &Path) -> Result<Vec<Part>, ImageError> {
        let one = |images| Ok(vec![Part { name: None, images }]);
        let ends = |ending: &str| self.images.ends_with(ending);
        let (shards, table) = if path.is_dir() {
            (holds(path, &SHARDS)?, holds(path, &TABLES)?)
        } else {
            (SHARDS.into_iter().any(ends), TABLES.into_iter().any(ends))
        };
        if shards && table {
            return Err(ImageError::InvalidArgument(format!(
                "{} holds tar shards and tables; give the files of one kind",
                self.images
            )));
        }
        if (self.image_from.is_some() || self.label_from.is_some()) && !shards && !table {
            return Err(ImageError::InvalidArgument(format!(
                "--image-from and --label-from are for tar shards and tables; {} is neither",
                self.images
            )));
        }
        if let Some(pattern) = &self.label {
            let labeller = Labeller::regex(pattern)?;
            if shards || table || ends(".pack") {
                return Err(ImageError::InvalidArgument(format!(
                    "--label is for folders of files; {} contains its labels",
                    self.images
                )));
            }
            return one(boxed(Labelled::of(ImageFiles::find(path)?, &labeller)?)?);
        }
        if ends(".pack") {
            return one(boxed(PackedImages::labelled(path)?)?);
        }
        if shards {
            return one(boxed(self.shards().open(&self.images)?.labelled()?)?);
        }
        if table {
            return one(self.table()?);
        }
        let has = |name: &&str| path.join(name).is_dir();
        if has(&"train") && ["valid", "val", "validation", "test"].iter().any(has) {
            let (train, valid) = ImageFolder::open_train_valid(path)?;
            return Ok(vec![
                Part { name: Some("train"), images: boxed(train)? },
                Part { name: Some("valid"), images: boxed(valid)? },
            ]);
        }
        one(boxed(ImageFolderOptions::new().open(path)?)?)
    }
}

impl SourceArgs {
    /// Returns the names of images and labels in tar shards.
    fn shards(&self) -> WebDatasetOptions {
        let mut options = WebDatasetOptions::new();
        if let Some(member) = &self.image_from {
            options = options.images([member]);
        }
        let Some(member) = &self.label_from else { return options };
        if let Some((member, field)) = member.split_once(':') {
            return options.json_label(member, field);
        }
        // Names that `webdataset` decodes as numbers.
        let last = member.rsplit('.').next().unwrap_or(member);
        match last.to_ascii_lowercase().as_str() {
            "cls" | "cls2" | "class" | "count" | "index" | "inx" | "id" => {
                options.number_label(member)
            }
            _ => options.text_label(member),
        }
    }

    /// Opens tables, whose images are copied to a deleted file that exists as long as it is open: it is freed when the
    /// process ends, in whichever way.
    fn table(&self) -> Result<Images, ImageError> {
        let mut options = ParquetOptions::new();
        if let Some(column) = &self.image_from {
            options = options.image(column);
        }
        if let Some(column) = &self.label_from {
            options = options.label(column);
        }
        let folder = tempfile::Builder::new().prefix("brigade-data-").tempdir();
        let folder = folder.map_err(|cause| ImageError::Read { path: env::temp_dir(), cause })?;
        boxed(options.open(&self.images, folder.path())?)
    }
}

const SHARDS: [&str; 3] = [".tar", ".tar.gz", ".tgz"];
const TABLES: [&str; 1] = [".parquet"];

/// Returns `true` if a folder has files with one of these extensions, and no folders of classes.
fn holds(folder: &Path, endings: &[&str]) -> Result<bool, ImageError> {
    let failed = |cause| ImageError::Read { path: folder.into(), cause };
    let mut found = false;
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        if endings.iter().any(|ending| name.ends_with(ending.as_bytes())) {
            found = true;
        } else if !name.starts_with(b".") && path.is_dir() {
            return Ok(false);
        }
    }
    Ok(found)
}

fn boxed(images: Labelled<impl ImageSource + 'static>) -> Result<Images, ImageError> {
    let (source, labels, categories) = images.into_parts();
    Labelled::new(Box::new(source), labels, categories)
}

/// Number of threads for work on images: one per core.
fn threads() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

/// Counter on the terminal while images are read. It is removed on drop.
struct Progress {
    all: usize,
    shown: AtomicUsize,
    next: Mutex<Option<Instant>>,
}

impl Progress {
    fn new(all: usize) -> Self {
        let next = io::stderr().is_terminal().then(|| Instant::now() + BEFORE_PROGRESS);
        Self { all, shown: AtomicUsize::new(0), next: Mutex::new(next) }
    }

    fn set(&self, done: usize) {
        let Some(mut next) = self.next.try_lock() else { return };
        let Some(at) = next.filter(|at| Instant::now() >= *at) else { return };
        *next = Some(at + Duration::from_millis(200));
        self.shown.store(done, Ordering::Relaxed);
        let _ = write!(io::stderr(), "\r{done} of {} images", self.all);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown.load(Ordering::Relaxed) > 0 {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

/// Delay before progress is shown, so that short work shows none.
const BEFORE_PROGRESS: Duration = Duration::from_secs(1);

/// Formats a list of broken images in lines, the first of them only.
fn broken_lines(source: &dyn ImageSource, broken: &[(usize, String)]) -> String {
    const SHOWN: usize = 10;
    let mut text = String::new();
    for (index, reason) in broken.iter().take(SHOWN) {
        // Most reasons begin with the name.
        let name = source.name(*index);
        if reason.contains(&*name) {
            text.push_str(&format!("  {}\n", escaped(reason)));
        } else {
            text.push_str(&format!("  {}: {}\n", escaped(name), escaped(reason)));
        }
    }
    if broken.len() > SHOWN {
        text.push_str(&format!("  and {} more; --json lists all\n", broken.len() - SHOWN));
    }
    text
}

/// Inserts a part's name into the path, before the extension.
fn with_part(path: &Path, part: Option<&str>) -> PathBuf {
    let Some(part) = part else { return path.to_owned() };
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let name = match path.extension() {
        Some(extension) => format!("{stem}-{part}.{}", extension.to_string_lossy()),
        None => format!("{stem}-{part}"),
    };
    path.with_file_name(name)
}
