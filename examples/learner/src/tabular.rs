//! A table as tensors, and fastai's model of such.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, ensure};
use brigade::learn::prelude::*;
use brigade::nn::{BatchNorm1d, Embedding, Linear, LinearOptions, Module, ParamPath};

/// Columns of names, of numbers, and the one to predict.
const CATEGORIES: [&str; 4] = ["workclass", "education", "marital-status", "occupation"];
const NUMBERS: [&str; 3] = ["age", "education-num", "hours-per-week"];
const TARGET: &str = "salary";

/// A table in fastai's form: names as numbers (`Categorify`), gaps filled by the median with a column that says so
/// (`FillMissing`), numbers with mean 0 and deviation 1 (`Normalize`), all by what the training rows have.
#[derive(Debug)]
pub struct Table {
    /// The rows to train with: categories `i64` `[n, c]` and numbers `f32` `[n, k]`, and the class `i64` `[n]`.
    pub train: ((Tensor, Tensor), Tensor),
    /// Those to validate with, a fifth of all.
    pub valid: ((Tensor, Tensor), Tensor),
    /// How many values each column of categories has; 0 stands for a name that the training rows lack.
    pub cardinalities: Vec<i64>,
    /// The columns of numbers.
    pub numbers: i64,
    /// The names of the classes.
    pub classes: Vec<String>,
}

impl Table {
    /// Reads a CSV file with the columns of fastai's `adult_sample`; others are passed over.
    ///
    /// # Errors
    /// When the file cannot be read, lacks a column, or has text where a number is expected.
    pub fn read(file: &Path, seed: u64) -> anyhow::Result<Self> {
        let mut reader = csv::ReaderBuilder::new()
            .trim(csv::Trim::All)
            .from_path(file)
            .with_context(|| format!("cannot read {}", file.display()))?;
        let header = reader.headers()?.clone();
        let records = reader.records().collect::<Result<Vec<_>, _>>();
        let records = records.with_context(|| format!("cannot read {}", file.display()))?;
        let column = |name: &str| -> anyhow::Result<Vec<&str>> {
            let place = header.iter().position(|it| it == name).with_context(|| {
                let there = header.iter().collect::<Vec<_>>().join(", ");
                format!("{} has no column {name:?}; it has {there}", file.display())
            })?;
            Ok(records.iter().map(|record| &record[place]).collect())
        };
        ensure!(records.len() >= 5, "{} has {} rows; 5 are needed", file.display(), records.len());
        let Split { train, valid } = Split::random(records.len(), 0.2, seed)?;

        let mut categories = Vec::new();
        for name in CATEGORIES {
            categories.push(Categories::of(&column(name)?, &train));
        }
        let mut numbers = Vec::new();
        for name in NUMBERS {
            let parse = |(row, text): (usize, &str)| match text {
                "" | "?" => Ok(None),
                text => text.parse().map(Some).with_context(|| {
                    format!("{} has {text:?} as {name} in row {}", file.display(), row + 1)
                }),
            };
            let values: Vec<Option<f32>> =
                column(name)?.into_iter().enumerate().map(parse).collect::<Result<_, _>>()?;
            if train.iter().any(|row| values[*row].is_none()) {
                let gaps: Vec<&str> = values
                    .iter()
                    .map(|value| if value.is_some() { "there" } else { "missing" })
                    .collect();
                categories.push(Categories::of(&gaps, &train));
            }
            numbers.push(normalized(&values, &train));
        }
        let target = Categories::of(&column(TARGET)?, &train);
        ensure!(
            target.codes.iter().all(|code| *code > 0),
            "a class in {} is not among the training rows; take another seed",
            file.display()
        );

        let stacked = |columns: Vec<Tensor>| Tensor::f_stack(&columns, 1);
        let names = categories.iter().map(|it| Tensor::from_slice(&it.codes)).collect();
        let values = numbers.iter().map(|it| Tensor::from_slice(it)).collect();
        let (names, values) = (stacked(names)?, stacked(values)?);
        let classes = Tensor::from_slice(&target.codes) - 1;
        let part = |rows: &[usize]| -> anyhow::Result<_> {
            let rows: Vec<i64> = rows.iter().map(|row| *row as i64).collect();
            let rows = Tensor::from_slice(&rows);
            let of = |tensor: &Tensor| tensor.f_index_select(0, &rows);
            Ok(((of(&names)?, of(&values)?), of(&classes)?))
        };
        Ok(Self {
            train: part(&train)?,
            valid: part(&valid)?,
            cardinalities: categories.iter().map(|it| it.names.len() as i64 + 1).collect(),
            numbers: numbers.len() as i64,
            classes: target.names,
        })
    }
}

