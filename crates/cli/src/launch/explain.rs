//! `brigade launch --explain`: what would be started, and where each value comes from.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::Path;

use brigade_config::{Layer, Place};
use brigade_launch::hosts::HostsOptions;
use brigade_launch::{
    Assignment, LaunchOptions, LaunchPlan, LogFolder, Meeting, NprocSpec, Program,
};
use brigade_world::{StoreHost, env};
use serde_json::{Map, Value, json};

use super::Job;
use crate::config::show;

/// What there is to explain.
pub(super) struct Explanation<'a> {
    pub(super) layers: &'a Layer,
    pub(super) file: Option<&'a Place>,
    pub(super) options: &'a LaunchOptions,
    pub(super) job: &'a Job,
}

/// One process that would be started.
struct Rank {
    /// Open where it depends on the other hosts.
    rank: Option<usize>,
    local_rank: usize,
    command: Vec<String>,
    env: Vec<(String, String)>,
    cpus: Option<String>,
}

impl Explanation<'_> {
    /// Answers on `out`. A reader that has seen enough ends the answer, without an error.
    pub(super) fn write(&self, in_json: bool, out: impl Write) -> io::Result<()> {
        let mut out = io::BufWriter::new(out);
        let written = if in_json { self.json(&mut out) } else { self.text(&mut out) };
        match written.and_then(|()| out.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            written => written,
        }
    }

    fn text(&self, out: &mut impl Write) -> io::Result<()> {
        show::text(self.layers, self.file, show::Which::Set, out)?;
        match self.job {
            Job::Here(plan) => Here { plan }.text(out)?,
            Job::OnHosts(hosts) => OnHosts { hosts, options: self.options }.text(out)?,
        }
        writeln!(out, "\nnothing was started")
    }

    fn json(&self, out: &mut impl Write) -> io::Result<()> {
        let mut answer = show::json(self.layers, self.file);
        match self.job {
            Job::Here(plan) => Here { plan }.json(&mut answer),
            Job::OnHosts(hosts) => OnHosts { hosts, options: self.options }.json(&mut answer),
        }
        serde_json::to_writer_pretty(&mut *out, &Value::Object(answer))?;
        writeln!(out)
    }
}

/// The ranks of this host.
struct Here<'a> {
    plan: &'a LaunchPlan,
}

