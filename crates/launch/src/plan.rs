//! Launch plan, made from options and facts: everything that is decided before a process starts.

use std::ffi::OsString;
use std::path::PathBuf;

use brigade_hardware::{NearNic, Vendor};
use brigade_rank_env::{LocalRank, Rank, StoreEndpoint, StoreHost, World, WorldError, WorldSize};
use brigade_rendezvous::{Assignment, TimeLimits, random_name};
use nix::unistd::gethostname;

use crate::placement::{self, PlacementFacts, RankSetup, TPU_VARIABLES};
use crate::program::{
    CargoTarget, Invocation, Program, ProgramError, SearchFacts, with_local_rank,
};
use crate::rendezvous::RendezvousMode;
use crate::{
    Device, Devices, ForOthers, ForPython, LaunchError, LaunchOptions, OutputFacts, OutputOptions,
    OutputPlan,
};

/// Facts about this host that a launch plan depends on, gathered once.
#[derive(Clone, Debug)]
pub struct HostFacts {
    /// Number of cores that this process may use, by its affinity mask and cgroup quota.
    pub cores: usize,
    /// Names of the variables of [`LaunchPlan::env`] and of the ranks' placement that the user has set already.
    pub set_by_user: Vec<&'static str>,
    /// Value of `OMP_NUM_THREADS`, if the user has set it.
    pub user_threads: Option<usize>,
    /// Location of the program, or the reason why it cannot be run.
    pub program: Result<Invocation, ProgramError>,
    /// `true` if Python runs the program, or may run it.
    pub is_python: bool,
    /// Unique name of this launcher.
    pub agent_id: String,
    /// Name of this host.
    pub host: String,
    /// Facts on which the display of output depends.
    pub output: OutputFacts,
    /// Facts about processors and accelerators, as far as the options need them.
    pub placement: PlacementFacts,
}

impl HostFacts {
    /// Gathers the facts about this host, its environment and the program's file.
    #[must_use]
    pub fn gather(options: &LaunchOptions) -> Self {
        let is_set = |name: &&'static str| {
            let inherited = std::env::var_os(name).is_some_and(|v| !v.is_empty());
            inherited || options.env.iter().any(|(own, _)| own == name)
        };
        let own = options.env.iter().find(|(name, _)| name == OMP_NUM_THREADS);
        let threads =
            own.map(|(_, value)| value.clone()).or_else(|| std::env::var(OMP_NUM_THREADS).ok());
        // A list has a number for each level of nesting.
        let user_threads = threads.and_then(|it| it.split(',').next()?.trim().parse().ok());
        let program = options.program.find(SearchFacts::gather().search());
        Self {
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            set_by_user: TUNED.into_iter().chain(TPU_VARIABLES).filter(is_set).collect(),
            user_threads,
            is_python: program.as_ref().is_ok_and(|it| options.program.is_python(it)),
            program,
            // Two launchers must not share a name.
            agent_id: new_name(),
            host: gethostname().ok().and_then(|name| name.into_string().ok()).unwrap_or_default(),
            output: OutputFacts::gather(),
            placement: PlacementFacts::gather(&options.placement, options.nproc),
        }
    }
}

/// Launch plan of this host: the command and environment of each rank, and how the hosts meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchPlan {
    /// Options that the plan was made from. The other fields are derived from them and from the host's facts: use those
    /// for the environment, the output and the name of the job.
    pub options: LaunchOptions,
    /// Number of ranks on this host.
    pub local_world_size: WorldSize,
    /// Cargo target that [`LaunchPlan::prepare`] builds first, if any.
    pub build: Option<CargoTarget>,
    /// Path of the program's file.
    pub program: PathBuf,
    /// Name of the program as the user wrote it: its `argv[0]`.
    pub name: OsString,
    /// Arguments of the program, before `${local_rank}` is replaced.
    pub args: Vec<OsString>,
    /// Environment variables for every rank, besides its place in the world.
    pub env: Vec<(&'static str, String)>,
    /// Environment variables of the user for every rank. All others take precedence.
    pub user_env: Vec<(String, String)>,
    /// Time limits of the job, derived from the shutdown timeout and the heartbeat timeout.
    pub limits: TimeLimits,
    /// Name of the job.
    pub run_id: String,
    /// Unique name of this launcher.
    pub agent_id: String,
    /// Name of this host.
    pub host: String,
    /// Plan of the ranks' output.
    pub output: OutputPlan,
    /// Placement of each rank of this host, by local rank.
    pub ranks: Vec<RankSetup>,
}

