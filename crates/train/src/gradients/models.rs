//! Models whose gradients are added up and reduced together.

use std::sync::atomic::{AtomicBool, Ordering};

use brigade_nn::Model;
use brigade_torch::{Reducer, Result, Sharder, gradient};
use tch::Tensor;

use crate::gradients::loss_check::CheckedModel;
use crate::parameters::Parameters;

/// One or several prepared models: the argument of [`crate::Accelerator::accumulate`] and
/// [`crate::Accelerator::no_sync`].
pub trait PreparedModels {
    /// Calls `f` with the gradient synchronisation switch of each model.
    fn each_switch(&self, f: &mut dyn FnMut(&AtomicBool));
    /// Calls `f` with each trained parameter.
    fn each_parameter(&self, f: &mut dyn FnMut(&Tensor));
    /// Calls `f` with each model whose gradients are reduced.
    fn each_joining<'a>(&'a self, f: &mut dyn FnMut(Joining<'a>));
    /// Calls `f` with the sharder of each sharded model that has gradients not yet reduced.
    fn each_sharder(&self, f: &mut dyn FnMut(&Sharder));
}

impl<P: PreparedModels + ?Sized> Parameters for P {
    fn each(&self, f: &mut dyn FnMut(&Tensor)) {
        self.each_parameter(f);
    }
}

/// A model that was not prepared has parameters, but no reduction to switch off or to take part in.
impl<M> PreparedModels for Model<M> {
    fn each_switch(&self, _f: &mut dyn FnMut(&AtomicBool)) {}

    fn each_parameter(&self, f: &mut dyn FnMut(&Tensor)) {
        for parameter in self.trainable_parameters() {
            f(&parameter.tensor);
        }
    }

    fn each_joining<'a>(&'a self, _f: &mut dyn FnMut(Joining<'a>)) {}

    fn each_sharder(&self, _f: &mut dyn FnMut(&Sharder)) {}
}

impl<P: PreparedModels + ?Sized> PreparedModels for &P {
    fn each_switch(&self, f: &mut dyn FnMut(&AtomicBool)) {
        (**self).each_switch(f);
    }

    fn each_parameter(&self, f: &mut dyn FnMut(&Tensor)) {
        (**self).each_parameter(f);
    }

    fn each_joining<'a>(&'a self, f: &mut dyn FnMut(Joining<'a>)) {
        (**self).each_joining(f);
    }

    fn each_sharder(&self, f: &mut dyn FnMut(&Sharder)) {
        (**self).each_sharder(f);
    }
}

macro_rules! several {
    ($($name:ident $index:tt),+) => {
        impl<$($name: PreparedModels),+> PreparedModels for ($($name,)+) {
            fn each_switch(&self, f: &mut dyn FnMut(&AtomicBool)) {
                $(self.$index.each_switch(f);)+
            }

            fn each_parameter(&self, f: &mut dyn FnMut(&Tensor)) {
                $(self.$index.each_parameter(f);)+
            }

            fn each_joining<'a>(&'a self, f: &mut dyn FnMut(Joining<'a>)) {
                $(self.$index.each_joining(f);)+
            }

            fn each_sharder(&self, f: &mut dyn FnMut(&Sharder)) {
                $(self.$index.each_sharder(f);)+
            }
        }
    };
}

several!(A 0, B 1);
several!(A 0, B 1, C 2);
several!(A 0, B 1, C 2, D 3);

/// A prepared model that takes part in [`crate::Accelerator::join_uneven_inputs`].
#[derive(Debug, Clone, Copy)]
pub struct Joining<'a> {
    pub(crate) reducer: &'a Reducer,
    pub(crate) checked: Option<&'a CheckedModel>,
}

/// Switches off the reduction of models until it is dropped, also after a panic of the body.
pub(crate) struct NoSyncGuard<'a, P: PreparedModels + ?Sized> {
    models: &'a P,
    before: Vec<bool>,
}

impl<'a, P: PreparedModels + ?Sized> NoSyncGuard<'a, P> {
    pub(crate) fn off(models: &'a P) -> Self {
        let mut before = Vec::new();
        models.each_switch(&mut |switch| before.push(switch.swap(false, Ordering::Relaxed)));
        Self { models, before }
    }
}

impl<P: PreparedModels + ?Sized> Drop for NoSyncGuard<'_, P> {
    fn drop(&mut self) {
        let mut before = self.before.iter();
        self.models.each_switch(&mut |switch| {
            switch.store(before.next().copied().unwrap_or(true), Ordering::Relaxed);
        });
    }
}

/// Multiplies gradients by `factor`, a tensor of one number on the host or on the parameters' device.
pub(crate) fn scale_gradients(
    models: &(impl PreparedModels + ?Sized),
    factor: &Tensor,
) -> Result<()> {
    let mut outcome = Ok(());
    models.each_parameter(&mut |parameter| {
        let scaled = gradient(parameter).and_then(|gradient| {
            if let Some(mut gradient) = gradient {
                let _ = tch::no_grad(|| gradient.f_mul_(factor))?;
            }
            Ok(())
        });
        if outcome.is_ok() {
            outcome = scaled;
        }
    });
    models.each_sharder(&mut |sharder| {
        if outcome.is_ok() {
            outcome = sharder.scale_unreduced(factor);
        }
    });
    outcome
}
