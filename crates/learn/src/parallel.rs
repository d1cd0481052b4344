//! Replicas of a model on several devices of one process, as `torch.nn.DataParallel`.

use std::fmt;
use std::marker::PhantomData;

use brigade_nn::{Model, Module};
use brigade_torch::{Error, NamedTensor, Result, Streams, grad_enabled, gradient};
use brigade_train::AutocastOptions;
use tch::{Device, Tensor};

use crate::loaders::ModelInput;

/// Copies of a model on other devices.
pub(crate) trait Replicas {
    fn len(&self) -> usize;
    /// Copies the model's values to the replicas, and computes their outputs for these inputs, one list per replica,
    /// while `own` runs in this thread.
    fn forward(
        &mut self,
        values: &[NamedTensor],
        training: bool,
        autocast: AutocastOptions,
        inputs: Vec<Vec<Tensor>>,
        own: &mut dyn FnMut() -> Result<Tensor>,
    ) -> Result<Vec<Tensor>>;
    /// Adds the replicas' gradients to those of the model, and clears the replicas'.
    fn reduce(&mut self, parameters: &[NamedTensor]) -> Result<()>;
}

/// Makes replicas from models of the same type. `None` without a model.
pub(crate) fn replicas<M, X>(models: Vec<Model<M>>) -> Option<Box<dyn Replicas>>
where
    M: for<'a> Module<X::Ref<'a>, Output = Tensor> + Send + 'static,
    X: ModelInput,
{
    (!models.is_empty())
        .then(|| -> Box<dyn Replicas> { Box::new(Set::<M, X> { models, input: PhantomData }) })
}

struct Set<M, X> {
    models: Vec<Model<M>>,
    input: PhantomData<fn(X)>,
}

impl<M, X> Replicas for Set<M, X>
where
    M: for<'a> Module<X::Ref<'a>, Output = Tensor> + Send + 'static,
    X: ModelInput,
{
    fn len(&self) -> usize {
        self.models.len()
    }

    fn forward(
        &mut self,
        values: &[NamedTensor],
        training: bool,
        autocast: AutocastOptions,
        inputs: Vec<Vec<Tensor>>,
        own: &mut dyn FnMut() -> Result<Tensor>,
    ) -> Result<Vec<Tensor>> {
        let with_grad = grad_enabled();
        for model in &mut self.models {
            let here = model.parameters().into_iter().chain(model.buffers());
            for (here, value) in here.zip(values) {
                here.tensor.f_detach()?.f_copy_(&value.tensor.f_detach()?)?;
            }
            if training {
                model.train();
            } else {
                model.eval();
            }
        }
        // Inputs were made on this thread's streams, and outputs are used on them.
        let devices: Vec<Device> = self.models.iter().map(Model::device).collect();
        let own_device = inputs.iter().flatten().map(Tensor::device);
        let streams = Streams::current(&devices.into_iter().chain(own_device).collect::<Vec<_>>())?;
        std::thread::scope(|scope| {
            let threads: Vec<_> = self
                .models
                .iter_mut()
                .zip(inputs)
                .map(|(model, inputs)| {
                    let streams = &streams;
                    scope.spawn(move || -> Result<Tensor> {
                        streams.enter()?;
                        let device = model.device();
                        let inputs: Vec<Tensor> = inputs
                            .iter()
                            .map(|input| input.f_to_device(device))
                            .collect::<std::result::Result<_, _>>()?;
                        let input = X::borrowed(&inputs).ok_or_else(other_inputs)?;
                        // Gradient recording is a setting of each thread.
                        let forward = || {
                            if with_grad {
                                model.forward(input)
                            } else {
                                tch::no_grad(|| model.forward(input))
                            }
                        };
                        autocast.run(device, forward)?
                    })
                })
                .collect();
            let first = own();
            let mut outputs = vec![first?];
            for thread in threads {
                let output = thread.join().map_err(|_| {
                    Error::invalid_argument("the forward pass of a replica panicked")
                })?;
                outputs.push(output?);
            }
            Ok(outputs)
        })
    }

    fn reduce(&mut self, parameters: &[NamedTensor]) -> Result<()> {
        let _without_autograd = tch::no_grad_guard();
        for model in &mut self.models {
            for (here, parameter) in model.parameters().iter().zip(parameters) {
                let found = (gradient(&here.tensor)?, gradient(&parameter.tensor)?);
                if let (Some(theirs), Some(mut ours)) = found {
                    let theirs = theirs.f_to_device(ours.device())?;
                    let _ = ours.f_add_(&theirs)?;
                }
            }
            model.zero_grad()?;
        }
        Ok(())
    }
}

pub(crate) fn other_inputs() -> Error {
    Error::invalid_argument(
        "a callback has left another number of tensors as the model's input than the data give",
    )
}

impl fmt::Debug for dyn Replicas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replicas").field("len", &self.len()).finish()
    }
}
