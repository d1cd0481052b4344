//! A Learner whose data lie on a GPU: one made of host memory, or a real one where `BRIGADE_TEST_DEVICE=cuda` says so.

use brigade_data::{BatchedDataset, DataLoader, TensorDataset};
use brigade_learn::{Learner, Loaders};
use brigade_nn::{Linear, Model};
use brigade_test_device::gpu;
use brigade_train::Accelerator;
use tch::{Device, Kind, Tensor};

#[test]
fn data_on_the_gpu_train_as_data_on_the_cpu() {
    let (device, _alone) = gpu();
    let fitted = |device: Device, threads: usize| {
        let accelerator = Accelerator::builder().device(device).tf32(false).quiet(true);
        let accelerator = accelerator.build().unwrap();
        let data = |rows: i64| {
            let inputs = (Tensor::arange(rows * 6, (Kind::Float, Device::Cpu)) * 0.7).sin();
            let labels = Tensor::arange(rows, (Kind::Int64, Device::Cpu)).remainder(3);
            let data = TensorDataset::new((inputs.reshape([rows, 6]), labels)).unwrap();
            let data = accelerator.processes().place_dataset(data).unwrap();
            assert_eq!(data.device(), device);
            let data = data.map(|(inputs, labels), _| Ok((inputs.f_mul_scalar(2.0)?, labels)));
            DataLoader::new(data).seed(4).threads(threads)
        };
        let loaders =
            Loaders::new(data(40).batch_size(8).shuffle(true), data(20).batch_size(6)).unwrap();
        // Values to show, and the outputs of a trial forward, are copied to the host.
        let (inputs, labels) = loaders.one_batch(3).unwrap();
        assert_eq!(inputs[0].device(), Device::Cpu);
        assert_eq!(labels.unwrap().size(), [3]);
        let weight = (Tensor::arange(18, (Kind::Float, Device::Cpu)) * 0.3).cos().reshape([3, 6]);
        let model = Model::new(|path| Linear::new(path, 6, 3)).unwrap();
        for parameter in model.parameters() {
            let size = parameter.tensor.size();
            let start = match size.as_slice() {
                [3, 6] => weight.shallow_clone(),
                _ => Tensor::zeros(size, (Kind::Float, Device::Cpu)),
            };
            tch::no_grad(|| parameter.tensor.shallow_clone().copy_(&start));
        }
        let mut learner = Learner::new(&accelerator, loaders, model).unwrap().quiet(true);
        learner.fit(2, 1e-2, ()).unwrap();
        learner.predictions().unwrap().predictions.to_device(Device::Cpu)
    };
    let expected = fitted(Device::Cpu, 0);
    for threads in [0, 2] {
        let found = fitted(device, threads);
        assert!(found.allclose(&expected, 1e-4, 1e-5, false), "{threads} threads");
    }
}
