//! Pairs of sentences with a class each.

use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use brigade::text::tokens::{
    CsvOptions, HuggingFaceTokenizer, ParallelOptions, ParquetOptions, TextSource,
};
use brigade::text::{Sequence, SequenceLabel};
use brigade_testkit::Reviews;

use crate::whole;

/// Pairs to train and to validate with, and the names of their classes.
#[derive(Debug)]
pub struct Pairs {
    /// The name of their folder.
    pub name: String,
    /// To train with: texts of two fields.
    pub train: TextSource,
    /// To validate with.
    pub valid: TextSource,
    /// The classes, in the order of their numbers: of two, the second is the one that is looked for.
    pub classes: Vec<String>,
}

impl Pairs {
    /// Opens a folder with files for both parts: tables of the Microsoft Research Paraphrase Corpus, or CSV or Parquet
    /// files with columns sentence1, sentence2 and label.
    ///
    /// # Errors
    /// When a part is missing, or a file cannot be read.
    pub fn open(folder: &Path) -> anyhow::Result<Self> {
        let train = part(folder, &["train", "msr_paraphrase_train"])?;
        let valid = part(folder, &["dev", "valid", "msr_paraphrase_test"])?;
        let mut classes = train.labels().unwrap_or_default().to_vec();
        classes.sort_by_key(|name| {
            // `not_equivalent` is class 0 of MRPC, and `equivalent` class 1.
            let is_negated = name.strip_prefix("not_").map(str::to_owned);
            (is_negated.is_none(), name.parse().unwrap_or(u32::MAX), name.clone())
        });
        classes.dedup();
        anyhow::ensure!(
            classes.len() > 1,
            "{}: the pairs to train with are of one class, {classes:?}",
            folder.display()
        );
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Self { name, train, valid, classes })
    }

    /// Encodes the pairs of a part.
    ///
    /// # Errors
    /// When the tokenizer refuses a text, or a pair is of a class that none to train with has.
    pub fn encode(
        &self,
        part: &TextSource,
        tokenizer: &HuggingFaceTokenizer,
    ) -> anyhow::Result<Vec<Sequence>> {
        let mut sequences = Vec::with_capacity(part.len());
        tokenizer.encode_all(part, ParallelOptions::new(), |_, encoding| {
            sequences.push(Sequence::from(&encoding));
            Ok(())
        })?;
        let labels = part.labels().unwrap_or_default().iter().enumerate();
        let labelled = sequences.into_iter().zip(labels).map(|(sequence, (index, label))| {
            let class = self.classes.iter().position(|class| class == label);
            let class = class.with_context(|| {
                let classes = self.classes.join(", ");
                format!("{}: the class {label} is none of {classes}", part.name(index))
            })?;
            Ok(sequence.label(SequenceLabel::Class(class as i64)))
        });
        labelled.collect()
    }
}

/// Opens the file of a part, whose name begins with one of these, or its several Parquet files.
fn part(folder: &Path, names: &[&str]) -> anyhow::Result<TextSource> {
    let read = || format!("cannot read the folder {}", folder.display());
    let mut files: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(folder).with_context(read)? {
        let path = entry.with_context(read)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if names.iter().any(|begin| name.starts_with(begin)) {
            files.push(path);
        }
    }
    files.sort();
    let of = |endings: &[&str]| -> Vec<&PathBuf> {
        let ends = |path: &&PathBuf| {
            path.extension().is_some_and(|it| endings.iter().any(|end| it == *end))
        };
        files.iter().filter(ends).collect()
    };
    let (tables, csv, parquet) = (of(&["tsv", "txt"]), of(&["csv"]), of(&["parquet"]));
    let sentences = ["sentence1", "sentence2"];
    let found = match (tables.first(), csv.first(), parquet.is_empty()) {
        // The first column is called Quality, after a byte order mark in some copies of the file. Quotation marks
        // are those of the texts.
        (Some(file), ..) => CsvOptions::new()
            .delimiter(b'\t')
            .quoting(false)
            .text_columns(["#1 String", "#2 String"])
            .label_column("0")
            .open(file),
        (None, Some(file), _) => {
            CsvOptions::new().text_columns(sentences).label_column("label").open(file)
        }
        (None, None, false) => {
            ParquetOptions::new().text_columns(sentences).label_column("label").open(parquet)
        }
        (None, None, true) => {
            anyhow::bail!("{} has no {}.tsv, .csv or .parquet", folder.display(), names[0])
        }
    };
    // A vocabulary is made of the sentences alone.
    Ok(found?.mark_fields(false))
}

/// Writes a folder with generated pairs, `train.tsv` and `dev.tsv`, as the Microsoft Research Paraphrase Corpus has
/// them; one that is there stays.
///
/// # Errors
/// When a file cannot be written.
pub fn write_pairs(folder: &Path, count: u64) -> anyhow::Result<()> {
    whole(folder, |folder| {
        fs::create_dir_all(folder)?;
        let (count, tested) = (count as usize, (count as usize).div_ceil(4));
        let reviews = Reviews::new(0);
        for (name, range) in [("train.tsv", 0..count), ("dev.tsv", count..count + tested)] {
            let mut file = BufWriter::new(fs::File::create(folder.join(name))?);
            writeln!(file, "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String")?;
            for index in range {
                let (first, second, same) = reviews.pair(index);
                let id = 2 * index;
                writeln!(file, "{}\t{id}\t{}\t{first}\t{second}", u8::from(same), id + 1)?;
            }
            file.flush()?;
        }
        Ok(())
    })
}
