//! `brigade env`: versions and facts for a bug report.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use brigade_doctor::{Facts, Question};
use brigade_hardware::Sources;
use brigade_rank_env::text::escaped;
use clap::Args;
use serde_json::{Value, json};

/// Print versions and facts of this host for a bug report
///
/// Nothing secret: of the environment, only variables that launchers, libtorch, OpenMP, NCCL and
/// Gloo listen to are shown. To see what may be wrong with them, ask `brigade doctor`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct EnvArgs {
    /// The program of the job: shows the libtorch that it would load
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,

    /// Print all facts as JSON
    #[arg(long)]
    json: bool,
}

/// Writes the answer to `out`. A reader that closes the pipe ends the answer without an error.
pub(crate) fn run(args: &EnvArgs, mut out: impl Write) -> anyhow::Result<()> {
    let question = Question { program: args.program.clone(), ..Question::default() };
    let facts = Facts::gather(&Sources::system(), &question);
    let tools: Vec<_> = TOOLS.iter().map(|tool| (tool.name, tool.version())).collect();
    let text = if args.json {
        let tools: serde_json::Map<_, _> =
            tools.into_iter().map(|(name, version)| (name.to_owned(), json!(version))).collect();
        let all = json!({ "facts": facts, "tools": Value::Object(tools) });
        format!("{all:#}\n")
    } else {
        text(&facts, &tools)
    };
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => Ok(written?),
    }
}

fn text(facts: &Facts, tools: &[(&str, Option<String>)]) -> String {
    let Facts { host, cpu, memory, devices, .. } = facts;
    let gib = |bytes: u64| format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30));
    let mut lines = vec![
        ("brigade", format!("{} ({})", host.brigade.version, host.brigade.path.display())),
        ("host", host.name.clone()),
        ("system", format!("{}, {}, Linux {}", host.system, host.machine, host.kernel)),
        ("processor", {
            let quota = cpu.quota.map(|quota| format!(", quota {quota}")).unwrap_or_default();
            let nodes = if cpu.numa_nodes > 1 {
                format!(", {} NUMA nodes", cpu.numa_nodes)
            } else {
                String::new()
            };
            format!("{}, {} of {} usable{quota}{nodes}", cpu.model, cpu.usable, cpu.online)
        }),
        ("memory", {
            let limit = memory.group_limit_bytes;
            let limit = limit.map(|it| format!(", limit {}", gib(it))).unwrap_or_default();
            format!("{}, {} free{limit}", gib(memory.total_bytes), gib(memory.free_bytes()))
        }),
        ("driver", devices.driver.version.clone().unwrap_or_else(|| NONE.to_owned())),
    ];
    let word = devices.kind().device_word();
    if devices.gpus.is_empty() {
        lines.push((word, NONE.to_owned()));
    }
    for gpu in &devices.gpus {
        let place = gpu.device.pci.as_deref().map(|it| format!(" at {it}")).unwrap_or_default();
        let memory = gpu.device.memory_bytes.map(|it| format!(", {}", gib(it))).unwrap_or_default();
        lines.push((word, format!("{}: {}{place}{memory}", gpu.device.id, gpu.model())));
    }
    if devices.kind().is_for_one_process() {
        lines.push(("TorchTPU", devices.torch_tpu.clone().unwrap_or_else(|| NONE.to_owned())));
    }
    let libtorch = facts.program.as_ref().and_then(|program| program.libtorch.as_ref());
    lines.push((
        "libtorch",
        libtorch.or(facts.libtorch.as_ref()).map_or_else(
            || NONE.to_owned(),
            |libtorch| {
                let version = libtorch.version.as_deref().unwrap_or("of unknown version");
                let cuda = libtorch
                    .cuda
                    .as_deref()
                    .map_or_else(|| "CPU only".to_owned(), |version| format!("CUDA {version}"));
                format!(
                    "{version}, {cuda}, {} (by {})",
                    libtorch.folder.display(),
                    libtorch.found_by
                )
            },
        ),
    ));
    for version in brigade_doctor::other_versions(facts) {
        let steps = [version.remedy, version.command].into_iter().filter(|it| !it.is_empty());
        let steps: Vec<String> = steps.collect();
        lines.push(("version", format!("{}: {}", version.found, steps.join(": "))));
    }
    for (name, version) in tools {
        lines.push((name, version.clone().unwrap_or_else(|| NONE.to_owned())));
    }
    for (name, value) in &facts.variables {
        lines.push(("variable", format!("{name}={value}")));
    }
    lines.iter().map(|(name, value)| format!("{name:<12}{}\n", escaped(value))).collect()
}

/// Program whose version is reported.
struct Tool {
    name: &'static str,
    command: &'static [&'static str],
}

impl Tool {
    /// Returns the first line that the program prints about its version; `None` if it is not installed.
    fn version(&self) -> Option<String> {
        let (program, arguments) = self.command.split_first()?;
        let python = brigade_launch::find_python().ok().filter(|_| *program == "python3");
        let mut command = Command::new(python.as_deref().unwrap_or_else(|| Path::new(program)));
        let output = command.args(arguments).stdin(Stdio::null()).output().ok()?;
        // ssh prints it to stderr.
        let said = if output.stdout.is_empty() { output.stderr } else { output.stdout };
        let first = String::from_utf8_lossy(&said).lines().next()?.trim().to_owned();
        if first.is_empty() {
            None
        } else if output.status.success() {
            Some(first)
        } else if self.command == [program, "--version"] {
            // Slurm's programs need their configuration even for that.
            Some(format!("there, but `{program} --version` fails: {first}"))
        } else {
            None
        }
    }
}

const TOOLS: [Tool; 6] = [
    Tool { name: "Python", command: &["python3", "--version"] },
    Tool { name: "PyTorch", command: &["python3", "-c", DISTRIBUTION, "torch"] },
    Tool { name: "Accelerate", command: &["python3", "-c", DISTRIBUTION, "accelerate"] },
    Tool { name: "ssh", command: &["ssh", "-V"] },
    Tool { name: "Slurm", command: &["srun", "--version"] },
    Tool { name: "MPI", command: &["mpirun", "--version"] },
];

/// Python program that prints the version of an installed package without importing it, which takes seconds for
/// PyTorch.
const DISTRIBUTION: &str = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))";

const NONE: &str = "none found";

const EXAMPLES: &str = "\
Examples:
  brigade env
  brigade env --program target/release/train --json > report.json";

#[cfg(test)]
mod tests {
    use super::*;
    use brigade_doctor::Gpu;
    use brigade_hardware::Device;

    #[test]
    fn tpus_are_named_with_torch_tpu() {
        let mut facts = Facts::default();
        facts.devices.kind = "Google".to_owned();
        let device = Device {
            id: "0".to_owned(),
            model: Some("TPU v5e".to_owned()),
            memory_bytes: Some(16 << 30),
            ..Device::default()
        };
        facts.devices.gpus = vec![Gpu { device, nics: Vec::new() }];
        let shown = text(&facts, &[]);
        assert!(shown.contains("TPU         0: TPU v5e, 16.0 GiB\n"), "{shown}");
        assert!(shown.contains("TorchTPU    none found\n"), "{shown}");
        facts.devices.torch_tpu = Some("0.2.0".to_owned());
        assert!(text(&facts, &[]).contains("TorchTPU    0.2.0\n"));
    }
}
