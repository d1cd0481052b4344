//! The environment contract, as tables: what each set of variables means, and what is refused.

use std::process::Command;

use brigade_rank_env::{StoreEndpoint, StoreHost, World, WorldError, WorldSize, env};

/// Reads `"RANK=1 WORLD_SIZE=2"`.
fn read(vars: &str) -> Result<World, WorldError> {
    World::from_vars(|name| {
        vars.split_whitespace()
            .find_map(|pair| pair.split_once('=').filter(|(key, _)| *key == name))
            .map(|(_, value)| value.to_owned())
    })
}

const LOOPBACK: &str = "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500";
const REMOTE: &str = "MASTER_ADDR=node-0 MASTER_PORT=29500";

#[test]
fn nothing_that_places_a_process_means_alone() {
    for vars in ["", LOOPBACK, "TORCHELASTIC_RUN_ID=x", "BRIGADE_STORE_FD=3", "GROUP_RANK=7"] {
        assert_eq!(read(vars).unwrap(), World::alone(), "{vars}");
    }
}

#[test]
fn places() {
    // variables, then: rank, world, local rank, local world, node, nodes
    let table = [
        ("RANK=0 WORLD_SIZE=1".to_owned(), [0, 1, 0, 1, 0, 1]),
        (format!("RANK=1 WORLD_SIZE=2 {LOOPBACK}"), [1, 2, 1, 2, 0, 1]),
        ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=1".to_owned(), [1, 2, 1, 2, 0, 1]),
        ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=::1 MASTER_PORT=1".to_owned(), [1, 2, 1, 2, 0, 1]),
        // Kubeflow: one process to a pod
        (format!("RANK=3 WORLD_SIZE=4 {REMOTE}"), [3, 4, 0, 1, 3, 4]),
        (format!("RANK=3 WORLD_SIZE=4 GROUP_WORLD_SIZE=2 {REMOTE}"), [3, 4, 1, 2, 1, 2]),
        (format!("RANK=5 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4 {REMOTE}"), [5, 8, 1, 4, 1, 2]),
        (
            format!("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 {REMOTE}"),
            [5, 8, 1, 4, 1, 2],
        ),
        (format!("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 {REMOTE}"), [1, 2, 1, 2, 0, 1]),
        // torchrun --virtual-local-rank
        (
            format!("RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 {LOOPBACK}"),
            [1, 2, 0, 2, 0, 1],
        ),
        // hosts of different sizes: 3 ranks and 1
        (
            format!(
                "RANK=3 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=1 GROUP_WORLD_SIZE=2 {REMOTE}"
            ),
            [3, 4, 0, 1, 1, 2],
        ),
        (" RANK=0 WORLD_SIZE=1 MASTER_PORT=29500".to_owned(), [0, 1, 0, 1, 0, 1]),
    ];
    for (vars, expected) in table {
        let world = read(&vars).unwrap_or_else(|error| panic!("{vars}: {error}"));
        let actual = [
            world.rank.as_usize(),
            world.world_size.as_usize(),
            world.local_rank.as_usize(),
            world.local_world_size.as_usize(),
            world.node_rank,
            world.num_nodes,
        ];
        assert_eq!(actual, expected, "{vars}");
    }
}

#[test]
fn rank_0_or_the_agent_serves_the_store() {
    let table = [
        ("RANK=0", StoreHost::Rank0),
        ("RANK=1", StoreHost::Rank0),
        ("RANK=0 TORCHELASTIC_USE_AGENT_STORE=False", StoreHost::Rank0),
        ("RANK=0 TORCHELASTIC_USE_AGENT_STORE=True", StoreHost::Agent),
        ("RANK=1 TORCHELASTIC_USE_AGENT_STORE=True", StoreHost::Agent),
        ("RANK=0 BRIGADE_STORE_FD=3", StoreHost::Rank0Fd(3)),
        ("RANK=1 BRIGADE_STORE_FD=3", StoreHost::Rank0),
        // torchrun inside a rank of ours
        ("RANK=0 BRIGADE_STORE_FD=3 TORCHELASTIC_USE_AGENT_STORE=True", StoreHost::Agent),
    ];
    for (vars, expected) in table {
        let world = read(&format!("{vars} WORLD_SIZE=2 {LOOPBACK}")).unwrap();
        let store = StoreEndpoint { addr: "127.0.0.1".to_owned(), port: 29500, host: expected };
        assert_eq!(world.store, store, "{vars}");
    }
}

