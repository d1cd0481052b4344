//! Sharding strategy for a Rust program from settings of Accelerate and DeepSpeed.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use brigade_config::plugin_arguments::Plugin;
use brigade_config::{ChosenBy, Layer, SettingsPath, plugins, read_layer, read_text};
use brigade_rank_env::text::escaped;
use brigade_sharding::settings::{Facts, Settings, describe};
use clap::Args;

use crate::sharding::{read, read_deepspeed};

/// Files with settings.
#[derive(Debug, Args)]
pub(super) struct SettingsFiles {
    /// Explain a settings file of Accelerate
    ///
    /// Explains fsdp_config, deepspeed_config and parallelism_config, with a line for each key that is not used
    /// unchanged. Brigade's own settings file may contain them, too, in `[accelerate]`
    #[arg(long, value_name = "FILE", conflicts_with_all = STRATEGY)]
    config: Option<PathBuf>,

    /// Explain a DeepSpeed configuration
    #[arg(long, value_name = "FILE", conflicts_with_all = STRATEGY)]
    deepspeed_config_file: Option<PathBuf>,
}

/// Options that the settings files replace.
const STRATEGY: [&str; 7] =
    ["strategy", "units", "at_least", "reshard", "mixed", "micro_batches", "reduce_once"];

impl SettingsFiles {
    pub(super) fn is_given(&self) -> bool {
        self.config.is_some() || self.deepspeed_config_file.is_some()
    }

    /// Resolves the files for a job of `ranks`, or of as many as the settings file has, and a model of `parameters`.
    pub(super) fn resolve(
        &self,
        ranks: Option<usize>,
        parameters: Option<u64>,
    ) -> Result<Described> {
        let mut layer = match &self.config {
            Some(path) => {
                let place = SettingsPath { path: path.clone(), chosen_by: ChosenBy::Flag };
                read_layer(path, &read_text(&place)?)?
            }
            None => Layer::default(),
        };
        let plugins = plugins::resolve(&mut layer)?;
        let is_on = |plugin: Plugin| plugins.iter().flat_map(|it| &it.on).any(|it| it.0 == plugin);
        let deepspeed = self.deepspeed_config_file.as_deref();
        let deepspeed = deepspeed
            .map(|path| read_deepspeed(path, "flag --deepspeed-config-file"))
            .transpose()?;
        let facts = facts(&layer, ranks, parameters)?;
        let (settings, notes) = read(&layer, deepspeed, is_on, &facts)?;
        let mut text = describe(&settings, &notes);
        for note in &layer.notes {
            let _ = writeln!(text, "note: {}", escaped(note));
        }
        Ok(Described { settings, text })
    }
}

/// Settings with their description.
pub(super) struct Described {
    pub(super) settings: Settings,
    pub(super) text: String,
}

fn facts(layer: &Layer, ranks: Option<usize>, parameters: Option<u64>) -> Result<Facts> {
    let hosts = layer.settings.nnodes.unwrap_or_default().max.max(1);
    // `gpu` and similar values are resolved on the hosts.
    let of_host: Option<usize> = layer.settings.text("nproc").and_then(|text| text.parse().ok());
    let world_size = ranks.or_else(|| of_host.map(|ranks| ranks.saturating_mul(hosts)));
    let world_size = world_size.context("the number of ranks is not known: give --nproc")?;
    Ok(Facts { local_world_size: world_size / hosts, parameters, ..Facts::new(world_size) })
}
