//! Test of both preludes in one program: each name has one meaning.

use brigade::data::TensorDataset;
use brigade::learn::prelude::*;
use brigade::prelude::*;

/// Returns inputs of two numbers, labelled with the index of the larger one.
fn data() -> DataLoader<TensorDataset<(Tensor, Tensor)>> {
    let inputs = Tensor::from_slice2(&[[2.0f32, 1.0], [0.0, 3.0], [1.0, 0.5], [0.2, 0.4]]);
    let labels = inputs.argmax(1, false);
    DataLoader::new(TensorDataset::new((inputs, labels)).unwrap()).batch_size(2)
}

fn linear(path: &ParamPath<'_>) -> Linear {
    Linear::new(path, 2, 2)
}

/// Uses names of `brigade::prelude`, including those that `learn::prelude` also has.
fn by_a_loop() -> Result<[f64; 4]> {
    let accumulation = GradientAccumulationOptions { steps: 2, ..Default::default() };
    let accelerator = Accelerator::builder()
        .cpu(true)
        .quiet(true)
        .mixed_precision(Precision::No)
        .gradient_accumulation(accumulation)
        .build()?;
    let model = Model::new(linear)?;
    let optimizer = Sgd::new(0.1).build(&model)?;
    let schedule = Schedule::one_cycle(OneCycle::new(0.1, 20))?;
    let scheduler = Scheduler::new(&optimizer, schedule);
    let (model, mut optimizer, mut scheduler, loader) =
        accelerator.prepare((model, optimizer, scheduler, data()))?;
    let mut accuracy = MetricState::new(Accuracy);
    let mut top = MetricState::new(TopK(2));
    let mut f2 = MetricState::new(FBeta::new(2.0).average(Average::Macro));
    let mut precision = MetricState::new(metrics::Precision::new());
    for batch in &loader {
        let batch = batch?;
        let (inputs, labels) = &*batch;
        accelerator.accumulate(&model, &batch, || -> Result<()> {
            let scores = model.forward(inputs)?;
            accelerator.backward(&scores.cross_entropy_for_logits(labels))?;
            optimizer.step()?;
            scheduler.step()?;
            optimizer.zero_grad()
        })?;
        // The inputs are also the scores, so all predictions are right.
        accelerator.update_metric(&mut accuracy, &batch, inputs, labels)?;
        accelerator.update_metric(&mut top, &batch, inputs, labels)?;
        accelerator.update_metric(&mut f2, &batch, inputs, labels)?;
        accelerator.update_metric(&mut precision, &batch, inputs, labels)?;
    }
    Ok([
        accelerator.compute_metric(&accuracy)?,
        accelerator.compute_metric(&top)?,
        accelerator.compute_metric(&f2)?,
        accelerator.compute_metric(&precision)?,
    ])
}

/// Uses names of `learn::prelude`.
fn by_a_learner() -> Result<Option<f64>> {
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    let data = Loaders::new(data(), data())?;
    let mut learner = Learner::new(&accelerator, data, linear)?
        .metrics((Accuracy, TopK(2), FBeta::new(2.0), metrics::Precision::new()))
        .mixed_precision(Precision::No)?
        .quiet(true);
    let cycle = OneCycleOptions::new(1, 0.1).pct_start(0.5);
    learner.fit_cycle(cycle, (GradientAccumulation::new(4), GradientClip::new(1.0)))?;
    Ok(learner.recorder().last("top_k_accuracy"))
}

#[test]
fn one_program_uses_the_names_of_both() {
    assert_eq!(by_a_loop().unwrap(), [1.0; 4]);
    assert_eq!(by_a_learner().unwrap(), Some(1.0));
    let main = || -> MainResult { Ok(by_a_loop().map(drop)?) };
    main().unwrap();
}