impl LaunchPlan {
    /// Computes the plan. A pure function: the same options and facts give the same plan.
    ///
    /// The hardware threads that this process may use are divided evenly, at least one per rank, unless the user has
    /// set `OMP_NUM_THREADS` or requests a number; a rank that is bound has as many as it has cores.
    ///
    /// Several ranks that use all of them get `OMP_WAIT_POLICY=PASSIVE`: a thread of libgomp that spins at a barrier
    /// delays the one it waits for (two epochs of two ranks with two threads each, on two cores: 3.7 s instead of 5.6
    /// s). One rank alone is faster when it spins (3.2 s instead of 3.5 s). libgomp reads both variables before `main`,
    /// so only a launcher can set them.
    ///
    /// # Errors
    /// The number of ranks or threads is 0, the program cannot be run, or the hosts cannot meet with the options.
    ///
    /// ```
    /// use brigade_launch::{HostFacts, LaunchOptions, LaunchPlan};
    ///
    /// let options = LaunchOptions { nproc: 4.into(), program: "sh".into(), ..Default::default() };
    /// let gathered = HostFacts::gather(&options);
    /// // What this process has in its environment would count as the user's word.
    /// let facts = HostFacts { cores: 10, user_threads: None, set_by_user: vec![], ..gathered };
    /// let plan = LaunchPlan::resolve(&options, &facts)?;
    /// assert!(plan.env.contains(&("OMP_NUM_THREADS", "2".to_owned())));
    /// # Ok::<(), brigade_launch::LaunchError>(())
    /// ```
    pub fn resolve(options: &LaunchOptions, facts: &HostFacts) -> Result<Self, LaunchError> {
        let wanted = options.placement.devices.as_ref();
        let nproc = facts.placement.devices.count(options.nproc, wanted, facts.cores)?;
        let local_world_size =
            WorldSize::new(nproc).map_err(|_| LaunchError::OptionOutOfRange {
                option: "nproc",
                value: nproc,
                reason: if nproc == 0 { "a job has at least one rank" } else { "too many ranks" },
            })?;
        if options.threads_per_rank == Some(0) {
            return Err(LaunchError::OptionOutOfRange {
                option: "threads-per-rank",
                value: 0,
                reason: "a rank needs at least one thread",
            });
        }
        options.rendezvous.check(options.nodes)?;
        let Invocation { file, name, mut args } = facts.program.clone()?;
        let mut user_env = options.env.clone();
        if let Some(ForPython { variables, others }) = &options.for_python {
            let variables = match others {
                _ if facts.is_python => variables,
                ForOthers::Variables(variables) => variables,
                ForOthers::Refused { what, remedy } => {
                    let (what, remedy) = (what.clone(), remedy.clone());
                    return Err(LaunchError::ForPython { what, program: name, remedy });
                }
            };
            let is_free = |name: &String| options.env.iter().all(|own| own.0 != *name);
            user_env.extend(variables.iter().filter(|it| is_free(&it.0)).cloned());
        }
        args.extend_from_slice(&options.args);
        let build = match &options.program {
            Program::Cargo(target) => Some(target.clone()),
            _ => None,
        };

        let free = |name: &str| !facts.set_by_user.contains(&name);
        let alone = options.rendezvous == RendezvousMode::OneHost;
        let mut ranks = placement::place(&options.placement, &facts.placement, nproc, alone, free)?;
        let bound = placement::threads(&ranks, &facts.placement.topology);
        let mut env = Vec::new();
        if let Some(threads) = options.threads_per_rank {
            env.push((OMP_NUM_THREADS, threads.to_string()));
        } else if let Some(bound) = bound.filter(|_| free(OMP_NUM_THREADS)) {
            // A control group may limit the processor time below the number of processors.
            let is_limited = facts.cores < facts.placement.topology.cpus.len();
            let most = if is_limited { (facts.cores / nproc).max(1) } else { usize::MAX };
            for (rank, threads) in ranks.iter_mut().zip(bound) {
                rank.env.push((OMP_NUM_THREADS, threads.min(most).to_string()));
            }
        } else if free(OMP_NUM_THREADS) {
            env.push((OMP_NUM_THREADS, (facts.cores / nproc).max(1).to_string()));
        }
        let set = |name: &str, env: &[(&str, String)]| -> Option<usize> {
            env.iter().find(|it| it.0 == name)?.1.parse().ok()
        };
        let threads = |rank: &RankSetup| {
            let own = set(OMP_NUM_THREADS, &rank.env).or_else(|| set(OMP_NUM_THREADS, &env));
            own.or(facts.user_threads).unwrap_or(facts.cores)
        };
        let uses_all = ranks.iter().map(threads).sum::<usize>() >= facts.cores;
        if free(OMP_WAIT_POLICY) && nproc > 1 && uses_all {
            env.push((OMP_WAIT_POLICY, "PASSIVE".to_owned()));
        }
        if free(TORCH_NCCL_ASYNC_ERROR_HANDLING) {
            env.push((TORCH_NCCL_ASYNC_ERROR_HANDLING, "1".to_owned()));
        }

        // For a job on several hosts, the user has to request it.
        let raw = options.output.raw.or_else(|| (!alone).then_some(false));
        let output = OutputOptions { raw, ..options.output.clone() };
        let run_id = match &options.run_id {
            Some(id) => id.clone(),
            None if alone => facts.agent_id.clone(),
            None => SHARED_RUN_ID.to_owned(),
        };
        Ok(Self {
            options: options.clone(),
            local_world_size,
            build,
            program: file,
            name,
            args,
            env,
            user_env,
            limits: TimeLimits::new(options.heartbeat_timeout, options.shutdown_timeout),
            run_id,
            agent_id: facts.agent_id.clone(),
            host: facts.host.clone(),
            output: OutputPlan::resolve(&output, &facts.output, nproc)?,
            ranks,
        })
    }

