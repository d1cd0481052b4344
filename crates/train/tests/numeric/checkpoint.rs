//! A run that was stopped and goes on equals, bit for bit, the run that was not stopped.

use std::time::Duration;

use brigade_testkit::{DistTest, dist_test, step};
use brigade_train::{Accelerator, CommHook, PowerSgd, Precision, ProjectConfiguration};

use crate::device::builder;
use crate::resume::{self, Run, Shared};

/// Buffers are rank 0's in a checkpoint: the others' are replaced before they matter.
fn compared(accelerator: &Accelerator, run: &Run) -> Vec<(String, Vec<u64>)> {
    if accelerator.is_main_process() { run.weights() } else { run.parameters() }
}

/// Saves after every batch of an uninterrupted run, then goes on from each.
fn resumed_runs_equal(background: bool, precision: Precision, hook: &CommHook) {
    let first = builder().build().unwrap();
    let folder = Shared::new(&first);
    let project = ProjectConfiguration::default().background(background);
    // Each with a scaler of its own, which belongs to the Accelerator.
    let again = || {
        Accelerator::builder()
            .sharing(&first)
            .gradient_accumulation_steps(2)
            .mixed_precision(precision)
            .comm_hook(hook.clone())
            .project(project.clone())
            .build()
            .unwrap()
    };
    let accelerator = again();
    let mut run = Run::new(&accelerator, 1);
    let at = |batches: usize| folder.join(batches.to_string());
    run.save(&accelerator, &at(0));
    let losses = run.go(&accelerator, |run, batches| {
        run.save(&accelerator, &at(batches));
        true
    });
    accelerator.checkpoints().wait().unwrap();
    let weights = compared(&accelerator, &run);
    assert!(losses.len() >= 8, "{} batches", losses.len());
    // Saving changes nothing.
    drop(run);
    let accelerator = again();
    let mut undisturbed = Run::new(&accelerator, 1);
    assert_eq!(undisturbed.go(&accelerator, |_, _| true), losses);

    for batches in 0..=losses.len() {
        step!("resume after {batches} batches");
        let accelerator = again();
        // Other weights, another seed of the data, other random numbers.
        let mut run = Run::new(&accelerator, 2);
        let loaded = accelerator.load_state(at(batches)).unwrap();
        assert_eq!(loaded.world_size, accelerator.processes().num_processes());
        run.batches = batches;
        let rest = run.go(&accelerator, |_, _| true);
        assert_eq!(rest, losses[batches..], "losses after {batches} batches");
        assert_eq!(compared(&accelerator, &run), weights, "weights after {batches} batches");
    }
}

dist_test!(world = 1, seconds = 200, one_rank_resumes_bit_for_bit, |_world| {
    resumed_runs_equal(true, Precision::No, &CommHook::None);
});

dist_test!(world = 2, seconds = 300, two_ranks_resume_bit_for_bit, |_world| {
    resumed_runs_equal(true, Precision::No, &CommHook::None);
});

dist_test!(world = 2, seconds = 300, two_ranks_without_a_thread_resume_bit_for_bit, |_world| {
    resumed_runs_equal(false, Precision::No, &CommHook::None);
});

dist_test!(world = 1, seconds = 200, one_rank_in_half_precision_resumes_bit_for_bit, |_world| {
    resumed_runs_equal(true, Precision::Fp16, &CommHook::None);
});

dist_test!(world = 2, seconds = 300, two_ranks_in_half_precision_resume_bit_for_bit, |_world| {
    resumed_runs_equal(true, Precision::Fp16, &CommHook::None);
});

dist_test!(world = 2, seconds = 300, two_ranks_with_power_sgd_resume_bit_for_bit, |_world| {
    // Its errors and factors, and the number of steps that were sent uncompressed.
    let hook = PowerSgd { start_iteration: 3, ..PowerSgd::default() };
    resumed_runs_equal(true, Precision::No, &CommHook::PowerSgd(hook));
});

