//! The scale on a GPU: no step waits for it.

use std::collections::VecDeque;

use brigade_torch::{DeviceExt, Error, Fetch, ReduceOp, Result, TensorId, gradient, gradients};
use tch::{Device, Kind, Tensor};

use super::{
    FoundInf, GradScaler, GradScalerOptions, GradScalerState, SMALLEST_SCALE, ScalerInner,
    mixed_gradients,
};
use crate::error::TrainError;
use crate::parameters::Parameters;
use crate::recorder::AtReplay;

/// Scale on a GPU, where it is applied and updated, so that no step waits for it. The host computes the same scale
/// later, from the overflow flags that it reads.
#[derive(Debug)]
pub(super) struct DeviceScale {
    /// The scale, one float32, and the growth counter of PyTorch's kernel, one int32.
    pub(super) scale: Tensor,
    growth_tracker: Tensor,
    /// Overflow flag of the steps since the last backward pass: one float32.
    found: Tensor,
    /// `true` if an optimizer has stepped since the last backward pass.
    pub(super) stepped: bool,
    /// Number of backward passes so far that followed a step.
    iteration: u64,
    /// Overflow flags of steps that are being copied to the host, with their iterations.
    arriving: VecDeque<(u64, Fetch)>,
}

impl DeviceScale {
    pub(super) fn new(state: GradScalerState, device: Device) -> Result<Self> {
        Ok(Self {
            scale: Tensor::f_full([1], state.scale, (Kind::Float, device))?,
            growth_tracker: Tensor::f_full(
                [1],
                i64::from(state.growth_tracker),
                (Kind::Int, device),
            )?,
            found: Tensor::f_zeros([1], (Kind::Float, device))?,
            stepped: false,
            iteration: 0,
            arriving: VecDeque::new(),
        })
    }

    /// Updates the scale on the device, from the overflow flags of the last steps.
    fn move_on(&mut self, options: &GradScalerOptions) -> Result<()> {
        let GradScalerOptions { growth_factor, backoff_factor, growth_interval, .. } = *options;
        let _guard = tch::no_grad_guard();
        let _ = self.scale.f_internal_amp_update_scale_(
            &self.growth_tracker,
            &self.found,
            growth_factor,
            backoff_factor,
            i64::from(growth_interval),
        )?;
        let _ = self.found.f_zero_()?;
        Ok(())
    }

    fn arrives(&mut self, found: &Tensor) -> Result<()> {
        let fetch = Fetch::start(&found.f_to_kind(Kind::Int64)?)?;
        self.arriving.push_back((self.iteration, fetch));
        Ok(())
    }
}

impl GradScaler {
    /// Returns the device on which the scale is kept for a loss on this device. `None` for the CPU, and for
    /// scalers of a program without an Accelerator.
    pub(super) fn device(&self, of_loss: Device) -> Option<Device> {
        let inner = self.inner.lock();
        let device = inner.job.as_ref()?.device;
        (device.device_kind().is_some() && of_loss == device).then_some(device)
    }

    pub(super) fn before_backward_on_device(&self, device: Device) -> Result<()> {
        let mut guard = self.inner.lock();
        let inner = &mut *guard;
        let recording = inner.job.as_ref().is_some_and(|job| job.recorder.is_recording());
        if !recording {
            // The result of the last step may not have arrived yet.
            inner.settle(1)?;
        }
        let waits = !inner.unscaled.is_empty();
        let scale = match &mut inner.device {
            Some(scale) => scale,
            none => none.insert(DeviceScale::new(inner.state, device)?),
        };
        if scale.stepped {
            scale.stepped = false;
            scale.move_on(&inner.options)?;
            inner.unscaled.clear();
            match inner.job.as_ref().filter(|_| recording) {
                Some(job) => job.recorder.at_each_replay(NextIteration { scaler: self.clone() }),
                None => scale.iteration += 1,
            }
        } else if waits {
            return Err(mixed_gradients());
        }
        if inner.state.scale < SMALLEST_SCALE {
            return Err(TrainError::NotFinite { scale: inner.state.scale }.into());
        }
        Ok(())
    }

    /// Divides the gradients unless that was done already, and returns a float32 tensor `[1]` on their device, non-zero
    /// if a gradient was not finite, so that the device skips the step. The host does not wait.
    pub(crate) fn found_on_device(&self, parameters: &[&Tensor]) -> Result<Tensor> {
        let found = self.unscale_on_device(parameters)?;
        let mut guard = self.inner.lock();
        let inner = &mut *guard;
        let job = inner.job.clone();
        if let Some(device) = &mut inner.device {
            // In place: a recorded step reads the tensor at the same address.
            let _guard = tch::no_grad_guard();
            device.found.f_copy_(&device.found.f_maximum(&found)?)?;
            device.stepped = true;
            match job.filter(|job| job.recorder.is_recording()) {
                Some(job) => job.recorder.at_each_replay(ReadOverflow {
                    scaler: self.clone(),
                    found: found.shallow_clone(),
                }),
                None => device.arrives(&found)?,
            }
        }
        Ok(found)
    }