impl Here<'_> {
    fn text(&self, out: &mut impl Write) -> io::Result<()> {
        let ranks = self.ranks();
        writeln!(out, "\nhosts: {}", self.meeting())?;
        writeln!(out, "ranks of this host: {}", ranks.len())?;
        let shared = shared(&ranks);
        if let Some(first) = ranks.first() {
            writeln!(out, "  every rank")?;
            if same(&ranks, |it| &it.command) {
                writeln!(out, "    {}", first.command.join(" "))?;
            }
            for (name, value) in &shared {
                writeln!(out, "    {name}={}", quoted(value))?;
            }
        }
        for rank in &ranks {
            match rank.rank {
                Some(number) => writeln!(out, "  rank {number}")?,
                None => writeln!(out, "  local rank {}", rank.local_rank)?,
            }
            if !same(&ranks, |it| &it.command) {
                writeln!(out, "    {}", rank.command.join(" "))?;
            }
            if let Some(cpus) = &rank.cpus {
                writeln!(out, "    on processors {cpus}")?;
            }
            for (name, value) in rank.env.iter().filter(|it| !shared.contains(it)) {
                writeln!(out, "    {name}={}", quoted(value))?;
            }
        }
        Ok(())
    }

    fn json(&self, answer: &mut Map<String, Value>) {
        let rank = |it: Rank| {
            let env: Map<String, Value> =
                it.env.into_iter().map(|(name, value)| (name, value.into())).collect();
            json!({
                "rank": it.rank,
                "local_rank": it.local_rank,
                "command": it.command,
                "env": env,
                "cpus": it.cpus,
            })
        };
        answer.insert("meeting".to_owned(), self.meeting().into());
        answer.insert("ranks".to_owned(), self.ranks().into_iter().map(rank).collect());
    }

    fn ranks(&self) -> Vec<Rank> {
        (0..self.plan.ranks.len()).filter_map(|local_rank| self.rank(local_rank)).collect()
    }

    /// What one rank of this host is given. Its environment is this process's besides.
    fn rank(&self, local_rank: usize) -> Option<Rank> {
        let plan = self.plan;
        let part = self.part();
        let world = plan.world(&part, local_rank, StoreHost::Rank0).ok()?;
        let setup = plan.ranks.get(local_rank)?;
        let open: &[&str] = match plan.meeting {
            // The ranks of the first host begin at 0.
            Meeting::OneHost => &[],
            Meeting::Static { node_rank: 0, .. } => OPEN_WITH_OTHERS,
            Meeting::Static { .. } => OPEN_AFTER_OTHERS,
            Meeting::Elastic { .. } | Meeting::Etcd { .. } | Meeting::Launcher { .. } => {
                OPEN_IN_A_RENDEZVOUS
            }
        };
        let place = plan.told(world.clone()).to_env().into_iter().map(|(name, value)| {
            let value = if name == env::MASTER_PORT {
                "(a free port for each attempt)".to_owned()
            } else if open.contains(&name) {
                "(known when the hosts have met)".to_owned()
            } else {
                value
            };
            (name.to_owned(), value)
        });
        let error_file = (plan.output.folder != LogFolder::Nowhere).then(|| {
            (env::TORCHELASTIC_ERROR_FILE.to_owned(), "(a file for each attempt)".to_owned())
        });
        let tuned = plan.env.iter().chain(&setup.env);
        let tuned = tuned.map(|(name, value)| ((*name).to_owned(), value.clone()));
        let mut env: Vec<(String, String)> = Vec::new();
        for (name, value) in
            plan.user_env.iter().cloned().chain(place).chain(error_file).chain(tuned)
        {
            env.retain(|it| it.0 != name);
            env.push((name, value));
        }
        Some(Rank {
            rank: open.is_empty().then(|| world.rank.as_usize()),
            local_rank,
            command: self.command(local_rank),
            env,
            cpus: setup.cpus.as_ref().map(ToString::to_string),
        })
    }

    /// This host's part, as far as it is known before the hosts have met.
    fn part(&self) -> Assignment {
        let plan = self.plan;
        let nproc = plan.ranks.len();
        let (node_rank, num_nodes, master_addr) = match &plan.meeting {
            Meeting::Static { node_rank, master_addr, .. } => {
                (*node_rank, plan.nodes.max, master_addr.clone())
            }
            _ => (0, 1, "127.0.0.1".to_owned()),
        };
        Assignment {
            attempt: 0,
            restarts: 0,
            max_restarts: plan.max_restarts,
            node_rank,
            num_nodes,
            first_rank: 0,
            nproc,
            world_size: nproc,
            master_addr,
            master_port: 0,
        }
    }

    /// Where the hosts meet, in words.
    fn meeting(&self) -> String {
        let nodes = self.plan.nodes;
        match &self.plan.meeting {
            Meeting::OneHost => "one host".to_owned(),
            // No command line asks for it: a launcher elsewhere does.
            Meeting::Launcher { node_rank } => {
                format!("{nodes} hosts, of which this is {node_rank}")
            }
            Meeting::Static { node_rank, master_addr, master_port } => format!(
                "{nodes} hosts, of which this is number {node_rank}; they meet at host 0, which is \
                 {master_addr}, on port {master_port}"
            ),
            Meeting::Elastic { endpoint, .. } => {
                format!("{nodes} hosts, which meet at {endpoint}")
            }
            Meeting::Etcd { endpoints } => {
                let endpoints: Vec<String> = endpoints.iter().map(ToString::to_string).collect();
                format!("{nodes} hosts, which meet through etcd at {}", endpoints.join(", "))
            }
        }
    }

    fn command(&self, local_rank: usize) -> Vec<String> {
        let words = |word: &OsString| word.to_string_lossy().into_owned();
        let program = match &self.plan.build {
            Some(target) => built(&target.name),
            None => Path::new(&self.plan.program).display().to_string(),
        };
        [program].into_iter().chain(self.plan.args_for(local_rank).iter().map(words)).collect()
    }
}

/// Agents on a list of hosts. What they find there is for them to say.
struct OnHosts<'a> {
    hosts: &'a HostsOptions,
    options: &'a LaunchOptions,
}

