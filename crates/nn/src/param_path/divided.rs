//! Registration of parameters that are divided over ranks.

use brigade_sharding::{TensorPart, TensorStyle};
use brigade_torch::ProcessGroup;
use tch::{TchError, Tensor};

use super::ParamPath;
use crate::{Divided, Init};

impl ParamPath<'_> {
    /// Registers a trainable parameter that is divided over the ranks of a tensor group if the plan contains it, for
    /// layers that can compute with a part. `shape` is the shape of the whole parameter; it is followed by the
    /// dimensions of output and of input features. Returns this rank's part with its division, or the whole parameter
    /// and `None` if the plan does not divide it.
    ///
    /// Initial values are those of the undivided parameter.
    pub fn divided_parameter(
        &self,
        name: &str,
        shape: &[i64],
        dims: [usize; 2],
        init: Init,
    ) -> (Tensor, Option<Divided>) {
        self.divided_parameter_with(name, shape, dims, move |values| init.fill(values))
    }

    /// Registers a divided parameter like [`ParamPath::divided_parameter`], with a function that sets the initial
    /// values of the whole parameter; see [`ParamPath::parameter_with`].
    pub fn divided_parameter_with(
        &self,
        name: &str,
        shape: &[i64],
        [outputs, inputs]: [usize; 2],
        first_values: impl FnOnce(&mut Tensor) -> Result<(), TchError> + Send + 'static,
    ) -> (Tensor, Option<Divided>) {
        let divided = self.tensor_style(name).and_then(|(style, group)| {
            let dim = if style == TensorStyle::Row { inputs } else { outputs };
            let part = self.part(name, shape, dim, &style, &group)?;
            Some(Divided { style, part, region: self.tensor_region() })
        });
        let part = divided.as_ref().map(|divided| divided.part.clone());
        (self.drawn_parameter(name, shape, part, Box::new(first_values)), divided)
    }

    /// Registers the bias of a weight: this rank's part of it if the weight is divided by output features, otherwise
    /// the whole bias.
    pub fn divided_bias(
        &self,
        name: &str,
        outputs: i64,
        weight: Option<&Divided>,
        init: Init,
    ) -> Tensor {
        let part = weight.filter(|weight| weight.style != TensorStyle::Row).and_then(|weight| {
            self.part(name, &[outputs], 0, &weight.style, weight.region.group()?)
        });
        self.drawn_parameter(name, &[outputs], part, Box::new(move |values| init.fill(values)))
    }

    /// Registers a trainable parameter whose first dimension is the experts: this rank's part if ranks divide the
    /// experts.
    pub(crate) fn expert_parameter(&self, name: &str, shape: &[i64], init: Init) -> Tensor {
        self.reject_style(name);
        let part = self.expert_group().and_then(|group| {
            let (experts, ranks) = (shape.first().copied().unwrap_or(0), group.size() as i64);
            if experts % ranks != 0 {
                let (less, more) = (experts / ranks * ranks, (experts / ranks + 1) * ranks);
                let nearest = if less > 0 { format!("{less} or {more}") } else { more.to_string() };
                self.reject_at(
                    name,
                    format_args!(
                        "{ranks} expert ranks do not divide {experts} experts: take {nearest}, or other ranks"
                    ),
                );
                return None;
            }
            let part = self.part(name, shape, 0, &TensorStyle::Column, &group)?;
            self.registry.borrow_mut().expert_parameters.insert(self.full_name(name));
            Some(part)
        });
        self.drawn_parameter(name, shape, part, Box::new(move |values| init.fill(values)))
    }

    fn part(
        &self,
        name: &str,
        shape: &[i64],
        dim: usize,
        style: &TensorStyle,
        group: &ProcessGroup,
    ) -> Option<TensorPart> {
        let sizes: Vec<u64> = shape.iter().map(|&size| u64::try_from(size).unwrap_or(0)).collect();
        let name = self.full_name(name);
        match TensorPart::new(&name, &sizes, dim, style, group.rank(), group.size()) {
            Ok(part) => Some(part),
            Err(error) => {
                // The error contains the parameter's full name.
                self.registry.borrow_mut().problems.push(error.to_string());
                None
            }
        }
    }
}
