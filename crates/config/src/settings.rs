//! Table of all settings of a launch, from which files, variables, flags and help are derived.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use brigade_launch::events::EventsTarget;
use brigade_launch::{
    BindMode, Color, DeviceList, LineFilter, LocalRanks, NodeRange, NprocSpec, PortRange, Prefix,
    StreamModes,
};

use crate::value::{
    Backend, DynamoBackend, DynamoMode, HostList, List, Pairs, Precision, Raw, ShardingSetting,
    Value,
};
use brigade_sharding::ContextMethod;
use brigade_sharding::pipeline::Schedule;

/// Row of the table of settings.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Name of the setting: the key in a file and, after two dashes, the flag.
    pub name: &'static str,
    /// Table of a settings file that contains the key.
    pub table: &'static str,
    /// Placeholder of a value in help: `N`, `HOST:PORT`.
    pub value_name: &'static str,
    /// Default value as text, or `None` if there is no default.
    pub default: Option<&'static str>,
    /// Variables of torchrun and Accelerate with the same meaning, in order of precedence. [`Self::variable`] precedes
    /// them all.
    pub variables: &'static [&'static str],
    /// Flags of torchrun and Accelerate with the same meaning.
    pub also: &'static [&'static str],
    /// Description of a valid value.
    pub expected: &'static str,
    /// Words of which the value is one. Empty if it is not one of a few words.
    pub words: &'static [&'static str],
    /// `true` for a Boolean setting, whose flag needs no value.
    pub is_switch: bool,
    /// `true` if a file may contain a table for the setting. A flag takes the table as JSON.
    pub(crate) takes_table: bool,
    meaning: &'static [&'static str],
    fault: fn(&str) -> String,
}

impl Setting {
    /// Returns the setting of that name, if it exists.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        TABLE.iter().find(|it| it.name == name)
    }

    /// Returns a summary of the setting in one line.
    ///
    /// ```
    /// use brigade_config::Setting;
    ///
    /// let setting = Setting::named("max-restarts").unwrap();
    /// assert_eq!(setting.summary(), "Restarts of the job after a failure");
    /// ```
    #[must_use]
    pub fn summary(&self) -> &'static str {
        self.meaning.first().map_or("", |line| line.trim())
    }

    /// Returns the summary and the details.
    #[must_use]
    pub fn meaning(&self) -> String {
        let details: Vec<&str> = self.meaning[1..].iter().map(|line| line.trim()).collect();
        let details = details.join(" ");
        let parts = [self.summary(), details.trim()].into_iter().filter(|it| !it.is_empty());
        parts.collect::<Vec<_>>().join(". ")
    }

    /// Returns what is wrong with a text that is not a valid value.
    #[must_use]
    pub fn fault(&self, text: &str) -> String {
        (self.fault)(text)
    }

    /// Returns the name of Brigade's own environment variable for the setting.
    ///
    /// ```
    /// use brigade_config::Setting;
    ///
    /// let setting = Setting::named("max-restarts").unwrap();
    /// assert_eq!(setting.variable(), "BRIGADE_MAX_RESTARTS");
    /// ```
    #[must_use]
    pub fn variable(&self) -> String {
        format!("BRIGADE_{}", self.name.to_ascii_uppercase().replace('-', "_"))
    }
}

/// Table of a settings file.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    /// Name of the table, without brackets.
    pub name: &'static str,
    /// Summary of the table's content.
    pub meaning: &'static str,
}