    /// Builds the Cargo target, if the plan has one. A second call does nothing. Cargo's progress and messages go to
    /// this process's stderr.
    ///
    /// # Errors
    /// The build fails.
    pub fn prepare(&mut self) -> Result<(), LaunchError> {
        let Some(target) = &self.build else { return Ok(()) };
        let built = target.build()?;
        let inherited = std::env::var_os(LD_LIBRARY_PATH).unwrap_or_default();
        let inherited =
            std::env::split_paths(&inherited).filter(|path| !path.as_os_str().is_empty());
        let paths = std::env::join_paths(built.libraries.into_iter().chain(inherited));
        // A list that is not valid text is not changed.
        if let Some(paths) = paths.ok().and_then(|paths| paths.into_string().ok()) {
            self.env.push((LD_LIBRARY_PATH, paths));
        }
        self.name = built.executable.clone().into();
        self.program = built.executable;
        self.build = None;
        Ok(())
    }

    /// Returns the vendor of the ranks' devices, and the device of each local rank, if it has one, with the nearby network
    /// cards as the rank sees them. Examines this host. A launch does not need it.
    #[must_use]
    pub fn devices(&self) -> (&'static dyn Vendor, Vec<(Device, Vec<NearNic>)>) {
        let root = brigade_hardware::host_root();
        let there = Devices::read(&root, placement::environment(&self.user_env));
        let chosen = there.choose(self.options.placement.devices.as_ref()).unwrap_or_default();
        if chosen.is_empty() {
            return (there.kind, Vec::new());
        }
        let nics = brigade_hardware::nics(&root);
        let ranks = chosen.into_iter().take(self.ranks.len());
        let devices = ranks
            .map(|device| (device.clone(), brigade_hardware::of_device(&root, &device, &nics)))
            .collect();
        (there.kind, devices)
    }

    /// Returns the world as the program of a rank sees it: with local rank 0 under `--virtual-local-rank`.
    #[must_use]
    pub fn world_of_program(&self, mut world: World) -> World {
        if self.options.placement.virtual_local_rank {
            world.local_rank = LocalRank::ZERO;
        }
        world
    }

    /// Returns the program's arguments on one rank.
    #[must_use]
    pub fn args_for(&self, local_rank: usize) -> Vec<OsString> {
        self.args.iter().map(|arg| with_local_rank(arg, local_rank)).collect()
    }

    /// Returns the place of one rank, once it is known which hosts take part and where the ranks meet.
    ///
    /// # Errors
    /// `local_rank` is not below the number of ranks of this host, or the assignment does not describe a valid world.
    pub fn world(
        &self,
        part: &Assignment,
        local_rank: usize,
        host: StoreHost,
    ) -> Result<World, WorldError> {
        let addr = part.master_addr.clone();
        let store = StoreEndpoint { addr, port: part.master_port, host };
        let mut world = World::on_one_host(local_rank, WorldSize::new(part.nproc)?, store)?;
        world.world_size = WorldSize::new(part.world_size)?;
        world.rank = Rank::new(part.first_rank.saturating_add(local_rank), world.world_size)?;
        (world.node_rank, world.num_nodes) = (part.node_rank, part.num_nodes);
        (world.restart_count, world.max_restarts) = (part.restarts, part.max_restarts);
        world.run_id = Some(self.run_id.clone());
        world.role.clone_from(&self.options.role);
        Ok(world)
    }
}

