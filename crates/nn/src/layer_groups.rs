//! Division of a module into groups of layers, and the parameters of normalisations.

use brigade_torch::Result;

use crate::Model;
use crate::model::is_under;

/// Division of a module's layers into groups for transfer learning, from the input to the output. The layers of a group
/// are frozen together and have one learning rate (fastai's `splitter`).
///
/// ```
/// use brigade_nn::{LayerGroups, Linear, Model, ParamPath};
///
/// struct Net(Linear, Linear);
///
/// impl Net {
///     fn new(path: &ParamPath) -> Self {
///         Self(Linear::new(path / "body", 8, 8), Linear::new(path / "head", 8, 2))
///     }
/// }
///
/// impl LayerGroups for Net {
///     fn layer_groups(&self) -> Vec<Vec<String>> {
///         vec![vec!["body".to_owned()], vec!["head".to_owned()]]
///     }
/// }
///
/// let groups = Model::new(Net::new)?.param_groups()?;
/// assert_eq!(groups, [["body.weight", "body.bias"], ["head.weight", "head.bias"]]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub trait LayerGroups {
    /// Returns the full names of the modules, or parameters, of each group. Every parameter is below one of them in
    /// exactly one group; modules may have no parameters.
    fn layer_groups(&self) -> Vec<Vec<String>>;
}

impl<M: LayerGroups> Model<M> {
    /// Returns the names of the parameters of each of the module's groups, in the model's order.
    ///
    /// # Errors
    /// [`crate::ModelError::Groups`] for a parameter in no group or in several.
    pub fn param_groups(&self) -> Result<Vec<Vec<String>>> {
        let groups = self.module().layer_groups();
        let parameters = self.parameters();
        let has_any = |module: &&str| parameters.iter().any(|it| is_under(&it.name, module));
        let modules: Vec<Vec<&str>> = groups
            .iter()
            .map(|group| group.iter().map(String::as_str).filter(has_any).collect())
            .collect();
        let names: Vec<String> = (0..groups.len()).map(|number| number.to_string()).collect();
        let named: Vec<(&str, &[&str])> = names
            .iter()
            .zip(&modules)
            .map(|(name, modules)| (name.as_str(), modules.as_slice()))
            .collect();
        let split = self.parameter_groups(&named)?;
        Ok(split
            .into_iter()
            .map(|group| group.parameters.into_iter().map(|parameter| parameter.name).collect())
            .collect())
    }
}

impl<M> Model<M> {
    /// Returns the names of the parameters of normalisations, in the model's order: those of [`crate::BatchNorm1d`],
    /// [`crate::BatchNorm2d`] and [`crate::LayerNorm`]. fastai keeps them trainable in frozen groups (`train_bn`) and
    /// exempts them from weight decay.
    ///
    /// For adopted tensors ([`crate::ParamPath::adopt_parameter`], TorchScript, `tch::nn`) the layer is unknown: a
    /// `weight` of one dimension with a `bias` of the same shape in its module is assumed to belong to a normalisation.
    ///
    /// ```
    /// use brigade_nn::{LayerNorm, Linear, Model, ParamPath};
    /// let model = Model::new(|p: &ParamPath| {
    ///     (Linear::new(p / "fc", 4, 8), LayerNorm::new(p / "norm", &[8]))
    /// })?;
    /// assert_eq!(model.norm_parameters(), ["norm.weight", "norm.bias"]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[must_use]
    pub fn norm_parameters(&self) -> Vec<String> {
        let parameters = self.parameters();
        let vector = |layer: &str, leaf: &str| {
            let name = if layer.is_empty() { leaf.to_owned() } else { format!("{layer}.{leaf}") };
            let found = parameters.iter().find(|parameter| parameter.name == name);
            found.map(|parameter| parameter.tensor.size()).filter(|shape| shape.len() == 1)
        };
        let is_norm = |name: &str| {
            let (layer, leaf) = name.rsplit_once('.').unwrap_or(("", name));
            if !self.adopted.contains(name) {
                return self.norms.contains(layer);
            }
            let weight = vector(layer, "weight");
            matches!(leaf, "weight" | "bias") && weight.is_some() && weight == vector(layer, "bias")
        };
        parameters.iter().map(|it| it.name.clone()).filter(|name| is_norm(name)).collect()
    }
}
