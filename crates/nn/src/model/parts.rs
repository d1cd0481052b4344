//! Parts of a model by name: layers with their hooks, children, groups of parameters.

use brigade_torch::{NamedTensor, Result};
use tch::Tensor;

use super::Model;
use crate::error::ModelError;
use crate::hooks::ForwardHook;

/// A named group of parameters, for example for an optimizer's group or for freezing.
#[derive(Debug)]
pub struct NamedGroup {
    /// Name of the group.
    pub name: String,
    /// Parameters of the group, in the model's order.
    pub parameters: Vec<NamedTensor>,
}

impl<M> Model<M> {
    /// Registers a hook that is called with each output of the layer of this name, until the handle is dropped
    /// (`register_forward_hook` of PyTorch). If it returns a tensor, that replaces the output; `None` leaves the output
    /// unchanged.
    ///
    /// The layers are those of [`Model::layers`]: all layers of this crate, and modules in [`crate::Named`]. Modules of
    /// `tch::nn` and TorchScript do not call hooks. In a [`crate::Recompute`] a hook is called a second time in the
    /// backward.
    ///
    /// ```
    /// use std::sync::{Arc, Mutex};
    ///
    /// use brigade_nn::{Linear, Model};
    /// use tch::{Kind, Tensor};
    ///
    /// let mut model = Model::new(|p| Linear::new(p / "head", 4, 2))?;
    /// let seen = Arc::new(Mutex::new(Vec::new()));
    /// let log = Arc::clone(&seen);
    /// let hook = model.forward_hook("head", move |name, output| {
    ///     log.lock().unwrap().push((name.to_owned(), output.size()));
    ///     None
    /// })?;
    /// let input = Tensor::zeros([8, 4], (Kind::Float, model.device()));
    /// let _ = model.forward(&input)?;
    /// drop(hook);
    /// let _ = model.forward(&input)?;
    /// assert_eq!(seen.lock().unwrap().len(), 1);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::ModelError::NoSuchLayer`] if there is no such layer.
    pub fn forward_hook(
        &mut self,
        layer: &str,
        hook: impl Fn(&str, &Tensor) -> Option<Tensor> + Send + 'static,
    ) -> Result<ForwardHook> {
        if !self.layers.iter().any(|known| known == layer) {
            let (layer, known) = (layer.to_owned(), self.layers.clone());
            return Err(ModelError::NoSuchLayer { layer, known }.into());
        }
        Ok(self.hooks.add(layer, Box::new(hook)))
    }

    /// Returns the full names of the layers, in the order of their creation, for [`Model::forward_hook`].
    #[must_use]
    pub fn layers(&self) -> &[String] {
        &self.layers
    }

    /// Returns the names of the direct children of a module that have parameters, in order of registration. The module
    /// `""` is the whole model. The module's name, a dot and such a name form an argument for
    /// [`Model::parameters_under`] and [`Model::requires_grad_under`].
    ///
    /// ```
    /// use brigade_nn::{Linear, Model, ParamPath};
    /// let model = Model::new(|p: &ParamPath| {
    ///     (Linear::new(p / "body" / 0, 4, 4), Linear::new(p / "body" / 1, 4, 4), Linear::new(p / "head", 4, 2))
    /// })?;
    /// assert_eq!(model.children(""), ["body", "head"]);
    /// assert_eq!(model.children("body"), ["0", "1"]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[must_use]
    pub fn children(&self, module: &str) -> Vec<String> {
        let mut children: Vec<String> = Vec::new();
        for parameter in self.parameters() {
            let rest = match module {
                "" => Some(parameter.name.as_str()),
                module => {
                    parameter.name.strip_prefix(module).and_then(|rest| rest.strip_prefix('.'))
                }
            };
            // A parameter of the module itself is not a child.
            let child = rest.and_then(|rest| rest.split_once('.')).map(|(child, _)| child);
            if let Some(child) = child
                && !children.iter().any(|known| known == child)
            {
                children.push(child.to_owned());
            }
        }
        children
    }

    /// Returns the parameter of this name, or all parameters below it. The name `""` stands for all parameters.
    ///
    /// # Errors
    /// [`crate::ModelError::NoSuchParameter`] if there is no such parameter.
    pub fn parameters_under(&self, module: &str) -> Result<Vec<NamedTensor>> {
        let mut parameters = self.parameters();
        parameters.retain(|parameter| is_under(&parameter.name, module));
        if parameters.is_empty() {
            let known = self.children("");
            return Err(ModelError::NoSuchParameter { name: module.to_owned(), known }.into());
        }
        Ok(parameters)
    }

    /// Splits the parameters into named groups, each of which consists of the parameters of some modules. Every
    /// parameter must be in exactly one group.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model, ParamPath};
    /// let model = Model::new(|p: &ParamPath| {
    ///     ["stem", "body", "head"].map(|name| Linear::new(p / name, 4, 4))
    /// })?;
    /// let groups = model.parameter_groups(&[("old", &["stem", "body"]), ("new", &["head"])])?;
    /// assert_eq!((groups[0].parameters.len(), groups[1].parameters.len()), (4, 2));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::ModelError::NoSuchParameter`] for a module without parameters; [`crate::ModelError::Groups`] for a
    /// parameter in no group or in several.
    pub fn parameter_groups(&self, groups: &[(&str, &[&str])]) -> Result<Vec<NamedGroup>> {
        let mut split = Vec::new();
        for (name, modules) in groups {
            for module in *modules {
                self.parameters_under(module)?;
            }
            let mut parameters = self.parameters();
            parameters.retain(|it| modules.iter().any(|module| is_under(&it.name, module)));
            split.push(NamedGroup { name: (*name).to_owned(), parameters });
        }
        for parameter in self.parameters() {
            let of = split.iter().filter(|group: &&NamedGroup| {
                group.parameters.iter().any(|other| other.name == parameter.name)
            });
            let groups: Vec<String> = of.map(|group| group.name.clone()).collect();
            if groups.len() != 1 {
                return Err(ModelError::Groups { parameter: parameter.name, groups }.into());
            }
        }
        Ok(split)
    }
}

/// Returns `true` if a name is a module's, or below it.
pub(crate) fn is_under(name: &str, module: &str) -> bool {
    module.is_empty()
        || name.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}
