//! Encoding of whole texts by a recurrent encoder, some tokens at a time.

use std::borrow::Borrow;

use brigade_nn::{Module, ParamPath};
use brigade_rank_env::text::counted;
use brigade_torch::{Error, Result, copy_to_device};
use tch::Tensor;

use super::{AwdLstm, AwdLstmOptions};

/// An [`AwdLstm`] that reads whole texts: from token ids `[n, time]` of int64 to outputs `[n, time, embedding]` and
/// their padding mask `[n, time]` (fastai's `SentenceEncoder`).
///
/// It begins with a state of zeros, and processes parts of `seq_len` tokens. Back-propagation through time is truncated
/// between parts. Rows without a token in a part, such as shorter texts whose padding comes first, are skipped in it,
/// and their state does not change. Only the outputs of the last parts that begin within `max_len` tokens of the end
/// are kept; earlier parts only update the state, without gradients.
///
/// Texts are padded in whole parts in front and with the rest at the end, as by fastai's loader, or in any way in front
/// or at the end. Rows may be in any order. fastai assumes that the texts are sorted by length and that a part that
/// begins with padding belongs to the shortest texts, so that it skips tokens of the shortest texts of a batch if the
/// padding at the end of a longer one fills the last part; here no token is skipped.
#[derive(Debug)]
pub struct SentenceEncoder {
    encoder: AwdLstm,
    seq_len: i64,
    max_len: Option<i64>,
}

impl SentenceEncoder {
    /// Registers the encoder below `module`.
    pub fn new<'a>(
        path: impl Borrow<ParamPath<'a>>,
        words: i64,
        options: &AwdLstmOptions,
        seq_len: i64,
        max_len: Option<i64>,
    ) -> Self {
        let path = path.borrow();
        if seq_len < 1 || max_len.is_some_and(|length| length < 1) {
            path.reject(format_args!(
                "parts of {}, of which {max_len:?} are kept: both have to be at least 1",
                counted(seq_len, "word")
            ));
        }
        Self { encoder: AwdLstm::new(path / "module", words, options), seq_len, max_len }
    }

    /// Returns the underlying encoder.
    #[must_use]
    pub fn encoder(&self) -> &AwdLstm {
        &self.encoder
    }

    /// Returns the length of the parts in tokens.
    #[must_use]
    pub fn seq_len(&self) -> i64 {
        self.seq_len
    }

    /// Returns the index of the first part whose outputs are kept.
    fn first_kept(&self, time: i64, parts: i64) -> Result<i64> {
        let Some(length) = self.max_len else { return Ok(0) };
        let first = (0..parts).find(|part| time - part * self.seq_len <= length);
        first.ok_or_else(|| {
            Error::invalid_argument(format!(
                "the last part of a batch of {} is {} long, and max_len {length} keeps none of it: choose one of \
                 seq_len, {}, at least",
                counted(time, "word"),
                time - (parts - 1) * self.seq_len,
                self.seq_len
            ))
        })
    }
}

impl Module<&Tensor> for SentenceEncoder {
    type Output = (Tensor, Tensor);

    fn forward(&self, words: &Tensor) -> Result<(Tensor, Tensor)> {
        let (rows, time) = words.size2()?;
        if rows == 0 || time == 0 {
            return Err(Error::invalid_argument(format!(
                "a batch of {} of {} has no outputs: leave it out",
                counted(rows, "text"),
                counted(time, "word")
            )));
        }
        let parts = (time + self.seq_len - 1) / self.seq_len;
        let first_kept = self.first_kept(time, parts)?;
        let layout = Layout::of(words, self.encoder.padding, self.seq_len, parts)?;
        layout.check(first_kept, self.encoder.padding)?;

        let order =
            layout.order().map(|order| copy_to_device(&Tensor::from_slice(&order), words.device()));
        let order = order.transpose()?;
        let sorted = match &order {
            Some(order) => words.f_index_select(0, order)?,
            None => words.shallow_clone(),
        };
        self.encoder.state().reset();
        let mut outputs = Vec::with_capacity((parts - first_kept) as usize);
        for (part, &real) in (0..parts).zip(&layout.real_rows()) {
            let start = part * self.seq_len;
            let length = self.seq_len.min(time - start);
            let here = sorted.f_narrow(0, 0, real)?.f_narrow(1, start, length)?;
            if part < first_kept {
                let _ = tch::no_grad(|| self.encoder.forward(&here))?;
                continue;
            }
            let output = self.encoder.forward(&here)?;
            outputs.push(if real < rows {
                output.f_constant_pad_nd([0, 0, 0, 0, 0, rows - real])?
            } else {
                output
            });
        }
        let mut whole = match outputs.len() {
            1 => outputs.remove(0),
            _ => Tensor::f_cat(&outputs, 1)?,
        };
        if let Some(order) = &order {
            whole = whole.f_index_select(0, &order.f_argsort(0, false)?)?;
        }
        let start = first_kept * self.seq_len;
        let padding = words.f_narrow(1, start, time - start)?.f_eq(self.encoder.padding)?;
        Ok((whole, padding))
    }
}

