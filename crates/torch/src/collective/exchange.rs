//! Collectives in which every rank sends different data to every other rank.

use tch::{Kind, Tensor};

use super::{copies, copy, dense, unshared};
use crate::bridge::{borrow, borrow_all, ffi};
use crate::check::describe_rows;
use crate::error::Error;
use crate::group::ProcessGroup;
use crate::work::Work;

impl ProcessGroup {
    /// Sends tensor `i` of the list to rank `i`, and returns a list whose tensor `j` came from rank `j`. Without
    /// `outputs`, tensor `j` arrives in the shape of this rank's own tensor `j`. With `outputs`, each of them is
    /// filled.
    ///
    /// # Errors
    /// [`crate::TorchError::Collective`], with [`crate::Fault::Invalid`] when a list is not one tensor per rank.
    ///
    /// ```
    /// # use brigade_torch::{Backend, ProcessGroup, Store};
    /// # let gloo = Backend::Gloo(Default::default());
    /// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
    /// use tch::Tensor;
    /// let mine = Tensor::from(group.rank() as f64);
    /// let parts: Vec<Tensor> = (0..group.size()).map(|_| mine.shallow_clone()).collect();
    /// let all = group.all_to_all(&parts, None)?;
    /// assert_eq!(all[group.rank()].double_value(&[]), group.rank() as f64);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[track_caller]
    pub fn all_to_all(
        &self,
        inputs: &[Tensor],
        outputs: Option<Vec<Tensor>>,
    ) -> Result<Vec<Tensor>, Error> {
        self.begin_all_to_all(inputs, outputs)?.wait()
    }

    /// Starts [`ProcessGroup::all_to_all`] without waiting for it, and returns a handle of the operation.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::all_to_all`].
    #[track_caller]
    pub fn start_all_to_all(
        &self,
        inputs: &[Tensor],
        outputs: Option<Vec<Tensor>>,
    ) -> Result<Work<Vec<Tensor>>, Error> {
        let outputs = outputs.map(|all| all.into_iter().map(unshared).collect()).transpose()?;
        self.begin_all_to_all(&copies(inputs)?, outputs)
    }

    #[track_caller]
    fn begin_all_to_all(
        &self,
        inputs: &[Tensor],
        outputs: Option<Vec<Tensor>>,
    ) -> Result<Work<Vec<Tensor>>, Error> {
        let inputs = self.one_per_rank("all_to_all", inputs)?;
        let outputs = match outputs {
            Some(outputs) => {
                self.one_per_rank("all_to_all", &outputs)?;
                outputs
            }
            None => inputs.iter().map(Tensor::f_empty_like).collect::<Result<_, _>>()?,
        };
        if inputs.iter().all(|input| self.backend().is_gloo(input.device())) {
            // c10d has no list form on Gloo: the flat one moves the same bytes.
            return self.all_to_all_by_bytes(&inputs, outputs);
        }
        let targets = outputs.iter().map(dense).collect::<Result<Vec<_>, _>>()?;
        let pending = self.collective(
            "all_to_all",
            || describe_rows(&inputs[0]),
            |group, limit| {
                ffi::all_to_all(group, &borrow_all(&targets), &borrow_all(&inputs), limit)
            },
        )?;
        Ok(pending.giving(outputs).reading(inputs).then(move |outputs| {
            for (output, target) in outputs.iter_mut().zip(targets) {
                if !output.is_contiguous() {
                    tch::no_grad(|| output.f_copy_(&target))?;
                }
            }
            Ok(())
        }))
    }

    /// Sends blocks of rows to all ranks and receives theirs. `send_rows[i]` rows go to rank `i`, `receive_rows[j]`
    /// come from rank `j`; empty slices mean equal parts. The result has the rows of all ranks, in the order of ranks.
    ///
    /// # Errors
    /// [`crate::TorchError::Collective`], with [`crate::Fault::Invalid`] when the counts are not one per rank or do
    /// not add up to the rows of `input`.
    #[track_caller]
    pub fn all_to_all_flat(
        &self,
        input: &Tensor,
        send_rows: &[i64],
        receive_rows: &[i64],
    ) -> Result<Tensor, Error> {
        self.begin_all_to_all_flat(input, send_rows, receive_rows)?.wait()
    }

