//! In float64, batch normalisation over ranks with unequal batches equals that of the whole batch.

use brigade_models::Cnn;
use brigade_nn::{
    BatchNorm1d, BatchNorm2d, BatchNormOptions, Conv2d, Conv2dOptions, Linear, Model, Module,
    ParamPath,
};
use brigade_test_device::{numeric_device, on_device, tolerance};
use brigade_testkit::{World, assert_close, dist_test};
use brigade_torch::{BatchNormState, ReducerOptions, Result, sync_batch_norm};
use tch::{Device, Kind, Tensor};

use crate::device::builder;

struct Net {
    conv: Conv2d,
    norm: BatchNorm2d,
    hidden: Linear,
    average: BatchNorm1d,
    bare: BatchNorm1d,
}

impl Net {
    fn new(path: &ParamPath<'_>) -> Self {
        let options = BatchNormOptions::default();
        let plain = Conv2dOptions::default();
        Self {
            conv: Conv2d::new(path / "conv", 2, 4, [3, 3], plain),
            norm: BatchNorm2d::new(path / "norm", 4),
            hidden: Linear::new(path / "hidden", 4 * 16, 6),
            average: BatchNorm1d::with_options(
                path / "average",
                6,
                BatchNormOptions { momentum: None, ..options },
            ),
            bare: BatchNorm1d::with_options(
                path / "bare",
                6,
                BatchNormOptions { affine: false, eps: 1e-3, ..options },
            ),
        }
    }
}

impl Module<&Tensor> for Net {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let maps = self.norm.forward(&self.conv.forward(input)?)?.tanh();
        let hidden = self.average.forward(&self.hidden.forward(&maps.flatten(1, -1))?)?;
        self.bare.forward(&hidden.tanh())
    }
}

/// Values of a formula: libtorch's random numbers belong to the whole process.
fn wave(shape: &[i64], phase: f64) -> Tensor {
    let places = Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu));
    on_device(&((&places * 0.7 + phase).sin() + (&places * &places * 0.013).cos())).reshape(shape)
}

fn model() -> Model<Net> {
    let model =
        Model::builder().device(numeric_device()).kind(Kind::Double).build(Net::new).unwrap();
    for (number, parameter) in model.parameters().iter().enumerate() {
        let values = wave(&parameter.tensor.size(), number as f64) * 0.4 + 0.1;
        parameter.tensor.detach().copy_(&values);
    }
    model
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().to_kind(Kind::Double).contiguous().reshape([-1])).unwrap()
}

/// Compares, on a real GPU at least as closely as its sums of float64 allow.
#[track_caller]
fn close(found: &[f64], expected: &[f64], relative: f64, absolute: f64) {
    let allowed = tolerance(Kind::Double);
    assert_close(found, expected, relative.max(allowed), absolute.max(allowed));
}

/// The weighted sum of all outputs, so that every sample counts alike however ranks share them.
fn loss(output: &Tensor, start: i64) -> Tensor {
    let rows = output.size()[0];
    let weights = wave(&[64, 6], 0.3).narrow(0, start, rows);
    (output * weights).sum(Kind::Double)
}

const ROWS: [i64; 3] = [3, 1, 4];

dist_test!(world = 3, dist_unequal_batches_equal_the_whole, |_world: World| -> Result<()> {
    let accelerator = builder().sync_batch_norm(true).build()?;
    let rank = accelerator.processes().process_index();
    let start: i64 = ROWS[..rank].iter().sum();
    let (mut reference, mut prepared) = (model(), accelerator.prepare(model())?);
    for step in 0..3 {
        let batch = wave(&[8, 2, 6, 6], f64::from(step)) + 3.0;
        let whole = batch.detach().set_requires_grad(true);
        reference.zero_grad()?;
        loss(&reference.forward(&whole).unwrap(), 0).backward();

        let mine = batch.narrow(0, start, ROWS[rank]).detach_copy();
        // Layouts of every kind: their results do not differ.
        let mine = if step == 1 { channels_last(&mine) } else { mine }.set_requires_grad(true);
        prepared.inner_mut().zero_grad()?;
        let output = prepared.forward(&mine)?;
        accelerator.backward(&loss(&output, start))?;

        let expected = whole.grad().narrow(0, start, ROWS[rank]);
        close(&values(&mine.grad()), &values(&expected), 1e-9, 1e-11);
        for (found, expected) in prepared.inner().parameters().iter().zip(reference.parameters()) {
            // The reducer divides by the ranks.
            let found = values(&(found.tensor.grad() * 3.0));
            close(&found, &values(&expected.tensor.grad()), 1e-9, 1e-11);
        }
        for (found, expected) in prepared.inner().buffers().iter().zip(reference.buffers()) {
            close(&values(&found.tensor), &values(&expected.tensor), 1e-12, 1e-13);
        }
    }
    // In evaluation ranks are independent: only one of them runs.
    prepared.eval();
    reference.eval();
    if rank == 1 {
        let batch = wave(&[2, 2, 6, 6], 9.0);
        let expected = values(&reference.forward(&batch).unwrap());
        close(&values(&prepared.inner().forward(&batch).unwrap()), &expected, 1e-12, 1e-12);
    }
    accelerator.processes().wait_for_everyone()?;
    Ok(())
});