/// The parts of a text that contain tokens, for each row.
struct Layout {
    /// By row, then by part: `true` if the part has a word.
    has_words: Vec<Vec<bool>>,
}

impl Layout {
    fn of(words: &Tensor, padding: i64, seq_len: i64, parts: i64) -> Result<Self> {
        let (rows, time) = words.size2()?;
        let real = words.f_ne(padding)?.f_constant_pad_nd([0, parts * seq_len - time])?;
        let any = real.f_view([rows, parts, seq_len])?.f_any_dim(2, false)?.f_reshape([-1])?;
        // A single query: on a GPU each one synchronises.
        let any = Vec::<bool>::try_from(any)?;
        let parts = usize::try_from(parts).unwrap_or(1).max(1);
        Ok(Self { has_words: any.chunks(parts).map(<[bool]>::to_vec).collect() })
    }

    /// Refuses rows without a word in the kept parts: their mean is undefined.
    fn check(&self, first_kept: i64, padding: i64) -> Result<()> {
        let first_kept = first_kept.unsigned_abs() as usize;
        let empty = self.has_words.iter().position(|parts| !parts[first_kept..].contains(&true));
        match empty {
            Some(row) => Err(Error::invalid_argument(format!(
                "text {row} of the batch has no word other than padding ({padding}) in the parts that max_len \
                 keeps: leave out empty texts, or raise max_len"
            ))),
            None => Ok(()),
        }
    }

    /// Returns the rows in the order of their first parts with words, or `None` if they are in that order.
    fn order(&self) -> Option<Vec<i64>> {
        let begin = |row: usize| self.has_words[row].iter().position(|&real| real);
        let mut order: Vec<usize> = (0..self.has_words.len()).collect();
        if order.is_sorted_by_key(|&row| begin(row)) {
            return None;
        }
        order.sort_by_key(|&row| begin(row));
        Some(order.into_iter().map(|row| row as i64).collect())
    }

    /// Returns for each part the number of rows, in the order of their beginnings, up to the last one with a word.
    fn real_rows(&self) -> Vec<i64> {
        let order = self.order();
        let at = |place: usize| match &order {
            Some(order) => &self.has_words[order[place].unsigned_abs() as usize],
            None => &self.has_words[place],
        };
        let rows = self.has_words.len();
        let parts = self.has_words.first().map_or(0, Vec::len);
        (0..parts)
            .map(|part| {
                (0..rows).rfind(|&place| at(place)[part]).map_or(0, |place| place as i64 + 1)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(rows: &[&[i64]], seq_len: i64) -> Layout {
        let time = rows[0].len() as i64;
        let words = Tensor::from_slice(&rows.concat()).view([rows.len() as i64, time]);
        Layout::of(&words, 1, seq_len, (time + seq_len - 1) / seq_len).unwrap()
    }

    #[test]
    fn a_longer_text_with_padding_at_its_end_does_not_hide_a_shorter_one() {
        let found = layout(&[&[2, 2, 2, 2, 2], &[2, 2, 1, 1, 1], &[1, 1, 2, 2, 1]], 2);
        assert_eq!(found.order(), None);
        assert_eq!(found.real_rows(), [2, 3, 1]);
    }

    #[test]
    fn rows_are_read_in_the_order_in_which_they_begin() {
        let found = layout(&[&[1, 1, 2, 2], &[2, 2, 2, 2], &[1, 1, 2, 1]], 2);
        assert_eq!(found.order(), Some(vec![1, 0, 2]));
        assert_eq!(found.real_rows(), [1, 3]);
    }

    #[test]
    fn a_text_that_lies_before_what_is_kept_is_refused() {
        let found = layout(&[&[2, 2, 2, 2], &[2, 1, 1, 1]], 2);
        assert!(found.check(0, 1).is_ok());
        let error = found.check(1, 1).unwrap_err().to_string();
        assert!(
            error.starts_with("text 1 of the batch has no word other than padding (1)"),
            "{error}"
        );
    }
}
