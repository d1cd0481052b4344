//! What it costs to go on after a loss, for 10, 100 and 1,000 hosts, in simulated time.
//!
//! `cargo run -p brigade-rendezvous --example reforming [SEED]`

#[path = "../tests/simulated/mod.rs"]
mod simulated;

use std::io::{self, Write};
use std::time::Instant;

use simulated::{Loss, reform};

fn main() -> io::Result<()> {
    let seed = std::env::args().nth(1).and_then(|seed| seed.parse().ok()).unwrap_or(7);
    let mut out = io::stdout().lock();
    writeln!(out, "seed {seed}; messages and bytes are of one agent, without beats")?;
    writeln!(
        out,
        "{:>7} {:>5} {:<7} {:>9} {:>6} {:>12} {:>10}",
        "hosts", "lost", "how", "messages", "bytes", "simulated ms", "real ms"
    )?;
    for loss in [Loss::Broken, Loss::Silent] {
        for agents in [10, 100, 1000] {
            let mut counts = vec![1, agents / 10];
            counts.dedup();
            for lost in counts {
                let start = Instant::now();
                let cost = reform(agents, lost, loss, seed);
                writeln!(
                    out,
                    "{agents:>7} {lost:>5} {:<7} {:>9} {:>6} {:>12} {:>10}",
                    format!("{loss:?}").to_lowercase(),
                    cost.messages,
                    cost.bytes,
                    cost.time.as_millis(),
                    start.elapsed().as_millis(),
                )?;
            }
        }
    }
    Ok(())
}
