//! A rank that is killed within a step of a pipeline ends all others, which say where they were.

use std::ffi::OsStr;
use std::io::Read;
use std::time::{Duration, Instant};

use brigade_models::{Gpt2LmHead, Gpt2Options, Labelled};
use brigade_optim::Sgd;
use brigade_sharding::Mesh;
use brigade_sharding::pipeline::Schedule;
use brigade_testkit::KillableRanks;
use brigade_train::{Accelerator, PipelineOptions, TrainError};
use rand::RngExt;
use rustix::process::{Signal, getpid, kill_process, set_parent_process_death_signal};
use tch::{Device, Kind, Tensor};

const RANKS: usize = 3;
/// Kills at random moments. Before passes each schedule has one.
const KILLS: usize = 20;
/// The rank that kills itself, and the number of its passes before.
const VICTIM: &str = "BRIGADE_TEST_PIPELINE_VICTIM";
const PASSES: &str = "BRIGADE_TEST_PIPELINE_PASSES";
/// The moment within a step at which it kills itself, as a part of the step's time: in any action, also in a send, a
/// receive, a backward pass or the step's end. Empty for a kill before a pass.
const MOMENT: &str = "BRIGADE_TEST_PIPELINE_MOMENT";
/// The schedule.
const SCHEDULE: &str = "BRIGADE_TEST_PIPELINE_SCHEDULE";
/// The time limit of collectives: ranks are to end before it.
const TIME_LIMIT: Duration = Duration::from_secs(40);

/// What ranks do in a step after their passes.
const AFTER_THE_PASSES: [&str; 3] =
    ["the loss of the batch", "the gradients of shared parameters", "the end of the step"];

fn number(variable: &str) -> usize {
    std::env::var(variable).unwrap().parse().unwrap()
}

/// A rank that trains until it is killed, or until another one is.
#[test]
#[ignore = "is what the test below starts"]
fn child() {
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let (victim, passes) = (number(VICTIM), number(PASSES));
    let moment = std::env::var(MOMENT).unwrap();
    let moment: Option<f64> = (!moment.is_empty()).then(|| moment.parse().unwrap());
    let mesh = Mesh::builder().pipeline(RANKS).build(RANKS).unwrap();
    let options = PipelineOptions::new(6).schedule(Schedule::ALL[number(SCHEDULE)]);
    let builder = Accelerator::builder().cpu(true).quiet(true).sharding(None).mesh(mesh);
    let accelerator = builder.pipeline_options(options).timeout(TIME_LIMIT).build().unwrap();
    let of_model = Gpt2Options {
        vocab_size: 19,
        n_positions: 6,
        n_embd: 8,
        n_layer: 6,
        n_head: 2,
        resid_pdrop: 0.0,
        embd_pdrop: 0.0,
        attn_pdrop: 0.0,
        ..Default::default()
    };
    let model = accelerator.parallel().model(|path| Gpt2LmHead::new(path, &of_model)).unwrap();
    let optimizer = Sgd::new(0.01).build(&model).unwrap();
    let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
    let ids = Tensor::arange(36, (Kind::Int64, Device::Cpu)).remainder(19).view([6, 6]);
    let is_victim = accelerator.processes().process_index() == victim;
    let (mut before, mut steps, mut of_step) = (0, 0, Duration::ZERO);
    let error = loop {
        let begun = Instant::now();
        steps += 1;
        if let Some(moment) = moment.filter(|_| is_victim && steps == 4) {
            let wait = of_step.mul_f64(moment);
            std::thread::spawn(move || {
                std::thread::sleep(wait);
                kill_process(getpid(), Signal::KILL).unwrap();
            });
        }
        let loss = accelerator.forward_backward(&model, &ids, |model, micro| {
            if is_victim && moment.is_none() && before == passes {
                kill_process(getpid(), Signal::KILL).unwrap();
            }
            before += 1;
            model.forward(Labelled::new(micro, micro))?.mean()
        });
        if let Err(error) = loss {
            break error;
        }
        optimizer.step().unwrap();
        optimizer.zero_grad().unwrap();
        of_step = begun.elapsed();
    };
    let Some(TrainError::Pipeline { rank, action, source }) = error.downcast_ref() else {
        panic!("{error}");
    };
    println!("told: {rank} | {action} | {source}");
}

#[test]
fn the_other_ranks_end_and_say_where() {
    kill_ranks(false);
}

