//! Ranks of this host, with their commands and variables.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::Path;

use brigade_hardware::{NearNic, Vendor, nearest};
use brigade_launch::{
    Assignment, ChosenPorts, Device, LaunchPlan, LogFolder, NodeRange, RendezvousMode,
};
use brigade_rank_env::text::escaped;
use brigade_rank_env::{StoreHost, env};
use serde_json::{Map, Value, json};

use super::{built, quoted};
use crate::secrets::shown;

/// The ranks of this host.
pub(super) struct Here<'a> {
    pub(super) plan: &'a LaunchPlan,
}

impl Here<'_> {
    pub(super) fn text(&self, out: &mut impl Write) -> io::Result<()> {
        let ranks = self.ranks();
        writeln!(out, "\nhosts: {}", self.rendezvous())?;
        writeln!(out, "ranks of this host: {}", ranks.len())?;
        let shared = shared(&ranks);
        let is_one_command = ranks.len() > 1 && same(&ranks, |it| &it.command);
        if let [first, _, ..] = ranks.as_slice() {
            writeln!(out, "  every rank")?;
            if is_one_command {
                writeln!(out, "    {}", escaped(first.command.join(" ")))?;
            }
            for (name, value) in &shared {
                writeln!(out, "    {}={}", escaped(name), quoted(value))?;
            }
        }
        for rank in &ranks {
            match rank.rank {
                Some(number) => writeln!(out, "  rank {number}")?,
                None => writeln!(out, "  local rank {}", rank.local_rank)?,
            }
            if !is_one_command {
                writeln!(out, "    {}", escaped(rank.command.join(" ")))?;
            }
            if let Some(cpus) = &rank.cpus {
                writeln!(out, "    on processors {cpus}")?;
            }
            if let Some(gpu) = &rank.gpu {
                writeln!(out, "    {}", gpu.text())?;
            }
            for (name, value) in rank.env.iter().filter(|it| !shared.contains(it)) {
                writeln!(out, "    {}={}", escaped(name), quoted(value))?;
            }
        }
        Ok(())
    }

    pub(super) fn json(&self, answer: &mut Map<String, Value>) {
        let rank = |rank: Rank| {
            let env: Map<String, Value> =
                rank.env.into_iter().map(|(name, value)| (name, value.into())).collect();
            json!({
                "rank": rank.rank,
                "local_rank": rank.local_rank,
                "command": rank.command,
                "env": env,
                "cpus": rank.cpus,
                "gpu": rank.gpu.as_ref().map(|it| &it.device),
                "nics": rank.gpu.as_ref().map(|it| &it.nics),
            })
        };
        answer.insert("rendezvous".to_owned(), self.rendezvous().into());
        answer.insert("ranks".to_owned(), self.ranks().into_iter().map(rank).collect());
    }

    fn ranks(&self) -> Vec<Rank> {
        let (kind, gpus) = self.plan.devices();
        let mut gpus = gpus.into_iter();
        let mut rank = |local_rank: usize| {
            let gpu = gpus.next().map(|(device, nics)| RankGpu { kind, device, nics });
            Some(Rank { gpu, ..self.rank(local_rank)? })
        };
        (0..self.plan.ranks.len()).filter_map(&mut rank).collect()
    }

    /// Returns the variables of one rank of this host, in addition to this process's environment.
    fn rank(&self, local_rank: usize) -> Option<Rank> {
        let plan = self.plan;
        let part = self.part();
        let world = plan.world(&part, local_rank, StoreHost::Rank0).ok()?;
        let setup = plan.ranks.get(local_rank)?;
        let open: &[&str] = match plan.options.rendezvous {
            // The ranks of the first host begin at 0.
            RendezvousMode::OneHost => &[],
            RendezvousMode::Static { node_rank: 0, .. } => OPEN_WITH_OTHERS,
            RendezvousMode::Static { .. } => OPEN_AFTER_OTHERS,
            RendezvousMode::Elastic { .. }
            | RendezvousMode::Etcd { .. }
            | RendezvousMode::Launcher { .. } => OPEN_IN_A_RENDEZVOUS,
        };
        let place =
            plan.world_of_program(world.clone()).to_env().into_iter().map(|(name, value)| {
                let value = if name == env::MASTER_PORT {
                    plan.options.store_port.as_ref().map_or_else(
                        || "(a free port for each attempt)".to_owned(),
                        |ChosenPorts { ports, .. }| {
                            if ports.first == ports.last {
                                ports.to_string()
                            } else {
                                format!("(a free one of {ports} for each attempt)")
                            }
                        },
                    )
                } else if open.contains(&name) {
                    self.open(&value)
                } else {
                    value
                };
                (name.to_owned(), value)
            });
        let is_first = world.is_main() && !open.contains(&env::RANK);
        let later = [
            (env::BRIGADE_AGENT, "(a name for this launch)", true),
            (env::BRIGADE_STORE_FD, "(a socket that is bound to the port)", is_first),
            (env::BRIGADE_PROGRESS_FD, "(a pipe to the launcher)", !plan.output.raw),
            (
                env::TORCHELASTIC_ERROR_FILE,
                "(a file for each attempt)",
                plan.output.folder != LogFolder::Discard,
            ),
        ];
        let later = later
            .into_iter()
            .filter(|(_, _, is_set)| *is_set)
            .map(|(name, words, _)| (name.to_owned(), words.to_owned()));
        let tuned = plan.env.iter().chain(&setup.env);
        let tuned = tuned.map(|(name, value)| ((*name).to_owned(), value.clone()));
        let mut env: Vec<(String, String)> = Vec::new();
        for (name, value) in plan.user_env.iter().cloned().chain(place).chain(later).chain(tuned) {
            env.retain(|it| it.0 != name);
            let value = shown(&name, &value).to_owned();
            env.push((name, value));
        }
        Some(Rank {
            rank: (!open.contains(&env::RANK)).then(|| world.rank.as_usize()),
            local_rank,
            command: self.command(local_rank),
            env,
            cpus: setup.cpus.as_ref().map(ToString::to_string),
            gpu: None,
        })
    }

    /// Marks a value that depends on the other hosts. With fixed node ranks, most hosts have as many ranks as this one.
    fn open(&self, value: &str) -> String {
        match self.plan.options.rendezvous {
            RendezvousMode::Static { .. } => {
                let each = match self.plan.ranks.len() {
                    1 => "one rank".to_owned(),
                    more => format!("{more} ranks"),
                };
                format!("({value} if every host has {each})")
            }
            _ => "(determined when the hosts have met)".to_owned(),
        }
    }

    /// Returns the assignment of this host, as far as it is known before the rendezvous.
    fn part(&self) -> Assignment {
        let plan = self.plan;
        let nproc = plan.ranks.len();
        let (node_rank, num_nodes, master_addr) = match &plan.options.rendezvous {
            RendezvousMode::Static { node_rank, master_addr, .. } => {
                (*node_rank, plan.options.nodes.max, master_addr.clone())
            }
            _ => (0, 1, "127.0.0.1".to_owned()),
        };
        Assignment {
            attempt: 0,
            restarts: 0,
            max_restarts: plan.options.max_restarts,
            node_rank,
            num_nodes,
            first_rank: node_rank * nproc,
            nproc,
            world_size: num_nodes * nproc,
            master_addr,
            master_port: 0,
            recorded: plan.options.events.is_some(),
        }
    }

    /// Describes the rendezvous method and its address.
    fn rendezvous(&self) -> String {
        let NodeRange { min, max } = self.plan.options.nodes;
        let nodes = if min == max { min.to_string() } else { format!("{min} to {max}") };
        match &self.plan.options.rendezvous {
            RendezvousMode::OneHost => "one host".to_owned(),
            // A launcher on another host requests this; there is no command-line flag for it.
            RendezvousMode::Launcher { node_rank } => {
                format!("{nodes} hosts, of which this is {node_rank}")
            }
            RendezvousMode::Static { node_rank, master_addr, master_port } => format!(
                "{nodes} hosts, of which this is number {node_rank}; they meet at host 0, which is \
                 {master_addr}, on port {master_port}"
            ),
            RendezvousMode::Elastic { endpoint, .. } => {
                format!("{nodes} hosts, which meet at {endpoint}")
            }
            RendezvousMode::Etcd { endpoints } => {
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

/// Process that would be started.
struct Rank {
    /// `None` if it depends on the other hosts.
    rank: Option<usize>,
    local_rank: usize,
    command: Vec<String>,
    env: Vec<(String, String)>,
    cpus: Option<String>,
    gpu: Option<RankGpu>,
}

/// GPU of a rank, with its distances to the network cards.
struct RankGpu {
    kind: &'static dyn Vendor,
    device: Device,
    nics: Vec<NearNic>,
}

impl RankGpu {
    /// Describes the GPU: `on GPU 0 (NVIDIA H100, PCI 0000:3b:00.0), near mlx5_0 (same PCI switch)`.
    fn text(&self) -> String {
        let Device { id, model, pci, .. } = &self.device;
        let place = pci.as_ref().map(|it| format!("PCI {it}"));
        let about: Vec<String> = model.iter().cloned().chain(place).collect();
        let about =
            if about.is_empty() { String::new() } else { format!(" ({})", about.join(", ")) };
        let near = nearest(&self.nics);
        let names: Vec<&str> = near.iter().map(|nic| nic.name()).collect();
        let word = self.kind.device_word();
        match near.first() {
            Some(nic) => {
                format!(
                    "on {word} {id}{about}, near {} ({})",
                    names.join(" and "),
                    nic.distance.words()
                )
            }
            None => format!("on {word} {id}{about}"),
        }
    }
}

/// Returns the variables that have the same value on all ranks.
fn shared(ranks: &[Rank]) -> Vec<(String, String)> {
    let [first, _, ..] = ranks else { return Vec::new() };
    first.env.iter().filter(|pair| ranks.iter().all(|it| it.env.contains(pair))).cloned().collect()
}

fn same<T: PartialEq>(ranks: &[Rank], of: impl Fn(&Rank) -> &T) -> bool {
    ranks.windows(2).all(|pair| of(&pair[0]) == of(&pair[1]))
}

/// Variables that depend on the numbers of ranks on other hosts.
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
