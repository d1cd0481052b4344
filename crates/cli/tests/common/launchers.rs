//! Several `brigade launch` that form one job: each acts as a host, all on the loopback interface.

#![allow(dead_code)] // each kind of tests uses a part of this

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;

use brigade_launch::{Interfaces, StorePort};
use tempfile::TempDir;

use crate::job::{self, Job, Run, Running};

/// Job that is to run on several hosts.
pub(crate) struct Hosts {
    /// Holds the port until the launchers listen on it.
    pub(crate) port: StorePort,
    /// Folder for files of all ranks: `$ALL`.
    pub(crate) all: TempDir,
}

impl Hosts {
    pub(crate) fn new() -> Self {
        Self {
            port: StorePort::reserve(Interfaces::Loopback).unwrap(),
            all: tempfile::tempdir().unwrap(),
        }
    }

    pub(crate) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port.number())
    }

    /// Returns a launcher of a job with fixed node ranks.
    pub(crate) fn numbered(&self, node_rank: usize, nodes: usize, nproc: usize) -> Job {
        self.any(nproc)
            .flag(&format!("--nnodes={nodes}"))
            .flag(&format!("--node-rank={node_rank}"))
            .flag("--master-addr=127.0.0.1")
            .flag(&format!("--master-port={}", self.port.number()))
    }

    /// Returns a launcher of an elastic job.
    pub(crate) fn elastic(&self, nodes: &str, nproc: usize) -> Job {
        self.any(nproc)
            .flag(&format!("--nnodes={nodes}"))
            .flag(&format!("--rdzv-endpoint={}", self.address()))
    }

    pub(crate) fn any(&self, nproc: usize) -> Job {
        let mut job = Job::new(nproc);
        job.command.env("ALL", self.all.path());
        job
    }

    /// Returns the flag for a file with a secret.
    pub(crate) fn secret(&self, name: &str) -> String {
        let path = self.all.path().join(name);
        let mut file =
            fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).unwrap();
        write!(file, "the {name} secret of a job").unwrap();
        format!("--rdzv-secret-file={}", path.display())
    }

    /// Waits until ranks have created these files.
    pub(crate) fn wait_for(&self, names: &[&str]) {
        job::wait_until(|| names.iter().all(|name| self.all.path().join(name).exists()));
    }

    pub(crate) fn touch(&self, name: &str) {
        fs::write(self.all.path().join(name), "").unwrap();
    }
}

pub(crate) fn finish(launchers: Vec<Running>) -> Vec<Run> {
    launchers.into_iter().map(Running::finish).collect()
}
