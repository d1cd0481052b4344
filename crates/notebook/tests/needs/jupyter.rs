//! Notebooks in Jupyter with the real kernel: `cargo xtask install rust-kernel` brings both.

mod kernel;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use brigade_test_hosts::Network;
use brigade_test_needs::{Need, needs, python};
use kernel::{Kernel, Setup, checkout};
use nix::sys::signal::kill;
use nix::unistd::Pid;
use serde_json::Value;

use crate::binary::brigade_beside;

/// The kernel with the `brigade` of this build.
fn setup() -> Setup {
    let test = std::env::current_exe().unwrap();
    let built = test.parent().and_then(Path::parent).unwrap();
    Setup::new(brigade_beside(built.join("brigade").to_str().unwrap()))
}

/// The first cell of the notebooks here.
fn dependency() -> String {
    let brigade = checkout().join("crates/brigade");
    format!(":dep brigade = {{ path = {brigade:?}, features = [\"notebook\"] }}")
}

/// The limit of a test whose notebook compiles, in seconds: the first one compiles Brigade.
const COMPILES: u64 = 2600;

const USE: &str = "use brigade::notebook::prelude::*;\nuse brigade::prelude::*;";

#[needs(RustKernel, limit = COMPILES)]
fn a_cell_launches_is_interrupted_fails_and_goes_on() {
    let setup = setup();
    let mut kernel = setup.kernel(&checkout());
    kernel.run(&dependency()).succeeds();
    kernel.run(USE).succeeds();

    // Output comes while the cell runs, and the processes end with the cell that is interrupted.
    kernel
        .run(
            "fn hang((): ()) -> Result<()> {\n\
                 println!(\"rank process {}\", std::process::id());\n\
                 loop { std::thread::sleep(std::time::Duration::from_secs(3600)); }\n\
             }",
        )
        .succeeds();
    kernel.start("notebook_launcher(hang, (), 2).unwrap();");
    let ranks = two_ranks(&mut kernel);
    kernel.interrupt();
    let cell = kernel.finish();
    assert!(!cell.error.is_empty() || cell.err.contains("interrupt"), "{cell:?}");
    wait_until_ended(&ranks);

    // The notebook's process continues, and so do its functions; one is changed.
    kernel
        .run(
            "fn doubled(number: i64) -> Result<i64> {\n\
                 let accelerator = Accelerator::new()?;\n\
                 let mine = Tensor::from(number + accelerator.processes().process_index() as i64);\n\
                 if number < 0 && accelerator.processes().process_index() == 1 {\n\
                     return Err(Error::invalid_argument(\"a negative number\"));\n\
                 }\n\
                 Ok(2 * accelerator.processes().reduce(&mine, ReduceOp::Sum)?.int64_value(&[]))\n\
             }",
        )
        .succeeds();
    let cell = kernel.run("notebook_launcher(doubled, 3, 2).unwrap()").succeeds();
    assert!(cell.out.contains("Launching training on 2 processes."), "{cell:?}");
    assert!(cell.shown().contains("14"), "{cell:?}");
    let cell = kernel.run("notebook_launcher(doubled, -1, 2).unwrap();");
    assert!(cell.err.contains("rank 1 on ") && cell.err.contains("a negative number"), "{cell:?}");
    let cell = kernel.run("notebook_launcher(|it: i64| doubled(it), 3, 2).unwrap();");
    assert!(cell.err.contains("write a `fn`"), "{cell:?}");
    kernel.run("fn doubled(number: i64) -> Result<i64> { Ok(200 * number) }").succeeds();
    let cell = kernel.run("notebook_launcher(doubled, 3, 2).unwrap()").succeeds();
    assert!(cell.shown().contains("600"), "{cell:?}");

    // Tensors and threads in the notebook's process do not interfere with ranks.
    kernel.run("let used = Tensor::ones([256, 256], brigade::tch::kind::FLOAT_CPU); (&used).matmul(&used)").succeeds();
    let cell = kernel.run("notebook_launcher(doubled, 4, 2).unwrap()").succeeds();
    assert!(cell.shown().contains("800"), "{cell:?}");

    // With this setting of evcxr, Jupyter is notified of a cell that fails.
    kernel.run(":preserve_vars_on_panic 0").succeeds();
    kernel
        .run("fn fails((): ()) -> Result<()> { Err(Error::invalid_argument(\"no data\")) }")
        .succeeds();
    let cell = kernel.run("notebook_launcher(fails, (), 2).unwrap();");
    assert!(cell.err.contains("no data") && !cell.error.is_empty(), "{cell:?}");

    // The end of the kernel ends the ranks.
    kernel.start("notebook_launcher(hang, (), 2).unwrap();");
    let ranks = two_ranks(&mut kernel);
    drop(kernel);
    wait_until_ended(&ranks);
}

