//! Tests of launchers that meet over IPv6.

use brigade_test_needs::needs;

use crate::launchers::{Hosts, finish};

#[needs(Ipv6)]
fn hosts_meet_at_an_address_of_ipv6() {
    // Addresses with and without brackets, as usual for each flag.
    let numbered = Hosts::new();
    let elastic = Hosts::new();
    let (port, endpoint) = (numbered.port.number(), elastic.port.number());
    let flags = |node: usize| {
        [
            vec![
                "--nnodes=2".to_owned(),
                format!("--node-rank={node}"),
                "--master-addr=::1".to_owned(),
                format!("--master-port={port}"),
            ],
            vec!["--nnodes=2".to_owned(), format!("--rdzv-endpoint=[::1]:{endpoint}")],
        ]
    };
    for way in 0..2 {
        let start = |node: usize| {
            let flags = &flags(node)[way];
            let job = flags.iter().fold(numbered.any(1), |job, flag| job.flag(flag));
            job.sh("echo $RANK of $WORLD_SIZE at $MASTER_ADDR").start()
        };
        let runs = finish(vec![start(0), start(1)]);
        let mut lines = Vec::new();
        for run in &runs {
            assert_eq!(run.code, 0, "{}", run.stderr);
            lines.extend(run.stdout.lines().map(|line| line.split_once(' ').unwrap().1));
        }
        lines.sort_unstable();
        assert_eq!(lines, ["0 of 2 at ::1", "1 of 2 at ::1"]);
    }
}
