//! Measurements of notebooks: time from a kernel's first cell to the first step, time after an edit, and the cost of a
//! launch.

#[expect(clippy::unwrap_used, reason = "it serves the tests of the crate")]
#[expect(dead_code, reason = "those tests look at more")]
#[path = "../../crates/notebook/tests/needs/jupyter/kernel.rs"]
mod kernel;

use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use brigade_test_needs::Need;
use kernel::{Kernel, Setup, checkout};

use crate::comparisons::{Comparison, milliseconds};
use crate::processes::{self, Side, median};
use crate::table::Row;

pub(crate) fn all() -> Vec<Comparison> {
    vec![Comparison { name: "notebook", run: notebook }]
}

fn notebook(rounds: usize) -> Result<Vec<Row>> {
    if let Some(lack) = Need::RustKernel.lacking() {
        bail!("{lack}");
    }
    let setup = Setup::new(processes::brigade()?);
    let peer = Side::peer("peers/notebook.py", &[]);
    // Compiles the dependencies of the cells, if that was not done before.
    first_step(&mut setup.kernel(&checkout()))?;
    let (mut first, mut edited, mut launches, mut others) = (vec![], vec![], vec![], vec![]);
    for _ in 0..rounds {
        let mut kernel = setup.kernel(&checkout());
        first.push(first_step(&mut kernel)?);
        let start = Instant::now();
        kernel.run(&train("2e-3")).succeeds();
        step(&mut kernel)?;
        edited.push(start.elapsed().as_secs_f64());
        kernel.finish().succeeds();
        launches.push(launch(&mut kernel)?);
        drop(kernel);
        if let Some(peer) = &peer {
            let [seconds] = peer.lists()?;
            others.extend(seconds);
        }
    }
    let seconds = |what, found: &mut Vec<f64>, goal: f64| {
        let found = median(found);
        Row {
            what,
            ours: format!("{found:.1} s"),
            other: "-".to_owned(),
            ratio: "-".to_owned(),
            goal: format!("under {goal} s"),
            reached: found < goal,
        }
    };
    let mut rows = vec![
        seconds("notebook: from the first cell to the first step on two ranks", &mut first, 60.0),
        seconds("notebook: from an edit of the function to its first step", &mut edited, 15.0),
    ];
    let ours = median(&mut launches);
    let other = (!others.is_empty()).then(|| median(&mut others));
    rows.push(Row {
        what: "notebook: a call on two ranks that form a group and return (the other: Accelerate's `debug_launcher`, \
               by forks)",
        ours: milliseconds(ours),
        other: other.map_or_else(|| "-".to_owned(), milliseconds),
        ratio: other.map_or_else(|| "-".to_owned(), |other| format!("{:.2}x", other / ours)),
        goal: "under 1.5 s".to_owned(),
        reached: ours < 1.5,
    });
    Ok(rows)
}

/// Measures the seconds from the first cell of a kernel to the first step of two ranks. The cell continues to run.
fn first_step(kernel: &mut Kernel) -> Result<f64> {
    let start = Instant::now();
    let brigade = checkout().join("crates/brigade");
    let cells = [
        format!(":dep brigade = {{ path = {brigade:?}, features = [\"notebook\"] }}"),
        "use brigade::notebook::prelude::*;\nuse brigade::prelude::*;".to_owned(),
        train("1e-3"),
    ];
    for cell in cells {
        kernel.run(&cell).succeeds();
    }
    step(kernel)?;
    let seconds = start.elapsed().as_secs_f64();
    kernel.finish().succeeds();
    Ok(seconds)
}

/// Launches the function on two ranks, and waits for their first step.
fn step(kernel: &mut Kernel) -> Result<()> {
    kernel.start("notebook_launcher(train, (), 2).unwrap();");
    let out = kernel.wait_for(|cell| cell.out.contains("first step\n"));
    ensure!(out.contains("Launching training on 2 processes."), "the cell printed {out}");
    Ok(())
}

/// Returns the loop of docs/notebooks.md for an epoch, with a line after its first step.
fn train(rate: &str) -> String {
    format!(
        "fn train((): ()) -> Result<Vec<f64>> {{
            let accelerator = Accelerator::new()?;
            let model = Model::new(Cnn::new)?;
            let optimizer = Adam::default().lr({rate}).build(&model)?;
            let train = DataLoader::new(Digits::train()?.resize(28, 28)?).batch_size(64).shuffle(true);
            let (mut model, mut optimizer, train) = accelerator.prepare((model, optimizer, train))?;
            let mut losses = Vec::new();
            for batch in accelerator.progress(&train) {{
                let (images, labels) = batch?.into_data();
                let loss = model.forward(&images)?.cross_entropy_for_logits(&labels);
                optimizer.zero_grad()?;
                accelerator.backward(&loss)?;
                optimizer.step()?;
                losses.push(loss.double_value(&[]));
                if losses.len() == 1 {{
                    accelerator.println(\"first step\");
                }}
            }}
            Ok(losses)
        }}"
    )
}

/// Measures the seconds of a call whose ranks do nothing, compiling excluded.
fn launch(kernel: &mut Kernel) -> Result<f64> {
    kernel
        .run("fn join((): ()) -> Result<usize> { Ok(Accelerator::new()?.num_processes()) }")
        .succeeds();
    let cell = "{
        let start = std::time::Instant::now();
        assert_eq!(notebook_launcher(join, (), 2).unwrap(), [2, 2]);
        println!(\"took {}\", start.elapsed().as_secs_f64());
    }";
    let out = kernel.run(cell).succeeds().out;
    let took = out.lines().find_map(|it| it.strip_prefix("took ")).context("the cell is silent")?;
    Ok(took.parse()?)
}
