//! Concatenated texts as one stream of tokens.

use std::ops::Range;

use brigade_data::DataError;
use brigade_torch::Result;

use crate::Documents;

/// Positions of texts in the stream.
#[derive(Debug)]
pub(crate) struct Stream {
    /// Indices of the texts in the order of the stream, or `None` for their own order.
    order: Option<Vec<usize>>,
    /// Number of tokens before each text of the stream.
    starts: Vec<usize>,
}

impl Stream {
    /// Concatenates the texts in the given order or in their own.
    pub(crate) fn new<D: Documents + ?Sized>(documents: &D, order: Option<Vec<usize>>) -> Self {
        let mut end = 0;
        let starts = (0..documents.len()).map(|place| {
            let document = order.as_ref().and_then(|order| order.get(place)).unwrap_or(&place);
            let start = end;
            end += documents.tokens(*document);
            start
        });
        let starts = starts.collect();
        Self { order, starts }
    }

    /// Appends the tokens of a range, which must be inside of the stream.
    pub(crate) fn read<D: Documents + ?Sized>(
        &self,
        documents: &D,
        range: Range<usize>,
        ids: &mut Vec<i64>,
    ) -> Result<()> {
        let (mut start, wanted) = (range.start, ids.len() + range.len());
        // Of several texts that begin at the same position, all but the last are empty.
        let mut place = self.starts.partition_point(|begin| *begin <= start).saturating_sub(1);
        while let Some(&begin) = self.starts.get(place).filter(|begin| **begin < range.end) {
            let document = match &self.order {
                Some(order) => order.get(place).copied().unwrap_or_default(),
                None => place,
            };
            let (from, to) = (start - begin, documents.tokens(document).min(range.end - begin));
            if from < to {
                documents.read(document, from..to, ids)?;
                start = begin + to;
            }
            place += 1;
        }
        if ids.len() == wanted {
            return Ok(());
        }
        Err(DataError::Unfit {
            message: format!(
                "the tokens {} to {} of the texts are not all there: the texts have changed since the data set was made",
                range.start, range.end
            ),
        }.into())
    }
}
