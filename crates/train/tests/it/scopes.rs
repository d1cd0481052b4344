//! Scopes that one rank runs for the others, and work that is divided.

use std::collections::BTreeMap;

use brigade_testkit::{World, dist_test};
use brigade_torch::{Error, ReduceOp, Result};
use brigade_train::Accelerator;
use tch::Tensor;

dist_test!(world = 3, dist_main_process_first_orders_the_ranks, |world: World| -> Result<()> {
    let accelerator = Accelerator::new()?;
    let store = accelerator.processes().group().unwrap().store().clone();
    // Rank 0's number must be drawn before other ranks'.
    let turn = accelerator.processes().main_process_first(|| store.add("turns", 1))?;
    assert_eq!(turn == 1, world.rank.as_usize() == 0, "turn {turn}");
    accelerator.processes().wait_for_everyone()?;
    assert_eq!(store.add("turns", 0)?, 3);
    Ok(())
});

dist_test!(world = 2, dist_a_leader_that_fails_fails_everybody, |world: World| {
    let accelerator = Accelerator::new().unwrap();
    let main = world.rank.as_usize() == 0;
    let ran = std::cell::Cell::new(false);
    let outcome = accelerator.processes().main_process_first(|| {
        ran.set(true);
        Err::<(), _>(Error::invalid_argument("no such mirror"))
    });
    let text = outcome.unwrap_err().to_string();
    assert!(text.contains("no such mirror"), "{text}");
    assert_eq!(ran.get(), main, "only the leader runs the body");
    if !main {
        assert!(text.contains("rank 0 failed"), "{text}");
    }
    // The ranks are still in step.
    accelerator.processes().wait_for_everyone().unwrap();

    let last =
        accelerator.processes().on_last_process(|| Err::<(), _>(Error::invalid_argument("last")));
    assert!(last.unwrap_err().to_string().contains("last"));
    accelerator.processes().wait_for_everyone().unwrap();
});

dist_test!(world = 2, dist_a_leader_that_panics_fails_everybody, |world: World| {
    let accelerator = Accelerator::new().unwrap();
    let scope = || {
        accelerator.processes().on_main_process(|| -> Result<()> { panic!("index out of range") })
    };
    if world.rank.as_usize() == 0 {
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(scope));
        assert!(caught.is_err(), "the panic goes on where it happened");
    } else {
        let text = scope().unwrap_err().to_string();
        assert!(text.contains("panic: index out of range"), "{text}");
    }
    accelerator.processes().wait_for_everyone().unwrap();
});

dist_test!(world = 2, dist_run_on_one_rank, |world: World| -> Result<()> {
    let accelerator = Accelerator::new()?;
    let rank = world.rank.as_usize();
    let done = accelerator.processes().on_main_process(|| Ok::<_, Error>(rank))?;
    assert_eq!(done, (rank == 0).then_some(0));
    let done = accelerator.processes().on_process(1, || Ok::<_, Error>(rank))?;
    assert_eq!(done, (rank == 1).then_some(1));
    let done = accelerator.processes().on_local_main_process(|| Ok::<_, Error>(rank))?;
    assert_eq!(done, (rank == 0).then_some(0));
    accelerator.processes().local_main_process_first(|| Ok::<_, Error>(()))?;
    assert!(accelerator.processes().on_process(2, || Ok::<_, Error>(())).is_err());
    assert_eq!(accelerator.processes().is_last_process(), rank == 1);
    assert_eq!(accelerator.processes().num_processes(), 2);
    Ok(())
});

