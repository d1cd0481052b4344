//! Messages between stages.

use std::collections::{HashMap, VecDeque};

use brigade_sharding::pipeline::Action;
use brigade_torch::{Error, ProcessGroup, Result, Work};
use parking_lot::Mutex;
use tch::{Device, Kind, Tensor};

use super::failure;

/// Shapes and types of a micro-batch's tensors, with the type of the model's parameters.
pub(super) type MicroForm = (Vec<(Vec<i64>, Kind)>, Kind);

/// Shapes and types of the tensors that a stage passes on: hidden states, and sums that some models carry along.
type Form = Vec<(Vec<i64>, Kind)>;

/// Shapes and types of the activations of stages. Each is sent once per form of micro-batch, and both ends store it.
#[derive(Debug, Default)]
pub(super) struct Forms(Mutex<HashMap<(usize, MicroForm), Form>>);

/// Number of values in a header: the number of tensors, and for each the type, the number of dimensions, and their sizes.
const HEADER: usize = 1 + MOST_TENSORS * TENSOR;
const TENSOR: usize = 2 + MOST_DIMENSIONS;
const MOST_TENSORS: usize = 4;
const MOST_DIMENSIONS: usize = 8;

/// Maximum number of pending messages to one rank. It limits how far a rank runs ahead of its peers, so that the tensors
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
    /// Messages to each rank, each of one tensor or several.
    sends: HashMap<usize, VecDeque<Vec<Work<Tensor>>>>,
    receives: HashMap<Action, Vec<Work<Tensor>>>,
}

impl<'a> Wire<'a> {
    pub(super) fn new(group: &'a ProcessGroup, forms: &'a Forms, device: Device) -> Self {
        Self { group, forms, device, sends: HashMap::new(), receives: HashMap::new() }
    }

    /// Sends a stage's outputs, preceded by their shapes and types unless the peer has them.
    pub(super) fn send_activation(
        &mut self,
        stage: usize,
        micro: &MicroForm,
        outputs: &[Tensor],
        to: usize,
    ) -> Result<()> {
        let form = form_of_outputs(outputs)?;
        let key = (stage, micro.clone());
        let known = self.forms.0.lock().get(&key).cloned();
        match known {
            Some(known) if known == form => {}
            Some(known) => {
                return Err(Error::invalid_argument(format!(
                    "the stage's output is {}, and was {} for micro-batches of the same shapes before: make shapes \
                     depend on the shapes of the batch alone",
                    words(&form),
                    words(&known)
                )));
            }
            None => {
                self.push(&[header(&form)?.f_to_device(self.device)?], to, TAG_HEADER)?;
                self.forms.0.lock().insert(key, form);
            }
        }
        self.push(outputs, to, TAG_ACTIVATION)
    }

    pub(super) fn send_gradients(&mut self, gradients: &[Tensor], to: usize) -> Result<()> {
        self.push(gradients, to, TAG_GRADIENT)
    }

    /// Starts to receive the outputs of the stage before that of `action`.
    pub(super) fn receive_activation(
        &mut self,
        action: Action,
        micro: &MicroForm,
        from: usize,
    ) -> Result<()> {
        let key = (action.stage.saturating_sub(1), micro.clone());
        let known = self.forms.0.lock().get(&key).cloned();
        let form = match known {
            Some(form) => form,
            None => {
                let mut header = Tensor::f_zeros([HEADER as i64], (Kind::Int64, self.device))?;
                self.group.recv(&mut header, from, TAG_HEADER)?;
                let form = form_in(&header)?;
                self.forms.0.lock().insert(key, form.clone());
                form
            }
        };
        self.begin(action, &form, from, TAG_ACTIVATION)
    }

    /// Starts to receive the gradients of a stage's outputs.
    pub(super) fn receive_gradients(
        &mut self,
        action: Action,
        outputs: &[Tensor],
        from: usize,
    ) -> Result<()> {
        self.begin(action, &form_of_outputs(outputs)?, from, TAG_GRADIENT)
    }

