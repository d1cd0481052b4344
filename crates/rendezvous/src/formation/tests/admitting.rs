//! Hosts that join and leave, and the number of restarts that this causes.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

/// A job whose hosts stop as soon as they are requested to.
struct Obedient {
    job: Job,
    /// The connected hosts.
    present: BTreeSet<u64>,
    /// The hosts of the current attempt.
    running: BTreeSet<u64>,
    /// Times at which attempts with new hosts began.
    admissions: Vec<Duration>,
    attempts: usize,
}

impl Obedient {
    fn new(rules: Rules) -> Self {
        Self {
            job: Job::new(Rules { last_call: Duration::ZERO, ..rules }),
            present: BTreeSet::new(),
            running: BTreeSet::new(),
            admissions: Vec::new(),
            attempts: 0,
        }
    }

    fn heed(&mut self, mut shown: Vec<String>) {
        while !shown.is_empty() {
            let mut starts = BTreeSet::new();
            let mut next = Vec::new();
            for line in &shown {
                let (id, what) = line.split_once(": ").expect("an agent is told something");
                let id = id.parse().unwrap();
                if what.starts_with("start") {
                    starts.insert(id);
                } else if let Some(rest) = what.strip_prefix("stop ") {
                    let attempt = rest.split(' ').next().unwrap().parse().unwrap();
                    next.extend(self.job.stopped(id, attempt));
                }
            }
            if !starts.is_empty() {
                if self.attempts > 0 && !starts.is_subset(&self.running) {
                    self.admissions.push(self.job.now);
                }
                self.attempts += 1;
                self.running = starts;
            }
            shown = next;
        }
    }

    fn joins(&mut self, id: u64) {
        if self.present.insert(id) {
            let shown = self.job.join(id, join(id));
            self.heed(shown);
        }
    }

    fn leaves(&mut self, id: u64) {
        if self.present.remove(&id) {
            let shown = self.job.say(id, FromAgent::Leaving);
            self.heed(shown);
        }
    }

    fn waits(&mut self, seconds: u64) {
        for _ in 0..2 * seconds {
            self.job.now += Duration::from_millis(500);
            for id in self.present.clone() {
                let shown = self.job.event(Event::Alive { agent: AgentId(id) });
                self.heed(shown);
            }
            let shown = self.job.event(Event::Tick);
            self.heed(shown);
        }
    }

    fn seconds(&self) -> Vec<u64> {
        self.admissions.iter().map(Duration::as_secs).collect()
    }
}

#[test]
fn a_host_that_comes_and_goes_restarts_the_others_ever_more_seldom() {
    let mut job = Obedient::new(rules(1, 3, 0));
    job.joins(1);
    job.joins(2);
    // The host never stays for longer than a second.
    for _ in 0..1000 {
        job.joins(3);
        job.waits(1);
        if job.running.contains(&3) {
            job.leaves(3);
        }
    }
    let seconds = job.seconds();
    assert_eq!(seconds[0], 0, "the first one is free");
    let gaps: Vec<u64> = seconds.windows(2).map(|it| it[1] - it[0]).collect();
    let expected = [30, 60, 120, 240, 480];
    assert!(gaps.iter().zip(expected).all(|(gap, expected)| *gap >= expected), "{gaps:?}");
    assert!(job.attempts <= 2 * seconds.len() + 1, "{} attempts", job.attempts);
}

#[test]
fn two_hosts_that_take_turns_gain_nothing() {
    let mut job = Obedient::new(rules(1, 4, 0));
    job.joins(1);
    for id in [2, 3].into_iter().cycle().take(2000) {
        // The other host waits when this one leaves, and would be admitted with that restart.
        job.joins(5 - id);
        job.waits(1);
        if job.running.contains(&id) {
            job.leaves(id);
        }
    }
    let gaps: Vec<u64> = job.seconds().windows(2).map(|it| it[1] - it[0]).collect();
    assert!(gaps.iter().skip(5).all(|gap| *gap >= 600), "{gaps:?}");
    assert!(job.attempts < 30, "{} attempts in 2000 s", job.attempts);
}

#[test]
fn hosts_that_wait_are_admitted_together_and_after_a_failure_at_once() {
    let mut job = Obedient::new(rules(1, 8, 1));
    job.joins(1);
    job.joins(2);
    job.joins(3);
    job.joins(4);
    assert_eq!(job.running, BTreeSet::from([1, 2]));
    job.waits(31);
    assert_eq!(job.running, BTreeSet::from([1, 2, 3, 4]));
    assert_eq!(job.attempts, 3);
    job.joins(5);
    assert_eq!(job.attempts, 3);
    let shown = job.job.failed(1, 0, 9);
    job.heed(shown);
    assert_eq!(job.running, BTreeSet::from([1, 2, 3, 4, 5]));
    // A host that joins after a long time without changes is also admitted at once.
    job.waits(200);
    job.joins(6);
    assert_eq!(job.running.len(), 6);
}

/// A job that has too few hosts without the one that joins and leaves is idle in the meantime, but the others are not
/// started and stopped repeatedly.
#[test]
fn a_needed_host_that_comes_and_goes_waits_too() {
    let mut job = Obedient::new(rules(2, 2, 0));
    job.joins(1);
    job.joins(2);
    job.leaves(2);
    job.joins(3);
    assert_eq!((job.attempts, &job.running), (2, &BTreeSet::from([1, 3])), "one is free");
    job.leaves(3);
    job.waits(5);
    let lines =
        job.job.lines(Event::Joined { agent: AgentId(4), join: join(4), seen: None, remote: true });
    job.present.insert(4);
    let said =
        "the next attempt starts in 25 s: a host has joined a running attempt shortly before";
    assert!(lines.iter().any(|line| line == said), "{lines:?}");
    job.waits(24);
    assert_eq!(job.attempts, 2);
    job.waits(1);
    assert_eq!((job.attempts, &job.running), (3, &BTreeSet::from([1, 4])));
}

#[test]
fn without_an_interval_every_host_is_admitted_at_once() {
    let mut job = Obedient::new(Rules { join_interval: Duration::ZERO, ..rules(1, 5, 0) });
    for id in 1..=5 {
        job.joins(id);
        assert_eq!(job.running.len() as u64, id);
    }
}

proptest! {
    /// Whichever hosts join and leave, attempts with new hosts keep their minimum distance, and a host that stays is
    /// admitted.
    #[test]
    fn hosts_that_come_and_go(
        min in 1..4_usize,
        what in prop::collection::vec((0..3_u8, 1..6_u64, 0..40_u64), 1..60),
    ) {
        let mut job = Obedient::new(rules(min, 5, 0));
        for (kind, id, seconds) in what {
            match kind {
                0 => job.joins(id),
                1 => job.leaves(id),
                _ => job.waits(seconds),
            }
            prop_assume!(job.job.formation.job_result().is_none());
        }
        for gap in job.admissions.windows(2) {
            prop_assert!(gap[1] - gap[0] >= Duration::from_secs(30), "{:?}", job.seconds());
        }
        if job.present.len() >= min {
            job.waits(601);
            prop_assert_eq!(&job.running, &job.present);
        }
    }
}
