//! Broadcast of rank 0's state to all ranks.

use brigade_checkpoint::Value;
use brigade_torch::{Error, Result, TorchError, dtype_of, kind_of};
use tch::Tensor;

use super::Processes;

impl Processes {
    /// Broadcasts rank 0's tree of values and tensors to every rank, with its tensors on the process's device; the
    /// other ranks pass `None`. Every rank calls it.
    ///
    /// ```
    /// use brigade_checkpoint::Value;
    /// use brigade_train::Accelerator;
    /// use tch::Tensor;
    ///
    /// let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let processes = accelerator.processes();
    /// let read = processes.on_main_process(|| {
    ///     Ok::<_, brigade_torch::Error>(Value::dict([("mean", Value::Tensor(Tensor::from(0.5)))]))
    /// })?;
    /// let state = processes.broadcast_state(read)?;
    /// assert_eq!(state.get("mean").and_then(Value::as_tensor).unwrap().double_value(&[]), 0.5);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for a tensor of a type that files cannot have;
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone.
    pub fn broadcast_state(&self, state: Option<Value<Tensor>>) -> Result<Value<Tensor>> {
        self.broadcast_values(state, &mut |_, tensor| Ok(tensor))
    }

    /// Broadcasts values as [`Processes::broadcast_state`] does, with the result of `keep` for each tensor and its
    /// place in the tree. Only one whole tensor at a time is in memory.
    pub(crate) fn broadcast_values(
        &self,
        state: Option<Value<Tensor>>,
        keep: &mut dyn FnMut(&str, Tensor) -> Result<Tensor>,
    ) -> Result<Value<Tensor>> {
        let missing = || TorchError::Internal("rank 0 has no value to send".into());
        let Some(group) = self.group() else {
            return state.ok_or_else(missing)?.try_map(keep);
        };
        let mut own = Vec::new();
        // On rank 0: the tree with numbers in place of tensors, and their shapes and types.
        let described = self.on_main_process(|| {
            let mut infos: Vec<(Vec<i64>, _)> = Vec::new();
            let tree = state.ok_or_else(missing)?.try_map(&mut |place, tensor: Tensor| {
                let kind = tensor.f_kind()?;
                let dtype = dtype_of(kind).ok_or_else(|| {
                    Error::invalid_argument(format!("`{place}` cannot be sent: it is of {kind:?}"))
                })?;
                infos.push((tensor.size(), dtype));
                own.push(tensor);
                Ok::<_, Error>((own.len() - 1).to_string())
            })?;
            Ok::<_, Error>((tree.to_json().to_string(), infos))
        })?;
        let unknown = |reason: &str| {
            Error::from(TorchError::Internal(format!("rank 0's value cannot be read: {reason}")))
        };
        let (json, infos) =
            self.broadcast_object(described, 0)?.ok_or_else(|| unknown("it sent none"))?;
        let json = serde_json::from_str(&json).map_err(|error| unknown(&error.to_string()))?;
        let tree = Value::<String>::from_json(&json).map_err(|reason| unknown(&reason))?;
        let mut own: Vec<Option<Tensor>> = own.into_iter().map(Some).collect();
        tree.try_map(&mut |place, number| {
            // The order of the text may differ from that of the tree.
            let number: usize = number.parse().map_err(|_| unknown("a tensor has no number"))?;
            let (size, dtype) = infos.get(number).ok_or_else(|| unknown("a tensor is missing"))?;
            let kind = kind_of(*dtype).ok_or_else(|| unknown("a tensor has no type"))?;
            let mut sent = match own.get_mut(number).and_then(Option::take) {
                Some(tensor) => tensor.f_detach()?.f_to_device(self.device())?.f_contiguous()?,
                None => Tensor::f_zeros(size, (kind, self.device()))?,
            };
            group.broadcast(&mut sent, 0)?;
            keep(place, sent)
        })
    }
}