    pub(super) fn unscale_on_device(&self, parameters: &[&Tensor]) -> Result<Tensor> {
        let mut guard = self.inner.lock();
        let inner = &mut *guard;
        let scale = match &inner.device {
            Some(device) => device.scale.shallow_clone(),
            None => {
                return Err(Error::invalid_argument(
                    "an optimizer's step with fp16 before the first backward",
                ));
            }
        };
        let waiting: Vec<&&Tensor> =
            parameters.iter().filter(|p| !inner.unscaled.contains_key(&TensorId::of(p))).collect();
        let gradients: Vec<Tensor> = waiting
            .iter()
            .map(|parameter| gradient(parameter))
            .filter_map(std::result::Result::transpose)
            .collect::<Result<_, _>>()?;
        let mut found = match &gradients[..] {
            [] => Tensor::f_zeros([1], (Kind::Float, scale.device()))?,
            _ => gradients::unscale_by(&gradients.iter().collect::<Vec<_>>(), &scale)?,
        };
        if let Some(group) = inner.job.as_ref().filter(|_| !inner.alone).and_then(|job| job.group())
        {
            group.all_reduce(&mut found, ReduceOp::Max)?;
        }
        // Flags of parameters that were divided earlier, such as by clipping.
        let earlier: Vec<Tensor> = parameters
            .iter()
            .filter_map(|p| inner.unscaled.get(&TensorId::of(p))?.on_device())
            .collect();
        for before in &earlier {
            found = found.f_maximum(before)?;
        }
        for parameter in waiting.iter().map(|parameter| TensorId::of(parameter)).collect::<Vec<_>>()
        {
            inner.unscaled.insert(parameter, FoundInf::OnDevice(found.shallow_clone()));
        }
        Ok(found)
    }

    /// Returns `true` if the scale is on a GPU: from the first backward on.
    pub(crate) fn is_on_device(&self) -> bool {
        self.inner.lock().device.is_some()
    }

    /// Divides the gradients as [`GradScaler::unscale`] does, without waiting for the device. Returns a float32 tensor
    /// `[1]` on the device, non-zero if a value was not finite.
    pub(crate) fn unscale_later(&self, parameters: &(impl Parameters + ?Sized)) -> Result<Tensor> {
        let mut handles = Vec::new();
        parameters.each(&mut |parameter| handles.push(parameter.shallow_clone()));
        self.unscale_on_device(&handles.iter().collect::<Vec<_>>())
    }

    /// Returns `true` if the last step was skipped. Waits for the device.
    pub(crate) fn settle(&self) -> Result<bool> {
        let mut inner = self.inner.lock();
        inner.settle(0)?;
        Ok(inner.skipped)
    }
}

impl ScalerInner {
    /// Reads the overflow flags of all steps but the newest `keep`, and updates the host's scale like the device's.
    /// Waits for the device.
    pub(super) fn settle(&mut self, keep: usize) -> Result<()> {
        let Some(device) = &mut self.device else { return Ok(()) };
        while device.arriving.len() > keep {
            let Some((iteration, fetch)) = device.arriving.pop_front() else { break };
            let found = fetch.wait()? != 0;
            if self.settled != iteration {
                self.settled = iteration;
                if let Some(before) = self.stepped.take() {
                    self.state = self.options.moved(self.state, before);
                }
            }
            // Several optimizers may step in one iteration.
            let any = self.stepped.unwrap_or(false) || found;
            self.stepped = Some(any);
            self.skipped = any;
        }
        Ok(())
    }
}

/// Reads the overflow flags of a recorded step at each replay.
struct ReadOverflow {
    scaler: GradScaler,
    found: Tensor,
}

impl AtReplay for ReadOverflow {
    fn before(&mut self) -> Result<()> {
        self.scaler.inner.lock().settle(1)
    }

    fn after(&mut self) -> Result<()> {
        match &mut self.scaler.inner.lock().device {
            Some(device) => device.arrives(&self.found),
            None => Ok(()),
        }
    }
}

/// Updates the scale at the backward pass of a recorded step.
struct NextIteration {
    scaler: GradScaler,
}

impl AtReplay for NextIteration {
    fn before(&mut self) -> Result<()> {
        if let Some(device) = &mut self.scaler.inner.lock().device {
            device.iteration += 1;
        }
        Ok(())
    }
}
