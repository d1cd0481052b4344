//! Messages between stages.

use std::collections::{HashMap, VecDeque};

use brigade_sharding::pipeline::Action;
use brigade_torch::{Error, ProcessGroup, Result, Work};
use parking_lot::Mutex;
use tch::{Device, Kind, Tensor};

use super::failure;

/// Shapes and types of a micro-batch's tensors, with the type of the model's parameters.
pub(super) type MicroForm = (Vec<(Vec<i64>, Kind)>, Kind);

/// Shape and type of an activation.
type Form = (Vec<i64>, Kind);

/// Shapes and types of the activations of stages. Each is sent once per form of micro-batch, and both ends store it.
#[derive(Debug, Default)]
pub(super) struct Forms(Mutex<HashMap<(usize, MicroForm), Form>>);

/// Number of values in a header: the type, the number of dimensions, and their sizes.
const HEADER: usize = 2 + MOST_DIMENSIONS;
const MOST_DIMENSIONS: usize = 8;

/// Maximum number of pending sends to one rank. It limits how far a rank runs ahead of its peers, so that the tensors
/// being sent do not fill its memory.
const MOST_SENDS: usize = 2;

/// Types that can be sent. The index is the number that is sent.
const KINDS: [Kind; 10] = [
    Kind::Float,
    Kind::Double,
    Kind::Half,
    Kind::BFloat16,
    Kind::Int64,
    Kind::Int,
    Kind::Int16,
    Kind::Int8,
    Kind::Uint8,
    Kind::Bool,
];

const TAG_HEADER: u16 = 0;
const TAG_ACTIVATION: u16 = 1;
const TAG_GRADIENT: u16 = 2;
const TAG_SHARED: u16 = 3;

/// The messages of a rank in one step.
pub(super) struct Wire<'a> {
    group: &'a ProcessGroup,
    forms: &'a Forms,
    device: Device,
    sends: HashMap<usize, VecDeque<Work<Tensor>>>,
    receives: HashMap<Action, Work<Tensor>>,
}

impl<'a> Wire<'a> {
    pub(super) fn new(group: &'a ProcessGroup, forms: &'a Forms, device: Device) -> Self {
        Self { group, forms, device, sends: HashMap::new(), receives: HashMap::new() }
    }

    /// Sends a stage's output, preceded by its shape and type unless the peer has them.
    pub(super) fn send_activation(
        &mut self,
        stage: usize,
        micro: &MicroForm,
        output: &Tensor,
        to: usize,
    ) -> Result<()> {
        let form = (output.size(), output.f_kind()?);
        let key = (stage, micro.clone());
        let known = self.forms.0.lock().get(&key).cloned();
        match known {
            Some(known) if known == form => {}
            Some((shape, kind)) => {
                return Err(Error::invalid_argument(format!(
                    "the stage's output is {:?} {:?}, and was {kind:?} {shape:?} for micro-batches of the same shapes before: \
                     make shapes depend on the shapes of the batch alone",
                    form.1, form.0
                )));
            }
            None => {
                self.push(&header(&form)?.f_to_device(self.device)?, to, TAG_HEADER)?;
                self.forms.0.lock().insert(key, form);
            }
        }
        self.push(output, to, TAG_ACTIVATION)
    }

    pub(super) fn send_gradient(&mut self, gradient: &Tensor, to: usize) -> Result<()> {
        self.push(gradient, to, TAG_GRADIENT)
    }

    /// Starts to receive the output of the stage before that of `action`.
    pub(super) fn receive_activation(
        &mut self,
        action: Action,
        micro: &MicroForm,
        from: usize,
    ) -> Result<()> {
        let key = (action.stage.saturating_sub(1), micro.clone());
        let known = self.forms.0.lock().get(&key).cloned();
        let (shape, kind) = match known {
            Some(form) => form,
            None => {
                let mut header = Tensor::f_zeros([HEADER as i64], (Kind::Int64, self.device))?;
                self.group.recv(&mut header, from, TAG_HEADER)?;
                let form = form_in(&header)?;
                self.forms.0.lock().insert(key, form.clone());
                form
            }
        };
        self.begin(action, &shape, kind, from, TAG_ACTIVATION)
    }

    /// Starts to receive the gradient of a stage's output.
    pub(super) fn receive_gradient(
        &mut self,
        action: Action,
        output: &Tensor,
        from: usize,
    ) -> Result<()> {
        self.begin(action, &output.size(), output.f_kind()?, from, TAG_GRADIENT)
    }

    /// Waits for the tensor that an action has started to receive. `None` if it has started none.
    pub(super) fn received(&mut self, action: Action) -> Result<Option<Tensor>> {
        self.receives.remove(&action).map(Work::wait).transpose()
    }