#[test]
fn three_ranks_over_tcp_resume_bit_for_bit() {
    // As on several hosts. The reducer of a resumed run begins with other buckets than that of a run which
    // was not stopped: sums must not depend on a gradient's place in them.
    let name = concat!(module_path!(), "::three_ranks_over_tcp_resume_bit_for_bit");
    DistTest::new(name, 3)
        .time_limit(Duration::from_secs(300))
        .variable("BRIGADE_SHARED_MEMORY", "0")
        .run_or_panic(|_| resumed_runs_equal(true, Precision::No, &CommHook::None));
}

/// The samples that a run of two ranks has not seen in its epoch are those that one rank goes on with,
/// in the same order; and the other way round.
fn other_worlds_go_on_at_the_right_sample(accelerator: &Accelerator, saved: usize) {
    let folder = Shared::new(accelerator);
    let order = |epoch: u64| -> Vec<i64> {
        let plan = brigade_sampling::Shuffle::new(resume::SAMPLES, 77);
        let order: Vec<usize> = brigade_sampling::Sampler::order(&plan, epoch);
        order.into_iter().map(|sample| sample as i64).collect()
    };
    // State of a loader as the other run writes it: `saved` samples of epoch 1 were used.
    let mut run = Run::new(accelerator, 1);
    accelerator.save_state(folder.join("first")).unwrap();
    accelerator.checkpoints().wait().unwrap();
    accelerator
        .processes()
        .on_main_process(|| pretend_another_world(&folder.join("first"), saved))
        .unwrap();
    let loaded = accelerator.load_state(folder.join("first")).unwrap();
    assert_eq!(loaded.world_size, 7);
    run.go(accelerator, |_, _| true);
    let all: Vec<Vec<i64>> = accelerator.processes().gather_object(run.seen.clone()).unwrap();
    let mut seen: Vec<i64> = all.concat();
    let mut expected = order(1)[saved..].to_vec();
    // In rounds: each rank's batch after that of the previous rank.
    if all.len() == 1 {
        assert_eq!(seen, expected);
    }
    seen.sort_unstable();
    expected.sort_unstable();
    assert_eq!(seen, expected, "after {saved} samples");
}

/// Rewrites the checkpoint's loader and world: with its checksums, as if seven ranks had written it.
fn pretend_another_world(
    path: &std::path::Path,
    samples: usize,
) -> Result<(), brigade_torch::Error> {
    use brigade_checkpoint::FileName;
    use brigade_checkpoint::layout::{FileFacts, MANIFEST, Manifest};
    let mut manifest = Manifest::read(path)?;
    let state = serde_json::json!({
        "seed": 77, "epoch": 1, "base": 0, "batches": 1, "samples": samples, "total_samples": 99
    });
    std::fs::write(path.join("loader.json"), state.to_string()).unwrap();
    let facts = FileFacts::of(&path.join("loader.json"), false)?;
    manifest.files.insert(FileName::new("loader.json").unwrap(), facts);
    let own =
        manifest.objects.iter().find(|object| object.name.as_str() == "rank_0").unwrap().clone();
    manifest.objects.retain(|object| object.kind != "rank");
    for rank in 0..7 {
        let mut object = own.clone();
        object.name = FileName::new(format!("rank_{rank}")).unwrap();
        manifest.objects.push(object);
    }
    manifest.world_size = 7;
    manifest.mesh[0].size = 7;
    std::fs::write(path.join(MANIFEST), manifest.to_json()).unwrap();
    Ok(())
}

dist_test!(world = 1, one_rank_resumes_where_seven_stopped, |_world| {
    let accelerator = builder().build().unwrap();
    for saved in [8, 15, 27] {
        other_worlds_go_on_at_the_right_sample(&accelerator, saved);
    }
});

dist_test!(world = 2, two_ranks_go_on_where_seven_stopped, |_world| {
    let accelerator = builder().build().unwrap();
    for saved in [8, 15, 27] {
        other_worlds_go_on_at_the_right_sample(&accelerator, saved);
    }
});
