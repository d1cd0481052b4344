//! Prints the place that a launcher or scheduler gave to this process: `srun -n 2 place`,
//! `mpirun -np 2 place`, `brigade launch --nproc 2 place`.

use std::io::{self, Write};
use std::process::ExitCode;

use brigade_rank_env::World;

fn main() -> ExitCode {
    let line = match World::from_env() {
        Err(error) => {
            // One write, whole: the ranks share a terminal.
            let _ = io::stderr().write_all(format!("place: {error}\n").as_bytes());
            return ExitCode::FAILURE;
        }
        Ok(world) if world.is_alone() => "alone\n".to_owned(),
        Ok(world) => format!(
            "{world}, {} of {} on host {} of {}, store at {}:{}\n",
            world.local_rank,
            world.local_world_size,
            world.node_rank,
            world.num_nodes,
            world.store.addr,
            world.store.port,
        ),
    };
    match io::stdout().write_all(line.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}