/// Returns a name that no other launcher or job has.
pub(crate) fn new_name() -> String {
    // A system without random numbers has just started: the process number is unique enough.
    random_name("brigade").unwrap_or_else(|_| format!("brigade-{}", std::process::id()))
}

/// Name of a job on several hosts without a name: torchrun's default.
const SHARED_RUN_ID: &str = "none";
const LD_LIBRARY_PATH: &str = "LD_LIBRARY_PATH";
const OMP_NUM_THREADS: &str = "OMP_NUM_THREADS";
const OMP_WAIT_POLICY: &str = "OMP_WAIT_POLICY";
/// torchrun's default for PyTorch programs: a failed NCCL collective ends the process.
const TORCH_NCCL_ASYNC_ERROR_HANDLING: &str = "TORCH_NCCL_ASYNC_ERROR_HANDLING";
const TUNED: [&str; 3] = [OMP_NUM_THREADS, OMP_WAIT_POLICY, TORCH_NCCL_ASYNC_ERROR_HANDLING];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Endpoint, NodeRange};

    fn facts(cores: usize, set_by_user: &[&'static str]) -> HostFacts {
        HostFacts {
            cores,
            set_by_user: set_by_user.to_vec(),
            user_threads: None,
            program: Ok(Invocation {
                file: "/bin/train".into(),
                name: "train".into(),
                args: Vec::new(),
            }),
            is_python: false,
            agent_id: "job".to_owned(),
            host: "node1".to_owned(),
            output: OutputFacts::default(),
            placement: PlacementFacts::default(),
        }
    }

    #[test]
    fn cores_are_shared_out() {
        // Cores, ranks, variables set by the user, requested threads, expected OMP_NUM_THREADS.
        type Case = (usize, usize, &'static [&'static str], Option<usize>, Option<&'static str>);
        let table: [Case; 9] = [
            (8, 1, &[], None, Some("8")),
            (8, 2, &[], None, Some("4")),
            (8, 3, &[], None, Some("2")),
            (2, 2, &[], None, Some("1")),
            (2, 64, &[], None, Some("1")),
            (8, 2, &[OMP_NUM_THREADS], None, None),
            (8, 2, &[OMP_NUM_THREADS], Some(3), Some("3")),
            (8, 2, &[OMP_WAIT_POLICY], None, Some("4")),
            (1, 1, &[], Some(16), Some("16")),
        ];
        for (cores, nproc, set, threads_per_rank, expected) in table {
            let options =
                LaunchOptions { nproc: nproc.into(), threads_per_rank, ..Default::default() };
            let plan = LaunchPlan::resolve(&options, &facts(cores, set)).unwrap();
            let value = |name| plan.env.iter().find(|v| v.0 == name).map(|v| v.1.as_str());
            assert_eq!(value(OMP_NUM_THREADS), expected, "{cores} cores, {nproc} ranks, {set:?}");
        }
    }

    #[test]
    fn ranks_that_share_all_cores_do_not_spin() {
        // Cores, ranks, requested threads, threads of the user, variables set by the user, `true` for PASSIVE.
        type Case = (usize, usize, Option<usize>, Option<usize>, &'static [&'static str], bool);
        let table: [Case; 8] = [
            (8, 1, None, None, &[], false),
            (8, 1, Some(16), None, &[], false),
            (8, 2, None, None, &[], true),
            (8, 3, None, None, &[], false),
            (8, 2, Some(2), None, &[], false),
            (8, 2, None, Some(8), &[OMP_NUM_THREADS], true),
            (8, 2, None, Some(1), &[OMP_NUM_THREADS], false),
            (8, 2, None, None, &[OMP_WAIT_POLICY], false),
        ];
        for (cores, nproc, threads_per_rank, user_threads, set, expected) in table {
            let options =
                LaunchOptions { nproc: nproc.into(), threads_per_rank, ..Default::default() };
            let facts = HostFacts { user_threads, ..facts(cores, set) };
            let plan = LaunchPlan::resolve(&options, &facts).unwrap();
            let is_passive = plan.env.contains(&(OMP_WAIT_POLICY, "PASSIVE".to_owned()));
            assert_eq!(is_passive, expected, "{cores} cores, {nproc} ranks, {set:?}");
        }
    }

    #[test]
    fn refusals() {
        let refuse = |options: LaunchOptions, facts: HostFacts| {
            LaunchPlan::resolve(&options, &facts).unwrap_err().to_string()
        };
        assert_eq!(
            refuse(LaunchOptions { nproc: 0.into(), ..Default::default() }, facts(8, &[])),
            "--nproc 0 is not possible: a job has at least one rank"
        );
        assert_eq!(
            refuse(
                LaunchOptions { threads_per_rank: Some(0), ..Default::default() },
                facts(8, &[])
            ),
            "--threads-per-rank 0 is not possible: a rank needs at least one thread"
        );
        let (what, remedy) = ("fp8 (flag --mixed-precision)".into(), "leave it out".into());
        let others = ForOthers::Refused { what, remedy };
        let for_python = Some(ForPython { variables: vec![], others });
        let options = LaunchOptions { for_python, ..Default::default() };
        assert_eq!(
            refuse(options.clone(), facts(8, &[])),
            "fp8 (flag --mixed-precision) needs a Python program that uses Accelerate, and train is not a \
             Python program; leave it out"
        );
        let python = HostFacts { is_python: true, ..facts(8, &[]) };
        assert!(LaunchPlan::resolve(&options, &python).is_ok());

        let pairs = |value: &str| vec![("A".to_owned(), value.to_owned())];
        let others = ForOthers::Variables(pairs("other"));
        let for_python = Some(ForPython { variables: pairs("python"), others });
        let options = LaunchOptions { for_python, ..Default::default() };
        for (facts, expected) in [(python, "python"), (facts(8, &[]), "other")] {
            assert_eq!(LaunchPlan::resolve(&options, &facts).unwrap().user_env, pairs(expected));
        }
        let directory =
            ProgramError::Executable(brigade_ssh::executable::ExecutableError::Directory {
                path: "/tmp".into(),
            });
        let no_program = HostFacts { program: Err(directory.clone()), ..facts(8, &[]) };
        assert_eq!(refuse(LaunchOptions::default(), no_program), directory.to_string());
    }

    #[test]
    fn places() {
        let (nproc, role) = (2.into(), "actor".to_owned());
        let options = LaunchOptions { nproc, role, ..Default::default() };
        let plan = LaunchPlan::resolve(&options, &facts(8, &[])).unwrap();
        let part = Assignment {
            attempt: 2,
            restarts: 1,
            max_restarts: 3,
            node_rank: 1,
            num_nodes: 2,
            first_rank: 4,
            nproc: 2,
            world_size: 6,
            master_addr: "node1".to_owned(),
            master_port: 5,
            recorded: false,
        };
        let world = plan.world(&part, 1, StoreHost::Rank0).unwrap();
        assert_eq!((world.rank.as_usize(), world.local_rank.as_usize()), (5, 1));
        assert_eq!((world.world_size.as_usize(), world.local_world_size.as_usize()), (6, 2));
        assert_eq!((world.node_rank, world.num_nodes), (1, 2));
        assert_eq!((world.restart_count, world.max_restarts), (1, 3));
        assert_eq!((world.store.addr.as_str(), world.store.port), ("node1", 5));
        assert_eq!((world.run_id.as_deref(), world.role.as_str()), (Some("job"), "actor"));
        assert!(plan.world(&part, 2, StoreHost::Rank0).is_err());
        let beyond = Assignment { first_rank: 5, ..part };
        assert!(plan.world(&beyond, 1, StoreHost::Rank0).is_err());
    }

    #[test]
    fn names_of_jobs() {
        let name = |run_id: Option<&str>, rendezvous| {
            let run_id = run_id.map(str::to_owned);
            let nodes = NodeRange { min: 1, max: 1 };
            let options = LaunchOptions { run_id, rendezvous, nodes, ..Default::default() };
            let plan = LaunchPlan::resolve(&options, &facts(8, &[])).unwrap();
            plan.run_id
        };
        let endpoint: Endpoint = "node1".parse().unwrap();
        let elastic = RendezvousMode::Elastic { endpoint, serve: None };
        assert_eq!(name(None, RendezvousMode::OneHost), "job");
        assert_eq!(name(Some("night"), RendezvousMode::OneHost), "night");
        assert_eq!(name(None, elastic.clone()), "none");
        assert_eq!(name(Some("night"), elastic), "night");
    }
}
