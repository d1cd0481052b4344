//! Values that `auto` stands for, as Accelerate 1.15 determines them: `DeepSpeedPlugin.__post_init__`,
//! `set_mixed_precision` and `Accelerator._prepare_deepspeed`.

use serde_json::{Map, Value, json};

use super::{Arguments, DeepSpeedConfig};
use crate::settings::reader::{AUTO, as_count, at, at_mut};
use crate::settings::{Facts, Precision, ProgramOptimizer, ProgramSchedule, SettingsError};

/// Replaces each `auto` of a configuration. Keys that depend on unknown facts stay `auto`.
pub(super) fn fill(
    config: &DeepSpeedConfig,
    facts: &Facts,
) -> Result<Map<String, Value>, SettingsError> {
    let mut filling = Filling {
        origin: &config.origin,
        root: config.root.clone(),
        known: Vec::new(),
        open: Vec::new(),
    };
    filling.arguments(&config.arguments);
    filling.precision(facts.mixed_precision.unwrap_or_default())?;
    filling.batch(facts)?;
    filling.sizes(facts)?;
    filling.optimizer_and_schedule(facts)?;
    filling.known("gradient_clipping", 1.0);
    filling.known("zero_optimization.stage3_gather_16bit_weights_on_model_save", false);
    filling.finish()
}

struct Filling<'a> {
    origin: &'a str,
    root: Map<String, Value>,
    known: Vec<(&'static str, Value)>,
    /// Keys that may stay `auto` until more facts are known.
    open: Vec<&'static str>,
}

/// Keys whose value follows from the hidden size of the model.
const SIZES: [&str; 3] = [
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
];
const MICRO: &str = "train_micro_batch_size_per_gpu";
const STEPS: &str = "gradient_accumulation_steps";
const OPTIMIZER: [&str; 2] = ["optimizer.params.lr", "optimizer.params.weight_decay"];
const SCHEDULER: [&str; 4] = [
    "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps",
];

