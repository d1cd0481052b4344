//! A recording of training steps, as a viewer would read it.

use std::path::Path;

use brigade_models::Cnn;
use brigade_nn::Model;
use brigade_optim::Sgd;
use brigade_testkit::{World, dist_test};
use brigade_torch::{Error, Result};
use brigade_train::{
    Accelerator, PreparedModel, PreparedOptimizer, ProfileOptions, ProfileSchedule,
};
use tch::{Device, Kind, Tensor};

fn training(accelerator: &Accelerator) -> Result<(PreparedModel<Cnn>, PreparedOptimizer)> {
    let model = Model::new(Cnn::new)?;
    let optimizer = Sgd::new(0.01).build(&model)?;
    accelerator.prepare((model, optimizer))
}

fn train_step(
    accelerator: &Accelerator,
    (model, optimizer): &mut (PreparedModel<Cnn>, PreparedOptimizer),
) -> Result<()> {
    let images = Tensor::ones([4, 1, 28, 28], (Kind::Float, Device::Cpu));
    let labels = Tensor::zeros([4], (Kind::Int64, Device::Cpu));
    let loss = model.forward(&images)?.cross_entropy_for_logits(&labels);
    optimizer.zero_grad()?;
    accelerator.backward(&loss)?;
    optimizer.step()
}

/// Name, begin and end of all complete events.
fn complete_events(path: &Path) -> Vec<(String, f64, f64)> {
    let trace: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let complete = events.iter().filter(|event| event["ph"] == "X");
    complete
        .map(|event| {
            assert!(!event["pid"].is_null() && !event["tid"].is_null());
            let begin = event["ts"].as_f64().unwrap();
            let name = event["name"].as_str().unwrap().to_owned();
            (name, begin, begin + event["dur"].as_f64().unwrap())
        })
        .collect()
}

dist_test!(world = 2, dist_every_rank_writes_a_trace, |_world: World| -> Result<()> {
    let accelerator = Accelerator::new()?;
    let folder =
        accelerator.processes().on_main_process(|| Ok::<_, Error>(tempfile::tempdir().unwrap()))?;
    let path = folder.as_ref().map(|folder| folder.path().to_owned()).unwrap_or_default();
    let path = accelerator.processes().broadcast_object(path, 0)?.join("traces");
    let mut objects = training(&accelerator)?;
    let options = ProfileOptions {
        trace_dir: Some(path.clone()),
        schedule: Some(ProfileSchedule { skip_first: 1, wait: 1, warmup: 1, active: 2, repeat: 2 }),
        shapes: true,
        memory: true,
        flops: true,
    };
    let (steps, profile) = accelerator.profile(options, |profiler| {
        for _ in 0..10 {
            train_step(&accelerator, &mut objects)?;
            profiler.step()?;
        }
        Ok(10)
    })?;
    assert_eq!(steps, 10);
    let rank = accelerator.processes().process_index();
    let names = [format!("trace_rank{rank}.json"), format!("trace_rank{rank}.2.json")];
    assert_eq!(profile.traces, names.map(|name| path.join(name)));

    for (cycle, trace) in profile.traces.iter().enumerate() {
        let events = complete_events(trace);
        let spans = |name: &str| -> Vec<(f64, f64)> {
            events.iter().filter(|e| e.0 == name).map(|e| (e.1, e.2)).collect()
        };
        // Two steps of two convolutions each, each inside its step and with its parts inside.
        let convolutions = spans("aten::conv2d");
        assert_eq!(convolutions.len(), 4);
        let inside = |inner: &(f64, f64), outer: &[(f64, f64)]| {
            outer.iter().any(|o| o.0 <= inner.0 && inner.1 <= o.1)
        };
        let steps: Vec<_> = [3, 4]
            .iter()
            .flat_map(|step| spans(&format!("ProfilerStep#{}", step + 4 * cycle)))
            .collect();
        assert!(steps.len() >= 2, "{steps:?}");
        assert!(convolutions.iter().all(|conv| inside(conv, &steps)));
        let parts = spans("aten::convolution");
        assert!(parts.iter().all(|part| inside(part, &convolutions)) && parts.len() == 4);
        assert!(events.iter().any(|e| e.0.contains("ConvolutionBackward")));
        assert!(spans("ProfilerStep#1").is_empty() && spans("ProfilerStep#6").is_empty());
    }
    let operations = profile.operations();
    let conv = operations.iter().find(|op| op.name == "aten::conv2d").unwrap();
    assert_eq!(conv.calls, 8);
    assert!(conv.flops > 0 && conv.total_ns > conv.self_ns);
    assert!(operations.iter().any(|op| op.self_bytes > 0));
    assert!(
        profile
            .events
            .iter()
            .any(|e| e.name == "aten::conv2d" && e.shapes.starts_with("[[4, 1, 28, 28]"))
    );
    let table = profile.table(5).to_string();
    assert!(table.contains("calls") && table.contains("memory (MB)"), "{table}");
    accelerator.processes().wait_for_everyone()
});

#[test]
fn all_steps_without_a_schedule_and_no_file() -> Result<()> {
    let accelerator = Accelerator::builder().build()?;
    let mut objects = training(&accelerator)?;
    let ((), profile) = accelerator.profile(ProfileOptions::default(), |profiler| {
        train_step(&accelerator, &mut objects)?;
        profiler.step()?;
        train_step(&accelerator, &mut objects)
    })?;
    assert!(profile.traces.is_empty());
    let calls = |name: &str| profile.events.iter().filter(|e| e.name == name).count();
    assert_eq!(calls("aten::conv2d"), 4);
    assert!(calls("ProfilerStep#0") >= 1 && calls("ProfilerStep#1") >= 1);
    // An error of the body leaves no recording running.
    let failed = accelerator.profile(ProfileOptions::default(), |_| -> Result<()> {
        Err(Error::invalid_argument("the body's own"))
    });
    assert_eq!(failed.unwrap_err().to_string(), "the body's own");
    assert!(accelerator.profile(ProfileOptions::default(), |_| Ok(())).is_ok());
    Ok(())
}

#[test]
fn invalid_options_are_errors() -> Result<()> {
    let accelerator = Accelerator::builder().build()?;
    let schedule = Some(ProfileSchedule { active: 0, ..ProfileSchedule::default() });
    let options = ProfileOptions { schedule, ..ProfileOptions::default() };
    let error = accelerator.profile(options, |_| Ok(())).unwrap_err().to_string();
    assert!(error.contains("no active steps"), "{error}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let options =
        ProfileOptions { trace_dir: Some(file.join("below")), ..ProfileOptions::default() };
    let error = accelerator.profile(options, |_| Ok(())).unwrap_err().to_string();
    assert!(error.contains("write the trace"), "{error}");
    Ok(())
}

/// The other process of the test below.
#[test]
fn child() -> Result<()> {
    if std::env::var_os("BRIGADE_TEST_PROFILE").is_none() {
        return Ok(());
    }
    // libtorch was loaded by the process's first thread, and tests run on others.
    let accelerator = Accelerator::builder().cpu(true).build()?;
    let mut trained = training(&accelerator)?;
    let options = ProfileOptions::default();
    accelerator.profile(options, |_| train_step(&accelerator, &mut trained)).map(drop)
}

#[test]
fn kineto_does_not_complain_about_the_thread() {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "profile::child", "--nocapture"])
        .env("BRIGADE_TEST_PROFILE", "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    assert!(!text.contains("same thread"), "{text}");
}