    /// Exchanges a tensor of this rank for those of other ranks, and returns them in their order.
    pub(super) fn exchange(&mut self, own: &Tensor, ranks: &[usize]) -> Result<Vec<Tensor>> {
        // Offloaded shards are in the host's memory.
        let own = &own.f_to_device(self.device)?;
        let peers = || ranks.iter().copied().filter(|&rank| rank != self.group.rank());
        let sends = peers().map(|rank| self.group.start_send(own, rank, TAG_SHARED));
        let sends = sends.collect::<Result<Vec<_>>>()?;
        let receive = |rank: usize| {
            let into = own.f_empty_like()?;
            Ok((rank, self.group.start_recv(into, rank, TAG_SHARED)?))
        };
        let receives = peers().map(receive).collect::<Result<Vec<_>>>()?;
        let mut all = HashMap::new();
        let failed = |peer: usize, error: Error| {
            let what = format!("the gradients of shared parameters, with rank {peer}");
            failure(self.group.rank(), what, error)
        };
        for (rank, receive) in receives {
            all.insert(rank, receive.wait().map_err(|error| failed(rank, error))?);
        }
        for (rank, send) in peers().zip(sends) {
            let _sent = send.wait().map_err(|error| failed(rank, error))?;
        }
        let in_order =
            ranks.iter().map(|rank| all.remove(rank).unwrap_or_else(|| own.shallow_clone()));
        Ok(in_order.collect())
    }

    /// Waits for all pending sends.
    pub(super) fn finish(self) -> Result<()> {
        for (to, send) in
            self.sends.into_iter().flat_map(|(to, all)| all.into_iter().map(move |it| (to, it)))
        {
            let what = || format!("the end of the step, to rank {to}");
            let _sent = send.wait().map_err(|error| failure(self.group.rank(), what(), error))?;
        }
        Ok(())
    }

    fn push(&mut self, tensor: &Tensor, to: usize, tag: u16) -> Result<()> {
        let sends = self.sends.entry(to).or_default();
        while sends.len() >= MOST_SENDS {
            let Some(oldest) = sends.pop_front() else { break };
            let _sent = oldest.wait()?;
        }
        sends.push_back(self.group.start_send(&tensor.f_contiguous()?, to, tag)?);
        Ok(())
    }

    fn begin(
        &mut self,
        action: Action,
        shape: &[i64],
        kind: Kind,
        from: usize,
        tag: u16,
    ) -> Result<()> {
        let into = Tensor::f_empty(shape, (kind, self.device))?;
        self.receives.insert(action, self.group.start_recv(into, from, tag)?);
        Ok(())
    }
}

/// Returns the number that is sent for a type.
pub(super) fn number_of(kind: Kind) -> Result<i64> {
    let place = KINDS.iter().position(|known| *known == kind);
    let place = place.ok_or_else(|| {
        Error::invalid_argument(format!("a tensor of {kind:?} cannot go from rank to rank"))
    })?;
    Ok(place as i64)
}

/// Returns the type for a number that was received.
pub(super) fn kind_of(number: i64) -> Option<Kind> {
    usize::try_from(number).ok().and_then(|place| KINDS.get(place)).copied()
}

fn header((shape, kind): &Form) -> Result<Tensor> {
    if shape.len() > MOST_DIMENSIONS {
        return Err(Error::invalid_argument(format!(
            "the stage's output has {} dimensions: at most {MOST_DIMENSIONS} can be sent",
            shape.len()
        )));
    }
    if !matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16) {
        return Err(Error::invalid_argument(format!(
            "the stage's output is {kind:?}, which has no gradient: cut the model elsewhere"
        )));
    }
    let mut numbers = vec![number_of(*kind)?, shape.len() as i64];
    numbers.extend(shape);
    numbers.resize(HEADER, 0);
    Ok(Tensor::f_from_slice(&numbers)?)
}

fn form_in(header: &Tensor) -> Result<Form> {
    let numbers: Vec<i64> = Vec::try_from(header)?;
    let strange = || {
        Error::invalid_argument(format!(
            "the stage before sent activations in an unknown format: {numbers:?}; run the same version of the \
             program on all ranks"
        ))
    };
    let [kind, dimensions, sizes @ ..] = numbers.as_slice() else { return Err(strange()) };
    let kind = kind_of(*kind);
    let shape = usize::try_from(*dimensions).ok().and_then(|dimensions| sizes.get(..dimensions));
    match (kind, shape) {
        (Some(kind), Some(shape)) if shape.iter().all(|&size| size >= 0) => {
            Ok((shape.to_vec(), kind))
        }
        _ => Err(strange()),
    }
}
