//! `brigade data`: what a folder of images holds, what transforms make of it, and the folder as one file.

mod grid;
mod pack;
mod show;
mod stats;
mod transforms;

use std::io::{self, IsTerminal, Write};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use brigade_images::labels::{Labelled, Labeller};
use brigade_images::source::{
    ImageFiles, ImageFolder, ImageFolderOptions, ImageSource, WebDatasetOptions,
};
use brigade_images::{ImageError, PackedImages};
use brigade_world::text::escaped;
use clap::{Args, Subcommand};

use crate::config::Usage;

#[derive(Debug, Subcommand)]
pub(crate) enum Data {
    Show(show::ShowArgs),
    Stats(stats::StatsArgs),
    Pack(pack::PackArgs),
}

/// Answers on `out`; a reader that has seen enough ends the answer without an error.
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
    /// Folder of images, pack, or tar shards (`shards-{000..009}.tar`)
    ///
    /// A folder has a folder for each class, or `train` and `valid` (`val`, `validation`, `test`)
    /// with a folder for each class. Tables of Parquet are read by programs alone.
    #[arg(value_name = "FOLDER|FILE")]
    images: String,

    /// Class from each file's name: the first group of a regular expression
    #[arg(long, value_name = "REGEX")]
    label: Option<String>,
}

type Images = Labelled<Box<dyn ImageSource>>;

/// A set of images, and its name where there are several.
struct Part {
    name: Option<&'static str>,
    images: Images,
}

impl SourceArgs {
    /// Opens the images: one set, or those to train and to validate with.
    fn open(&self) -> anyhow::Result<Vec<Part>> {
        let path = Path::new(&self.images);
        let parts = self.parts(path).map_err(|error| match error {
            // The user can mend what was given; the rest is the files' fault.
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
        if let Some(pattern) = &self.label {
            let labeller = Labeller::regex(pattern)?;
            if ends(".tar") || ends(".pack") {
                return Err(ImageError::InvalidArgument(format!(
                    "--label is for folders of files; {} has labels of its own",
                    self.images
                )));
            }
            return one(boxed(Labelled::of(ImageFiles::find(path)?, &labeller)?)?);
        }
        if ends(".pack") {
            return one(boxed(PackedImages::labelled(path)?)?);
        }
        if ends(".tar") {
            return one(boxed(WebDatasetOptions::new().open(&self.images)?.labelled()?)?);
        }
        if ends(".parquet") {
            return Err(ImageError::InvalidArgument(format!(
                "{} is a table: this command reads folders, packs and tar shards; a program reads \
                 tables with `ParquetImages`",
                self.images
            )));
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

fn boxed(images: Labelled<impl ImageSource + 'static>) -> Result<Images, ImageError> {
    let (source, labels, categories) = images.into_parts();
    Labelled::new(Box::new(source), labels, categories)
}

/// Threads for work on images: one for each core.
fn threads() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

/// A count on the terminal while images are read, gone when dropped.
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
        let Ok(mut next) = self.next.try_lock() else { return };
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

/// Work that is over by then shows no progress.
const BEFORE_PROGRESS: Duration = Duration::from_secs(1);

/// Makes a list of broken images into lines, the first ones of them.
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

/// The path with a part's name before its extension.
fn with_part(path: &Path, part: Option<&str>) -> PathBuf {
    let Some(part) = part else { return path.to_owned() };
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let name = match path.extension() {
        Some(extension) => format!("{stem}-{part}.{}", extension.to_string_lossy()),
        None => format!("{stem}-{part}"),
    };
    path.with_file_name(name)
}
