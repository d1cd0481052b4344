//! `brigade launch --explain`: what would be started, and where each value comes from.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::Path;

use brigade_config::{Layer, Place};
use brigade_launch::LaunchPlan;
use brigade_world::env::MASTER_PORT;
use brigade_world::{StoreEndpoint, StoreHost};
use serde_json::{Map, Value, json};

use crate::config::show;

/// What there is to explain.
pub(super) struct Explanation<'a> {
    pub(super) layers: &'a Layer,
    pub(super) file: Option<&'a Place>,
    pub(super) plan: &'a LaunchPlan,
}

/// One process that would be started.
struct Rank {
    rank: usize,
    local_rank: usize,
    command: Vec<String>,
    env: Vec<(String, String)>,
    cpus: Option<String>,
}

impl Explanation<'_> {
    /// Answers on `out`. A reader that has seen enough ends the answer, without an error.
    pub(super) fn write(&self, in_json: bool, out: impl Write) -> io::Result<()> {
        let mut out = io::BufWriter::new(out);
        let written = if in_json { self.json(&mut out) } else { self.text(&mut out) };
        match written.and_then(|()| out.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            written => written,
        }
    }

    fn text(&self, out: &mut impl Write) -> io::Result<()> {
        show::text(self.layers, self.file, show::Which::Set, out)?;
        let ranks = self.ranks();
        writeln!(out, "\nranks of this host: {}", ranks.len())?;
        let shared = shared(&ranks);
        if let Some(first) = ranks.first() {
            writeln!(out, "  every rank")?;
            if same(&ranks, |it| &it.command) {
                writeln!(out, "    {}", first.command.join(" "))?;
            }
            for (name, value) in &shared {
                writeln!(out, "    {name}={}", quoted(value))?;
            }
        }
        for rank in &ranks {
            writeln!(out, "  rank {}", rank.rank)?;
            if !same(&ranks, |it| &it.command) {
                writeln!(out, "    {}", rank.command.join(" "))?;
            }
            if let Some(cpus) = &rank.cpus {
                writeln!(out, "    on processors {cpus}")?;
            }
            for (name, value) in rank.env.iter().filter(|it| !shared.contains(it)) {
                writeln!(out, "    {name}={}", quoted(value))?;
            }
        }
        writeln!(out, "\nnothing was started")
    }

    fn json(&self, out: &mut impl Write) -> io::Result<()> {
        let mut answer = show::json(self.layers, self.file);
        let rank = |it: Rank| {
            let env: Map<String, Value> =
                it.env.into_iter().map(|(name, value)| (name, value.into())).collect();
            json!({
                "rank": it.rank,
                "local_rank": it.local_rank,
                "command": it.command,
                "env": env,
                "cpus": it.cpus,
            })
        };
        answer.insert("ranks".to_owned(), self.ranks().into_iter().map(rank).collect());
        serde_json::to_writer_pretty(&mut *out, &Value::Object(answer))?;
        writeln!(out)
    }

    fn ranks(&self) -> Vec<Rank> {
        (0..self.plan.ranks.len()).filter_map(|local_rank| self.rank(local_rank)).collect()
    }

    /// What one rank of this host is given. Its environment is this process's besides.
    fn rank(&self, local_rank: usize) -> Option<Rank> {
        let plan = self.plan;
        let store = StoreEndpoint { addr: "127.0.0.1".to_owned(), port: 0, host: StoreHost::Rank0 };
        let world = plan.world(local_rank, store).ok()?;
        let setup = plan.ranks.get(local_rank)?;
        let place = plan.told(world.clone()).to_env().into_iter().map(|(name, value)| {
            let is_open = name == MASTER_PORT;
            (name.to_owned(), if is_open { "(a free port)".to_owned() } else { value })
        });
        let tuned = plan
            .env
            .iter()
            .chain(&setup.env)
            .map(|(name, value)| ((*name).to_owned(), value.clone()));
        let mut env: Vec<(String, String)> = Vec::new();
        for (name, value) in plan.user_env.iter().cloned().chain(place).chain(tuned) {
            env.retain(|it| it.0 != name);
            env.push((name, value));
        }
        Some(Rank {
            rank: world.rank.as_usize(),
            local_rank,
            command: self.command(local_rank),
            env,
            cpus: setup.cpus.as_ref().map(ToString::to_string),
        })
    }

    fn command(&self, local_rank: usize) -> Vec<String> {
        let words = |word: &OsString| word.to_string_lossy().into_owned();
        let program = match &self.plan.build {
            Some(target) => format!("(what cargo makes of {})", target.name),
            None => Path::new(&self.plan.program).display().to_string(),
        };
        [program].into_iter().chain(self.plan.args_for(local_rank).iter().map(words)).collect()
    }
}

/// The variables that all ranks have with the same value.
fn shared(ranks: &[Rank]) -> Vec<(String, String)> {
    let Some(first) = ranks.first() else { return Vec::new() };
    first.env.iter().filter(|pair| ranks.iter().all(|it| it.env.contains(pair))).cloned().collect()
}

fn same<T: PartialEq>(ranks: &[Rank], of: impl Fn(&Rank) -> &T) -> bool {
    ranks.windows(2).all(|pair| of(&pair[0]) == of(&pair[1]))
}

/// A value with blanks shows where it begins and ends.
fn quoted(value: &str) -> String {
    if value.contains(char::is_whitespace) || value.is_empty() {
        format!("{value:?}")
    } else {
        value.to_owned()
    }
}
