//! Megatron-LM settings: the fields of Accelerate's `MegatronLMPlugin` that `accelerate launch` has.

use super::given::{Given, Values, closest};
use super::{Facts, Note, Precision, Settings, SettingsError};
use crate::{Mesh, MixedPrecision, Offload, Sharding};

/// Megatron-LM configuration of Accelerate: the keys of `megatron_lm_config`, the variables `MEGATRON_LM_*` and the
/// flags `--megatron-lm-*`. Sizes of the mesh, sequence regions, sharding, clipping, accumulation and recomputation of
/// whole blocks are applied. Each other key is explained in a [`Note`], with what to write in its place.
#[derive(Debug, Clone, PartialEq)]
pub struct MegatronConfig {
    tensor: usize,
    pipeline: usize,
    context: usize,
    experts: usize,
    has_sequence_regions: bool,
    /// Number of micro-batches of a pipeline, or without a pipeline the number of accumulated batches.
    micro_batches: Option<u64>,
    clipping: f64,
    sharding: Option<Sharding>,
    recompute: bool,
    notes: Vec<Note>,
    /// Source of the first key.
    origin: String,
}

impl MegatronConfig {
    /// Reads the arguments that begin with `megatron_lm_`, and skips all others.
    ///
    /// # Errors
    /// [`SettingsError`] for an unknown key, an invalid value, and experts that are divided over several ranks each.
    pub fn read(given: &[Given]) -> Result<Self, SettingsError> {
        let values = Values::new(given);
        let mut notes = Vec::new();
        for given in values.with_prefix(PREFIX) {
            let name = &given.name[PREFIX.len()..];
            if let Some((_, instead)) = INSTEAD.iter().find(|(known, _)| *known == name) {
                if !is_default(&given.value) {
                    notes.push(given.note(*instead));
                }
            } else if !HONOURED.contains(&name) {
                let names = HONOURED.into_iter().chain(INSTEAD.iter().map(|it| it.0));
                return Err(SettingsError::UnknownKey {
                    origin: given.origin.clone(),
                    key: given.name.clone(),
                    hint: closest(name, names),
                });
            }
        }
        let find = |name: &str| values.find(&format!("{PREFIX}{name}"));
        let switch = |name: &str, default: bool| find(name).map_or(Ok(default), Given::truth);
        let ranks = |name: &str| match find(name) {
            None => Ok(1),
            Some(given) => match given.value.trim().parse() {
                Ok(ranks) if ranks > 0 => Ok(ranks),
                _ => Err(given.wrong("a whole number from 1")),
            },
        };
        let of_experts = "expert_tensor_parallel_size";
        if let (true, Some(given)) = (ranks(of_experts)? > 1, find(of_experts)) {
            return Err(given.unsupported(
                "each expert is whole on a rank: divide the experts by expert_model_parallel_size",
            ));
        }
        let (tensor, pipeline) = (ranks("tp_degree")?, ranks("pp_degree")?);
        let regions = switch("sequence_parallelism", false)?;
        if let (true, 1, Some(given)) = (regions, tensor, find("sequence_parallelism")) {
            notes.push(given.note("it needs tp_degree above 1, and does nothing"));
        }
        let micro_batches = find("num_micro_batches").map(|given| match given.count()? {
            0 => Err(given.wrong("a whole number from 1")),
            count => Ok(count),
        });
        let micro_batches = micro_batches.transpose()?;
        let clipping = match find("gradient_clipping") {
            None => 1.0,
            Some(given) => {
                let norm = given.value.trim().parse().ok().filter(|norm: &f64| *norm >= 0.0);
                norm.ok_or_else(|| given.wrong("a number from 0"))?
            }
        };
        let offloads = switch("optimizer_cpu_offload", false)?;
        let has_all = switch("use_custom_fsdp", false)?;
        let has_states = switch("use_distributed_optimizer", true)?;
        let sharding = match (has_all, has_states || offloads) {
            (true, _) => Some(Sharding::zero3()),
            (false, true) => Some(Sharding::zero1()),
            (false, false) => None,
        };
        let offload = if offloads { Offload::Cpu { pin: true } } else { Offload::None };
        let granularity = find("recompute_granularity").map(|given| given.value.as_str());
        let selective = switch("recompute_activations", false)? || granularity == Some("selective");
        if let (true, Some(given)) =
            (selective, find("recompute_activations").or_else(|| find("recompute_granularity")))
        {
            notes.push(given.note(
                "the core of attention alone would be computed again, of which fused attention keeps nothing: `Recompute` is \
                 for whole blocks",
            ));
        }
        let first = values.with_prefix(PREFIX).next().or_else(|| values.find("use_megatron_lm"));
        Ok(Self {
            tensor,
            pipeline,
            context: ranks("context_parallel_size")?,
            experts: ranks("expert_model_parallel_size")?,
            has_sequence_regions: regions && tensor > 1,
            micro_batches,
            clipping,
            sharding: sharding.map(|sharding| sharding.offload(offload)),
            recompute: granularity == Some("full"),
            notes,
            origin: first.map_or_else(|| "Megatron-LM".to_owned(), |it| it.origin.clone()),
        })
    }