impl Filling<'_> {
    fn is_auto(&self, path: &str) -> bool {
        at(&self.root, path).is_some_and(|value| value == AUTO)
    }

    fn known(&mut self, path: &'static str, value: impl Into<Value>) {
        self.known.push((path, value.into()));
    }

    fn fill_now(&mut self, path: &str, value: impl Into<Value>) {
        if self.is_auto(path)
            && let Some(found) = at_mut(&mut self.root, path)
        {
            *found = value.into();
        }
    }

    fn auto(&self, path: &str, reason: &'static str) -> SettingsError {
        SettingsError::Auto { origin: self.origin.to_owned(), key: path.to_owned(), reason }
    }

    fn exclude(&self, first: &str, second: &str, remedy: &'static str) -> SettingsError {
        SettingsError::Contradiction {
            first: format!("{first} ({})", self.origin),
            second: second.to_owned(),
            remedy,
        }
    }

    /// Replaces `auto` with values from flags and variables.
    fn arguments(&mut self, arguments: &Arguments) {
        self.root.entry(STEPS).or_insert(json!(1));
        if let Some(steps) = arguments.steps {
            self.fill_now(STEPS, steps);
        }
        if let Some(norm) = arguments.clipping {
            self.fill_now("gradient_clipping", norm);
        }
        self.fill_now("zero_optimization.stage", arguments.stage);
        for (section, device) in [
            ("offload_optimizer", &arguments.offload_optimizer),
            ("offload_param", &arguments.offload_param),
        ] {
            self.fill_now(&format!("zero_optimization.{section}.device"), device.as_str());
            self.fill_now(&format!("zero_optimization.{section}.nvme_path"), "none");
        }
        self.fill_now(
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            arguments.gathers_on_save,
        );
    }

    fn precision(&mut self, precision: Precision) -> Result<(), SettingsError> {
        let (own, other) = match precision {
            Precision::Fp16 => (Some("fp16"), Some("bf16")),
            Precision::Bf16 | Precision::Fp8 => (Some("bf16"), Some("fp16")),
            Precision::No => (None, None),
        };
        if let Some(own) = own
            && !self.root.contains_key(own)
        {
            let section = match own {
                "fp16" => json!({"enabled": true, "auto_cast": true}),
                _ => json!({"enabled": true}),
            };
            self.root.insert(own.to_owned(), section);
        }
        if let Some(other) = other
            && at(&self.root, &format!("{other}.enabled")).is_some_and(is_true)
        {
            return Err(self.exclude(
                &format!("{other}.enabled"),
                &format!("mixed precision {}", precision.word()),
                "set one of them, or write \"auto\" for `enabled`",
            ));
        }
        for section in ["fp16", "bf16"] {
            self.root.entry(section).or_insert(json!({"enabled": false}));
            self.fill_now(&format!("{section}.enabled"), own == Some(section));
        }
        Ok(())
    }

    fn batch(&mut self, facts: &Facts) -> Result<(), SettingsError> {
        let micro = if self.is_auto(MICRO) {
            self.micro_batch_size(facts)?
        } else {
            at(&self.root, MICRO).and_then(as_count)
        };
        self.fill_now(STEPS, facts.gradient_accumulation_steps);
        if let Some(micro) = micro {
            let steps = at(&self.root, STEPS).and_then(as_count).unwrap_or(1);
            let ranks = u64::try_from(facts.world_size).unwrap_or(u64::MAX);
            self.known(MICRO, micro);
            self.known("train_batch_size", micro.saturating_mul(steps).saturating_mul(ranks));
        } else if self.is_auto(MICRO) {
            self.open.extend([MICRO, "train_batch_size"]);
        }
        Ok(())
    }

    /// Returns the batch size of the loaders. `None` if they are not known yet.
    fn micro_batch_size(&self, facts: &Facts) -> Result<Option<u64>, SettingsError> {
        let Some(sizes) = &facts.batch_sizes else { return Ok(None) };
        let sizes: Option<Vec<u64>> = sizes.iter().copied().collect();
        let mut sizes = sizes
            .ok_or_else(|| self.auto(MICRO, "a loader given to `prepare` has no batch size"))?;
        if facts.split_batches {
            let ranks = u64::try_from(facts.world_size).unwrap_or(u64::MAX).max(1);
            sizes.iter_mut().for_each(|size| *size /= ranks);
        }
        let sizes = sizes.into_iter();
        let size = if facts.takes_largest_batch { sizes.max() } else { sizes.min() };
        size.map(Some).ok_or_else(|| self.auto(MICRO, "no loader is given to `prepare`"))
    }

    fn sizes(&mut self, facts: &Facts) -> Result<(), SettingsError> {
        let Some(key) = SIZES.into_iter().find(|path| self.is_auto(path)) else { return Ok(()) };
        let Some(sizes) = &facts.hidden_sizes else {
            self.open.extend(SIZES);
            return Ok(());
        };
        let width = sizes.iter().copied().max();
        let width = width.ok_or_else(|| self.auto(key, "the model has no hidden size"))?;
        let square = width.saturating_mul(width);
        // Python: int(0.9 * width * width).
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "Python's own conversions"
        )]
        let most = (0.9 * width as f64 * width as f64) as u64;
        self.known(SIZES[0], square);
        self.known(SIZES[1], most);
        self.known(SIZES[2], width.saturating_mul(10));
        Ok(())
    }

    fn optimizer_and_schedule(&mut self, facts: &Facts) -> Result<(), SettingsError> {
        let has_optimizer = self.root.contains_key("optimizer");
        let has_schedule = self.root.contains_key("scheduler");
        let lr = match facts.optimizer {
            ProgramOptimizer::Unknown => {
                self.open.extend(OPTIMIZER);
                None
            }
            ProgramOptimizer::Own { .. } if has_optimizer => {
                let remedy =
                    "leave one of them out, or use the optimizer of the settings in the program";
                return Err(self.exclude("optimizer", "the program's own optimizer", remedy));
            }
            ProgramOptimizer::Own { lr } => {
                self.root.insert("zero_allow_untested_optimizer".to_owned(), true.into());
                Some(lr)
            }
            ProgramOptimizer::FromSettings { .. } if !has_optimizer => {
                return Err(SettingsError::Missing {
                    origin: self.origin.to_owned(),
                    key: "optimizer",
                    remedy: "the program takes the optimizer of the settings; add it, or make one in the program",
                });
            }
            ProgramOptimizer::FromSettings { lr, weight_decay } => {
                self.known(OPTIMIZER[0], lr);
                self.known(OPTIMIZER[1], weight_decay);
                Some(lr)
            }
        };
        match facts.schedule {
            ProgramSchedule::Unknown => self.open.extend(SCHEDULER),
            ProgramSchedule::Own if has_schedule => {
                let remedy =
                    "leave one of them out, or use the schedule of the settings in the program";
                return Err(self.exclude("scheduler", "the program's own schedule", remedy));
            }
            ProgramSchedule::Own => {
                if let ProgramOptimizer::FromSettings { .. } = facts.optimizer {
                    let remedy = "take both from the settings, or both from the program";
                    return Err(self.exclude("optimizer", "the program's own schedule", remedy));
                }
            }
            ProgramSchedule::FromSettings { .. } if !has_schedule => {
                return Err(SettingsError::Missing {
                    origin: self.origin.to_owned(),
                    key: "scheduler",
                    remedy: "the program takes the schedule of the settings; add it, or make one in the program",
                });
            }
            ProgramSchedule::FromSettings { warmup_steps, total_steps } => {
                self.known(SCHEDULER[0], 0);
                match lr {
                    Some(lr) => self.known(SCHEDULER[1], lr),
                    None => self.open.push(SCHEDULER[1]),
                }
                self.known(SCHEDULER[2], warmup_steps.max(1));
                if let Some(total) = total_steps {
                    let ranks = u64::try_from(facts.world_size).unwrap_or(u64::MAX).max(1);
                    let total = if facts.split_batches { total } else { total.div_ceil(ranks) };
                    self.known(SCHEDULER[3], total);
                }
            }
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Map<String, Value>, SettingsError> {
        for (path, value) in std::mem::take(&mut self.known) {
            self.fill_now(path, value);
        }
        match left_open(&self.root, "", &self.open) {
            Some(path) => {
                Err(self.auto(&path, "neither Accelerate nor Brigade has a value for it"))
            }
            None => Ok(self.root),
        }
    }
}

/// Returns the first key that is `auto` and not in `open`. Lists are not searched, as in Accelerate.
fn left_open(section: &Map<String, Value>, prefix: &str, open: &[&str]) -> Option<String> {
    section.iter().find_map(|(key, value)| {
        let path = format!("{prefix}{key}");
        match value {
            Value::Object(inner) => left_open(inner, &format!("{path}."), open),
            value if value == AUTO && !open.contains(&path.as_str()) => Some(path),
            _ => None,
        }
    })
}

/// Returns the value of Python's `str(value).lower() == "true"`.
fn is_true(value: &Value) -> bool {
    match value {
        Value::Bool(value) => *value,
        Value::String(word) => word.eq_ignore_ascii_case("true"),
        _ => false,
    }
}
