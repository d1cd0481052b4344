//! Universal checkpoints, which have one folder per parameter.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use super::files::UNIVERSAL;
use super::flat::Flat;
use super::model::{ModelStates, Shape};
use super::{Moments, Parameter};
use crate::error::Error;
use crate::fault::Fault;
use crate::file_name::FileName;
use crate::file_tensor::FileTensor;
use crate::pth::{PthFile, shown};
use crate::torch_optimizer::StateTensor;
use crate::value::Value;

/// Stems of a parameter's files, other than its weights.
const SLOTS: [&str; 3] = ["exp_avg", "exp_avg_sq", "step"];
const WEIGHTS: &str = "fp32";
const OPTIMIZER: &str = "optimizer_state.pt";

/// An open universal checkpoint.
#[derive(Debug)]
pub(super) struct Universal {
    folder: PathBuf,
    pub(super) stage: Option<u64>,
    pub(super) partitions: Option<u64>,
    pub(super) groups: Option<Value<FileTensor>>,
    /// Attributes of the loss scaler.
    pub(super) scaler: Option<Value<FileTensor>>,
}

impl Universal {
    pub(super) fn of(folder: &Path) -> Result<Self, Error> {
        let folder = folder.join(UNIVERSAL);
        let path = folder.join(OPTIMIZER);
        if !path.exists() {
            return Ok(Self { folder, stage: None, partitions: None, groups: None, scaler: None });
        }
        let file = PthFile::open(&path)?;
        let tree = file.value_with_sizes()?;
        let natural = |value: &Value<_>| u64::try_from(value.as_int()?).ok();
        let partitions = tree.get("partition_count").and_then(|count| match count {
            Value::List(counts) | Value::Tuple(counts) => counts.iter().filter_map(natural).max(),
            count => natural(count),
        });
        let stage = tree.get("zero_stage").and_then(natural);
        let file = Arc::new(Mutex::new(file));
        let stored = |tensor| Ok::<_, Error>(FileTensor::stored(&file, tensor));
        let groups = tree.get("param_groups").cloned();
        let groups = groups.map(|it| it.try_map(&mut |_, tensor| stored(tensor))).transpose()?;
        let scaler = tree.get("loss_scaler").filter(|it| it.as_dict().is_some()).cloned();
        let scaler = scaler.map(|it| it.try_map(&mut |_, tensor| stored(tensor))).transpose()?;
        Ok(Self { folder, stage, partitions, groups, scaler })
    }

    pub(super) fn parameters(model: &ModelStates) -> Result<Vec<Parameter>, Fault> {
        let groups = model.shapes()?.into_iter().enumerate();
        let parameters = groups.flat_map(|(group, shapes)| {
            shapes.into_iter().map(move |Shape { name, shape, .. }| Parameter {
                name,
                shape,
                group,
            })
        });
        Ok(parameters.collect())
    }

    pub(super) fn weight(&self, parameter: &Parameter) -> Result<FileTensor, Error> {
        let path = self.path(parameter, WEIGHTS)?;
        tensor(&path, Some(parameter))
    }

    pub(super) fn moments(&self, parameters: &[Parameter]) -> Result<Moments, Error> {
        let mut moments = Moments::new();
        for parameter in parameters {
            let mut own = BTreeMap::new();
            for slot in SLOTS {
                let path = self.path(parameter, slot)?;
                if path.exists() {
                    let shaped = Some(parameter).filter(|_| slot != "step");
                    own.insert(slot.to_owned(), tensor(&path, shaped)?);
                }
            }
            if !own.is_empty() {
                moments.insert(parameter.name.clone(), own);
            }
        }
        Ok(moments)
    }

    fn path(&self, parameter: &Parameter, slot: &str) -> Result<PathBuf, Error> {
        let name = FileName::new(parameter.name.as_str()).map_err(|error| Error::Unsupported {
            path: self.folder.clone(),
            fact: error.to_string(),
        })?;
        Ok(self.folder.join(name).join(format!("{slot}.pt")))
    }
}

/// Reads the tensor of a file, which is the whole value or under `param`. For a parameter it gets the parameter's
/// shape.
fn tensor(path: &Path, parameter: Option<&Parameter>) -> Result<FileTensor, Error> {
    let file = PthFile::open(path)?;
    let value = file.value()?;
    let read = || -> Result<FileTensor, Fault> {
        let found = match (value.get("param").unwrap_or(&value), parameter) {
            (Value::Tensor(tensor), _) => tensor,
            (Value::Int(step), None) => return Ok(FileTensor::from_scalar(*step as f64)),
            (Value::Float(step), None) => return Ok(FileTensor::from_scalar(*step)),
            (other, _) => {
                let found = other.describe();
                return Err(Fault::damaged(format_args!("expected a tensor, found {found}")));
            }
        };
        let flat = Flat::of(&file, found)?;
        let info = found.info();
        let Some(parameter) = parameter else { return Ok(flat.shaped(info.shape)) };
        // Flat if saved with stage 3.
        let elements = parameter.shape.iter().try_fold(1u64, |all, size| all.checked_mul(*size));
        if Some(flat.elements) != elements {
            return Err(Fault::damaged(format_args!(
                "`{}` is {info}, but of shape {:?} in the model's states",
                shown(&parameter.name),
                parameter.shape
            )));
        }
        Ok(flat.shaped(parameter.shape.clone()))
    };
    read().map_err(|fault| fault.at(path))
}