impl OnHosts<'_> {
    fn text(&self, out: &mut impl Write) -> io::Result<()> {
        let hosts = &self.hosts.hosts;
        writeln!(out, "\nhosts: {}, each by {}", hosts.len(), self.client())?;
        let mut first = Some(0);
        for host in hosts {
            let (count, last) = self.count(host.slots, first);
            let numbers = match (first, last) {
                (Some(first), Some(last)) if first == last => format!(": rank {first}"),
                (Some(first), Some(last)) => format!(": ranks {first} to {last}"),
                _ => String::new(),
            };
            writeln!(out, "  {}  {count}{numbers}", host.destination())?;
            first = last.map(|last| last + 1);
        }
        if let Some(min) = self.hosts.min_hosts {
            writeln!(out, "the job goes on while {min} of them are left")?;
        }
        if let Some(folder) = &self.hosts.workdir {
            writeln!(out, "in {}", folder.display())?;
        }
        writeln!(out, "every rank\n  {}", self.command().join(" "))?;
        for (name, value) in &self.options.env {
            writeln!(out, "  {name}={}", quoted(value))?;
        }
        Ok(())
    }

    fn json(&self, answer: &mut Map<String, Value>) {
        let host = |it: &brigade_launch::hosts::HostSpec| {
            let (count, _) = self.count(it.slots, None);
            json!({ "host": it.destination(), "nproc": count.trim_end_matches(" ranks") })
        };
        answer.insert("ssh".to_owned(), self.client().into());
        answer.insert("hosts".to_owned(), self.hosts.hosts.iter().map(host).collect());
        answer.insert("min_hosts".to_owned(), self.hosts.min_hosts.into());
        answer.insert("command".to_owned(), self.command().into());
    }

    fn client(&self) -> &str {
        self.hosts.ssh_command.as_deref().unwrap_or("ssh")
    }

    /// How many ranks a host has, and the number of its last one where that is known.
    fn count(&self, slots: Option<usize>, first: Option<usize>) -> (String, Option<usize>) {
        let count = match (slots, self.options.nproc) {
            (Some(count), _) | (None, NprocSpec::Count(count)) => count,
            (None, other) => return (format!("{other} ranks"), None),
        };
        (format!("{count} ranks"), first.map(|first| (first + count).saturating_sub(1)))
    }

    fn command(&self) -> Vec<String> {
        let words = |word: &OsString| word.to_string_lossy().into_owned();
        let program = match &self.options.program {
            Program::Cargo(target) => built(&target.name),
            Program::Module(name) => format!("python -u -m {}", words(name)),
            Program::Auto(name) | Program::Executable(name) => words(name),
        };
        [program].into_iter().chain(self.options.args.iter().map(words)).collect()
    }
}

fn built(name: &str) -> String {
    format!("(what cargo makes of {name})")
}

/// The variables that all ranks have with the same value.
fn shared(ranks: &[Rank]) -> Vec<(String, String)> {
    let Some(first) = ranks.first() else { return Vec::new() };
    first.env.iter().filter(|pair| ranks.iter().all(|it| it.env.contains(pair))).cloned().collect()
}

fn same<T: PartialEq>(ranks: &[Rank], of: impl Fn(&Rank) -> &T) -> bool {
    ranks.windows(2).all(|pair| of(&pair[0]) == of(&pair[1]))
}

/// A value with blanks shows where it begins and ends.
fn quoted(value: &str) -> String {
    if value.contains(char::is_whitespace) || value.is_empty() {
        format!("{value:?}")
    } else {
        value.to_owned()
    }
}

/// How many ranks the other hosts have is for them to say.
const OPEN_WITH_OTHERS: &[&str] = &[env::WORLD_SIZE, env::ROLE_WORLD_SIZE];
const OPEN_AFTER_OTHERS: &[&str] =
    &[env::RANK, env::ROLE_RANK, env::WORLD_SIZE, env::ROLE_WORLD_SIZE];
const OPEN_IN_A_RENDEZVOUS: &[&str] = &[
    env::RANK,
    env::ROLE_RANK,
    env::WORLD_SIZE,
    env::ROLE_WORLD_SIZE,
    env::GROUP_RANK,
    env::GROUP_WORLD_SIZE,
    env::MASTER_ADDR,
];
