//! Parsers of settings, and of messages from hosts and ranks.

use std::path::Path;

use brigade_hardware::{KernelLog, fault_in};
use brigade_rank_env::scheduler::{expand_hosts, expand_tasks};
use brigade_rank_env::{ErrorRecord, MAX_REPORT_LEN, ProgressReport};
use brigade_rendezvous::{Decoder, FromAgent, ToAgent};
use brigade_sharding::settings::{DeepSpeedConfig, Facts, Given, Settings, SettingsError};
use brigade_sharding::settings::{Note, describe, resolve};
use brigade_ssh::HostSpec;
use brigade_track::reader::Line;

use super::{FREE, TREE, file, path_of};
use crate::Target;

pub(super) const TARGETS: &[Target] = &[
    Target {
        name: "hostfile",
        reads: "a hostfile, or a list of hosts",
        words: &["slots=", "max-slots=", ":4", "[fd00::7]", "@", "#", ","],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: hostfile,
    },
    Target {
        name: "accelerate_yaml",
        reads: "Accelerate's settings in YAML",
        words: &[
            "distributed_type: MULTI_GPU\n",
            "num_machines: ",
            "&a ",
            "*a",
            "<<: ",
            "? ",
            "|\n",
        ],
        bytes_per_byte: YAML,
        free_bytes: FREE,
        read: accelerate_yaml,
    },
    Target {
        name: "accelerate_json",
        reads: "Accelerate's settings in JSON",
        words: &["\"distributed_type\":", "\"num_processes\":", "null", "{}", "[]", "\\u0000"],
        bytes_per_byte: YAML,
        free_bytes: FREE,
        read: accelerate_json,
    },
    Target {
        name: "deepspeed_json",
        reads: "DeepSpeed's configuration, in JSON or base64",
        words: &[
            "\"zero_optimization\":",
            "{\"stage\":3}",
            "\"auto\"",
            "\"train_batch_size\":",
            "\"scheduler\":{\"type\":\"OneCycle\",\"params\":",
            "\"fp16\":{\"enabled\":true}",
            "1e400",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: deepspeed_json,
    },
    Target {
        name: "fsdp_variables",
        reads: "the variables and keys of Accelerate's FSDP, DeepSpeed and axes of ranks",
        words: &[
            "FSDP_VERSION=2\n",
            "fsdp_sharding_strategy=HYBRID_SHARD\n",
            "PARALLELISM_CONFIG_DP_SHARD_SIZE=",
            "ACCELERATE_USE_DEEPSPEED=true\n",
            "zero_stage=",
            "=auto\n",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: fsdp_variables,
    },
    Target {
        name: "settings",
        reads: "Brigade's settings in TOML",
        words: &[
            "version = 1\n",
            "[ranks]\n",
            "[env]\n",
            "nproc = ",
            "\"\"\"",
            "[[a]]\n",
            "a.b.c = 1",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: settings,
    },
    Target {
        name: "node_list",
        reads: "Slurm's lists of nodes and tasks",
        words: &["[", "]", "-", ",", "(x", ")", "0000", "131072"],
        // A few characters stand for hosts up to a limit.
        bytes_per_byte: TREE,
        free_bytes: FREE + (128 << 20),
        read: node_list,
    },
    Target {
        name: "kernel_log",
        reads: "the kernel's log, and the faults of GPUs in it (Xids, SXids, amdgpu)",
        words: &[
            "6,1,500000,-;",
            "NVRM: Xid (PCI:0000:3b:00): 79, ",
            "NVRM: GPU 0000:91:00.0: ",
            "nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, ",
            "amdgpu 0000:c1:00.0: amdgpu: ",
            "Fatal, ",
            "154, ",
            "): ",
            "\n",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: kernel_log,
    },
    Target {
        name: "rendezvous",
        reads: "the frames between agents and coordinator",
        words: &["\0\0\0\x10", "Beat", "Join", "Output", "Finished", "Refused"],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: rendezvous,
    },
    Target {
        name: "agent",
        reads: "what the launcher and an agent say over ssh before the job",
        words: &["Hello", "Found", "Look", "Store", "Piece", "Enter", "Job"],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: agent,
    },
    Target {
        name: "error_file",
        reads: "the error file of a rank",
        words: &["\"message\":", "\"extraInfo\":", "\"py_callstack\":", "\"errorCode\":"],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: error_file,
    },
    Target {
        name: "progress",
        reads: "a rank's report of its progress, or a bar of tqdm's",
        words: &[
            "\"label\":",
            "\"rate\":",
            "\"values\":[[",
            "%|",
            "| 1/9 [",
            "it/s, ",
            "s/it",
            "00:01<",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: progress,
    },
    Target {
        name: "run",
        reads: "the lines of a run, as `brigade watch` and `brigade report` read them",
        words: &[
            "{\"_event\":\"start\"",
            "\"_time\":",
            "\"_step\":",
            "\"_config\":{",
            "\"_project\":",
            "{\"columns\":[\"rank\"],\"data\":[[0]]}",
            "\"NaN\"",
            "}\n{",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: run,
    },
];

/// Memory factor of the YAML parser, which stores positions, and copies the value of an anchor.
const YAML: usize = 2048;

fn hostfile(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let _ = HostSpec::parse_list(text);
    let _ = HostSpec::parse_file(text, Path::new("hosts"));
}

fn accelerate_yaml(input: &[u8]) {
    accelerate("default_config.yaml", input);
}

fn accelerate_json(input: &[u8]) {
    accelerate("default_config.json", input);
}

fn accelerate(path: &str, input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    if let Err(error) = brigade_config::accelerate::read(Path::new(path), text) {
        let _ = error.to_string();
    }
}

fn deepspeed_json(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let config = DeepSpeedConfig::from_json("ds.json", text);
    sharding(config.and_then(|config| config.resolve(&Facts::new(4))));
}

fn fsdp_variables(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let lines: Vec<(&str, &str)> = text.lines().filter_map(|line| line.split_once('=')).collect();
    let variables = Given::from_variables(lines.iter().copied());
    let keys: Vec<Given> =
        lines.iter().map(|(name, value)| Given::new(name, *value, "a.yaml")).collect();
    for given in [variables, keys] {
        sharding(resolve(&given, None, &Facts::new(4)));
    }
}

fn sharding(resolved: Result<(Settings, Vec<Note>), SettingsError>) {
    match resolved {
        Ok((settings, notes)) => {
            let shown = describe(&settings, &notes);
            assert!(shown.lines().count() >= notes.len(), "{shown}");
            if let Some(schedule) = settings.schedule {
                let _ = schedule.lr(3, 0.1);
            }
        }
        Err(error) => drop(error.to_string()),
    }
}

fn settings(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    if let Err(error) = brigade_config::read_layer(Path::new("brigade.toml"), text) {
        let _ = error.to_string();
    }
}

fn node_list(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    if let Ok(hosts) = expand_hosts(text) {
        assert!(hosts.iter().all(|host| !host.is_empty()));
    }
    let _ = expand_tasks(text);
}

fn kernel_log(input: &[u8]) {
    let file = file(input);
    let mut log = KernelLog::open(&path_of(&file)).expect("the file can be read");
    log.read(|message| fault(message.text)).expect("the file can be read");
    // Most changes to the beginning of a line make it another program's.
    String::from_utf8_lossy(input).lines().for_each(fault);
}

fn fault(text: &str) {
    let Some(fault) = fault_in(text) else { return };
    assert!(!fault.means.is_empty() && !fault.remedy.is_empty(), "{fault:?}");
    // It is shown on terminals, and compared with the devices of ranks.
    if let Some(pci) = &fault.pci {
        assert!(pci.chars().all(|it| it.is_ascii_hexdigit() || it == ':'), "{fault:?}");
        assert!(fault.is_of(pci) && fault.is_of(&format!("{pci}.0")), "{fault:?}");
    }
}

fn rendezvous(input: &[u8]) {
    // In pieces, as from a network.
    for piece in [1, 7, input.len().max(1)] {
        let (mut agent, mut coordinator) = (Decoder::default(), Decoder::limited(4 << 10));
        let (mut from_agent, mut to_agent) = (true, true);
        for bytes in input.chunks(piece) {
            coordinator.push(bytes);
            agent.push(bytes);
            while from_agent {
                match coordinator.next::<FromAgent>() {
                    Ok(Some(_)) => {}
                    Ok(None) => break,
                    Err(_) => from_agent = false,
                }
            }
            while to_agent {
                match agent.next::<ToAgent>() {
                    Ok(Some(_)) => {}
                    Ok(None) => break,
                    Err(_) => to_agent = false,
                }
            }
        }
    }
}

fn agent(input: &[u8]) {
    brigade_launch::hosts::read_messages(input);
}

fn error_file(input: &[u8]) {
    let file = file(input);
    let _ = ErrorRecord::read(&path_of(&file));
}

fn progress(input: &[u8]) {
    let tqdm = std::str::from_utf8(input).ok().and_then(ProgressReport::from_tqdm);
    for report in [ProgressReport::decode(input), tqdm].into_iter().flatten() {
        let line = report.encode();
        assert!(line.len() <= MAX_REPORT_LEN, "{} bytes", line.len());
        assert_eq!(ProgressReport::decode(&line).as_ref(), Some(&report));
        let text = report.text();
        assert!(!text.chars().any(char::is_control), "{text:?}");
    }
}

fn run(input: &[u8]) {
    for line in input.split(|byte| *byte == b'\n') {
        if let Line::Values { values, .. } = Line::parse(line) {
            assert!(values.len() <= line.len(), "{} values of {} bytes", values.len(), line.len());
        }
    }
}
