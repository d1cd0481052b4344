//! Asks every host, lets hosts knock at each other's doors, and writes down what comes of it.
//!
//! Hosts are asked at the same time and each question has a time limit, so a host that hangs costs
//! its own limit and nothing else. Only bandwidths are measured one after the other.

use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, SocketAddr};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::cluster::{Attempt, ClockReading, Cluster, Lost, Patient, Route, Way};
use crate::facts::Question;
use crate::picks;
use crate::protocol::{Answer, Request};
use crate::serve::OUR_FILE;
use crate::session::{Broken, Session};

/// A host to be examined.
#[derive(Debug)]
pub struct Host {
    /// Its name, as the job would use it.
    pub name: String,
    /// It is the host that we run on.
    pub here: bool,
    /// What starts [`serve`](crate::serve) there, and carries its input and output.
    pub command: Command,
}

/// What to look at.
#[derive(Clone, Debug, Default)]
pub struct Examination {
    /// What hosts are asked about; the names of all of them are added.
    pub question: Question,
    /// The port that the job's hosts are to meet at, on the first of them.
    pub master_port: Option<u16>,
    /// Ports to try between hosts; where empty, three that the system chooses.
    pub ports: Vec<u16>,
    /// Measure round-trip times and bandwidths.
    pub measure: bool,
}

/// The user has had enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("interrupted")]
pub struct Interrupted;

/// Examines all hosts, and the ways between them. `said` hears what is being done.
///
/// # Errors
/// `enough` was set meanwhile. Nothing is left running then, here or elsewhere.
pub fn examine(
    hosts: Vec<Host>,
    what: &Examination,
    enough: &AtomicBool,
    said: &mut dyn FnMut(&str),
) -> Result<Cluster, Interrupted> {
    let mut question = what.question.clone();
    question.names = hosts.iter().map(|host| host.name.clone()).collect();
    let mut ward = Ward { sessions: Vec::new(), hosts: Vec::new(), enough };
    said("reaching the hosts");
    for host in hosts {
        let session = Session::start(host.command);
        let patient = Patient { name: host.name, here: host.here, ..Patient::default() };
        ward.hosts.push(patient);
        ward.sessions.push(None);
        match session {
            Ok(session) => *ward.sessions.last_mut().unwrap_or(&mut None) = Some(session),
            Err(lost) => ward.lose(ward.hosts.len() - 1, lost),
        }
    }
    ward.meet()?;
    said("looking at each host");
    ward.read_clocks()?;
    ward.gather_facts(&question)?;
    ward.look_for_a_shared_folder()?;

    let word = new_word();
    let doors = ward.open_doors(&word, what)?;
    let mut cluster = Cluster {
        question,
        master_port: what.master_port,
        measured: what.measure,
        hosts: std::mem::take(&mut ward.hosts),
        routes: Vec::new(),
    };
    said("knocking at ports");
    cluster.routes = plan_routes(&cluster, &doors);
    ward.hosts = std::mem::take(&mut cluster.hosts);
    ward.knock(&word, &mut cluster.routes)?;
    if what.measure {
        ward.measure(&word, &mut cluster.routes, said)?;
    }
    for (host, session) in ward.hosts.iter_mut().zip(&ward.sessions) {
        host.noise = session.as_ref().map(|it| it.noise().to_vec()).unwrap_or_default();
    }
    cluster.hosts = std::mem::take(&mut ward.hosts);
    Ok(cluster)
}

/// The hosts and the lines to them; a line that breaks is given up.
struct Ward<'a> {
    hosts: Vec<Patient>,
    sessions: Vec<Option<Session>>,
    enough: &'a AtomicBool,
}

