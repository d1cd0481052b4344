//! Default settings for a machine.

use brigade_launch::NprocSpec;
use brigade_rank_env::text::counted;

use crate::settings::Settings;
use crate::value::Precision;

/// Resources of a machine that settings depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Number of GPUs or TPUs that programs can use.
    pub gpus: usize,
    /// Word for one of them: `GPU` or `TPU`.
    pub device_word: &'static str,
    /// Number of cores that this process may use.
    pub cores: usize,
}

impl Machine {
    /// Returns settings with one rank per GPU; without a GPU, one rank with all cores.
    ///
    /// ```
    /// use brigade_config::Machine;
    ///
    /// let settings = Machine { gpus: 2, device_word: "GPU", cores: 16 }.settings(None);
    /// assert_eq!(settings.text("nproc").as_deref(), Some("2"));
    /// assert_eq!(settings.cpu, None);
    /// ```
    #[must_use]
    pub fn settings(self, precision: Option<Precision>) -> Settings {
        Settings {
            nproc: Some(NprocSpec::Count(self.gpus.max(1))),
            cpu: (self.gpus == 0).then_some(true),
            mixed_precision: Some(precision.unwrap_or(Precision::No)),
            ..Settings::default()
        }
    }

    /// Describes the machine in words, for the heading of a settings file.
    #[must_use]
    pub fn words(self) -> String {
        let some = |count: usize, one: &str| match count {
            0 => format!("no {one}"),
            1 => format!("one {one}"),
            more => counted(more, one),
        };
        format!("{} and {}", some(self.gpus, self.device_word), some(self.cores, "core"))
    }
}