    /// Starts [`ProcessGroup::all_to_all_flat`] without waiting for it, and returns a handle of the operation.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::all_to_all_flat`].
    #[track_caller]
    pub fn start_all_to_all_flat(
        &self,
        input: &Tensor,
        send_rows: &[i64],
        receive_rows: &[i64],
    ) -> Result<Work<Tensor>, Error> {
        self.begin_all_to_all_flat(&copy(input)?, send_rows, receive_rows)
    }

    #[track_caller]
    fn begin_all_to_all_flat(
        &self,
        input: &Tensor,
        send_rows: &[i64],
        receive_rows: &[i64],
    ) -> Result<Work<Tensor>, Error> {
        self.exchange("all_to_all_flat", input, send_rows, receive_rows)
    }

    #[track_caller]
    fn exchange(
        &self,
        operation: &'static str,
        input: &Tensor,
        send_rows: &[i64],
        receive_rows: &[i64],
    ) -> Result<Work<Tensor>, Error> {
        let input = dense(input)?;
        let mut shape = input.size();
        if send_rows.is_empty() && receive_rows.is_empty() {
            shape = self.rows_for_all(operation, &input)?;
        } else {
            let rows = *shape.first().ok_or_else(|| {
                self.invalid_argument(
                    operation,
                    "a tensor without dimensions has no rows to send".into(),
                )
            })?;
            if self.total(operation, send_rows)? != rows {
                return Err(self.invalid_argument(
                    operation,
                    format!("the input has {rows} rows, but {send_rows:?} are to be sent"),
                ));
            }
            shape[0] = self.total(operation, receive_rows)?;
        }
        let output = Tensor::f_empty(&shape, (input.f_kind()?, input.device()))?;
        let pending = self.collective(
            operation,
            || describe_rows(&input),
            |group, limit| {
                ffi::all_to_all_flat(
                    group,
                    borrow(&output),
                    borrow(&input),
                    receive_rows,
                    send_rows,
                    limit,
                )
            },
        )?;
        Ok(pending.giving(output).reading([input]))
    }

    /// The sum of one count per rank.
    fn total(&self, operation: &'static str, rows: &[i64]) -> Result<i64, Error> {
        let sum = rows.iter().try_fold(0i64, |sum, &n| sum.checked_add(n).filter(|_| n >= 0));
        sum.filter(|_| rows.len() == self.size()).ok_or_else(|| {
            let ranks = self.size();
            self.invalid_argument(
                operation,
                format!("expected {ranks} counts of rows, found {rows:?}"),
            )
        })
    }

    /// The list form of all_to_all as one flat exchange of bytes.
    #[track_caller]
    fn all_to_all_by_bytes(
        &self,
        inputs: &[Tensor],
        outputs: Vec<Tensor>,
    ) -> Result<Work<Vec<Tensor>>, Error> {
        let bytes = inputs.iter().map(as_bytes).collect::<Result<Vec<_>, _>>()?;
        let send: Vec<i64> = bytes.iter().map(|b| b.numel() as i64).collect();
        let receive: Vec<i64> = outputs
            .iter()
            .map(|output| Ok(output.numel() as i64 * output.f_kind()?.elt_size_in_bytes() as i64))
            .collect::<Result<_, Error>>()?;
        let work = self.exchange("all_to_all", &Tensor::f_cat(&bytes, 0)?, &send, &receive)?;
        Ok(work.into_filling(outputs, move |flat, outputs| {
            for (piece, output) in flat.f_split_with_sizes(&receive, 0)?.iter().zip(outputs) {
                // A copy: a piece may begin where its type must not.
                let piece = Tensor::f_cat(&[piece], 0)?.f_view_dtype(output.f_kind()?)?;
                tch::no_grad(|| output.f_copy_(&piece.f_view_as(output)?))?;
            }
            Ok(())
        }))
    }
}

fn as_bytes(tensor: &Tensor) -> Result<Tensor, Error> {
    Ok(tensor.f_reshape([-1])?.f_view_dtype(Kind::Uint8)?)
}
