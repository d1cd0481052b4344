//! Program of the ranks: a small model that trains deterministically, whatever the world size, and resumes from its
//! last checkpoint.
//!
//! The ranks connect without a store of Brigade's: rank 0 listens at `MASTER_PORT`, the others connect to it. In each
//! step, every rank computes the gradients of its micro-batches, rank 0 sends all of them to all ranks, and every rank
//! adds them up in the same order: the bits of the weights depend on the number of steps and on nothing else.

use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

const WEIGHTS: usize = 24;
/// Micro-batches per step.
const BATCHES: usize = 12;
/// Steps between two checkpoints.
const INTERVAL: u64 = 10;

type Vector = [f64; WEIGHTS];

/// Linear model with its momentum and the number of steps that it has been trained.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Model {
    pub(crate) step: u64,
    weights: Vector,
    momentum: Vector,
}

impl Model {
    fn new() -> Self {
        Self { step: 0, weights: [0.0; WEIGHTS], momentum: [0.0; WEIGHTS] }
    }

    /// Returns the model after this many steps of uninterrupted training.
    pub(crate) fn after(steps: u64) -> Self {
        let mut model = Self::new();
        while model.step < steps {
            let gradients: Vec<Vector> = (0..BATCHES).map(|batch| model.gradient(batch)).collect();
            model.apply(&gradients);
        }
        model
    }

    /// Returns the gradient of the mean squared error over four examples.
    fn gradient(&self, batch: usize) -> Vector {
        let mut noise = Noise(self.step * BATCHES as u64 + batch as u64);
        let mut gradient = [0.0; WEIGHTS];
        for _ in 0..4 {
            let inputs: Vector = std::array::from_fn(|_| noise.next());
            let target: f64 = (1_u8..).zip(inputs).map(|(i, x)| f64::from(i).sin() * x).sum();
            let output: f64 = self.weights.iter().zip(inputs).map(|(w, x)| w * x).sum();
            for (sum, x) in gradient.iter_mut().zip(inputs) {
                *sum += (output - target) * x;
            }
        }
        gradient
    }

    fn apply(&mut self, gradients: &[Vector]) {
        for i in 0..WEIGHTS {
            let sum: f64 = gradients.iter().map(|gradient| gradient[i]).sum();
            self.momentum[i] = 0.9 * self.momentum[i] + sum / BATCHES as f64;
            self.weights[i] -= 0.02 * self.momentum[i];
        }
        self.step += 1;
    }

    /// Returns a digest of every bit of the model.
    pub(crate) fn digest(&self) -> u64 {
        self.to_words().into_iter().fold(0xcbf2_9ce4_8422_2325, |sum, word| {
            (sum ^ word).wrapping_mul(0x100_0000_01b3).rotate_left(23)
        })
    }

    fn to_words(&self) -> Vec<u64> {
        let values = self.weights.iter().chain(&self.momentum).map(|value| value.to_bits());
        [self.step].into_iter().chain(values).collect()
    }

    fn from_words(words: &[u64]) -> io::Result<Self> {
        let [step, values @ ..] = words else { return Err(damaged("a model", words.len())) };
        let values: Vec<f64> = values.iter().copied().map(f64::from_bits).collect();
        let split = values.split_at_checked(WEIGHTS);
        let whole = split.and_then(|(a, b)| Some((a.try_into().ok()?, b.try_into().ok()?)));
        let (weights, momentum) = whole.ok_or_else(|| damaged("a model", words.len()))?;
        Ok(Self { step: *step, weights, momentum })
    }
}

/// SplitMix64 generator of numbers from -1 to 1.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        // A double has 53 bits.
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    }
}

/// Progress of a job, which rank 0 writes to the working folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Restarts before the current attempt.
    pub(crate) restarts: u64,
    /// World size of the attempt.
    pub(crate) world: u64,
    /// Steps that the model has been trained.
    pub(crate) step: u64,
}

impl Progress {
    const FILE: &str = "progress";

    pub(crate) fn read(work: &Path) -> Option<Self> {
        let text = fs::read_to_string(work.join(Self::FILE)).ok()?;
        let mut numbers = text.split(' ').map(|word| word.parse().unwrap());
        let mut next = || numbers.next().unwrap();
        Some(Self { restarts: next(), world: next(), step: next() })
    }

    fn write(self, work: &Path) -> io::Result<()> {
        let Self { restarts, world, step } = self;
        replace(&work.join(Self::FILE), format!("{restarts} {world} {step}").as_bytes())
    }
}

/// Makes the job end with this step.
pub(crate) fn finish_at(work: &Path, step: u64) {
    replace(&work.join(FINISH), step.to_string().as_bytes()).unwrap();
}

