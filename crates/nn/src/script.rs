//! Models from TorchScript files.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::path::Path;

use brigade_torch::{Result, Script, ScriptValue};
use tch::{Kind, Tensor};

use crate::error::ModelError;
use crate::param_path::is_floating_point;
use crate::{Model, Module, ParamPath, Training};

/// A module that was saved by Python's `torch.jit.script` or `torch.jit.trace`, loaded by [`Model::from_torchscript`].
/// `O` is the type of its output. Defaults to a tensor.
pub struct TorchScript<O = Tensor> {
    script: Script,
    training: Training,
    output: PhantomData<fn() -> O>,
}

impl<O> Model<TorchScript<O>> {
    /// Reads a TorchScript file (`torch.jit.script(module).save(path)`, or of `torch.jit.trace`) as a model. Parameters
    /// and buffers have Python's names; the model can be trained, saved as safetensors, and loaded in PyTorch by
    /// `load_state_dict`. Names that share a parameter in Python share it here.
    ///
    /// The forward takes tensors by position, or by the names of the Python function's arguments
    /// ([`TorchScriptInputs`]). `O` is the type of its output ([`TorchScriptOutput`]): a tensor, tuples, lists,
    /// dictionaries, or any [`ScriptValue`].
    ///
    /// `train` and `eval` set Python's attribute `training`. A traced module has recorded one of the two modes and does
    /// not change: trace it in training mode to train it with dropout. A file does not contain which buffers had
    /// `persistent=False`: see [`Model::set_persistent`]. Operations run one by one, with the same bits as in PyTorch
    /// without TorchScript.
    ///
    /// A file is a program: load only files from sources that you trust.
    ///
    /// ```
    /// use brigade_nn::{Model, TorchScript};
    /// use tch::{Kind, Tensor};
    ///
    /// # let folder = std::env::temp_dir().join(format!("brigade-script-{}", std::process::id()));
    /// # std::fs::create_dir_all(&folder)?;
    /// # let file = folder.join("pair.safetensors");
    /// // `torch.jit.trace(module, (input, factor)).save(…)` of a module that returns `(output, (scaled, factor))`.
    /// type Output = (Tensor, (Tensor, Tensor));
    /// let path = "tests/fixtures/torchscript_trace.pt";
    /// let mut model = Model::<TorchScript<Output>>::from_torchscript(path)?;
    /// let input = Tensor::ones([2, 3], (Kind::Float, model.device()));
    /// let (output, (scaled, _factor)) = model.forward((&input, &Tensor::from(3_f32)))?;
    /// assert_eq!(output * 3.0, scaled);
    /// model.save_weights(&file)?; // load_state_dict takes it
    /// # std::fs::remove_dir_all(&folder)?;
    ///
    /// // By name: `forward(left, right)` that returns a dictionary of tensors.
    /// use std::collections::BTreeMap;
    /// let path = "tests/fixtures/torchscript_script.pt";
    /// let model = Model::<TorchScript<BTreeMap<String, Tensor>>>::from_torchscript(path)?;
    /// let rows = Tensor::ones([5, 4], (Kind::Float, model.device()));
    /// assert_eq!(model.forward([("left", &rows), ("right", &rows)])?["sum"].size(), [5, 6]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::ModelError::Script`] if the file cannot be read or is not TorchScript, and for a module without the
    /// attribute `training` (`torch.jit.freeze`), which has no parameters either.
    pub fn from_torchscript(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let failed = |source| ModelError::Script { path: path.to_owned(), source };
        let script = Script::load(path).map_err(failed)?;
        script.set_training(true).map_err(failed)?;
        let parameters = script.parameters().map_err(failed)?;
        let buffers = script.buffers().map_err(failed)?;
        let kind = parameters.iter().map(|(_, tensor)| tensor.kind());
        let kind = kind.into_iter().find(|&kind| is_floating_point(kind)).unwrap_or(Kind::Float);
        Model::builder().kind(kind).build(|p: &ParamPath<'_>| {
            for (name, tensor) in &parameters {
                p.adopt_parameter(name, tensor);
            }
            for (name, tensor) in &buffers {
                p.adopt_buffer(name, tensor);
            }
            let output = PhantomData;
            TorchScript { script, training: p.training(), output }
        })
    }
}

impl<O, I> Module<I> for TorchScript<O>
where
    O: TorchScriptOutput,
    I: TorchScriptInputs,
{
    type Output = O;

    fn forward(&self, input: I) -> Result<O> {
        let (inputs, names) = input.into_inputs();
        self.script.set_training(self.training.is_on())?;
        let value = self.script.forward(&inputs, &names)?;
        let found = value.kind();
        Ok(O::from_value(value).map_err(|expected| ModelError::ScriptOutput { expected, found })?)
    }
}

