//! Readers of settings, and of what hosts and ranks say.

use std::path::Path;

use brigade_hardware::{KernelLog, fault_in};
use brigade_rank_env::scheduler::{expand_hosts, expand_tasks};
use brigade_rank_env::{ErrorRecord, MAX_REPORT_LEN, ProgressReport};
use brigade_rendezvous::{Decoder, FromAgent, ToAgent};
use brigade_ssh::HostSpec;
use brigade_track::reader::Line;

use super::{file, path_of};

pub(super) fn hostfile(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let _ = HostSpec::parse_list(text);
    let _ = HostSpec::parse_file(text, Path::new("hosts"));
}

pub(super) fn accelerate_yaml(input: &[u8]) {
    accelerate("default_config.yaml", input);
}

pub(super) fn accelerate_json(input: &[u8]) {
    accelerate("default_config.json", input);
}

pub(super) fn accelerate(path: &str, input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    if let Err(error) = brigade_config::accelerate::read(Path::new(path), text) {
        let _ = error.to_string();
    }
}

pub(super) fn settings(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    if let Err(error) = brigade_config::read_layer(Path::new("brigade.toml"), text) {
        let _ = error.to_string();
    }
}

pub(super) fn node_list(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    if let Ok(hosts) = expand_hosts(text) {
        assert!(hosts.iter().all(|host| !host.is_empty()));
    }
    let _ = expand_tasks(text);
}

pub(super) fn kernel_log(input: &[u8]) {
    let file = file(input);
    let mut log = KernelLog::open(&path_of(&file)).expect("the file can be read");
    log.read(|message| fault(message.text)).expect("the file can be read");
    // Most changes to a line's beginning leave none of the kernel's.
    String::from_utf8_lossy(input).lines().for_each(fault);
}

pub(super) fn fault(text: &str) {
    let Some(fault) = fault_in(text) else { return };
    assert!(!fault.means.is_empty() && !fault.remedy.is_empty(), "{fault:?}");
    // It is shown on terminals, and compared with the devices of ranks.
    if let Some(pci) = &fault.pci {
        assert!(pci.chars().all(|it| it.is_ascii_hexdigit() || it == ':'), "{fault:?}");
        assert!(fault.is_of(pci) && fault.is_of(&format!("{pci}.0")), "{fault:?}");
    }
}

pub(super) fn rendezvous(input: &[u8]) {
    // In pieces, as they come from a network.
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

pub(super) fn agent(input: &[u8]) {
    brigade_launch::hosts::read_messages(input);
}

pub(super) fn error_file(input: &[u8]) {
    let file = file(input);
    let _ = ErrorRecord::read(&path_of(&file));
}

pub(super) fn progress(input: &[u8]) {
    let tqdm = std::str::from_utf8(input).ok().and_then(ProgressReport::from_tqdm);
    for report in [ProgressReport::decode(input), tqdm].into_iter().flatten() {
        let line = report.encode();
        assert!(line.len() <= MAX_REPORT_LEN, "{} bytes", line.len());
        assert_eq!(ProgressReport::decode(&line).as_ref(), Some(&report));
        let text = report.text();
        assert!(!text.chars().any(char::is_control), "{text:?}");
    }
}

pub(super) fn run(input: &[u8]) {
    for line in input.split(|byte| *byte == b'\n') {
        if let Line::Values { values, .. } = Line::parse(line) {
            assert!(values.len() <= line.len(), "{} values of {} bytes", values.len(), line.len());
        }
    }
}
