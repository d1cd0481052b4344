//! Matrix of speeds between hosts: rows are senders.

use std::io::{self, Write};

use brigade_rank_env::text::escaped;

use crate::cluster::{Cluster, Route};
use crate::examine::ALL_PAIRS;
use crate::quantity::{bandwidth, duration};

pub(super) fn write(to: &mut impl Write, cluster: &Cluster) -> io::Result<()> {
    let count = cluster.hosts.len();
    let any = cluster.routes.iter().any(|it| it.measured.is_some());
    // Of more hosts, only some pairs are measured, and no terminal is that wide.
    if !any || count > ALL_PAIRS {
        return Ok(());
    }
    let mut cells = vec![vec![String::new()]];
    cells[0].extend(cluster.hosts.iter().map(|host| format!("to {}", escaped(&host.name))));
    for (from, host) in cluster.hosts.iter().enumerate() {
        let mut row = vec![escaped(&host.name).to_string()];
        row.extend((0..count).map(|to| match cluster.route(from, to) {
            _ if from == to => String::new(),
            Some(route) => text(route),
            None => "not tried".to_owned(),
        }));
        cells.push(row);
    }
    writeln!(to, "\nround trip and bandwidth from each host (left) to the others")?;
    let width = |column: usize| cells.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..=count).map(|column| width(column).unwrap_or_default()).collect();
    for row in &cells {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(&format!("  {cell:width$}"));
        }
        writeln!(to, "{}", line.trim_end())?;
    }
    Ok(())
}

fn text(route: &Route) -> String {
    let Some(measured) = &route.measured else {
        return if route.open_address().is_some() { "not measured" } else { "closed" }.to_owned();
    };
    match measured.bandwidth() {
        Some(rate) => format!("{} {}", duration(measured.round_trip), bandwidth(rate)),
        None if measured.stalled => format!("{} stalls", duration(measured.round_trip)),
        None => "broke off".to_owned(),
    }
}