dist_test!(world = 2, dist_values_of_all_ranks, |world: World| -> Result<()> {
    let accelerator = Accelerator::new()?;
    let rank = world.rank.as_usize() as f64;
    let mine = Tensor::from_slice(&[rank, rank + 10.0]);
    let all: Vec<f64> = Vec::try_from(accelerator.processes().gather(&mine)?)?;
    assert_eq!(all, [0.0, 10.0, 1.0, 11.0]);
    let losses: Vec<f64> = Vec::try_from(accelerator.processes().gather(&Tensor::from(rank))?)?;
    assert_eq!(losses, [0.0, 1.0]);
    let (sum, mean) = (
        accelerator.processes().reduce(&mine, ReduceOp::Sum)?,
        accelerator.processes().reduce(&mine, ReduceOp::Mean)?,
    );
    assert_eq!(Vec::<f64>::try_from(sum)?, [1.0, 21.0]);
    assert_eq!(Vec::<f64>::try_from(mean)?, [0.5, 10.5]);
    assert_eq!(Vec::<f64>::try_from(&mine)?, [rank, rank + 10.0], "arguments stay");
    let last = accelerator.processes().broadcast(&mine, 1)?;
    assert_eq!(Vec::<f64>::try_from(last)?, [1.0, 11.0]);

    let longer = Tensor::ones([2, 1 + world.rank.as_usize() as i64], tch::kind::DOUBLE_CPU);
    let padded = accelerator.processes().pad_across_processes(&longer, -1, 7.0, false)?;
    let expected = if rank == 0.0 { [1.0, 7.0, 1.0, 7.0] } else { [1.0; 4] };
    assert_eq!(Vec::<f64>::try_from(padded.reshape([-1]))?, expected);
    let first = accelerator.processes().pad_across_processes(&longer, 1, 7.0, true)?;
    let expected = if rank == 0.0 { [7.0, 1.0, 7.0, 1.0] } else { [1.0; 4] };
    assert_eq!(Vec::<f64>::try_from(first.reshape([-1]))?, expected);
    assert_eq!(
        accelerator.processes().pad_across_processes(&longer, 5, 0.0, false)?.size(),
        longer.size()
    );

    let names = accelerator.processes().gather_object(format!("rank {rank}"))?;
    assert_eq!(names, ["rank 0", "rank 1"]);
    assert_eq!(accelerator.processes().broadcast_object(rank, 1)?, 1.0);
    Ok(())
});

dist_test!(world = 2, dist_work_is_divided, |world: World| -> Result<()> {
    let accelerator = Accelerator::new()?;
    let main = world.rank.as_usize() == 0;
    let items = ["a", "b", "c"];
    let part = accelerator.processes().split_between_processes(&items[..])?;
    assert_eq!(part, if main { vec!["a", "b"] } else { vec!["c"] });
    let part = accelerator.processes().split_between_processes_padded(&items[..])?;
    assert_eq!(part, if main { vec!["a", "b"] } else { vec!["c", "c"] });

    let rows = Tensor::from_slice(&[1i64, 2, 3]);
    let part = accelerator.processes().split_between_processes_padded(&rows)?;
    assert_eq!(Vec::<i64>::try_from(part)?, if main { [1, 2] } else { [3, 3] });

    let uneven = BTreeMap::from([("x".to_owned(), vec![1, 2, 3]), ("y".to_owned(), vec![1, 2])]);
    let text = accelerator.processes().split_between_processes(&uneven).unwrap_err().to_string();
    assert!(text.contains("\"x\" has 3 elements, \"y\" has 2"), "{text}");
    Ok(())
});

#[test]
fn alone_every_scope_runs_here() {
    let accelerator = Accelerator::new().unwrap();
    assert!(accelerator.is_main_process() && accelerator.processes().is_last_process());
    assert_eq!(accelerator.processes().on_main_process(|| Ok::<_, Error>(3)).unwrap(), Some(3));
    assert_eq!(accelerator.processes().main_process_first(|| Ok::<_, Error>(3)).unwrap(), 3);
    accelerator.processes().wait_for_everyone().unwrap();
    let gathered = accelerator.processes().gather(&Tensor::from(2.0)).unwrap();
    assert_eq!(gathered.size(), [1]);
    assert_eq!(accelerator.processes().split_between_processes(&vec![1, 2]).unwrap(), [1, 2]);
}