/// Defines the settings: each row becomes a field of [`Settings`], a row of [`TABLE`] and an arm of each `match`.
macro_rules! settings {
    ($(
        $(#[doc = $table_meaning:literal])*
        [$table:literal] {$(
            $(#[doc = $meaning:literal])*
            $field:ident: $type:ty = $name:literal $value_name:literal
                $(default $default:literal)? $(env $($variable:literal)*)? $(also $($also:literal)*)?;
        )*}
    )*) => {
        /// Settings of a launch that are set: in a file, a variable or a flag.
        #[derive(Clone, Debug, Default, PartialEq)]
        pub struct Settings {
            $($(
                $(#[doc = $meaning])*
                pub $field: Option<$type>,
            )*)*
            /// Environment variables for every rank.
            pub env: BTreeMap<String, String>,
            /// Arguments of Accelerate's plugins, by name.
            pub accelerate: BTreeMap<String, String>,
        }

        /// All settings except `env` and `accelerate`, in the order of a file.
        pub const TABLE: &[Setting] = &[$($(
            Setting {
                name: $name,
                table: $table,
                value_name: $value_name,
                default: [$(Some($default),)? None][0],
                variables: &[$($($variable,)*)?],
                also: &[$($($also,)*)?],
                expected: <$type as Value>::EXPECTED,
                words: <$type as Value>::WORDS,
                is_switch: <$type as Value>::IS_SWITCH,
                takes_table: <$type as Value>::TAKES_TABLE,
                meaning: &[$($meaning,)*],
                fault: <$type as Value>::fault,
            },
        )*)*];

        /// All tables of a settings file except `env` and `accelerate`, in order.
        pub const TABLES: &[Table] = &[$(
            Table { name: $table, meaning: concat!($($table_meaning,)*) },
        )*];

        impl Settings {
            /// Sets a value from the text of a variable or flag. Returns `false`, and keeps the old value, if the text
            /// is not [`Setting::expected`].
            pub fn set(&mut self, name: &str, text: &str) -> bool {
                match name {
                    $($($name => {
                        let value = <$type as Value>::parse(text);
                        let is_good = value.is_some();
                        self.$field = value.or(self.$field.take());
                        is_good
                    })*)*
                    _ => false,
                }
            }

            /// Sets a value from a file. Returns `false` if it is not [`Setting::expected`].
            pub(crate) fn read(&mut self, name: &str, raw: &Raw) -> bool {
                match name {
                    $($($name => {
                        self.$field = <$type as Value>::read(raw);
                        self.$field.is_some()
                    })*)*
                    _ => false,
                }
            }

            /// Returns the value in the form of a variable or flag, or `None` if it is not set.
            #[must_use]
            pub fn text(&self, name: &str) -> Option<String> {
                match name {
                    $($($name => self.$field.as_ref().map(Value::text),)*)*
                    _ => None,
                }
            }

            /// Returns the value in the form of a settings file, or `None` if it is not set.
            #[must_use]
            pub fn value(&self, name: &str) -> Option<toml::Value> {
                match name {
                    $($($name => self.$field.as_ref().map(Value::write),)*)*
                    _ => None,
                }
            }

            /// Removes the value of a setting.
            pub(crate) fn unset(&mut self, name: &str) {
                match name {
                    $($($name => self.$field = None,)*)*
                    _ => {}
                }
            }

            /// Takes over the values that are set in `upper` and keeps the others. `env` and `accelerate` are merged by
            /// name.
            pub(crate) fn overlay(&mut self, upper: Self) {
                $($(
                    self.$field = upper.$field.or(self.$field.take());
                )*)*
                self.env.extend(upper.env);
                self.accelerate.extend(upper.accelerate);
            }
        }
    };
}

settings! {
    /// The ranks of each host.
    ["ranks"] {
        /// Ranks per host: a number, gpu, cpu or auto [default: one per GPU, else 1]
        ///
        /// gpu starts one rank per GPU or TPU, cpu one per core, auto one per GPU or TPU if there are any, else one per core
        nproc: NprocSpec = "nproc" "N"
            env "PET_NPROC_PER_NODE" also "nproc-per-node" "num-gpus";
        /// Train on the CPU even if there are GPUs
        cpu: bool = "cpu" "BOOL"
            default "false" env "ACCELERATE_USE_CPU";
        /// GPUs that the ranks use: 0,2 or all
        devices: DeviceList = "devices" "LIST"
            also "gpu-ids";
        /// Give each rank one GPU and LOCAL_RANK=0
        virtual_local_rank: bool = "virtual-local-rank" "BOOL"
            default "false" env "PET_VIRTUAL_LOCAL_RANK";
        /// OMP_NUM_THREADS of each rank [default: cores per rank]
        ///
        /// By default the value in the environment, else the number of cores divided by the number of ranks, or the
        /// number of cores to which bind binds the rank
        threads_per_rank: usize = "threads-per-rank" "N"
            also "num-cpu-threads-per-process";
        /// Cores of each rank: none, cores, numa, socket or core-complex
        ///
        /// none: ranks are not bound; cores: an equal share of the cores of the rank's NUMA node; numa: all cores of
        /// that node; socket: all cores of its socket; core-complex: the cores of one last-level cache. A rank's NUMA
        /// node is that of its GPU; ranks without a GPU are spread over the nodes
        bind: BindMode = "bind" "MODE"
            default "none" also "numa-binding";
        /// Role of these ranks, in ROLE_NAME
        role: String = "role" "NAME"
            default "default" env "PET_ROLE";
    }

    /// Several hosts: set `hosts` or `hostfile` to start all of them from here, or the other settings to run one
    /// command on each.
    ["hosts"] {
        /// Hosts to start over ssh, with their numbers of ranks
        hosts: HostList = "hosts" "HOST[:N],..";
        /// File of hosts, as DeepSpeed's (`HOST slots=N`) or MPI's
        hostfile: PathBuf = "hostfile" "FILE"
            also "mpirun-hostfile" "deepspeed-hostfile";
        /// Use only these hosts and slots of the list
        ///
        /// In DeepSpeed's notation: worker-0@worker-1:0,2 selects all of worker-0, and GPUs 0 and 2 of worker-1
        include: String = "include" "HOST[:N,..][@..]"
            also "deepspeed-inclusion-filter";
        /// Use all of the list except these hosts and slots
        ///
        /// In the same notation as include
        exclude: String = "exclude" "HOST[:N,..][@..]"
            also "deepspeed-exclusion-filter";
        /// ssh client for the hosts, and its options
        ssh_command: String = "ssh-command" "COMMAND"
            env "BRIGADE_SSH";
        /// Folder to run in on the hosts [default: the current one]
        workdir: PathBuf = "workdir" "DIR";
        /// Copy brigade and the program to hosts that lack them
        ///
        /// Copies brigade, and the program with its libtorch, a Python script with the modules and packages beside it,
        /// or the package of -m below the working folder
        sync: bool = "sync" "BOOL"
            default "false";
        /// Time limit to connect to a host and log in
        connect_timeout: Duration = "connect-timeout" "SECONDS"
            default "10";
        /// Variables of this environment to pass to the hosts
        ///
        /// Names, or prefixes such as PREFIX_*. NCCL_*, OMP_*, TORCH_*, PYTHON* and similar variables are always passed
        env_pass: List = "env-pass" "NAME,..";
        /// Number of hosts, or MIN:MAX for an elastic job
        ///
        /// Hosts of an elastic job may join, leave or be lost, as long as MIN of them remain
        nnodes: NodeRange = "nnodes" "N|MIN:MAX"
            default "1" env "PET_NNODES" also "num-machines";
        /// Number of this host, from 0
        node_rank: usize = "node-rank" "N"
            env "PET_NODE_RANK" also "machine-rank";
        /// Address of host 0, for the others
        ///
        /// [default with hosts: the address that ssh connected to]
        master_addr: String = "master-addr" "HOST"
            env "PET_MASTER_ADDR" also "main-process-ip";
        /// Port on host 0 where the launchers meet [default: 29500]
        ///
        /// On a single host it is the ranks' MASTER_PORT, and can also be set by the variable MASTER_PORT [default: a
        /// free port for each attempt]
        master_port: u16 = "master-port" "PORT"
            env "PET_MASTER_PORT" also "main-process-port";
        /// Address of this host, for the others
        local_addr: String = "local-addr" "HOST"
            env "PET_LOCAL_ADDR";
        /// MASTER_PORT of the ranks, on host 0, or FIRST-LAST
        ///
        /// A firewall between the hosts must allow it [default: a free port for each attempt]
        store_port: PortRange = "store-port" "PORT";
    }

    /// Rendezvous of hosts that may join and leave.
    ["rendezvous"] {
        /// Rendezvous: builtin (or c10d), static or etcd
        ///
        /// With builtin and static, the job ends if the host at the endpoint is lost; with etcd it survives the loss of
        /// any host
        rdzv_backend: Backend = "rdzv-backend" "BACKEND"
            env "PET_RDZV_BACKEND";
        /// Address where hosts meet, the same on all [default port: 29400]
        rdzv_endpoint: String = "rdzv-endpoint" "HOST:PORT"
            env "PET_RDZV_ENDPOINT";
        /// Name of the job, the same on all of its hosts
        rdzv_id: String = "rdzv-id" "NAME"
            env "PET_RDZV_ID";
        /// More options of the rendezvous, such as join_timeout=600
        ///
        /// For etcd: protocol=https, cacert=FILE, cert=FILE, key=FILE, user=NAME and password-file=FILE (or the
        /// variable BRIGADE_ETCD_PASSWORD)
        rdzv_conf: Pairs = "rdzv-conf" "KEY=VALUE,.."
            env "PET_RDZV_CONF";
        /// File with the secret that authenticates hosts
        ///
        /// Must be readable by its owner only. The variable BRIGADE_RDZV_SECRET can contain the secret instead
        /// (`openssl rand -hex 32` makes one). It also encrypts the connections between the launchers
        rdzv_secret_file: PathBuf = "rdzv-secret-file" "FILE";
    }

    /// Behaviour when a rank fails.
    ["failure"] {
        /// Restarts of the job after a failure
        max_restarts: u32 = "max-restarts" "N"
            default "0" env "PET_MAX_RESTARTS";
        /// Time between SIGTERM and SIGKILL when ranks are stopped
        shutdown_timeout: Duration = "shutdown-timeout" "SECONDS"
            default "30" env "PET_SHUTDOWN_TIMEOUT" "TORCH_ELASTIC_SHUTDOWN_TIMEOUT";
        /// Time without a sign of life after which a host is lost
        ///
        /// Until then its ranks continue, and its launcher reconnects. At least 1
        heartbeat_timeout: Duration = "heartbeat-timeout" "SECONDS"
            default "30";
    }

    /// Output on the terminal and in files.
    ["output"] {
        /// Folder for log files, which keep each rank's output
        ///
        /// Each job has its own subfolder, with files attempt_N/LOCAL_RANK/stdout.log and stderr.log. Without tee and
        /// redirects, all output is also shown on the terminal
        log_dir: PathBuf = "log-dir" "DIR"
            env "PET_LOG_DIR";
        /// Streams for log files and the terminal: 0 to 3
        ///
        /// 0 is none, 1 stdout, 2 stderr, 3 both; or per local rank: 0:3,12:1
        tee: StreamModes = "tee" "MODES"
            env "PET_TEE";
        /// Streams for log files only, not the terminal
        ///
        /// 0 is none, 1 stdout, 2 stderr, 3 both; or per local rank: 0:3,12:1
        redirects: StreamModes = "redirects" "MODES"
            env "PET_REDIRECTS";
        /// Show only these local ranks on the terminal: 0,1
        local_ranks_filter: LocalRanks = "local-ranks-filter" "RANKS"
            env "PET_LOCAL_RANKS_FILTER";
        /// Collect lines of stdout with one of these words
        ///
        /// They are collected from all ranks under tee, in filtered_stdout.log
        duplicate_stdout_filters: LineFilter = "duplicate-stdout-filters" "WORD,.."
            env "PET_DUPLICATE_STDOUT_FILTERS";
        /// Collect lines of stderr with one of these words
        ///
        /// They are collected from all ranks under tee, in filtered_stderr.log
        duplicate_stderr_filters: LineFilter = "duplicate-stderr-filters" "WORD,.."
            env "PET_DUPLICATE_STDERR_FILTERS";
        /// Prefix of each line [default: [${rank}] ]
        ///
        /// May contain ${rank}, ${local_rank}, ${host} and other variables
        prefix: Prefix = "prefix" "TEMPLATE";
        /// Colour each rank's prefix: auto, always or never
        ///
        /// auto: if the output is a terminal
        color: Color = "color" "WHEN"
            default "auto";
        /// Append the job's events to this file, as JSON lines
        ///
        /// Starts and ends of ranks, failures, restarts. fd:N is an inherited descriptor. docs/events.md describes the
        /// format
        events: EventsTarget = "events" "FILE|fd:N";
        /// Pass the terminal through to the only rank of this host
        ///
        /// Progress bars, debuggers and keyboard input work as without a launcher [default: on, if the job has one rank
        /// and a terminal]
        raw: bool = "raw" "BOOL";
        /// Print only what the ranks print, unless the job fails
        quiet: bool = "quiet" "BOOL"
            default "false";
    }

    /// Settings that ranks read: Brigade programs, and Python programs that use Accelerate.
    ["training"] {
        /// Precision of computations: no, fp16 or bf16
        ///
        /// no computes in the model's own type; fp8 is for Python programs that use Accelerate
        mixed_precision: Precision = "mixed-precision" "TYPE"
            default "no" env "ACCELERATE_MIXED_PRECISION";
        /// Batches whose gradients are added up for one step
        gradient_accumulation_steps: NonZeroUsize = "gradient-accumulation-steps" "N"
            default "1" env "ACCELERATE_GRADIENT_ACCUMULATION_STEPS";
        /// Sharding of a Rust program's model: none, zero1, zero2, zero3 or hybrid=N
        ///
        /// hybrid=N shards over N neighbouring ranks. With options, the value is a JSON object, or a table in a
        /// settings file: { strategy = "zero3", reshard_after_forward = "no" }. Settings of FSDP and DeepSpeed are
        /// read, too
        sharding: ShardingSetting = "sharding" "STRATEGY"
            default "none";
        /// Ranks that divide each layer of a Rust program's model (tensor parallelism)
        ///
        /// These are neighbouring ranks, which read the same samples. The number must divide the number of ranks, and
        /// that of the model's attention heads
        tensor: NonZeroUsize = "tensor" "N"
            default "1";
        /// Give tensor ranks parts of the sequence between divided layers (sequence parallelism)
        ///
        /// Each tensor rank then computes normalisations, dropout and residuals for its part of the sequence only
        sequence_parallel: bool = "sequence-parallel" "BOOL"
            default "false";
        /// Ranks that divide each sequence of a Rust program (context parallelism)
        ///
        /// These are neighbouring ranks, which read the same samples. The number must divide the number of ranks
        context: NonZeroUsize = "context" "N"
            default "1";
        /// Exchange of keys between context ranks: gather, ring or ulysses
        ///
        /// gather: every rank gets all keys at once. ring: keys pass from rank to rank; without masks, and without
        /// dropout of scores. ulysses: ranks exchange their parts of the sequence for heads, which they divide
        context_method: ContextMethod = "context-method" "METHOD"
            default "gather";
        /// Ranks that divide the experts of a Rust program's mixtures (expert parallelism)
        ///
        /// These are neighbouring ranks, which read different samples. The number must divide the number of ranks, and
        /// that of the experts
        expert: NonZeroUsize = "expert" "N"
            default "1";
        /// Ranks that divide a Rust program's model into stages (pipeline parallelism)
        ///
        /// These ranks read the same samples, and are as far apart as possible. The number must divide the number of
        /// ranks
        pipeline: NonZeroUsize = "pipeline" "N"
            default "1";
        /// Micro-batches into which a pipeline cuts each batch
        ///
        /// A batch has at least as many rows. Options that the program sets win [default: 4 for each rank of a pipeline]
        micro_batches: NonZeroUsize = "micro-batches" "N";
        /// Order of the passes of a pipeline: gpipe, 1f1b, interleaved, looped-bfs, zb-h1 or zbv
        ///
        /// `brigade explain pipeline` shows the order, the idle time and the activations that a rank holds
        pipeline_schedule: Schedule = "pipeline-schedule" "SCHEDULE"
            default "1f1b";
        /// Stages of each rank of a pipeline (virtual stages)
        ///
        /// interleaved and looped-bfs have 2 or more, zbv has 2, and the other schedules have 1 [default: the smallest
        /// number of the schedule]
        pipeline_chunks: NonZeroUsize = "pipeline-chunks" "N";
        /// Backend of torch.compile, for Python programs
        dynamo_backend: DynamoBackend = "dynamo-backend" "BACKEND"
            default "no" env "ACCELERATE_DYNAMO_BACKEND";
        /// Mode of torch.compile
        ///
        /// default, reduce-overhead or max-autotune
        dynamo_mode: DynamoMode = "dynamo-mode" "MODE"
            default "default" env "ACCELERATE_DYNAMO_MODE";
        /// Make torch.compile fail instead of breaking the graph
        dynamo_use_fullgraph: bool = "dynamo-use-fullgraph" "BOOL"
            default "false" env "ACCELERATE_DYNAMO_USE_FULLGRAPH";
        /// Let torch.compile trace shapes as variables
        dynamo_use_dynamic: bool = "dynamo-use-dynamic" "BOOL"
            default "false" env "ACCELERATE_DYNAMO_USE_DYNAMIC";
        /// Compile repeated blocks once
        dynamo_use_regional_compilation: bool = "dynamo-use-regional-compilation" "BOOL"
            default "false" env "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION";
        /// Compare the shapes of all ranks before each collective
        debug_collectives: bool = "debug-collectives" "BOOL"
            default "false" env "ACCELERATE_DEBUG_MODE" also "debug";
    }
}

/// Table for the arguments of `accelerate launch` that are not settings.
pub(crate) const ACCELERATE: Table = Table {
    name: "accelerate",
    meaning: " Arguments of `accelerate launch` for FSDP, DeepSpeed, Megatron-LM, axes of parallelism \
              and fp8. FSDP and DeepSpeed are for Rust programs, too, the rest is for Python programs.",
};
/// Last table: environment variables for the ranks.
pub(crate) const ENV: Table = Table { name: "env", meaning: " Variables for every rank." };

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_are_used_once() {
        let mut seen = HashSet::new();
        for setting in TABLE {
            for name in [setting.name].iter().chain(setting.also) {
                assert!(seen.insert(*name), "{name} is there twice");
                assert!(!name.contains('_'), "{name}");
            }
            assert!(seen.insert(setting.variable().leak()));
            for name in setting.variables {
                assert!(seen.insert(name), "{name} is there twice");
            }
        }
    }

    #[test]
    fn words_are_values() {
        for setting in TABLE {
            for word in setting.words {
                assert!(Settings::default().set(setting.name, word), "{}: {word}", setting.name);
            }
        }
        assert_eq!(Setting::named("color").unwrap().words, ["auto", "always", "never"]);
    }

    #[test]
    fn defaults_are_values() {
        let mut settings = Settings::default();
        for setting in TABLE {
            let Some(default) = setting.default else { continue };
            assert!(settings.set(setting.name, default), "{}", setting.name);
            assert_eq!(settings.text(setting.name).as_deref(), Some(default), "{}", setting.name);
        }
    }
}
