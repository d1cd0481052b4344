//! Optimizer settings of DeepSpeed's configuration.

use super::SettingsError;
use super::reader::Reader;

/// Optimizer settings of a DeepSpeed configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct OptimizerSettings {
    /// Kind of the optimizer.
    pub kind: OptimizerKind,
    /// Learning rate. `None` for that of the program, or the optimizer's default.
    pub lr: Option<f64>,
    /// Weight decay. `None` for that of the program, or the optimizer's default.
    pub weight_decay: Option<f64>,
    /// Decay rates of the running averages of both moments (Adam's betas). `None` for the optimizer's default.
    pub betas: Option<(f64, f64)>,
    /// Epsilon: the number added to denominators for numerical stability. `None` for the optimizer's default.
    pub eps: Option<f64>,
    /// Momentum factor. `None` for the optimizer's default.
    pub momentum: Option<f64>,
    /// `true` for Nesterov momentum. Defaults to `false`.
    pub nesterov: bool,
}

/// Optimizers that both DeepSpeed's settings and Brigade have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptimizerKind {
    /// Adam, with weight decay added to the gradient (L2 regularization).
    Adam,
    /// `AdamW`: Adam with decoupled weight decay.
    AdamW,
    /// Adagrad, which divides gradients by the root of the sum of their squares.
    Adagrad,
    /// LAMB: Adam with step sizes per layer, for large batches (arXiv 1904.00962).
    Lamb,
    /// Muon: momentum with orthogonalized updates of matrices.
    Muon,
    /// Stochastic gradient descent, with or without momentum.
    Sgd,
    /// `RMSprop`, which divides gradients by the root of a running average of their squares.
    RmsProp,
    /// `RAdam`: Adam with a rectified variance of its first steps (arXiv 1908.03265).
    RAdam,
}

impl OptimizerKind {
    /// Returns the name of the optimizer in Brigade: `AdamW`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Adam => "Adam",
            Self::AdamW => "AdamW",
            Self::Adagrad => "Adagrad",
            Self::Lamb => "Lamb",
            Self::Muon => "Muon",
            Self::Sgd => "Sgd",
            Self::RmsProp => "RmsProp",
            Self::RAdam => "RAdam",
        }
    }
}

/// Reads `optimizer`. DeepSpeed's `Adam` is `AdamW` unless `adam_w_mode` is false.
pub(super) fn read(reader: Reader<'_>) -> Result<Option<OptimizerSettings>, SettingsError> {
    const TYPE: &str = "optimizer.type";
    let Some(name) = reader.text(TYPE)? else {
        return match reader.find("optimizer") {
            None => Ok(None),
            Some(_) => Err(SettingsError::Missing {
                origin: reader.origin.to_owned(),
                key: TYPE,
                remedy: "write one, such as \"AdamW\"",
            }),
        };
    };
    let adam = || -> Result<OptimizerKind, SettingsError> {
        let is_decoupled = reader.truth("optimizer.params.adam_w_mode")?.unwrap_or(true);
        Ok(if is_decoupled { OptimizerKind::AdamW } else { OptimizerKind::Adam })
    };
    const ADAM: &[&str] =
        &["betas", "eps", "bias_correction", "adam_w_mode", "torch_adam", "amsgrad"];
    let (kind, own): (OptimizerKind, &[&str]) = match name.to_ascii_lowercase().as_str() {
        "adam" => (adam()?, ADAM),
        "adamw" => (OptimizerKind::AdamW, ADAM),
        "adagrad" => (OptimizerKind::Adagrad, &["eps"]),
        "lamb" => (OptimizerKind::Lamb, &["betas", "eps", "bias_correction"]),
        "muon" => (OptimizerKind::Muon, &["momentum", "nesterov"]),
        "sgd" => (OptimizerKind::Sgd, &["momentum", "nesterov"]),
        "rmsprop" => (OptimizerKind::RmsProp, &["eps", "momentum"]),
        "radam" => (OptimizerKind::RAdam, &["betas", "eps"]),
        _ => {
            return Err(reader.unsupported(
                TYPE,
                "Brigade's are Adam, AdamW, Adagrad, Lamb, Muon, SGD, RMSprop and RAdam; make another in the program",
            ));
        }
    };
    reader.only("optimizer.params", &[&["lr", "weight_decay"], own].concat())?;
    for (key, usual, reason) in [
        (
            "bias_correction",
            true,
            "moments would not be corrected for their first values; leave it out",
        ),
        ("amsgrad", false, "DeepSpeed's own optimizers do not have it either; leave it out"),
    ] {
        let path = format!("optimizer.params.{key}");
        if reader.truth(&path)?.is_some_and(|value| value != usual) {
            return Err(reader.unsupported(&path, reason));
        }
    }
    Ok(Some(OptimizerSettings {
        kind,
        lr: reader.number("optimizer.params.lr")?,
        weight_decay: reader.number("optimizer.params.weight_decay")?,
        betas: reader.pair("optimizer.params.betas")?,
        eps: reader.number("optimizer.params.eps")?,
        momentum: reader.number("optimizer.params.momentum")?,
        nesterov: reader.is_on("optimizer.params.nesterov")?,
    }))
}