    /// Returns the settings of a job, and notes on keys that are not applied as they are written. The data-parallel
    /// size is the world size divided by the sizes of tensor, pipeline and context parallelism.
    ///
    /// # Errors
    /// [`SettingsError::Mesh`] for sizes that do not divide the world size.
    pub fn resolve(&self, facts: &Facts) -> Result<(Settings, Vec<Note>), SettingsError> {
        let inner = self.tensor.saturating_mul(self.pipeline).saturating_mul(self.context);
        let data = (facts.world_size / inner).max(1);
        let sharding = self.sharding.clone();
        // Experts are divided within a replica.
        let builder = if sharding.is_some() || self.experts > 1 {
            Mesh::builder().shard(data)
        } else {
            Mesh::builder().replicate(data)
        };
        let builder = builder.pipeline(self.pipeline).context(self.context).tensor(self.tensor);
        let builder = builder.expert(self.experts);
        let mesh = builder.build(facts.world_size);
        let mesh =
            mesh.map_err(|source| SettingsError::Mesh { origin: self.origin.clone(), source })?;
        let precision = facts.mixed_precision.unwrap_or_default();
        let mixed = match precision {
            Precision::No => MixedPrecision::default(),
            Precision::Fp16 => MixedPrecision::fp16(),
            Precision::Bf16 | Precision::Fp8 => MixedPrecision::bf16(),
        };
        let steps = self.micro_batches.filter(|_| self.pipeline == 1);
        let micro_batches = self.micro_batches.filter(|_| self.pipeline > 1);
        Ok((
            Settings {
                sharding: sharding.map(|sharding| sharding.mixed(mixed)),
                sequence_regions: self.has_sequence_regions,
                gradient_accumulation_steps: steps.unwrap_or(facts.gradient_accumulation_steps),
                pipeline_micro_batches: micro_batches
                    .map(|count| usize::try_from(count).unwrap_or(usize::MAX)),
                gradient_clipping: Some(self.clipping).filter(|norm| *norm > 0.0),
                recompute: self.recompute,
                ..Settings::of_copies(mesh, facts)
            },
            self.notes.clone(),
        ))
    }
}

/// Returns `true` if a value keeps Megatron's default behaviour: an empty value, or a switch that is off.
fn is_default(value: &str) -> bool {
    let value = value.trim();
    value.is_empty()
        || value.eq_ignore_ascii_case("none")
        || super::given::truth(value) == Some(false)
}

const PREFIX: &str = "megatron_lm_";

const HONOURED: [&str; 13] = [
    "tp_degree",
    "pp_degree",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallelism",
    "num_micro_batches",
    "gradient_clipping",
    "use_distributed_optimizer",
    "use_custom_fsdp",
    "optimizer_cpu_offload",
    "recompute_activations",
    "recompute_granularity",
];

