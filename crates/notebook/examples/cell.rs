//! A cell, as evcxr compiles one: a shared library whose function launches another function of it on ranks. The tests
//! of the launcher load it; the variable CELL says what the cell does.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use brigade_dylib_call::Entry;
use brigade_notebook::{NotebookError, NotebookLauncher, debug_launcher, notebook_launcher};
use brigade_torch::ReduceOp;
use brigade_train::Accelerator;
use serde::{Deserialize, Serialize};
use tch::Tensor;

/// Where the tests find the cell in the library.
#[used]
static CELL_ENTRY: Entry = Entry::new(cell);

/// A global of the notebook, which no rank inherits.
static CALLS: AtomicU64 = AtomicU64::new(0);

#[derive(Debug, Serialize, Deserialize)]
struct Settings {
    rate: f64,
    steps: usize,
    name: Option<String>,
}

extern "C" fn cell() -> i32 {
    let what = std::env::var("CELL").unwrap_or_default();
    let mut text = String::new();
    let result = run(&what, &mut text);
    let shown = match result {
        Ok(()) => text,
        // As a kernel shows the error of a cell.
        Err(error) => format!("{text}error: {error:?}\n"),
    };
    let _ = std::io::Write::write_all(&mut std::io::stdout(), shown.as_bytes());
    0
}

fn run(what: &str, text: &mut String) -> Result<(), NotebookError> {
    let settings = Settings { rate: 0.1, steps: 3, name: None };
    match what {
        "losses" => {
            // Threads of libtorch, autograd and the global are in use before the ranks start.
            let used = Tensor::ones([64, 64], tch::kind::FLOAT_CPU).set_requires_grad(true);
            used.matmul(&used).sum(tch::Kind::Float).backward();
            CALLS.fetch_add(7, Ordering::Relaxed);
            let found = notebook_launcher(train, settings, ranks())?;
            let _ = writeln!(text, "{found:?}");
        }
        "closure" => {
            let step = |number: u32| Ok::<u32, std::fmt::Error>(number + 1);
            notebook_launcher(step, 1, 2)?;
        }
        "failing" => drop(notebook_launcher(fails_on_rank_1, "no such file".to_owned(), 2)?),
        "panicking" => drop(notebook_launcher(panics_on_rank_1, (), 2)?),
        "hanging" => drop(notebook_launcher(hangs, (), 2)?),
        "not_a_number" => {
            let found = notebook_launcher(returns, f64::NAN, 2)?;
            let _ = writeln!(text, "{found:?}");
        }
        "debug" => {
            let found = debug_launcher(returns, 2.5, 2)?;
            let _ = writeln!(text, "{found:?}");
        }
        "none" => drop(notebook_launcher(returns, 1.0, 0)?),
        "node_rank" => {
            drop(NotebookLauncher::new(1).num_nodes(2).node_rank(2).launch(returns, 1.0)?);
        }
        "missing" => drop(NotebookLauncher::new(2).program("/no/brigade").launch(returns, 1.0)?),
        "old" => drop(NotebookLauncher::new(2).program("/bin/false").launch(returns, 1.0)?),
        other => {
            let _ = writeln!(text, "no cell {other}");
        }
    }
    Ok(())
}

fn ranks() -> usize {
    std::env::var("CELL_RANKS").ok().and_then(|it| it.parse().ok()).unwrap_or(2)
}

/// Steps of gradient descent on a square, with its gradients reduced by hand.
fn train(settings: Settings) -> brigade_torch::Result<Vec<f64>> {
    let Settings { rate, steps, name } = settings;
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    accelerator.println(format!("{} calls before", CALLS.fetch_add(1, Ordering::Relaxed)));
    let mut weight = Tensor::from(1.0 + accelerator.processes().process_index() as f64);
    let mut losses = vec![accelerator.processes().num_processes() as f64];
    for _ in 0..steps {
        losses.push(
            accelerator.processes().reduce(&weight.square(), ReduceOp::Mean)?.double_value(&[]),
        );
        weight = &weight - rate * 2.0 * &weight;
    }
    assert!(name.is_none());
    Ok(losses)
}

fn fails_on_rank_1(reason: String) -> brigade_torch::Result<()> {
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    if accelerator.processes().process_index() == 1 {
        return Err(brigade_torch::Error::invalid_argument(reason));
    }
    accelerator.processes().wait_for_everyone()
}

fn panics_on_rank_1((): ()) -> brigade_torch::Result<()> {
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    assert!(accelerator.processes().process_index() == 0, "the second rank gives up");
    accelerator.processes().wait_for_everyone()
}

/// Says who hangs, so that a test can look for the processes.
fn hangs((): ()) -> Result<(), std::fmt::Error> {
    let _ = std::io::Write::write_all(
        &mut std::io::stdout(),
        format!("rank process {}\n", std::process::id()).as_bytes(),
    );
    loop {
        thread::sleep(Duration::from_secs(3600));
    }
}

fn returns(number: f64) -> Result<(f64, Vec<u8>), std::fmt::Error> {
    Ok((number, vec![1, 2]))
}