/// Returns the command line of a rank: a part of this test program, with its working folder and its folder of
/// checkpoints.
pub(crate) fn command(program: &Path, work: &Path, checkpoints: &Path) -> Vec<String> {
    vec![
        "env".to_owned(),
        format!("{WORK}={}", work.display()),
        format!("{CHECKPOINTS}={}", checkpoints.display()),
        program.display().to_string(),
        "--part".to_owned(),
        "faults::rank".to_owned(),
    ]
}

/// Returns `true` if a process with this environment is a rank.
pub(crate) fn is_rank(environment: &[String]) -> bool {
    environment.iter().any(|variable| variable.starts_with(WORK))
}

/// Trains as a rank. Ends the process if that fails.
#[expect(clippy::exit, reason = "the exit code is the rank's")]
pub(crate) fn train() {
    let trained = || {
        let (work, checkpoints) = (variable(WORK)?, variable(CHECKPOINTS)?);
        Trainer::new(work, checkpoints)?.train()
    };
    if let Err(error) = trained() {
        eprintln!("training failed: {error}");
        std::process::exit(1);
    }
}

/// State of a rank.
struct Trainer {
    rank: usize,
    world: usize,
    work: PathBuf,
    checkpoints: Checkpoints,
    model: Model,
    /// Connections of rank 0 to the others, in the order of their ranks; of the others to rank 0.
    peers: Vec<TcpStream>,
}

impl Trainer {
    /// Connects to the other ranks. All of them begin with the checkpoint that rank 0 finds.
    fn new(work: PathBuf, checkpoints: Checkpoints) -> io::Result<Self> {
        let (rank, world) = (variable("RANK")?, variable("WORLD_SIZE")?);
        let (address, port): (String, u16) = (variable("MASTER_ADDR")?, variable("MASTER_PORT")?);
        let (peers, model) = if rank == 0 {
            let model = checkpoints.load()?.unwrap_or_else(Model::new);
            let listener = TcpListener::bind(("0.0.0.0", port))?;
            let mut peers = Vec::new();
            for _ in 1..world {
                let (mut peer, _) = listener.accept()?;
                peer.set_nodelay(true)?;
                let number = receive(&mut peer)?[0];
                send(&mut peer, &model.to_words())?;
                peers.push((number, peer));
            }
            peers.sort_by_key(|(number, _)| *number);
            (peers.into_iter().map(|(_, peer)| peer).collect(), model)
        } else {
            let mut first = connect(&address, port)?;
            first.set_nodelay(true)?;
            send(&mut first, &[rank as u64])?;
            let model = Model::from_words(&receive(&mut first)?)?;
            (vec![first], model)
        };
        Ok(Self { rank, world, work, checkpoints, model, peers })
    }

    fn train(mut self) -> io::Result<()> {
        let restarts = variable("TORCHELASTIC_RESTART_COUNT")?;
        while self.step()? {
            if self.model.step.is_multiple_of(INTERVAL) {
                self.save()?;
            }
            if self.rank == 0 {
                let Self { world, model: Model { step, .. }, .. } = self;
                Progress { restarts, world: world as u64, step }.write(&self.work)?;
                // So that a job is not pure computation, on a machine with few processors.
                thread::sleep(Duration::from_millis(2));
            }
        }
        self.save()?;
        writeln!(io::stdout(), "{}", result(&self.model))?;
        Ok(())
    }

    /// Runs one step. Returns `false` if the model has been trained for the requested steps.
    fn step(&mut self) -> io::Result<bool> {
        let share = |rank: usize| rank * BATCHES / self.world..(rank + 1) * BATCHES / self.world;
        let own = share(self.rank).map(|batch| self.model.gradient(batch));
        let mut words: Vec<u64> = own.flatten().map(f64::to_bits).collect();
        let Some((first, others)) = self.peers.split_first_mut() else {
            return Ok(self.advance(&words));
        };
        if self.rank == 0 {
            for peer in [&mut *first].into_iter().chain(&mut *others) {
                words.extend(receive(peer)?);
            }
            let finish = fs::read_to_string(self.work.join(FINISH)).unwrap_or_default();
            let ends = finish.parse().is_ok_and(|step: u64| step <= self.model.step);
            words.push(u64::from(ends));
            for peer in [first].into_iter().chain(others) {
                send(peer, &words)?;
            }
        } else {
            send(first, &words)?;
            words = receive(first)?;
        }
        if words.pop() == Some(1) {
            return Ok(false);
        }
        Ok(self.advance(&words))
    }

    fn advance(&mut self, words: &[u64]) -> bool {
        let values: Vec<f64> = words.iter().copied().map(f64::from_bits).collect();
        let gradients: Vec<Vector> =
            values.chunks_exact(WEIGHTS).map(|it| it.try_into().unwrap()).collect();
        assert_eq!(gradients.len(), BATCHES);
        self.model.apply(&gradients);
        true
    }

