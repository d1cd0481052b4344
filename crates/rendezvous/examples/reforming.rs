//! Measures the cost of continuing after a lost host, and of reconnecting after a cut or a pause, for 10, 100 and
//! 1,000 hosts, in simulated time.
//!
//! `cargo run -p brigade-rendezvous --example reforming [SEED]`

#[path = "../tests/it/simulated.rs"]
mod simulated;

use std::io::{self, Write};
use std::time::{Duration, Instant};

use simulated::{Cost, Disturbance, Loss, disturb, reform};

fn main() -> io::Result<()> {
    let seed = std::env::args().nth(1).and_then(|seed| seed.parse().ok()).unwrap_or(7);
    let mut out = io::stdout().lock();
    writeln!(out, "seed {seed}; messages and bytes are of one agent, without beats")?;
    writeln!(
        out,
        "{:>7} {:>5} {:<18} {:>9} {:>6} {:>12} {:>10}",
        "hosts", "lost", "how", "messages", "bytes", "simulated ms", "real ms"
    )?;
    let mut row = |hosts: usize, lost: usize, how: &str, run: &dyn Fn() -> Cost| {
        let start = Instant::now();
        let cost = run();
        writeln!(
            out,
            "{hosts:>7} {lost:>5} {how:<18} {:>9} {:>6} {:>12} {:>10}",
            cost.messages,
            cost.bytes,
            cost.time.as_millis(),
            start.elapsed().as_millis(),
        )
    };
    for loss in [Loss::Broken, Loss::Silent] {
        for agents in [10, 100, 1000] {
            let mut counts = vec![1, agents / 10];
            counts.dedup();
            for lost in counts {
                row(agents, lost, &format!("{loss:?}"), &|| reform(agents, lost, loss, seed))?;
            }
        }
    }
    for how in [Disturbance::Cut, Disturbance::PausedAgents, Disturbance::PausedCoordinator] {
        for agents in [10, 100, 1000] {
            let time = Duration::from_secs(10);
            let run = || disturb(agents, agents, how, time, seed);
            row(agents, agents, &format!("{how:?}"), &run)?;
        }
    }
    Ok(())
}
