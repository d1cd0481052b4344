//! A Learner whose batches are computed on several devices of one process.

use brigade_nn::{Model, Module, ParamPath};
use brigade_torch::{DeviceExt, Error, NamedTensor, Result};
use tch::{Device, Tensor};

use super::Learner;
use crate::loaders::ModelInput;
use crate::parallel::replicas;

impl Learner {
    /// Computes each batch on several devices in one process: the batch is scattered over them, each has a replica of
    /// the model, outputs are gathered on the Learner's device, and gradients are summed on it
    /// (`torch.nn.DataParallel`). The first device is the Learner's own; BatchNorm uses the statistics of its part of
    /// the batch.
    ///
    /// `build` must create the same model as the Learner's. Several processes, one for each device, are faster: that is
    /// what `brigade launch` starts.
    ///
    /// ```no_run
    /// # use brigade_learn::Learner;
    /// # use brigade_torch::Result;
    /// # use brigade_models::resnet18;
    /// # use tch::{Device, Tensor};
    /// # fn f(learner: Learner) -> Result<()> {
    /// let learner = learner.parallel::<Tensor, _>(
    ///     &[Device::Cuda(0), Device::Cuda(1)],
    ///     |path: &brigade_nn::ParamPath| brigade_models::ResNet::resnet18(path, 10),
    /// )?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] with several ranks, for a first device that is not the Learner's,
    /// and for a model whose parameters differ from the Learner's.
    pub fn parallel<X, M>(
        mut self,
        devices: &[Device],
        build: impl Fn(&ParamPath<'_>) -> M,
    ) -> Result<Self>
    where
        X: ModelInput,
        M: for<'a> Module<X::Ref<'a>, Output = Tensor> + Send + 'static,
    {
        if self.state.accelerator.processes().use_distributed() {
            return Err(Error::invalid_argument(
                "`parallel` is for one process, and this job has several, each with its own device",
            ));
        }
        if let Some(sharding) = self.state.accelerator.parallel().sharding() {
            return Err(Error::invalid_argument(format!(
                "`parallel` keeps the whole model on each device, and the Accelerator shards it ({}): leave one of them \
                 out",
                sharding.strategy
            )));
        }
        let own = self.state.accelerator.device();
        let Some((first, others)) = devices.split_first().filter(|(first, _)| **first == own)
        else {
            let devices: Vec<String> = devices.iter().map(|device| device.label()).collect();
            return Err(Error::invalid_argument(format!(
                "the first device of `parallel` must be the Learner's, {}; found [{}]",
                own.label(),
                devices.join(", ")
            )));
        };
        debug_assert_eq!(*first, own);
        let here = shapes(&self.state.parameters());
        let mut models = Vec::new();
        for device in others {
            let model = Model::builder().device(*device).build(&build)?;
            if shapes(&model.parameters()) != here {
                return Err(Error::invalid_argument(
                    "`parallel` was given the constructor of another model than the Learner's: its parameters \
                     differ in names or shapes",
                ));
            }
            models.push(model);
        }
        self.state.model.set_replicas(replicas::<M, X>(models));
        Ok(self)
    }
}

fn shapes(parameters: &[NamedTensor]) -> Vec<(String, Vec<i64>)> {
    parameters.iter().map(|it| (it.name.clone(), it.tensor.size())).collect()
}