    /// Saves a checkpoint: every rank writes a part, and rank 0 commits when all parts exist.
    fn save(&mut self) -> io::Result<()> {
        self.checkpoints.write_part(&self.model, self.rank, self.world)?;
        if self.rank == 0 {
            for peer in &mut self.peers {
                receive(peer)?;
            }
            self.checkpoints.commit(&self.model, self.world)?;
            for peer in &mut self.peers {
                send(peer, &[])?;
            }
        } else {
            send(&mut self.peers[0], &[])?;
            receive(&mut self.peers[0])?;
        }
        Ok(())
    }
}

/// Returns the line that every rank prints at the end.
pub(crate) fn result(model: &Model) -> String {
    format!("weights {:016x} after {} steps", model.digest(), model.step)
}

/// Folder of checkpoints: `STEP.RANK-of-WORLD` for the parts, and `STEP.commit` once all exist.
struct Checkpoints(PathBuf);

impl FromStr for Checkpoints {
    type Err = io::Error;

    fn from_str(path: &str) -> io::Result<Self> {
        Ok(Self(path.into()))
    }
}

impl Checkpoints {
    fn part(&self, step: u64, rank: usize, world: usize) -> PathBuf {
        self.0.join(format!("{step}.{rank}-of-{world}"))
    }

    fn write_part(&self, model: &Model, rank: usize, world: usize) -> io::Result<()> {
        let words = model.to_words();
        let range = rank * words.len() / world..(rank + 1) * words.len() / world;
        let bytes: Vec<u8> = words[range].iter().flat_map(|word| word.to_le_bytes()).collect();
        replace(&self.part(model.step, rank, world), &bytes)
    }

    /// Commits a checkpoint whose parts are complete. Keeps the previous one and removes older ones.
    fn commit(&self, model: &Model, world: usize) -> io::Result<()> {
        let step = model.step;
        let commit = self.0.join(format!("{step}.commit"));
        replace(&commit, format!("{world} {}", model.digest()).as_bytes())?;
        for entry in fs::read_dir(&self.0)? {
            let path = entry?.path();
            let of = path.file_name().and_then(|it| it.to_str()?.split('.').next()?.parse().ok());
            if of.is_some_and(|of: u64| of + INTERVAL < step) {
                match fs::remove_file(&path) {
                    Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Loads the last checkpoint, if there is one.
    fn load(&self) -> io::Result<Option<Model>> {
        let mut last: Option<u64> = None;
        for entry in fs::read_dir(&self.0)? {
            let name = entry?.file_name().into_string().unwrap();
            last = last.max(name.strip_suffix(".commit").map(|step| step.parse().unwrap()));
        }
        let Some(step) = last else { return Ok(None) };
        let commit = fs::read_to_string(self.0.join(format!("{step}.commit")))?;
        let facts: Vec<u64> = commit.split(' ').map(|word| word.parse().unwrap()).collect();
        let &[world, digest] = facts.as_slice() else { return Err(damaged("commit", facts.len())) };
        let world = usize::try_from(world).unwrap();
        let mut bytes = Vec::new();
        for rank in 0..world {
            bytes.extend(fs::read(self.part(step, rank, world))?);
        }
        let model = Model::from_words(&to_words(&bytes))?;
        if (model.digest(), model.step) != (digest, step) {
            return Err(damaged("the digest of step", step));
        }
        Ok(Some(model))
    }
}

fn damaged(what: &str, number: impl Display) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("a checkpoint is damaged: {what} {number}"))
}

/// Writes a file atomically.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    let mut file = File::create(&part)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    drop(file);
    fs::rename(&part, path)
}

fn send(peer: &mut TcpStream, words: &[u64]) -> io::Result<()> {
    let length = [words.len() as u64];
    let bytes: Vec<u8> = length.iter().chain(words).flat_map(|word| word.to_le_bytes()).collect();
    peer.write_all(&bytes)
}

fn receive(peer: &mut TcpStream) -> io::Result<Vec<u64>> {
    let mut length = [0; 8];
    peer.read_exact(&mut length)?;
    let mut bytes = vec![0; usize::try_from(u64::from_le_bytes(length)).unwrap() * 8];
    peer.read_exact(&mut bytes)?;
    Ok(to_words(&bytes))
}

fn to_words(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect()
}

/// Connects with retries: rank 0 may not listen yet.
fn connect(address: &str, port: u16) -> io::Result<TcpStream> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match TcpStream::connect((address, port)) {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                if Instant::now() > deadline {
                    return Err(error);
                }
                thread::sleep(Duration::from_millis(5));
            }
            done => return done,
        }
    }
}

fn variable<T: FromStr>(name: &str) -> io::Result<T> {
    let value = std::env::var(name).ok().and_then(|value| value.parse().ok());
    value.ok_or_else(|| io::Error::new(ErrorKind::InvalidInput, format!("{name} is not set")))
}

const FINISH: &str = "finish";
const WORK: &str = "BRIGADE_FAULTS_WORK";
const CHECKPOINTS: &str = "BRIGADE_FAULTS_CHECKPOINTS";
