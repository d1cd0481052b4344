//! A tensor as its shape and its values, or a corner of them with statistics.

use brigade_plot::escape_markup;
use brigade_torch::DeviceExt;
use tch::{Device, Kind, TchError, Tensor};

use super::numbers::reals;
use super::table::Table;
use super::{CellDisplay, Content};

/// Shows shape, kind and device with the values. For a dimension of more than 16 elements, the first and the last 8 are
/// shown; for more than four matrices, the first four. Such an output also has the minimum, mean and maximum of the
/// finite values, and the number of the others.
impl CellDisplay for Tensor {
    fn cell_content(&self) -> Content {
        if !self.defined() {
            return Content::new("Tensor, undefined");
        }
        let head = head(self);
        if self.is_sparse() || self.is_mkldnn() {
            return Content::new(format!("{head}; its layout is not shown"));
        }
        match Summary::of(&self.detach()) {
            Ok(summary) => summary.content(&head),
            Err(error) => {
                Content::new(format!("{head}; its values cannot be read: {}", reason(&error)))
            }
        }
    }
}

/// The first line of libtorch's message, which goes on with its own frames.
fn reason(error: &TchError) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

fn head(tensor: &Tensor) -> String {
    let device = tensor.device().label();
    let gradient = if tensor.requires_grad() { ", requires grad" } else { "" };
    format!("Tensor {:?}, {:?}, {device}{gradient}", tensor.size(), tensor.kind())
}

/// Elements shown at each end of a dimension that is too long.
const EDGE: i64 = 8;
/// Matrices shown of a tensor with more dimensions than two.
const MATRICES: i64 = 4;
const GAP: &str = "…";

#[derive(Debug, Default)]
struct Summary {
    /// The value of a tensor without dimensions.
    scalar: Option<String>,
    /// The place of each matrix, empty if there is one, and its values.
    matrices: Vec<(String, Table)>,
    /// Number of further matrices that are not shown.
    further: i64,
    statistics: Option<Table>,
}

impl Summary {
    fn of(tensor: &Tensor) -> Result<Self, TchError> {
        let size = tensor.size();
        let mut summary = Self::default();
        if tensor.numel() == 0 {
            return Ok(summary);
        }
        let (leading, matrix) = match size.as_slice() {
            [] => {
                summary.scalar = texts(&tensor.f_reshape([1])?)?.pop();
                return Ok(summary);
            }
            [_] => (&size[..0], tensor.f_unsqueeze(0)?),
            [leading @ .., _, _] => (leading, tensor.shallow_clone()),
        };
        let count: i64 = leading.iter().product();
        for index in 0..count.min(MATRICES) {
            let (mut rest, mut places, mut one) = (index, Vec::new(), matrix.shallow_clone());
            for (dimension, length) in leading.iter().enumerate().rev() {
                one = one.f_select(dimension as i64, rest % length)?;
                places.insert(0, (rest % length).to_string());
                rest /= length;
            }
            let place = match places.as_slice() {
                [] => String::new(),
                _ => format!("[{}, .., ..]", places.join(", ")),
            };
            summary.matrices.push((place, table(&one, size.len() > 1)?));
        }
        summary.further = (count - MATRICES).max(0);
        let is_cut = size.iter().rev().take(2).any(|length| *length > 2 * EDGE);
        if is_cut || summary.further > 0 {
            summary.statistics = statistics(tensor)?;
        }
        Ok(summary)
    }

    fn content(&self, head: &str) -> Content {
        let head = match (&self.scalar, self.matrices.is_empty()) {
            (Some(value), _) => format!("{head}: {value}"),
            (None, true) => format!("{head}: no values"),
            (None, false) => head.to_owned(),
        };
        let (mut plain, mut html) =
            (format!("{head}\n"), format!("<p><code>{}</code></p>\n", escape_markup(&head)));
        for (place, table) in &self.matrices {
            if !place.is_empty() {
                plain += &format!("{place}\n");
                html += &format!("<p><code>{}</code></p>\n", escape_markup(place));
            }
            plain += &table.text();
            html += &table.html();
        }
        if self.further > 0 {
            let line = format!("{GAP} and {} more of this shape", self.further);
            plain += &format!("{line}\n");
            html += &format!("<p>{line}</p>\n");
        }
        if let Some(table) = &self.statistics {
            plain += &format!("\n{}", table.text());
            html += &table.html();
        }
        Content::new(plain).html(html)
    }
}

