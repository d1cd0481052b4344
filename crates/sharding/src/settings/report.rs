//! Description of settings as text.

use std::fmt::Write as _;

use brigade_checkpoint::Dtype;
use brigade_rank_env::text::counted;

use super::{LossScale, Note, Precision, Settings};
use crate::{MixedPrecision, Offload, ReduceGradients, Reshard, Sharding, Units};

/// Describes settings and notes as text, with a line for each. `brigade explain sharding` prints it.
///
/// ```
/// use brigade_sharding::settings::{DeepSpeedConfig, Facts, describe};
///
/// let text = r#"{"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5, "zero_optimization": {"stage": 1}}"#;
/// let (settings, notes) = DeepSpeedConfig::from_json("ds.json", text)?.resolve(&Facts::new(2))?;
/// let shown = describe(&settings, &notes);
/// assert!(shown.starts_with("strategy     zero1: each rank has a part of the optimizer's state\n"), "{shown}");
/// assert!(shown.contains("batches      4 samples x 2 ranks x 1 batch = 8 samples in a step\n"), "{shown}");
/// # Ok::<(), brigade_sharding::settings::SettingsError>(())
/// ```
#[must_use]
pub fn describe(settings: &Settings, notes: &[Note]) -> String {
    let mut rows: Vec<(&str, String)> = Vec::new();
    match &settings.sharding {
        None => rows.push(("strategy", "none: each rank has the whole model".to_owned())),
        Some(sharding) => rows.extend(of_sharding(sharding)),
    }
    rows.push(("mesh", settings.mesh.to_string()));
    if settings.sequence_regions {
        rows.push(("sequence", "tensor ranks have parts of it between divided layers".to_owned()));
    }
    rows.push(("precision", precision(settings)));
    rows.push(("batches", batches(settings)));
    if let Some(count) = settings.pipeline_micro_batches {
        let count = counted(count, "micro-batch");
        rows.push(("pipeline", format!("each batch is cut into {count}")));
    }
    rows.push((
        "clipping",
        settings.gradient_clipping.map_or_else(
            || "none; the program may clip".to_owned(),
            |norm| format!("gradients' norm at most {norm}"),
        ),
    ));
    if settings.recompute {
        rows.push((
            "recompute",
            "activations of each unit are computed again in backward".to_owned(),
        ));
    }
    if let Some(optimizer) = &settings.optimizer {
        let mut words = vec![optimizer.kind.name().to_owned()];
        let values = [
            ("lr", optimizer.lr),
            ("weight decay", optimizer.weight_decay),
            ("eps", optimizer.eps),
            ("momentum", optimizer.momentum),
        ];
        words.extend(
            values.iter().filter_map(|(name, value)| Some(format!("{name} {}", (*value)?))),
        );
        words.extend(optimizer.betas.map(|(first, second)| format!("betas {first}, {second}")));
        words.extend(optimizer.nesterov.then(|| "nesterov".to_owned()));
        rows.push(("optimizer", words.join(", ")));
    }
    if let Some(schedule) = &settings.schedule {
        rows.push(("schedule", schedule.name().to_owned()));
    }
    let mut text = String::new();
    for (name, value) in rows {
        let _ = writeln!(text, "{name:WIDTH$}{value}");
    }
    for note in notes {
        let _ = writeln!(text, "note: {note}");
    }
    text
}

const WIDTH: usize = 13;

fn of_sharding(sharding: &Sharding) -> Vec<(&'static str, String)> {
    let Sharding { strategy, reshard_after_forward, mixed: _, offload, units, reduce } = sharding;
    let divided = match strategy {
        crate::Strategy::Zero1 => "each rank has a part of the optimizer's state",
        crate::Strategy::Zero2 => "each rank has a part of the gradients and the optimizer's state",
        _ => "each rank has a part of the parameters, the gradients and the optimizer's state",
    };
    let mut rows = vec![("strategy", format!("{strategy}: {divided}"))];
    if !strategy.keeps_parameters_whole() {
        let reshard = match reshard_after_forward {
            Reshard::Yes => {
                "parameters are freed after forward, and gathered again in backward".to_owned()
            }
            Reshard::No => "parameters stay whole from forward to backward".to_owned(),
            Reshard::To(size) => {
                format!("parameters stay in {size} parts from forward to backward")
            }
        };
        rows.push(("reshard", reshard));
        let units = match units {
            Units::Blocks => "the model's blocks".to_owned(),
            Units::Matching(patterns) => patterns.join(", "),
            Units::AtLeast(u64::MAX) => "one: the whole model".to_owned(),
            Units::AtLeast(parameters) => format!("blocks of at least {parameters} parameters"),
        };
        rows.push(("units", units));
    }
    rows.push((
        "reduce",
        match reduce {
            ReduceGradients::EachBatch => "gradients are reduced in each backward".to_owned(),
            ReduceGradients::Window => "gradients are reduced once in a step".to_owned(),
        },
    ));
    if let Offload::Cpu { pin } = offload {
        let pinned = if *pin { ", pinned" } else { "" };
        rows.push((
            "offload",
            format!("shards and the optimizer's state are in the host's memory{pinned}"),
        ));
    }
    rows
}

fn precision(settings: &Settings) -> String {
    let mut text = match settings.precision {
        Precision::No => "that of the parameters".to_owned(),
        Precision::Fp8 => "fp8, computed as bf16".to_owned(),
        precision => precision.word().to_owned(),
    };
    if let Some(Sharding { mixed: MixedPrecision { reduce: Some(reduce), .. }, .. }) =
        &settings.sharding
    {
        let _ = write!(text, ", gradients summed in {}", name(*reduce));
    }
    match settings.loss_scale {
        None => {}
        Some(LossScale::Static(scale)) => {
            let _ = write!(text, ", loss scale {scale}");
        }
        Some(LossScale::Dynamic { initial, growth_interval }) => {
            let _ = write!(
                text,
                ", loss scale {initial} at first, doubled after {growth_interval} steps"
            );
        }
    }
    text
}

/// Returns PyTorch's name of a data type.
fn name(dtype: Dtype) -> String {
    match dtype {
        Dtype::F16 => "float16".to_owned(),
        Dtype::BF16 => "bfloat16".to_owned(),
        Dtype::F32 => "float32".to_owned(),
        Dtype::F64 => "float64".to_owned(),
        other => other.to_string(),
    }
}

fn batches(settings: &Settings) -> String {
    let ranks = counted(settings.mesh.size(crate::Axis::Data), "rank");
    let steps = counted(settings.gradient_accumulation_steps, "batch");
    match (settings.micro_batch_size, settings.train_batch_size) {
        (Some(micro), Some(train)) => {
            let micro = counted(micro, "sample");
            format!("{micro} x {ranks} x {steps} = {train} samples in a step")
        }
        _ => format!("the loader's x {ranks} x {steps} in a step"),
    }
}