/// The template's notebook and program: what the ranks print, and the last loss to the last bit.
#[needs(RustKernel, limit = COMPILES)]
fn a_new_notebook_trains_as_its_program_under_brigade_launch() {
    let setup = setup();
    let folder = tempfile::tempdir().unwrap();
    let mut new = Command::new(setup.brigade());
    new.args(["new", "digits", "--template", "notebook", "--no-setup", "--brigade"]);
    let made = new.arg(checkout()).current_dir(folder.path()).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let project = folder.path().join("digits");

    let notebook = read(&project.join("digits.ipynb"));
    let mut kernel = setup.kernel(&project);
    let mut lines = BTreeSet::new();
    for source in sources(&notebook) {
        let cell = kernel.run(&source).succeeds();
        if source.contains("images(") || source.contains("curve(") {
            assert!(cell.mimes.iter().any(|it| it == "image/png"), "{cell:?}");
        }
        lines.extend(epochs(&cell.out));
    }
    let last =
        kernel.run("losses.iter().map(|it| it[it.len() - 1]).collect::<Vec<_>>()").succeeds();
    drop(kernel);

    // Cells are optimised. Without that, loops of the border crates have no fused multiply-add, and other last digits.
    let mut program = Command::new("cargo");
    program.args([
        "build",
        "--quiet",
        "--release",
        "-p",
        "templates",
        "--bin",
        "template_notebook",
    ]);
    assert!(program.current_dir(checkout()).status().unwrap().success());
    let mut launch = Command::new(setup.brigade());
    launch.args(["launch", "--nproc", "2", "--"]);
    let launched =
        launch.arg(checkout().join("target/release/template_notebook")).output().unwrap();
    let out = String::from_utf8_lossy(&launched.stdout).into_owned();
    assert!(launched.status.success(), "{}", String::from_utf8_lossy(&launched.stderr));
    assert_eq!(lines.len(), 4, "{lines:?}");
    assert_eq!(lines, epochs(&out));
    let losses: Vec<&str> =
        out.lines().filter_map(|it| Some(it.split_once("the last loss is ")?.1)).collect();
    assert_eq!(losses.len(), 2, "{out}");
    for loss in losses {
        assert!(last.shown().contains(loss), "{loss} is not in {last:?}");
    }
}

/// The lines of epochs that rank 0 prints.
fn epochs(out: &str) -> BTreeSet<String> {
    let lines = out.lines().filter_map(|it| it.find("epoch ").map(|at| it[at..].trim().to_owned()));
    lines.filter(|it| it.contains("accuracy")).collect()
}