/// Keys that are not applied, with their meaning and what a Rust program does instead.
const INSTEAD: [(&str, &str); 14] = [
    (
        "recompute_method",
        "blocks would be chosen so; set `recompute` in the model's options for all of them",
    ),
    (
        "recompute_num_layers",
        "this number of blocks would be recomputed; set `recompute` in the model's options for all",
    ),
    (
        "no_load_optim",
        "states of optimizers would not be read; use `load_model`, which reads weights alone",
    ),
    (
        "no_save_optim",
        "states of optimizers would not be written; use `save_model`, which writes weights alone",
    ),
    (
        "eod_mask_loss",
        "ends of documents would have no loss; give them the label -100 (`IGNORED_LABEL`)",
    ),
    (
        "use_precision_aware_optimizer",
        "states would have other types; here they have the type of the parameters",
    ),
    ("overlap_cpu_optimizer_d2h_h2d", "copies would overlap; with offload they do"),
    (
        "decoder_last_pipeline_num_layers",
        "the last stage would have this number of blocks; set `StageCut` in `PipelineOptions`",
    ),
    (
        "attention_backend",
        "attention would be computed by it; here libtorch chooses a fused kernel",
    ),
    ("attention_dropout", "it would be the model's; set it in the model's options"),
    ("hidden_dropout", "it would be the model's; set it in the model's options"),
    ("attention_softmax_in_fp32", "scores would be normalised in 32 bits; fused attention does"),
    (
        "calculate_per_token_loss",
        "the mean would be over all tokens; use `backward_weighted` with their number",
    ),
    (
        "use_rotary_position_embeddings",
        "they would be the model's; use a model that has them, such as Llama",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::resolve;
    use crate::{Axis, Strategy};

    fn given(keys: &[(&str, &str)]) -> Vec<Given> {
        let all = [("use_megatron_lm", "true")].iter().chain(keys);
        let name = |name: &str| match name {
            "use_megatron_lm" => name.to_owned(),
            _ => format!("{PREFIX}{name}"),
        };
        all.map(|(key, value)| Given::new(&name(key), *value, "a.yaml:3")).collect()
    }

    fn settings(keys: &[(&str, &str)], ranks: usize) -> (Settings, Vec<String>) {
        let (settings, notes) = resolve(&given(keys), None, &Facts::new(ranks)).unwrap();
        (settings, notes.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn sizes_and_switches_are_honoured() {
        let (found, notes) = settings(&[], 4);
        assert_eq!(found.sharding.unwrap().strategy, Strategy::Zero1);
        assert_eq!(
            (found.mesh.to_string().as_str(), found.gradient_clipping),
            ("dp_shard 4", Some(1.0))
        );
        assert!(notes.is_empty(), "{notes:?}");

        let keys = [
            ("tp_degree", "2"),
            ("context_parallel_size", "2"),
            ("sequence_parallelism", "True"),
            ("num_micro_batches", "3"),
            ("gradient_clipping", "0.5"),
            ("use_custom_fsdp", "true"),
            ("recompute_granularity", "full"),
            ("no_load_optim", "False"),
        ];
        let (found, notes) = settings(&keys, 8);
        let size = |axis| found.mesh.size(axis);
        assert_eq!((size(Axis::Tensor), size(Axis::Context), size(Axis::Shard)), (2, 2, 2));
        assert!(found.sequence_regions && found.recompute);
        assert_eq!((found.gradient_accumulation_steps, found.gradient_clipping), (3, Some(0.5)));
        assert_eq!(found.pipeline_micro_batches, None);
        assert_eq!(found.sharding.unwrap().strategy, Strategy::Zero3);
        assert!(notes.is_empty(), "{notes:?}");

        let (found, _) = settings(&[("optimizer_cpu_offload", "true")], 2);
        assert_eq!(found.sharding.unwrap().offload, Offload::Cpu { pin: true });
        let off = [("use_distributed_optimizer", "false"), ("gradient_clipping", "0")];
        let (found, _) = settings(&off, 2);
        assert_eq!((found.sharding, found.gradient_clipping), (None, None));
        assert_eq!(found.mesh.size(Axis::Replicate), 2);
    }

    #[test]
    fn the_micro_batches_of_a_pipeline_are_not_accumulated_batches() {
        let keys = [("pp_degree", "2"), ("tp_degree", "2"), ("num_micro_batches", "8")];
        let (found, notes) = settings(&keys, 8);
        assert_eq!((found.mesh.size(Axis::Pipeline), found.mesh.size(Axis::Shard)), (2, 2));
        assert_eq!(found.sharding.as_ref().unwrap().strategy, Strategy::Zero1);
        assert_eq!((found.gradient_accumulation_steps, found.pipeline_micro_batches), (1, Some(8)));
        assert!(notes.is_empty(), "{notes:?}");
        let shown = crate::settings::describe(&found, &[]);
        assert!(shown.contains("pipeline     each batch is cut into 8 micro-batches\n"), "{shown}");
    }

    #[test]
    fn experts_are_divided_with_sharding_and_without() {
        for states in ["true", "false"] {
            let keys = [("expert_model_parallel_size", "2"), ("use_distributed_optimizer", states)];
            let (found, notes) = settings(&keys, 4);
            assert_eq!(found.mesh.to_string(), "dp_shard 4, ep 2");
            assert_eq!(found.sharding.is_some(), states == "true");
            assert!(notes.is_empty(), "{notes:?}");
        }
    }

    #[test]
    fn every_other_key_is_named_in_a_line() {
        for (key, instead) in INSTEAD {
            let (_, notes) = settings(&[(key, "true")], 2);
            let expected = format!("a.yaml:3: megatron_lm_{key} = true: {instead}");
            assert_eq!(notes, [expected]);
        }
        let (_, notes) = settings(&[("recompute_activations", "true")], 2);
        assert!(notes[0].contains("fused attention keeps nothing"), "{notes:?}");
        let (found, notes) = settings(&[("sequence_parallelism", "true")], 2);
        assert!(!found.sequence_regions && notes[0].contains("needs tp_degree above 1"));
    }

    #[test]
    fn wrong_keys_and_values_are_refused() {
        let refused = [
            (("tp_degree", "0"), "a whole number from 1"),
            (("tp_degree", "3"), "tp 3"),
            (("num_micro_batches", "0"), "a whole number from 1"),
            (("gradient_clipping", "-1"), "a number from 0"),
            (("sequence_parallelism", "maybe"), "true or false"),
            (("expert_model_parallel_size", "3"), "ep 3"),
            (("expert_tensor_parallel_size", "2"), "each expert is whole on a rank"),
            (("tp_degre", "2"), "tp_degree"),
        ];
        for (key, expected) in refused {
            let error = resolve(&given(&[key]), None, &Facts::new(4)).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