fn channels_last(tensor: &Tensor) -> Tensor {
    tensor.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2])
}

dist_test!(world = 2, dist_a_rank_without_rows_takes_part, |_world: World| -> Result<()> {
    let accelerator = builder().build()?;
    let group = accelerator.processes().group().unwrap();
    let batch = wave(&[5, 3], 0.0);
    let whole = batch.detach().set_requires_grad(true);
    let none = None::<&Tensor>;
    let expected = whole.batch_norm(none, none, none, none, true, 0.1, 1e-5, false);
    let rows = if group.rank() == 0 { 5 } else { 0 };
    let mine = batch.narrow(0, 0, rows).detach_copy().set_requires_grad(true);
    let found = sync_batch_norm(&group, &mine, BatchNormState::default(), 0.1, 1e-5)?;
    close(&values(&found), &values(&expected.narrow(0, 0, rows)), 1e-12, 1e-12);
    (&expected * wave(&[5, 3], 2.0)).sum(Kind::Double).backward();
    (&found * wave(&[5, 3], 2.0).narrow(0, 0, rows)).sum(Kind::Double).backward();
    let expected = whole.grad().narrow(0, 0, rows);
    close(&values(&mine.grad()), &values(&expected), 1e-9, 1e-11);

    // One value in all has no variance: an error on every rank.
    let single = wave(&[i64::from(rows > 0), 3], 0.0);
    let error = sync_batch_norm(&group, &single, BatchNormState::default(), 0.1, 1e-5);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("more than one value per channel"), "{error}");
    let error = sync_batch_norm(&group, &Tensor::from(1.0), BatchNormState::default(), 0.1, 1e-5);
    assert!(error.is_err());
    Ok(())
});

dist_test!(world = 2, dist_sixteen_bits_stay_sixteen_bits, |_world: World| -> Result<()> {
    let accelerator = builder().build()?;
    let group = accelerator.processes().group().unwrap();
    let mut model = Model::builder().device(numeric_device()).build(|p| BatchNorm2d::new(p, 3))?;
    assert_eq!(model.convert_sync_batch_norm(&group), 1);
    let batch = wave(&[8, 3, 4, 4], 0.0).to_kind(Kind::BFloat16);
    let mine = batch.narrow(0, 4 * group.rank() as i64, 4).detach_copy().set_requires_grad(true);
    let output = model.forward(&mine).unwrap();
    assert_eq!(output.kind(), Kind::BFloat16);
    output.square().sum(Kind::Float).backward();
    assert_eq!(mine.grad().kind(), Kind::BFloat16);
    let plain = Model::builder().device(numeric_device()).build(|p| BatchNorm2d::new(p, 3))?;
    let expected = plain.forward(&batch).unwrap().narrow(0, 4 * group.rank() as i64, 4);
    close(&values(&output), &values(&expected), 2e-2, 2e-2);
    close(&values(model.module().running_var()), &values(plain.module().running_var()), 1e-5, 1e-5);
    Ok(())
});

dist_test!(world = 2, dist_a_lost_rank_is_an_error, |_world: World| -> Result<()> {
    // Buffers would be missing first.
    let reducer = ReducerOptions { broadcast_buffers: false, ..ReducerOptions::default() };
    let accelerator = builder()
        .timeout(std::time::Duration::from_secs(3))
        .reducer(reducer)
        .sync_batch_norm(true)
        .build()?;
    let model = accelerator.prepare(Model::new(Cnn::new)?)?;
    let images = Tensor::ones([2, 1, 28, 28], (Kind::Float, numeric_device()));
    accelerator.processes().wait_for_everyone()?;
    if accelerator.processes().process_index() == 0 {
        let error = model.forward(&images).unwrap_err().to_string();
        assert!(error.contains("sync_batch_norm on group"), "{error}");
    }
    Ok(())
});

#[test]
fn one_process_is_plain() -> Result<()> {
    let accelerator = builder().sync_batch_norm(true).build()?;
    let prepared = accelerator.prepare(model())?;
    let batch = wave(&[4, 2, 6, 6], 1.0);
    assert_eq!(values(&prepared.forward(&batch)?), values(&model().forward(&batch).unwrap()));
    Ok(())
}