#[test]
fn a_kill_within_any_action_ends_the_other_ranks() {
    kill_ranks(true);
}

/// Returns `true` if an error names a rank, alone or in a list ("ranks 0, 1 had not arrived").
fn names(told: &str, rank: usize) -> bool {
    let told = told.split_once(" | ").map_or(told, |(_, rest)| rest);
    let missing = told.split_once(" had not arrived").map(|(before, _)| before);
    let missing = missing.and_then(|before| before.rsplit_once("ranks "));
    let mut listed = missing.into_iter().flat_map(|(_, list)| list.split(", "));
    told.contains(&format!("rank {rank}")) || listed.any(|it| it == rank.to_string())
}

fn kill_ranks(is_in_action: bool) {
    let seed = brigade_test_needs::random().u64(..);
    let kills = if is_in_action { KILLS } else { Schedule::ALL.len() };
    for kill in 0..kills {
        let mut random = brigade_sampling::stream(seed, &[kill as u64]);
        let victim = random.random_range(0..RANKS);
        // Each rank has six passes of a stage in a step, or twelve of two stages.
        let passes = random.random_range(0..40);
        let schedule = kill % Schedule::ALL.len();
        let moment = random.random_range(0.0..1.0);
        let (moment, place) = if is_in_action {
            (f64::to_string(&moment), format!("at {moment} of a step"))
        } else {
            (String::new(), format!("after {passes} passes"))
        };
        let [of_victim, of_passes, of_schedule] =
            [victim, passes, schedule].map(|number| number.to_string());
        let text = [of_victim, of_passes, of_schedule, moment];
        let variables = [VICTIM, PASSES, SCHEDULE, MOMENT];
        let variables: Vec<(&str, &OsStr)> =
            variables.into_iter().zip(text.iter().map(OsStr::new)).collect();
        let about = format!("seed {seed}, kill {kill}: rank {victim} {place}");
        let mut ranks = KillableRanks::start("pipeline_kill::child", RANKS, &variables).unwrap();
        let begun = Instant::now();
        let mut last_end = None;
        let mut is_named = false;
        let schedule = Schedule::ALL[schedule];
        let stages = match schedule.least_chunks() {
            1 => "stage 0",
            _ if schedule == Schedule::ZeroBubbleV => "stages 0, 5",
            _ => "stages 0, 3",
        };
        let of_rank_0 = format!("(rank 0, which has {stages}, has ended)");
        let mut all_told = Vec::new();
        // The killed rank first: the others have the time limit from then on.
        let order = std::iter::once(victim).chain((0..RANKS).filter(|rank| *rank != victim));
        for rank in order {
            let process = &mut ranks.ranks()[rank];
            let mut text = String::new();
            process.stdout.take().unwrap().read_to_string(&mut text).unwrap();
            let status = process.wait().unwrap();
            if rank == victim {
                assert_eq!(status.code(), None, "{about}: {text}");
                last_end = Some(Instant::now());
                continue;
            }
            assert!(status.success(), "{about}: rank {rank}: {status}\n{text}");
            let told = text.lines().find_map(|line| line.split_once("told: "));
            let (_, told) = told.unwrap_or_else(|| panic!("{about}: rank {rank}: {text}"));
            let parts: Vec<&str> = told.splitn(3, " | ").collect();
            assert_eq!(parts[0], rank.to_string(), "{about}: {told}");
            let is_pass = parts[1].contains("stage ") && parts[1].contains("micro-batch ");
            let is_end = AFTER_THE_PASSES.iter().any(|it| parts[1].starts_with(it));
            assert!(is_pass || is_end, "{about}: {told}");
            all_told.push(told.to_owned());
            is_named |= names(told, victim);
            if victim == 0 {
                // It hosts the store, which has ended with it.
                assert!(parts[1].ends_with(&of_rank_0), "{about}: {told}");
                let store = told.split_once("; the store at 127.0.0.1:");
                let store = store.map_or("", |(_, rest)| rest.trim_start_matches(char::is_numeric));
                let expected = ", which rank 0 hosts, is gone, so rank 0 has ended";
                assert!(store.starts_with(expected), "{about}: {told}");
            }
        }
        assert!(is_named, "{about}: no rank names it: {all_told:?}");
        let waited = last_end.map_or(Duration::ZERO, |end| end.elapsed());
        assert!(waited < TIME_LIMIT, "{about}: {waited:?}");
        assert!(begun.elapsed() < Duration::from_secs(120), "{about}");
    }
}