/// A column of names as numbers, from 1 on.
struct Categories {
    codes: Vec<i64>,
    names: Vec<String>,
}

impl Categories {
    fn of(values: &[&str], train: &[usize]) -> Self {
        let known: BTreeSet<&str> = train.iter().map(|row| values[*row]).collect();
        let codes: BTreeMap<&str, i64> = known.iter().copied().zip(1..).collect();
        Self {
            codes: values.iter().map(|it| codes.get(it).copied().unwrap_or(0)).collect(),
            names: known.into_iter().map(str::to_owned).collect(),
        }
    }
}

/// Fills gaps by the median of the training rows, and makes their mean 0 and their deviation 1.
fn normalized(values: &[Option<f32>], train: &[usize]) -> Vec<f32> {
    let mut there: Vec<f32> = train.iter().filter_map(|row| values[*row]).collect();
    there.sort_by(f32::total_cmp);
    let median = there.get(there.len() / 2).copied().unwrap_or(0.0);
    let filled: Vec<f32> = values.iter().map(|it| it.unwrap_or(median)).collect();
    let count = train.len() as f32;
    let mean = train.iter().map(|row| filled[*row]).sum::<f32>() / count;
    let variance = train.iter().map(|row| (filled[*row] - mean).powi(2)).sum::<f32>() / count;
    filled.iter().map(|value| (value - mean) / (variance.sqrt() + 1e-7)).collect()
}

/// fastai's `TabularModel`: an embedding for each column of categories beside the normalised numbers, then blocks of
/// a linear layer, ReLU and BatchNorm. From `(categories [n, c], numbers [n, k])` to logits `[n, classes]`.
#[derive(Debug)]
pub struct TabularModel {
    embeddings: Vec<Embedding>,
    norm: BatchNorm1d,
    blocks: Vec<(Linear, BatchNorm1d)>,
    last: Linear,
}

impl TabularModel {
    /// Registers all layers below the path, under fastai's names, for a table.
    #[must_use]
    pub fn new<'a>(path: impl Borrow<ParamPath<'a>>, table: &Table, hidden: &[i64]) -> Self {
        let path = path.borrow();
        let mut inputs = table.numbers;
        let mut embeddings = Vec::new();
        for (column, values) in table.cardinalities.iter().enumerate() {
            // fastai's `emb_sz_rule`.
            let width = ((1.6 * (*values as f64).powf(0.56)).round() as i64).min(600);
            embeddings.push(Embedding::new(path / "embeds" / column, *values, width));
            inputs += width;
        }
        let norm = BatchNorm1d::new(path / "bn_cont", table.numbers);
        let mut blocks = Vec::new();
        for (number, outputs) in hidden.iter().enumerate() {
            let block = path / "layers" / number;
            let without_bias = LinearOptions { bias: false };
            blocks.push((
                Linear::with_options(&block / 0, inputs, *outputs, without_bias),
                BatchNorm1d::new(&block / 2, *outputs),
            ));
            inputs = *outputs;
        }
        let last = path / "layers" / hidden.len() / 0;
        let last = Linear::new(last, inputs, table.classes.len() as i64);
        Self { embeddings, norm, blocks, last }
    }
}

impl Module<(&Tensor, &Tensor)> for TabularModel {
    type Output = Tensor;

    fn forward(&self, (categories, numbers): (&Tensor, &Tensor)) -> Result<Tensor> {
        let mut parts = Vec::with_capacity(self.embeddings.len() + 1);
        for (column, embedding) in self.embeddings.iter().enumerate() {
            parts.push(embedding.forward(&categories.f_select(1, column as i64)?)?);
        }
        parts.push(self.norm.forward(numbers)?);
        let mut values = Tensor::f_cat(&parts, 1)?;
        for (linear, norm) in &self.blocks {
            values = norm.forward(&linear.forward(&values)?.f_relu()?)?;
        }
        self.last.forward(&values)
    }
}