/// The matrix `[rows, columns]` with the numbers of both; of a vector without the row's.
fn table(matrix: &Tensor, with_rows: bool) -> Result<Table, TchError> {
    let (mut part, mut names) = (matrix.shallow_clone(), Vec::new());
    for dimension in 0..2 {
        let kept = kept(matrix.size()[dimension as usize]);
        let indices: Vec<i64> = kept.iter().copied().flatten().collect();
        let indices = Tensor::from_slice(&indices).f_to_device(matrix.device())?;
        part = part.f_index_select(dimension, &indices)?;
        names.push(kept);
    }
    let width = part.size()[1] as usize;
    let mut texts = texts(&part.f_reshape([-1])?)?.into_iter();
    let named = |place: &Option<i64>| place.map_or_else(|| GAP.to_owned(), |it| it.to_string());
    let mut rows = Vec::new();
    for row in &names[0] {
        let mut values = match row {
            Some(_) => texts.by_ref().take(width).collect(),
            None => vec![GAP.to_owned(); width],
        };
        if let Some(gap) = names[1].iter().position(Option::is_none) {
            values.insert(gap, GAP.to_owned());
        }
        if with_rows {
            values.insert(0, named(row));
        }
        rows.push(values);
    }
    let mut header: Vec<String> = names[1].iter().map(named).collect();
    if with_rows {
        header.insert(0, String::new());
        return Ok(Table::new(header, rows).named_rows());
    }
    Ok(Table::new(header, rows))
}

/// Returns the shown indices of a dimension. `None` stands for the gap.
fn kept(length: i64) -> Vec<Option<i64>> {
    if length <= 2 * EDGE {
        return (0..length).map(Some).collect();
    }
    let ends = (0..EDGE).map(Some).chain([None]);
    ends.chain((length - EDGE..length).map(Some)).collect()
}

/// The values of a tensor `[n]`, few of them, as texts.
fn texts(values: &Tensor) -> Result<Vec<String>, TchError> {
    let values = values.f_to_device(Device::Cpu)?;
    let reals_of = |values: &Tensor| -> Result<Vec<String>, TchError> {
        Ok(reals(&Vec::<f64>::try_from(&values.f_to_kind(Kind::Double)?.f_contiguous()?)?))
    };
    let integers = || -> Result<Vec<i64>, TchError> {
        Vec::<i64>::try_from(&values.f_to_kind(Kind::Int64)?.f_contiguous()?)
    };
    match values.kind() {
        Kind::Bool => Ok(integers()?.iter().map(|it| (*it != 0).to_string()).collect()),
        kind if is_integer(kind) => Ok(integers()?.iter().map(i64::to_string).collect()),
        kind if is_complex(kind) => {
            let (real, imaginary) = (reals_of(&values.f_real()?)?, reals_of(&values.f_imag()?)?);
            let sign = |text: &str| if text.starts_with('-') { "" } else { "+" };
            let pairs = real.iter().zip(&imaginary);
            Ok(pairs.map(|(a, b)| format!("{a}{}{b}i", sign(b))).collect())
        }
        Kind::QInt8 | Kind::QUInt8 | Kind::QInt32 => reals_of(&values.f_dequantize()?),
        _ => reals_of(&values),
    }
}

fn is_integer(kind: Kind) -> bool {
    matches!(kind, Kind::Uint8 | Kind::Int8 | Kind::Int16 | Kind::Int | Kind::Int64)
}

fn is_complex(kind: Kind) -> bool {
    matches!(kind, Kind::ComplexHalf | Kind::ComplexFloat | Kind::ComplexDouble)
}