#[test]
fn refusals_name_the_variable_and_its_value() {
    let table = [
        ("RANK=0", "RANK=\"0\" is set but WORLD_SIZE is not"),
        ("WORLD_SIZE=2", "WORLD_SIZE=\"2\" is set but RANK is not"),
        ("LOCAL_RANK=0", "LOCAL_RANK=\"0\" is set but RANK is not"),
        ("LOCAL_WORLD_SIZE=2", "LOCAL_WORLD_SIZE=\"2\" is set but RANK is not"),
        ("RANK=2 WORLD_SIZE=2", "RANK=2 and WORLD_SIZE=2 contradict each other"),
        ("RANK=0 WORLD_SIZE=0", "RANK=0 and WORLD_SIZE=0 contradict each other"),
        ("RANK=one WORLD_SIZE=2", "RANK=\"one\" is not a whole number from 0"),
        ("RANK= WORLD_SIZE=2", "RANK=\"\" is not a whole number from 0"),
        ("RANK=-1 WORLD_SIZE=2", "RANK=\"-1\" is not a whole number from 0"),
        ("RANK=0 WORLD_SIZE=2.0", "WORLD_SIZE=\"2.0\" is not a whole number from 0"),
        ("RANK=0 WORLD_SIZE=9999999999", "a world size of 9999999999 is not possible"),
        ("RANK=0 WORLD_SIZE=2", "WORLD_SIZE=\"2\" is set but MASTER_ADDR is not"),
        ("RANK=0 WORLD_SIZE=2 MASTER_PORT=1", "WORLD_SIZE=\"2\" is set but MASTER_ADDR is not"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a", "WORLD_SIZE=\"2\" is set but MASTER_PORT is not"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=0", "MASTER_PORT=\"0\" is not a port"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=65536", "MASTER_PORT=\"65536\" is not a"),
        (
            "RANK=0 WORLD_SIZE=2 LOCAL_RANK=2 MASTER_ADDR=a MASTER_PORT=1",
            "LOCAL_RANK=2 and WORLD_SIZE=2 contradict each other",
        ),
        (
            "RANK=0 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=1",
            "LOCAL_RANK=1 and LOCAL_WORLD_SIZE=1 contradict each other",
        ),
        (
            "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=3 MASTER_ADDR=a MASTER_PORT=1",
            "LOCAL_WORLD_SIZE=3 and WORLD_SIZE=2 contradict each other",
        ),
        (
            "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=0 MASTER_ADDR=a MASTER_PORT=1",
            "LOCAL_WORLD_SIZE=0 and WORLD_SIZE=2 contradict each other",
        ),
        ("RANK=0 WORLD_SIZE=1 GROUP_WORLD_SIZE=0", "GROUP_WORLD_SIZE=\"0\" is not a number of"),
        ("RANK=0 WORLD_SIZE=1 GROUP_RANK=1", "GROUP_RANK=1 and WORLD_SIZE=1 contradict each other"),
        (
            "RANK=0 WORLD_SIZE=1 TORCHELASTIC_RESTART_COUNT=x",
            "TORCHELASTIC_RESTART_COUNT=\"x\" is not a whole number",
        ),
        (
            "RANK=0 WORLD_SIZE=2 TORCHELASTIC_USE_AGENT_STORE=maybe MASTER_ADDR=a MASTER_PORT=1",
            "TORCHELASTIC_USE_AGENT_STORE=\"maybe\" is not True or False",
        ),
        (
            "RANK=0 WORLD_SIZE=2 BRIGADE_STORE_FD=-1 MASTER_ADDR=a MASTER_PORT=1",
            "BRIGADE_STORE_FD=\"-1\" is not the number of an open descriptor",
        ),
    ];
    for (vars, expected) in table {
        let error = read(vars).expect_err(vars).to_string();
        assert!(error.starts_with(expected), "{vars}\n  gave     {error}\n  expected {expected}");
    }
}

#[test]
fn what_is_written_reads_back() {
    for host in [StoreHost::Agent, StoreHost::Rank0, StoreHost::Rank0Fd(7)] {
        let store = StoreEndpoint { addr: "127.0.0.1".to_owned(), port: 4242, host };
        let mut world = World::on_one_host(0, WorldSize::new(3).unwrap(), store).unwrap();
        world.run_id = Some("job".to_owned());
        world.role = "actor".to_owned();
        (world.restart_count, world.max_restarts) = (1, 3);
        let vars = world.to_env();
        let read = World::from_vars(|name| vars.iter().find(|v| v.0 == name).map(|v| v.1.clone()));
        assert_eq!(read.unwrap(), world);
        for (name, _) in vars {
            assert!(env::TABLE.iter().any(|variable| variable.name == name), "{name}");
        }
    }
}

#[test]
fn a_child_inherits_nothing_of_another_job() {
    let mut child = Command::new("true");
    World::alone().describe_to(&mut child);
    let removed: Vec<_> =
        child.get_envs().filter(|(_, value)| value.is_none()).map(|(name, _)| name).collect();
    for name in [env::BRIGADE_STORE_FD, env::TORCHELASTIC_ERROR_FILE, env::TORCHELASTIC_RUN_ID] {
        assert!(removed.iter().any(|removed| *removed == name), "{name}");
    }
}