/// `nbconvert --execute`, as `cargo xtask notebook --execute` calls it.
#[needs(RustKernel, limit = COMPILES)]
fn the_notebooks_of_the_examples_run() {
    let setup = setup();
    let folder = checkout().join("examples/notebooks");
    let mut names: Vec<PathBuf> =
        fs::read_dir(&folder).unwrap().map(|it| it.unwrap().path()).collect();
    names.retain(|it| it.extension().is_some_and(|it| it == "ipynb"));
    names.sort();
    assert_eq!(names.len(), 3);
    let out = tempfile::tempdir().unwrap();
    for path in names {
        let mut convert = Command::new(python(Need::RustKernel).unwrap());
        convert.args(["-m", "nbconvert", "--to", "notebook", "--execute", "--output-dir"]);
        convert.arg(out.path()).arg("--ExecutePreprocessor.timeout=1800").arg(&path);
        let converted = setup.with_kernel(&mut convert).output().unwrap();
        let said = String::from_utf8_lossy(&converted.stderr);
        assert!(converted.status.success(), "{}: {said}", path.display());
        let notebook = read(&out.path().join(path.file_name().unwrap()));
        let text = notebook.to_string();
        assert!(text.contains("Launching training on 2 processes."), "{}", path.display());
        assert!(!text.contains("\"output_type\":\"error\""), "{}", path.display());
        // evcxr reports a cell that panics as done.
        assert!(!text.contains("panicked at"), "{}: {text}", path.display());
        assert!(text.contains("\"image/png\":"), "{} shows no picture", path.display());
    }
}

/// One rank on each of two hosts, each with a notebook.
#[needs(RustKernel, Hosts, limit = COMPILES)]
fn notebooks_on_two_hosts_train_together() {
    let setup = setup();
    // The dependencies of the kernels are fetched and built if there is a network: both kernels have their own folder.
    let mut warm: Vec<Kernel> = (0..2).map(|_| setup.kernel(&checkout())).collect();
    for kernel in &mut warm {
        kernel.start(&dependency());
    }
    for kernel in &mut warm {
        kernel.finish().succeeds();
    }
    drop(warm);

    let network = Network::new(2);
    let mut kernels: Vec<Kernel> =
        (0..2).map(|host| setup.kernel_on(network.host(host), &checkout())).collect();
    for (host, kernel) in kernels.iter_mut().enumerate() {
        kernel.run(&dependency()).succeeds();
        kernel.run(USE).succeeds();
        kernel
            .run(
                "fn sum((): ()) -> Result<(usize, usize, i64)> {\n\
                     let accelerator = Accelerator::new()?;\n\
                     let rank = accelerator.processes().process_index();\n\
                     let sum = accelerator.processes().reduce(&Tensor::from(10 + rank as i64), ReduceOp::Sum)?;\n\
                     Ok((rank, accelerator.processes().num_processes(), sum.int64_value(&[])))\n\
                 }",
            )
            .succeeds();
        let master = network.host(0).address();
        kernel.start(&format!(
            "NotebookLauncher::new(1).num_nodes(2).node_rank({host}).master_addr({master:?}).launch(sum, ()).unwrap()"
        ));
    }
    for (host, kernel) in kernels.iter_mut().enumerate() {
        let cell = kernel.finish().succeeds();
        assert!(cell.out.contains("Launching training on 2 processes."), "{cell:?}");
        assert!(cell.shown().contains(&format!("({host}, 2, 21)")), "{cell:?}");
    }
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// The sources of a notebook's code.
fn sources(notebook: &Value) -> Vec<String> {
    let cells = notebook["cells"].as_array().unwrap().iter();
    let code = cells.filter(|it| it["cell_type"] == "code");
    code.map(|it| it["source"].as_str().unwrap().to_owned()).collect()
}

/// The processes that two ranks say they are.
fn two_ranks(kernel: &mut Kernel) -> Vec<Pid> {
    let out = kernel.wait_for(|cell| cell.out.matches("rank process ").count() == 2);
    let ids = out.lines().filter_map(|it| it.split_once("rank process ")?.1.trim().parse().ok());
    ids.map(Pid::from_raw).collect()
}

fn wait_until_ended(processes: &[Pid]) {
    assert_eq!(processes.len(), 2);
    let limit = Instant::now() + Duration::from_secs(60);
    while processes.iter().any(|it| kill(*it, None).is_ok()) {
        assert!(Instant::now() < limit, "the ranks {processes:?} live on");
        thread::sleep(Duration::from_millis(20));
    }
}