    /// Waits for the tensors that an action has started to receive. `None` if it has started none.
    pub(super) fn received(&mut self, action: Action) -> Result<Option<Vec<Tensor>>> {
        let works = self.receives.remove(&action);
        works.map(|works| works.into_iter().map(Work::wait).collect()).transpose()
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
        for (to, send) in self
            .sends
            .into_iter()
            .flat_map(|(to, all)| all.into_iter().flatten().map(move |tensor| (to, tensor)))
        {
            let what = || format!("the end of the step, to rank {to}");
            let _sent = send.wait().map_err(|error| failure(self.group.rank(), what(), error))?;
        }
        Ok(())
    }

    fn push(&mut self, tensors: &[Tensor], to: usize, tag: u16) -> Result<()> {
        let sends = self.sends.entry(to).or_default();
        while sends.len() >= MOST_SENDS {
            for oldest in sends.pop_front().into_iter().flatten() {
                let _sent = oldest.wait()?;
            }
        }
        let start = |tensor: &Tensor| self.group.start_send(&tensor.f_contiguous()?, to, tag);
        sends.push_back(tensors.iter().map(start).collect::<Result<_>>()?);
        Ok(())
    }

    fn begin(&mut self, action: Action, form: &Form, from: usize, tag: u16) -> Result<()> {
        let start = |(shape, kind): &(Vec<i64>, Kind)| {
            let into = Tensor::f_empty(shape, (*kind, self.device))?;
            self.group.start_recv(into, from, tag)
        };
        self.receives.insert(action, form.iter().map(start).collect::<Result<_>>()?);
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

fn form_of_outputs(tensors: &[Tensor]) -> Result<Form> {
    tensors.iter().map(|tensor| Ok((tensor.size(), tensor.f_kind()?))).collect()
}

fn header(form: &Form) -> Result<Tensor> {
    if form.len() > MOST_TENSORS {
        return Err(Error::invalid_argument(format!(
            "the stage passes on {} tensors: at most {MOST_TENSORS} can be sent",
            form.len()
        )));
    }
    let mut numbers = vec![form.len() as i64];
    for (place, (shape, kind)) in form.iter().enumerate() {
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
        numbers.extend([number_of(*kind)?, shape.len() as i64]);
        numbers.extend(shape);
        numbers.resize(1 + (place + 1) * TENSOR, 0);
    }
    numbers.resize(HEADER, 0);
    Ok(Tensor::f_from_slice(&numbers)?)
}

fn form_in(header: &Tensor) -> Result<Form> {
    let numbers: Vec<i64> = Vec::try_from(header)?;
    let parsed = || {
        let (count, tensors) = numbers.split_first()?;
        let count = usize::try_from(*count).ok().filter(|count| *count <= MOST_TENSORS)?;
        tensors.chunks_exact(TENSOR).take(count).map(tensor_form).collect::<Option<Form>>()
    };
    parsed().ok_or_else(|| {
        Error::invalid_argument(format!(
            "the stage before sent activations in an unknown format: {numbers:?}; run the same version of the \
             program on all ranks"
        ))
    })
}

fn tensor_form(numbers: &[i64]) -> Option<(Vec<i64>, Kind)> {
    let [kind, dimensions, sizes @ ..] = numbers else { return None };
    let shape = sizes.get(..usize::try_from(*dimensions).ok()?)?;
    Some((shape.iter().all(|&size| size >= 0).then(|| shape.to_vec())?, kind_of(*kind)?))
}

/// Formats shapes and types: `Float [2, 6, 8]`, `Float [2, 6, 8] and Float [13]`.
fn words(form: &Form) -> String {
    let tensors: Vec<String> =
        form.iter().map(|(shape, kind)| format!("{kind:?} {shape:?}")).collect();
    tensors.join(" and ")
}
