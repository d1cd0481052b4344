//! The choice between the kernels of attention of a GPU.

use brigade_test_device::{fake, gpu, kernels};
use brigade_torch::{AttentionOptions, GradOptions, attention, grad};
use kernels::ProductTimes;
use tch::{Device, Kind, Tensor};

use crate::distance::apart;

/// Two candidates with three runs each, and one that reads the last time.
const MEASURED_RUNS: usize = 7;

fn operands(device: Device, kind: Kind, width: i64) -> [Tensor; 3] {
    tch::manual_seed(5);
    std::array::from_fn(|_| {
        let values = Tensor::randn([2, 3, 7, width], (Kind::BFloat16, Device::Cpu));
        values.to_device(device).to_kind(kind).set_requires_grad(true)
    })
}

/// Returns the output, and the gradients if they are wanted, with the names of the kernels that ran.
fn run(operands: &[Tensor; 3], options: AttentionOptions, trains: bool) -> (Vec<Tensor>, String) {
    let mut found = Vec::new();
    let account = fake::account(|| {
        let [q, k, v] = if trains {
            operands.each_ref().map(Tensor::shallow_clone)
        } else {
            operands.each_ref().map(Tensor::detach)
        };
        let output = attention(&q, &k, &v, None, &options).unwrap();
        if trains {
            let upstream = output.detach();
            let of_output =
                GradOptions { output_gradients: &[&upstream], ..GradOptions::default() };
            let gradients = grad(&[&output], &[&q, &k, &v], of_output).unwrap();
            found.extend(gradients.into_iter().map(|it| it.unwrap().to_device(Device::Cpu)));
        }
        found.push(output.detach().to_device(Device::Cpu));
    });
    let kernels = account.0.keys().filter_map(|name| {
        let name = name.strip_prefix("aten::_scaled_dot_product_")?;
        Some(name.replace("_attention", ""))
    });
    let kernels = kernels.collect::<Vec<_>>().join(" ");
    (found, kernels)
}

#[test]
fn the_faster_kernel_of_attention_is_taken_for_a_shape_in_16_bits() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    let (flash, cudnn) = ("flash flash_backward", "cudnn cudnn_backward");
    let causal = AttentionOptions { causal: true, ..AttentionOptions::default() };
    for options in [AttentionOptions::default(), causal] {
        let exact = run(&operands(Device::Cpu, Kind::Double, 16), options, true).0;
        let own = operands(device, Kind::BFloat16, 16);
        let plain = run(&own, options, true).0;
        // In training a slow backward counts, too.
        for (slow, trained) in [
            ("flash", cudnn),
            ("flash_attention_backward", cudnn),
            ("cudnn", flash),
            ("cudnn_attention_backward", flash),
        ] {
            let times = ProductTimes { launch: 1.0, named: (slow, 1e6), ..ProductTimes::default() };
            kernels::with_products(times, || {
                let mut last = String::new();
                for attempt in 0..=MEASURED_RUNS {
                    let (found, kernels) = run(&own, options, true);
                    for (index, found) in found.iter().enumerate() {
                        let allowed = apart(&plain[index], &exact[index]) + 2f64.powi(-7);
                        let apart = apart(found, &exact[index]);
                        assert!(apart <= allowed, "{slow}, run {attempt}, {index}: {apart:e}");
                    }
                    last = kernels;
                }
                assert_eq!(last, trained, "{slow}");
                if !slow.contains("backward") {
                    for _ in 0..=MEASURED_RUNS {
                        last = run(&own, options, false).1;
                    }
                    assert_eq!(Some(&*last), trained.split(' ').next(), "without gradients");
                }
            });
        }
    }
}

#[test]
fn attention_that_one_of_both_kernels_does_not_take_is_not_measured_in_16_bits() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    let times = ProductTimes { launch: 1.0, named: ("flash", 1e6), ..ProductTimes::default() };
    kernels::with_products(times, || {
        // Trials with dropout would draw numbers of the generator.
        let dropped = AttentionOptions { dropout: 0.5, ..AttentionOptions::default() };
        for (width, options) in [(16, dropped), (160, AttentionOptions::default())] {
            let own = operands(device, Kind::BFloat16, width);
            for _ in 0..=MEASURED_RUNS {
                // libtorch's own choice, which has no name on GPUs made of host memory.
                assert_eq!(run(&own, options, true).1, "", "{width}");
            }
        }
    });
}