/// Least, mean and greatest of all finite values, and how many are NaN and infinite; of numbers that have an order.
fn statistics(tensor: &Tensor) -> Result<Option<Table>, TchError> {
    let kind = tensor.kind();
    let names = |names: &[&str]| names.iter().map(|it| (*it).to_owned()).collect();
    let mean = |values: &Tensor| values.f_mean(Kind::Double)?.f_double_value(&[]);
    if kind == Kind::Bool {
        let set = tensor.f_sum(Kind::Int64)?.f_int64_value(&[])?;
        let row = vec![set.to_string(), (tensor.numel() as i64 - set).to_string()];
        return Ok(Some(Table::new(names(&["true", "false"]), vec![row])));
    }
    if is_integer(kind) {
        let [least, greatest] = [tensor.f_min()?, tensor.f_max()?].map(|it| it.f_int64_value(&[]));
        let mean = reals(&[mean(tensor)?]).concat();
        let row = vec![least?.to_string(), mean, greatest?.to_string()];
        return Ok(Some(Table::new(names(&["min", "mean", "max"]), vec![row])));
    }
    if !matches!(kind, Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double) {
        return Ok(None);
    }
    let count = |mask: &Tensor| mask.f_sum(Kind::Int64)?.f_int64_value(&[]);
    let is_finite = tensor.f_isfinite()?;
    let finite = count(&is_finite)?;
    let all = tensor.numel() as i64;
    let nan = if finite == all { 0 } else { count(&tensor.f_isnan()?)? };
    let values =
        if finite == all { tensor.shallow_clone() } else { tensor.f_masked_select(&is_finite)? };
    let mut row = match finite {
        0 => vec!["none".to_owned(); 3],
        _ => reals(&[
            values.f_min()?.f_double_value(&[])?,
            mean(&values)?,
            values.f_max()?.f_double_value(&[])?,
        ]),
    };
    row.extend([nan.to_string(), (all - finite - nan).to_string()]);
    Ok(Some(Table::new(names(&["min", "mean", "max", "NaN", "infinite"]), vec![row])))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(tensor: &Tensor) -> String {
        tensor.cell_content().plain().to_owned()
    }

    #[test]
    fn small_tensors_show_all_values() {
        let matrix = Tensor::from_slice(&[1.5f32, -2.0, f32::NAN, 4.0]).view([2, 2]);
        let expected = "Tensor [2, 2], Float, cpu\n\
                        \x20       0        1\n\
                        0  1.5000  -2.0000\n\
                        1     NaN   4.0000\n";
        assert_eq!(plain(&matrix), expected);
        let html = matrix.cell_content().as_html();
        assert!(html.contains("<tr><th>1</th><td>NaN</td><td>4.0000</td></tr>"), "{html}");
        assert_eq!(plain(&Tensor::from(3i64)), "Tensor [], Int64, cpu: 3\n");
        let mask = Tensor::from_slice(&[true, false]);
        assert_eq!(plain(&mask), "Tensor [2], Bool, cpu\n   0      1\ntrue  false\n");
        let empty = Tensor::zeros([0, 3], (Kind::Half, Device::Cpu)).set_requires_grad(true);
        assert_eq!(plain(&empty), "Tensor [0, 3], Half, cpu, requires grad: no values\n");
        assert_eq!(plain(&Tensor::new()), "Tensor, undefined");
    }

    #[test]
    fn every_kind_shows_its_values() {
        for kind in [Kind::Uint8, Kind::Int8, Kind::Int16, Kind::Int, Kind::Int64] {
            let text = plain(&Tensor::from_slice(&[1i64, 2]).to_kind(kind));
            assert!(text.ends_with("\n0  1\n1  2\n"), "{kind:?}: {text}");
        }
        for kind in [Kind::Half, Kind::BFloat16, Kind::Float, Kind::Double] {
            let text = plain(&Tensor::from_slice(&[1i64, 2]).to_kind(kind));
            assert!(text.ends_with("\n1.0  2.0\n"), "{kind:?}: {text}");
        }
        let [real, imaginary] = [[1.0f64, 2.0], [0.5, -0.5]].map(|it| Tensor::from_slice(&it));
        let text = plain(&Tensor::complex(&real, &imaginary));
        assert!(text.ends_with("\n1.0+0.5000i  2.0-0.5000i\n"), "{text}");
        let largest = plain(&Tensor::from_slice(&[i64::MAX]));
        assert!(largest.contains("9223372036854775807"), "{largest}");
    }

    #[test]
    fn large_tensors_show_a_corner_and_statistics() {
        let tensor = Tensor::arange(2000, (Kind::Float, Device::Cpu)).view([100, 20]);
        let _ = tensor.get(3).get(10).fill_(f64::NAN);
        let _ = tensor.get(4).get(10).fill_(f64::INFINITY);
        let text = plain(&tensor);
        let lines: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1].len(), 17, "{text}");
        assert_eq!(lines[1][8], "…", "{text}");
        assert_eq!(lines[2][..3], ["0", "0.0", "1.0"], "{text}");
        assert_eq!(lines[10][0], "…", "{text}");
        assert_eq!(lines[18][..2], ["99", "1980.0"], "{text}");
        assert_eq!(lines[18].last(), Some(&"1999.0"), "{text}");
        let mean = format!("{:.4}", (1999.0 * 1000.0 - 70.0 - 90.0) / 1998.0);
        assert_eq!(lines[20], ["min", "mean", "max", "NaN", "infinite"], "{text}");
        assert_eq!(lines[21], ["0.0000", &mean, "1999.0000", "1", "1"], "{text}");

        let nothing = Tensor::full([40], f64::NAN, (Kind::Half, Device::Cpu));
        let nothing = plain(&nothing);
        assert!(nothing.ends_with("\nnone  none  none   40         0\n"), "{nothing}");
        let bytes = plain(&Tensor::arange(40, (Kind::Uint8, Device::Cpu)));
        assert!(bytes.ends_with("\nmin     mean  max\n  0  19.5000   39\n"), "{bytes}");
        let mask = plain(&Tensor::arange(40, (Kind::Int64, Device::Cpu)).gt(9));
        assert!(mask.ends_with("\ntrue  false\n  30     10\n"), "{mask}");
    }

    #[test]
    fn matrices_of_more_dimensions_have_their_places() {
        let tensor = Tensor::arange(24, (Kind::Int64, Device::Cpu)).view([3, 2, 2, 2]);
        // Not contiguous, and the values stay at their places.
        let text = plain(&tensor.transpose(2, 3));
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        assert_eq!(lines[5..9], ["[0, 1, .., ..]", "0  1", "0  4  6", "1  5  7"], "{text}");
        assert!(lines.contains(&"… and 2 more of this shape"), "{text}");
        assert_eq!(lines.last(), Some(&"0  11.5000   23"), "{text}");
    }
}
