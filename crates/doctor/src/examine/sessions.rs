//! Sessions with the hosts under examination.

use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use brigade_ssh::wire::Limit;

use super::{ALL_PAIRS, Examination, Interrupted, new_nonce};
use crate::cluster::{ClockReading, HostReport, Lost, Route};
use crate::facts::Question;
use crate::protocol::{Answer, Request};
use crate::serve::OUR_FILE;
use crate::session::{Broken, Session};

/// Hosts with their sessions. A session that breaks is closed for good.
pub(super) struct Sessions<'a> {
    pub(super) hosts: Vec<HostReport>,
    pub(super) sessions: Vec<Option<Session>>,
    pub(super) cancelled: &'a AtomicBool,
}

impl Sessions<'_> {
    fn lose(&mut self, place: usize, lost: Lost) {
        if let Some(session) = self.sessions[place].take() {
            self.hosts[place].login_banner = session.login_banner().to_vec();
        }
        self.hosts[place].lost = Some(lost);
    }

    /// Sends requests to some hosts at once and waits for all answers; `None` for a host that is lost.
    fn ask(
        &mut self,
        asked: &str,
        timeout: Duration,
        requests: Vec<(usize, Request)>,
    ) -> Result<Vec<(usize, Option<Answer>)>, Interrupted> {
        for (place, request) in &requests {
            if let Some(session) = &mut self.sessions[*place] {
                session.ask(request);
            }
        }
        let limit = Limit::after(timeout).unless(self.cancelled);
        let mut answers = Vec::with_capacity(requests.len());
        for (place, _) in requests {
            let received = match &mut self.sessions[place] {
                Some(session) => session.receive(asked, limit),
                None => continue,
            };
            answers.push((place, self.settle(place, received)?));
        }
        Ok(answers)
    }

    fn settle<T>(
        &mut self,
        place: usize,
        received: Result<T, Broken>,
    ) -> Result<Option<T>, Interrupted> {
        match received {
            Ok(answer) => Ok(Some(answer)),
            Err(Broken::Interrupted) => Err(Interrupted),
            Err(Broken::Lost(lost)) => {
                self.lose(place, lost);
                Ok(None)
            }
        }
    }

    /// Returns the indices of the hosts that still answer.
    fn present(&self) -> Vec<usize> {
        (0..self.sessions.len()).filter(|place| self.sessions[*place].is_some()).collect()
    }

    pub(super) fn meet(&mut self, timeout: Duration) -> Result<(), Interrupted> {
        let limit = Limit::after(timeout).unless(self.cancelled);
        for place in self.present() {
            let Some(session) = &mut self.sessions[place] else { continue };
            let met = session.meet(limit);
            self.settle(place, met)?;
        }
        Ok(())
    }

    /// Reads the clocks. The answer was written between request and receipt: the shorter that interval, the smaller the
    /// error. One host at a time, so that no request waits behind another.
    pub(super) fn read_clocks(&mut self) -> Result<(), Interrupted> {
        for place in self.present() {
            let mut best: Option<ClockReading> = None;
            for _ in 0..CLOCK_READINGS {
                let (now, start) = (SystemTime::now(), Instant::now());
                let answers = self.ask("the time", SHORT, vec![(place, Request::Clock)])?;
                let Some((_, Some(Answer::Clock(theirs)))) = answers.first() else { break };
                let error_seconds = start.elapsed().as_secs_f64() / 2.0;
                let ours = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
                // Exact in integers; the difference then fits a float.
                let ahead = i128::from(*theirs) - ours as i128;
                let ahead_seconds = ahead as f64 / 1e9 - error_seconds;
                if best.is_none_or(|best| error_seconds < best.error_seconds) {
                    best = Some(ClockReading { ahead_seconds, error_seconds });
                }
            }
            self.hosts[place].clock = best;
        }
        Ok(())
    }

    pub(super) fn gather_facts(&mut self, question: &Question) -> Result<(), Interrupted> {
        let ask = |place: usize| {
            let mut question = question.clone();
            if self.hosts[place].here {
                // The host has these variables already, and perhaps more.
                question.variables.clear();
            }
            (place, Request::Examine(question))
        };
        let requests = self.present().into_iter().map(ask).collect();
        for (place, answer) in self.ask("its facts", FACTS, requests)? {
            if let Some(Answer::Examined(facts)) = answer {
                self.hosts[place].facts = Some(*facts);
            }
        }
        Ok(())
    }

    /// Tests whether the working folder is shared: the first host creates a file in it, and the others look for it.
    pub(super) fn look_for_a_shared_folder(&mut self) -> Result<(), Interrupted> {
        let present = self.present();
        let working = |host: &HostReport| Some(host.facts.as_ref()?.working_folder()?.to_owned());
        let Some((first, others)) = present.split_first() else { return Ok(()) };
        let Some(folder) = working(&self.hosts[*first]).filter(|_| !others.is_empty()) else {
            return Ok(());
        };
        let name = format!("{OUR_FILE}{}", &new_nonce()[..8]);
        let leave = Request::Leave { folder: folder.clone(), name: name.clone() };
        let left = self.ask("leaving a file", FILES, vec![(*first, leave)])?;
        if !matches!(left.first(), Some((_, Some(Answer::File(true))))) {
            return Ok(());
        }
        self.hosts[*first].sees_our_file = Some(true);
        let look = |place: &usize| {
            let folder = working(&self.hosts[*place])?;
            Some((*place, Request::Look { folder, name: name.clone() }))
        };
        let looks = others.iter().filter_map(look).collect();
        let seen = self.ask("looking for a file", FILES, looks);
        // The file is removed, whatever has failed meanwhile.
        let take = Request::TakeAway { folder, name };
        let taken = self.ask("taking a file away", FILES, vec![(*first, take)]);
        for (place, answer) in seen? {
            if let Some(Answer::File(seen)) = answer {
                self.hosts[place].sees_our_file = Some(seen);
            }
        }
        taken.map(drop)
    }

    /// Returns the ports on which each host listens.
    pub(super) fn open_ports(
        &mut self,
        nonce: &str,
        what: &Examination,
    ) -> Result<Vec<Vec<u16>>, Interrupted> {
        let mut addresses = vec![Vec::new(); self.hosts.len()];
        let several = self.hosts.len() > 1;
        let mut asked = Vec::new();
        let mut requests = Vec::new();
        for place in self.present() {
            let mut ports = match (&what.ports[..], several) {
                (_, false) => Vec::new(),
                ([], true) => vec![0; ANY_PORTS],
                (given, true) => given.to_vec(),
            };
            if place == 0 {
                ports.extend(what.master_port.filter(|it| !ports.contains(it)));
            }
            if !ports.is_empty() {
                asked.push((place, ports.clone()));
                requests.push((place, Request::Listen { nonce: nonce.to_owned(), ports }));
            }
        }
        for (place, answer) in self.ask("opening ports", SHORT, requests)? {
            let Some(Answer::Listening(opened)) = answer else { continue };
            let ports = asked.iter().find(|(it, _)| *it == place).map(|(_, ports)| ports);
            for (port, opened) in ports.into_iter().flatten().zip(opened) {
                match opened {
                    Ok(port) => addresses[place].push(port),
                    Err(why) => self.hosts[place].closed_ports.push((*port, why)),
                }
            }
        }
        Ok(addresses)
    }

    /// Lets every host connect to all addresses of the others.
    pub(super) fn probe_ports(
        &mut self,
        nonce: &str,
        routes: &mut [Route],
    ) -> Result<(), Interrupted> {
        let mut requests = Vec::new();
        let mut most = 0;
        for place in self.present() {
            let ours = routes.iter().filter(|it| it.from == place);
            let addresses: Vec<SocketAddr> =
                ours.flat_map(|it| it.attempts.iter().map(|it| it.address)).collect();
            most = most.max(addresses.len());
            if !addresses.is_empty() {
                requests.push((place, Request::Probe { nonce: nonce.to_owned(), addresses }));
            }
        }
        let timeout = KNOCKS * (1 + most as u32 / 64);
        for (place, answer) in self.ask("connections to ports", timeout, requests)? {
            let Some(Answer::Probed(outcomes)) = answer else { continue };
            let ours = routes.iter_mut().filter(|it| it.from == place);
            for (attempt, outcome) in ours.flat_map(|it| &mut it.attempts).zip(outcomes) {
                attempt.outcome = outcome;
            }
        }
        routes.iter_mut().for_each(|route| {
            let gone = self.hosts[route.from].lost.is_some();
            if gone {
                route.attempts.clear();
            }
        });
        Ok(())
    }

    /// Measures one route at a time: two at once would share the bandwidth.
    pub(super) fn measure(
        &mut self,
        nonce: &str,
        routes: &mut [Route],
        progress: &mut dyn FnMut(&str),
    ) -> Result<(), Interrupted> {
        let count = self.hosts.len();
        for route in routes {
            // Each host to its next, as in a ring of many hosts, takes an acceptable time.
            if count > ALL_PAIRS && route.to != (route.from + 1) % count {
                continue;
            }
            let Some(address) = route.open_address() else { continue };
            let names = (&self.hosts[route.from].name, &self.hosts[route.to].name);
            progress(&format!("measuring {} -> {}", names.0, names.1));
            let request = Request::Measure { nonce: nonce.to_owned(), address };
            let answers = self.ask("measuring", MEASURE, vec![(route.from, request)])?;
            if let Some((_, Some(Answer::Measured(measured)))) = answers.into_iter().next() {
                route.measured = Some(measured);
            }
        }
        Ok(())
    }
}

const SHORT: Duration = Duration::from_secs(5);
const FACTS: Duration = Duration::from_secs(40);
const FILES: Duration = Duration::from_secs(8);
const KNOCKS: Duration = Duration::from_secs(12);
const MEASURE: Duration = Duration::from_secs(30);
const CLOCK_READINGS: usize = 5;
/// Number of ports, chosen by the system as for Gloo and NCCL.
const ANY_PORTS: usize = 3;