impl Ward<'_> {
    fn lose(&mut self, place: usize, lost: Lost) {
        if let Some(session) = self.sessions[place].take() {
            self.hosts[place].noise = session.noise().to_vec();
        }
        self.hosts[place].lost = Some(lost);
    }

    /// Asks some hosts at once and hears all of them; `None` for a host that is lost.
    fn ask(
        &mut self,
        asked: &str,
        patience: Duration,
        requests: Vec<(usize, Request)>,
    ) -> Result<Vec<(usize, Option<Answer>)>, Interrupted> {
        for (place, request) in &requests {
            if let Some(session) = &mut self.sessions[*place] {
                session.ask(request);
            }
        }
        let until = Instant::now() + patience;
        let mut answers = Vec::with_capacity(requests.len());
        for (place, _) in requests {
            let heard = match &mut self.sessions[place] {
                Some(session) => session.receive(asked, until, self.enough),
                None => continue,
            };
            answers.push((place, self.settle(place, heard)?));
        }
        Ok(answers)
    }

    fn settle<T>(
        &mut self,
        place: usize,
        heard: Result<T, Broken>,
    ) -> Result<Option<T>, Interrupted> {
        match heard {
            Ok(answer) => Ok(Some(answer)),
            Err(Broken::Interrupted) => Err(Interrupted),
            Err(Broken::Lost(lost)) => {
                self.lose(place, lost);
                Ok(None)
            }
        }
    }

    /// Places of the hosts that still answer.
    fn present(&self) -> Vec<usize> {
        (0..self.sessions.len()).filter(|place| self.sessions[*place].is_some()).collect()
    }

    fn meet(&mut self) -> Result<(), Interrupted> {
        let until = Instant::now() + LOGIN;
        for place in self.present() {
            let Some(session) = &mut self.sessions[place] else { continue };
            let met = session.meet(until, self.enough);
            self.settle(place, met)?;
        }
        Ok(())
    }

    /// The answer was written somewhere between question and answer: the shorter that time, the
    /// surer. One host at a time, so that no question waits behind another.
    fn read_clocks(&mut self) -> Result<(), Interrupted> {
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

    fn gather_facts(&mut self, question: &Question) -> Result<(), Interrupted> {
        let present = self.present().into_iter();
        let requests = present.map(|it| (it, Request::Examine(question.clone()))).collect();
        for (place, answer) in self.ask("its facts", FACTS, requests)? {
            if let Some(Answer::Examined(facts)) = answer {
                self.hosts[place].facts = Some(*facts);
            }
        }
        Ok(())
    }

    /// The first host leaves a file in the working folder, and the others look for it.
    fn look_for_a_shared_folder(&mut self) -> Result<(), Interrupted> {
        let present = self.present();
        let working = |host: &Patient| Some(host.facts.as_ref()?.working_folder()?.to_owned());
        let Some((first, others)) = present.split_first() else { return Ok(()) };
        let Some(folder) = working(&self.hosts[*first]).filter(|_| !others.is_empty()) else {
            return Ok(());
        };
        let name = format!("{OUR_FILE}{}", &new_word()[..8]);
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
        // Whatever has happened meanwhile, nothing of ours stays.
        let take = Request::TakeAway { folder, name };
        let taken = self.ask("taking a file away", FILES, vec![(*first, take)]);
        for (place, answer) in seen? {
            if let Some(Answer::File(seen)) = answer {
                self.hosts[place].sees_our_file = Some(seen);
            }
        }
        taken.map(drop)
    }

    /// The ports that each host listens on.
    fn open_doors(&mut self, word: &str, what: &Examination) -> Result<Vec<Vec<u16>>, Interrupted> {
        let mut doors = vec![Vec::new(); self.hosts.len()];
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
                requests.push((place, Request::Listen { word: word.to_owned(), ports }));
            }
        }
        for (place, answer) in self.ask("opening ports", SHORT, requests)? {
            let Some(Answer::Listening(opened)) = answer else { continue };
            let ports = asked.iter().find(|(it, _)| *it == place).map(|(_, ports)| ports);
            for (port, opened) in ports.into_iter().flatten().zip(opened) {
                match opened {
                    Ok(port) => doors[place].push(port),
                    Err(why) => self.hosts[place].closed_doors.push((*port, why)),
                }
            }
        }
        Ok(doors)
    }

    /// Every host knocks at all doors of the others.
    fn knock(&mut self, word: &str, routes: &mut [Route]) -> Result<(), Interrupted> {
        let mut requests = Vec::new();
        let mut most = 0;
        for place in self.present() {
            let ours = routes.iter().filter(|it| it.from == place);
            let doors: Vec<SocketAddr> =
                ours.flat_map(|it| it.attempts.iter().map(|it| it.door)).collect();
            most = most.max(doors.len());
            if !doors.is_empty() {
                requests.push((place, Request::Knock { word: word.to_owned(), doors }));
            }
        }
        let patience = KNOCKS * (1 + most as u32 / 64);
        for (place, answer) in self.ask("knocking at ports", patience, requests)? {
            let Some(Answer::Knocked(outcomes)) = answer else { continue };
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

    /// One route after the other: two at a time would share what both should have.
    fn measure(
        &mut self,
        word: &str,
        routes: &mut [Route],
        said: &mut dyn FnMut(&str),
    ) -> Result<(), Interrupted> {
        let count = self.hosts.len();
        for route in routes {
            // Each host to its next is what a ring of many hosts uses, and takes bearable time.
            if count > ALL_PAIRS && route.to != (route.from + 1) % count {
                continue;
            }
            let Some(door) = route.open_door() else { continue };
            let names = (&self.hosts[route.from].name, &self.hosts[route.to].name);
            said(&format!("measuring {} -> {}", names.0, names.1));
            let request = Request::Measure { word: word.to_owned(), door };
            let answers = self.ask("measuring", MEASURE, vec![(route.from, request)])?;
            if let Some((_, Some(Answer::Measured(measured)))) = answers.into_iter().next() {
                route.measured = Some(measured);
            }
        }
        Ok(())
    }
}

/// Who knocks where. Outcomes are those of hosts that never answer, until they do.
fn plan_routes(cluster: &Cluster, doors: &[Vec<u16>]) -> Vec<Route> {
    let mut routes = Vec::new();
    for (from, _, facts) in cluster.examined() {
        for (to, host, theirs) in cluster.examined() {
            if from == to || host.lost.is_some() {
                continue;
            }
            let named = facts.names.iter().find(|it| it.name == host.name);
            let mut known: Vec<IpAddr> = named
                .into_iter()
                .flat_map(|it| it.addresses.iter().copied())
                .filter(|it| !it.is_loopback())
                .take(MOST_ADDRESSES)
                .collect();
            let by = if known.is_empty() { Way::Reached } else { Way::Name };
            if known.is_empty() {
                known.extend(cluster.meeting_address(to));
            }
            let mut attempts: Vec<(Way, SocketAddr)> = Vec::new();
            for address in &known {
                attempts.extend(doors[to].iter().map(|port| (by, (*address, *port).into())));
            }
            let nccl =
                if theirs.nvidia.gpus.is_empty() { None } else { picks::nccl(theirs).address() };
            for (by, pick) in [(Way::Gloo, picks::gloo(theirs).address()), (Way::Nccl, nccl)] {
                let new = pick.filter(|it| !it.is_loopback() && !is_link_local(it));
                let new = new.filter(|it| !known.contains(it));
                let door = doors[to].first().zip(new);
                attempts.extend(door.map(|(port, address)| (by, (address, *port).into())));
            }
            let attempts = attempts.into_iter().map(|(by, door)| Attempt {
                by,
                door,
                outcome: crate::cluster::Outcome::Silent,
            });
            routes.push(Route { from, to, attempts: attempts.collect(), measured: None });
        }
    }
    routes
}

/// Such an address needs the name of an interface besides.
fn is_link_local(address: &IpAddr) -> bool {
    matches!(address, IpAddr::V6(it) if it.is_unicast_link_local())
}

/// 32 letters nobody can guess, from the system's random source.
fn new_word() -> String {
    let random = || RandomState::new().hash_one(0);
    format!("{:016x}{:016x}", random(), random())
}

const LOGIN: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_secs(5);
const FACTS: Duration = Duration::from_secs(40);
const FILES: Duration = Duration::from_secs(8);
const KNOCKS: Duration = Duration::from_secs(12);
const MEASURE: Duration = Duration::from_secs(30);
const CLOCK_READINGS: usize = 5;
/// Three of the ports that the system gives to programs which ask for any: Gloo and NCCL do.
const ANY_PORTS: usize = 3;
/// A name with both kinds of address.
const MOST_ADDRESSES: usize = 2;
/// With more hosts than that, not every pair is measured: 0.5 s each.
pub(crate) const ALL_PAIRS: usize = 8;