impl<O> fmt::Debug for TorchScript<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TorchScript").finish_non_exhaustive()
    }
}

/// Inputs of a TorchScript forward: a tensor, a tuple or a slice of tensors by position, or an array of names and
/// tensors.
pub trait TorchScriptInputs {
    /// Returns the tensors, and the names of those that are passed by name, which come last.
    fn into_inputs<'a>(self) -> (Vec<&'a Tensor>, Vec<String>)
    where
        Self: 'a;
}

impl TorchScriptInputs for &Tensor {
    fn into_inputs<'a>(self) -> (Vec<&'a Tensor>, Vec<String>)
    where
        Self: 'a,
    {
        (vec![self], Vec::new())
    }
}

impl TorchScriptInputs for &[&Tensor] {
    fn into_inputs<'a>(self) -> (Vec<&'a Tensor>, Vec<String>)
    where
        Self: 'a,
    {
        (self.to_vec(), Vec::new())
    }
}

impl<const N: usize> TorchScriptInputs for [(&str, &Tensor); N] {
    fn into_inputs<'a>(self) -> (Vec<&'a Tensor>, Vec<String>)
    where
        Self: 'a,
    {
        let names = self.iter().map(|(name, _)| (*name).to_owned()).collect();
        (self.map(|(_, tensor)| tensor).to_vec(), names)
    }
}

macro_rules! inputs {
    ($($name:ident: $tensor:ty),+) => {
        impl TorchScriptInputs for ($($tensor,)+) {
            fn into_inputs<'a>(self) -> (Vec<&'a Tensor>, Vec<String>)
            where
                Self: 'a,
            {
                let ($($name,)+) = self;
                (vec![$($name),+], Vec::new())
            }
        }
    };
}

inputs!(a: &Tensor, b: &Tensor);
inputs!(a: &Tensor, b: &Tensor, c: &Tensor);
inputs!(a: &Tensor, b: &Tensor, c: &Tensor, d: &Tensor);

/// Outputs of a TorchScript forward: a tensor, tuples of up to four, `Vec`s, `Option`s, maps from `String`, or the
/// [`ScriptValue`] itself.
pub trait TorchScriptOutput: Sized {
    /// Converts a value that the module returned.
    ///
    /// # Errors
    /// Returns a description of the expected type, for an error message.
    fn from_value(value: ScriptValue) -> Result<Self, &'static str>;
}

impl TorchScriptOutput for ScriptValue {
    fn from_value(value: ScriptValue) -> Result<Self, &'static str> {
        Ok(value)
    }
}

impl TorchScriptOutput for Tensor {
    fn from_value(value: ScriptValue) -> Result<Self, &'static str> {
        match value {
            ScriptValue::Tensor(tensor) => Ok(tensor),
            _ => Err("a tensor"),
        }
    }
}

impl<T: TorchScriptOutput> TorchScriptOutput for Option<T> {
    fn from_value(value: ScriptValue) -> Result<Self, &'static str> {
        match value {
            ScriptValue::None => Ok(None),
            value => T::from_value(value).map(Some),
        }
    }
}

impl<T: TorchScriptOutput> TorchScriptOutput for Vec<T> {
    fn from_value(value: ScriptValue) -> Result<Self, &'static str> {
        match value {
            ScriptValue::List(values) | ScriptValue::Tuple(values) => {
                values.into_iter().map(T::from_value).collect()
            }
            _ => Err("a list or a tuple"),
        }
    }
}

impl<T: TorchScriptOutput> TorchScriptOutput for BTreeMap<String, T> {
    fn from_value(value: ScriptValue) -> Result<Self, &'static str> {
        match value {
            ScriptValue::Dict(pairs) => {
                pairs.into_iter().map(|(key, value)| Ok((key, T::from_value(value)?))).collect()
            }
            _ => Err("a dictionary"),
        }
    }
}

macro_rules! outputs {
    ($($name:ident),+; $expected:literal) => {
        impl<$($name: TorchScriptOutput),+> TorchScriptOutput for ($($name,)+) {
            fn from_value(value: ScriptValue) -> Result<Self, &'static str> {
                let ScriptValue::Tuple(values) = value else { return Err($expected) };
                let mut values = values.into_iter();
                let elements = ($($name::from_value(values.next().ok_or($expected)?)?,)+);
                if values.next().is_some() { Err($expected) } else { Ok(elements) }
            }
        }
    };
}

outputs!(A; "a tuple of one element");
outputs!(A, B; "a tuple of two elements");
outputs!(A, B, C; "a tuple of three elements");
outputs!(A, B, C, D; "a tuple of four elements");
