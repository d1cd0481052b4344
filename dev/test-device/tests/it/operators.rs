//! Tests that operators of GPUs made of host memory give the CPU's results, bit for bit, and on the right device.

#![cfg(not(feature = "cuda"))] // libtorch's own kernels have their places

use brigade_test_device::fake;
use brigade_torch::{Autocast, DeviceNumbers, fused, gradients};
use tch::{Device, Kind, Reduction, Tensor};

use crate::numbers::random;

fn gpu() -> Device {
    fake::install(2).unwrap();
    Device::Cuda(0)
}

/// Runs the function on both devices, with the same inputs. The results must have the same bits.
fn same(inputs: &[Tensor], function: impl Fn(&[Tensor]) -> Vec<Tensor>) {
    let gpu = gpu();
    let there: Vec<Tensor> = inputs.iter().map(|it| it.to_device(gpu)).collect();
    // Each device's generator begins in the same state.
    tch::manual_seed(11);
    let expected = function(inputs);
    tch::manual_seed(11);
    let found = function(&there);
    assert_eq!(expected.len(), found.len());
    for (at, (expected, found)) in expected.iter().zip(&found).enumerate() {
        assert_eq!(found.device(), gpu, "result {at}");
        assert_eq!(found.size(), expected.size(), "result {at}");
        assert_eq!(found.kind(), expected.kind(), "result {at}");
        assert_eq!(found.stride(), expected.stride(), "result {at}");
        let found = found.to_device(Device::Cpu);
        let equal = found.equal(expected)
            || (expected.isnan().any().int64_value(&[]) == 1
                && found.isnan().equal(&expected.isnan()));
        assert!(equal, "result {at}: {found} is not {expected}");
    }
}

/// Runs the function on both devices, of which one rounds more often than the other.
fn close(inputs: &[Tensor], function: impl Fn(&[Tensor]) -> Vec<Tensor>) {
    let gpu = gpu();
    let there: Vec<Tensor> = inputs.iter().map(|it| it.to_device(gpu)).collect();
    for (at, (expected, found)) in function(inputs).iter().zip(function(&there)).enumerate() {
        assert_eq!(found.device(), gpu, "result {at}");
        let is_close = found.to_device(Device::Cpu).allclose(expected, 1e-5, 1e-6, false);
        assert!(is_close, "result {at}: {found} is not {expected}");
    }
}

/// Returns gradients of the sum of squares of the results, by the floating-point inputs.
fn with_gradients(inputs: &[Tensor], function: impl Fn(&[Tensor]) -> Tensor) -> Vec<Tensor> {
    let inputs: Vec<Tensor> = inputs
        .iter()
        .map(|input| {
            if input.is_floating_point() {
                input.detach().set_requires_grad(true)
            } else {
                input.shallow_clone()
            }
        })
        .collect();
    let result = function(&inputs);
    result.square().sum(Kind::Float).backward();
    let mut all = vec![result.detach()];
    all.extend(
        inputs.iter().filter(|it| it.requires_grad()).map(Tensor::grad).filter(Tensor::defined),
    );
    all
}

#[test]
fn linear_layers_and_their_gradients() {
    same(&[random(&[4, 6]), random(&[3, 6]), random(&[3])], |x| {
        with_gradients(x, |x| x[0].linear(&x[1], Some(&x[2])).relu())
    });
    same(&[random(&[2, 4, 6]), random(&[3, 6]), random(&[3])], |x| {
        with_gradients(x, |x| x[0].linear(&x[1], Some(&x[2])).gelu("none"))
    });
}

#[test]
fn convolutions_pooling_and_normalisation() {
    same(&[random(&[2, 3, 8, 8]), random(&[4, 3, 3, 3]), random(&[4])], |x| {
        with_gradients(x, |x| x[0].conv2d(&x[1], Some(&x[2]), [2, 2], [1, 1], [1, 1], 1))
    });
    // Depthwise: real CUDA has a separate operator for it.
    same(&[random(&[2, 4, 8, 8]), random(&[4, 1, 3, 3])], |x| {
        with_gradients(x, |x| {
            x[0].conv2d(&x[1], None::<Tensor>, [1, 1], [1, 1], [1, 1], 4).max_pool2d(
                [2, 2],
                [2, 2],
                [0, 0],
                [1, 1],
                false,
            )
        })
    });
    same(&[random(&[2, 3, 9]), random(&[4, 3, 3])], |x| {
        with_gradients(x, |x| {
            x[0].conv1d(&x[1], None::<Tensor>, [1], [1], [1], 1).avg_pool1d(
                [2],
                [2],
                [0],
                false,
                true,
            )
        })
    });
    same(&[random(&[2, 4, 3, 3]), random(&[4, 2, 2, 2])], |x| {
        with_gradients(x, |x| {
            x[0].conv_transpose2d(&x[1], None::<Tensor>, [2, 2], [0, 0], [0, 0], 1, [1, 1])
        })
    });
    same(&[random(&[4, 3, 5, 5]), random(&[3]), random(&[3])], |x| {
        let options = (Kind::Float, x[0].device());
        let (mean, variance) = (Tensor::zeros([3], options), Tensor::ones([3], options));
        let mut all = with_gradients(x, |x| {
            x[0].batch_norm(
                Some(&x[1]),
                Some(&x[2]),
                Some(&mean),
                Some(&variance),
                true,
                0.1,
                1e-5,
                true,
            )
        });
        all.extend([mean, variance]);
        all
    });
    same(&[random(&[4, 6]), random(&[6]), random(&[6])], |x| {
        with_gradients(x, |x| x[0].layer_norm([6], Some(&x[1]), Some(&x[2]), 1e-5, true))
    });
    same(&[random(&[4, 6, 5]), random(&[6]), random(&[6])], |x| {
        with_gradients(x, |x| x[0].group_norm(3, Some(&x[1]), Some(&x[2]), 1e-5, true))
    });
    same(&[random(&[2, 3, 6, 6])], |x| {
        with_gradients(x, |x| {
            x[0].adaptive_avg_pool2d([2, 2]).upsample_bilinear2d([5, 5], false, None, None)
        })
    });
}

#[test]
fn losses_embeddings_and_attention() {
    let classes = Tensor::from_slice(&[1i64, 0, 4, 2]);
    same(&[random(&[4, 5]), classes.shallow_clone()], |x| {
        with_gradients(x, |x| {
            x[0].cross_entropy_loss(&x[1], None::<Tensor>, Reduction::Mean, -100, 0.1)
        })
    });
    same(&[random(&[7, 3]), classes], |x| {
        with_gradients(x, |x| Tensor::embedding(&x[0], &x[1], -1, false, false))
    });
    same(&[random(&[4, 5]), random(&[4, 5])], |x| {
        with_gradients(x, |x| {
            x[0].softmax(-1, None)
                + x[1].log_softmax(0, None)
                + x[0].mse_loss(&x[1], Reduction::Mean)
        })
    });
    same(&[random(&[4, 5]), random(&[4, 5]).sigmoid()], |x| {
        with_gradients(x, |x| {
            x[0].binary_cross_entropy_with_logits(
                &x[1],
                None::<Tensor>,
                None::<Tensor>,
                Reduction::Sum,
            )
        })
    });
    // The CPU itself uses another kernel than plain operators, so the bits differ.
    let inputs = [random(&[2, 2, 4, 8]), random(&[2, 2, 4, 8]), random(&[2, 2, 4, 8])];
    let attention = |x: &[Tensor]| {
        with_gradients(x, |x| {
            Tensor::scaled_dot_product_attention(
                &x[0],
                &x[1],
                &x[2],
                None::<Tensor>,
                0.0,
                true,
                None,
                false,
            )
        })
    };
    let there: Vec<Tensor> = inputs.iter().map(|it| it.to_device(gpu())).collect();
    for (expected, found) in attention(&inputs).iter().zip(attention(&there)) {
        assert_eq!(found.device(), gpu());
        assert!(found.to_device(Device::Cpu).allclose(expected, 1e-4, 1e-5, false));
    }
}

#[test]
fn recurrent_layers() {
    let (input, hidden) = (3, 4);
    for (gates, lstm) in [(4, true), (3, false)] {
        let x = [
            random(&[5, 2, input]),
            random(&[1, 2, hidden]),
            random(&[1, 2, hidden]),
            random(&[gates * hidden, input]),
            random(&[gates * hidden, hidden]),
            random(&[gates * hidden]),
            random(&[gates * hidden]),
        ];
        let run = |x: &[Tensor]| {
            with_gradients(x, |x| {
                let weights = &x[3..];
                if lstm {
                    let (all, h, c) =
                        x[0].lstm(&x[1..3], weights, true, 1, 0.0, true, false, false);
                    Tensor::cat(&[all, h, c], 0)
                } else {
                    let (all, h) = x[0].gru(&x[1], weights, true, 1, 0.0, true, false, false);
                    Tensor::cat(&[all, h], 0) + &x[2]
                }
            })
        };
        let there: Vec<Tensor> = x.iter().map(|it| it.to_device(gpu())).collect();
        for (at, (expected, found)) in run(&x).iter().zip(run(&there)).enumerate() {
            assert_eq!(found.device(), gpu());
            assert!(
                found.to_device(Device::Cpu).allclose(expected, 1e-4, 1e-5, false),
                "result {at}, lstm {lstm}"
            );
        }
    }
}

#[test]
fn sorting_indexing_and_shapes() {
    same(&[random(&[4, 6])], |x| {
        let (values, indices) = x[0].topk(3, 1, true, true);
        let (sorted, order) = x[0].sort(0, true);
        vec![values, indices, sorted, order, x[0].argmax(1, true), x[0].cumsum(1, Kind::Float)]
    });
    same(&[random(&[4, 6]), Tensor::from_slice(&[0i64, 2, 1, 3]).view([4, 1])], |x| {
        let scattered = x[0].zeros_like().scatter(1, &x[1], &x[0]);
        vec![x[0].gather(1, &x[1], false), scattered, x[0].index_select(0, &x[1].flatten(0, 1))]
    });
    same(&[random(&[4, 6])], |x| {
        let mask = x[0].gt(0.0);
        let mut changed = x[0].copy();
        let _ = changed.index_put_(&[Some(mask.shallow_clone())], &Tensor::from(7.0f32), false);
        let selected = x[0].index(&[Some(mask.shallow_clone())]);
        vec![
            selected,
            changed,
            x[0].masked_select(&mask),
            mask.nonzero(),
            x[0].masked_fill(&mask, 3.0),
            x[0].where_self(&mask, &x[0].neg()),
        ]
    });
    same(&[random(&[4, 6]), random(&[4, 6])], |x| {
        let joined = Tensor::cat(&[&x[0], &x[1]], 1);
        let stacked = Tensor::stack(&[&x[0], &x[1]], 0);
        let mut all = joined.split(5, 1);
        all.extend([
            stacked.transpose(0, 2).contiguous(),
            joined.reshape([6, 8]),
            x[0].unfold(1, 2, 2).copy(),
        ]);
        all.extend([x[0].tril(0), x[0].flip([1]), x[0].roll([1], [0]), x[0].repeat([2, 1])]);
        all
    });
    same(&[random(&[4, 6])], |x| {
        let mut base = x[0].copy();
        let mut view = base.view([3, 8]).select(0, 1);
        let _ = view.g_mul_scalar_(2.0);
        let _ = base.narrow(1, 2, 2).fill_(1.0);
        let _ = base.transpose_(0, 1);
        vec![base.contiguous(), view]
    });
    same(&[random(&[3, 4])], |x| {
        let complex = Tensor::complex(&x[0], &x[0].neg());
        vec![
            complex.view_as_real(),
            complex.conj().resolve_conj().abs(),
            x[0].fft_rfft(None, -1, "backward").abs(),
        ]
    });
}

#[test]
fn results_are_written_into_what_is_given() {
    let gpu = gpu();
    let a = random(&[4, 6]);
    let there = a.to_device(gpu);
    // An empty tensor is resized, as on every device.
    let mut out = Tensor::empty([0], (Kind::Float, gpu));
    assert_eq!(there.add_out(&out, &there).data_ptr(), out.data_ptr());
    assert_eq!(out.size(), [4, 6]);
    assert!(out.to_device(Device::Cpu).equal(&(&a + &a)));
    let _ = out.resize_([2, 3]);
    assert_eq!(out.size(), [2, 3]);
    assert_eq!(out.device(), gpu);
}

#[test]
fn optimizers_and_scaling_of_losses() {
    let made = || (0..3).map(|at| random(&[2, 3 + at])).collect::<Vec<Tensor>>();
    let (weights, gradients, first, second) = (made(), made(), made(), made());
    let run = |device: Device| {
        let on = |list: &[Tensor]| {
            list.iter().map(|it| it.to_device(device).copy()).collect::<Vec<Tensor>>()
        };
        let (weights, gradients, first) = (on(&weights), on(&gradients), on(&first));
        let second: Vec<Tensor> = on(&second).iter().map(Tensor::square).collect();
        let steps: Vec<Tensor> =
            weights.iter().map(|_| Tensor::from(3.0f32).to_device(device)).collect();
        let (weights, gradients, first, second, steps) =
            (refs(&weights), refs(&gradients), refs(&first), refs(&second), refs(&steps));
        let none = DeviceNumbers::default();
        let adam = fused::AdamStep {
            lr: 0.1,
            beta1: 0.9,
            beta2: 0.99,
            eps: 1e-8,
            weight_decay: 0.01,
            amsgrad: false,
            maximize: false,
            decoupled: true,
        };
        fused::adam(&weights, &gradients, &first, &second, &[], &steps, &adam, &none).unwrap();
        let sgd = fused::SgdStep {
            lr: 0.1,
            momentum: 0.9,
            dampening: 0.0,
            weight_decay: 0.01,
            decoupled: false,
            nesterov: true,
            maximize: false,
            first: false,
        };
        fused::sgd(&weights, &gradients, &first, &sgd, &none).unwrap();
        gradients::multiply(&second, &Tensor::from(0.5f32).to_device(device)).unwrap();
        let norm = gradients::norm(&gradients, 2.0).unwrap();
        let overflow = gradients::unscale(&gradients, 0.5).unwrap();
        let _ = gradients[0].get(0).fill_(f64::INFINITY);
        let some = gradients::unscale(&gradients, 0.5).unwrap();
        let mut all = vec![norm, overflow, some];
        all.extend(
            weights
                .iter()
                .chain(&gradients)
                .chain(&first)
                .chain(&second)
                .map(|tensor| tensor.shallow_clone()),
        );
        all
    };
    for (at, (expected, found)) in run(Device::Cpu).iter().zip(run(gpu())).enumerate() {
        assert_eq!(found.device(), gpu(), "{at}");
        // On the CPU steps are kernels of Brigade's own, whose last bits differ from libtorch's.
        let is_close = found.to_device(Device::Cpu).allclose(expected, 1e-6, 1e-7, false);
        assert!(is_close, "{at}: {found} is not {expected}");
    }
}

fn refs(list: &[Tensor]) -> Vec<&Tensor> {
    list.iter().collect()
}

#[test]
fn autocast_and_half_precision() {
    let inputs = [random(&[4, 8]), random(&[8, 8]), random(&[8])];
    for kind in [Kind::BFloat16, Kind::Half] {
        same(&inputs, |x| {
            let _autocast = Autocast::enter(x[0].device(), kind, true).unwrap();
            let linear = x[0].linear(&x[1], Some(&x[2]));
            assert_eq!(linear.kind(), kind);
            vec![linear.relu(), x[0].layer_norm([8], Some(&x[2]), None::<&Tensor>, 1e-5, true)]
        });
        same(&inputs, |x| {
            let x: Vec<Tensor> = x.iter().map(|it| it.to_kind(kind)).collect();
            with_gradients(&x, |x| x[0].matmul(&x[1]).softmax(-1, None) * &x[2])
        });
        // On CUDA this is one operator, which reads 16 bits and writes 32.
        same(&inputs[..2], |x| {
            let low: Vec<Tensor> = x.iter().map(|it| it.to_kind(kind)).collect();
            with_gradients(&low, |x| {
                x[0].log_softmax(-1, Kind::Float) + x[1].narrow(0, 0, 4).softmax(-1, Kind::Float)
            })
        });
    }
}

#[test]
fn functions_of_elements_and_reductions() {
    same(&[random(&[4, 6]), random(&[4, 6]), random(&[6])], |x| {
        with_gradients(x, |x| {
            let (a, b) = (&x[0], &x[1]);
            let positive = a.abs() + 0.1;
            let all = [
                a.exp(),
                positive.log(),
                a.sin(),
                a.tanh(),
                a.sigmoid(),
                positive.sqrt(),
                positive.rsqrt(),
                a.erf(),
                a.silu(),
                a.mish(),
                a.softplus(),
                a.elu(),
                a.selu(),
                a.celu(),
                a.hardswish(),
                a.hardtanh(),
                a.leaky_relu(),
                a.log_sigmoid(),
                a.clamp(-0.5, 0.5),
                a.maximum(b),
                a.lerp_tensor(b, &x[2]),
                a.atan2(b),
                a.addcmul(b, &x[2]),
                a.addcdiv(b, &positive),
                a.pow_tensor_scalar(3),
                positive.pow(b),
                a.fmod(2.0),
                a.where_self(&a.gt_tensor(b), &x[2]),
                a.prelu(&x[2].narrow(0, 0, 1)),
                a.hypot(b),
                a.logaddexp(b),
                a.cumprod(0, Kind::Float),
                a.logcumsumexp(1),
            ];
            Tensor::stack(&all, 0)
        })
    });
    // The gradient is computed in float64 on a CPU and in float32 on a GPU (libtorch's `renorm_backward`).
    close(&[random(&[4, 6])], |x| with_gradients(x, |x| x[0].renorm(2, 0, 1)));
    same(&[random(&[4, 6])], |x| {
        with_gradients(x, |x| {
            let a = &x[0];
            let all = [
                a.mean_dim(1i64, false, Kind::Float),
                a.logsumexp(1i64, false),
                a.amax(1i64, false),
                a.std(true) + a.sum_dim_intlist(1i64, false, Kind::Float),
                a.norm_scalaropt_dim(2, 1i64, false),
                a.prod_dim_int(1, false, Kind::Float),
                a.max_dim(1, false).0,
                a.median_dim(1, false).0,
                a.kthvalue(2, 1, false).0,
                a.quantile_scalar(0.3, 1, false, "linear"),
                a.var(true).expand([4], false),
            ];
            Tensor::stack(&all, 0)
        })
    });
    same(&[random(&[4, 6])], |x| {
        let a = &x[0];
        vec![
            a.isnan(),
            a.isfinite().all(),
            a.gt(0.0).any(),
            a.argmin(0, false),
            a.argsort(1, false),
            a.sign(),
            a.floor(),
            a.histc(5),
            a.bucketize(&a.flatten(0, 1).sort(0, false).0, false, false),
            a.gt(0.0).logical_not(),
            a.to_kind(Kind::Int64).bitwise_and(3),
            a.nan_to_num(0.0, 1.0, 2.0),
            a.count_nonzero_dim_intlist(1i64),
            a.round(),
            a.cummax(1).0,
            a.diff(1, 1, None::<&Tensor>, None::<&Tensor>),
        ]
    });
}

#[test]
fn linear_algebra() {
    same(&[random(&[3, 4, 4]), random(&[3, 4, 2]), random(&[4])], |x| {
        with_gradients(x, |x| {
            let a = &x[0];
            let positive = a.matmul(&a.transpose(1, 2)) + Tensor::eye(4, (Kind::Float, a.device()));
            let solved = Tensor::linalg_solve(&positive, &x[1], true);
            let all = [
                positive.linalg_cholesky(false),
                Tensor::linalg_inv(&positive),
                a.bmm(a),
                a.baddbmm(a, a, 1.0, 1.0),
                a.matmul(&x[2]).unsqueeze(-1).expand([3, 4, 4], false),
                Tensor::einsum("bij,bjk->bik", &[a, a], None::<i64>),
                solved.repeat([1, 1, 2]),
                Tensor::cdist(a, a, 2.0, None),
                positive.logdet().view([3, 1, 1]).expand([3, 4, 4], false),
            ];
            Tensor::stack(&all, 0)
        })
    });
    same(&[random(&[4, 3])], |x| {
        let (q, r) = Tensor::linalg_qr(&x[0], "reduced");
        vec![q, r, x[0].svd(true, false).1]
    });
}

#[test]
fn further_layers_and_losses() {
    same(&[random(&[2, 3, 5, 5, 5]), random(&[4, 3, 2, 2, 2])], |x| {
        with_gradients(x, |x| {
            x[0].conv3d(&x[1], None::<Tensor>, [1, 1, 1], [0, 0, 0], [1, 1, 1], 1)
        })
    });
    same(&[random(&[2, 4, 6, 6]), random(&[4])], |x| {
        with_gradients(x, |x| {
            let a = &x[0];
            let all = [
                a.instance_norm(
                    Some(&x[1]),
                    Some(&x[1]),
                    None::<&Tensor>,
                    None::<&Tensor>,
                    true,
                    0.1,
                    1e-5,
                    true,
                ),
                a.pixel_shuffle(2).pixel_unshuffle(2),
                a.upsample_nearest2d([12, 12], None, None).avg_pool2d(
                    [2, 2],
                    [2, 2],
                    [0, 0],
                    false,
                    true,
                    None,
                ),
                a.reflection_pad2d([1, 1, 1, 1]).narrow(2, 0, 6).narrow(3, 0, 6),
                a.pad([1, 1], "constant", 2.0).narrow(3, 1, 6),
                a.rms_norm([6], None::<Tensor>, None),
                a.upsample_bicubic2d([6, 6], true, None, None),
                a.channel_shuffle(2),
                a.glu(1).repeat([1, 2, 1, 1]),
            ];
            Tensor::stack(&all, 0)
        })
    });
    let classes = Tensor::from_slice(&[1i64, 0, 4, 2]);
    same(&[random(&[4, 5]), random(&[4, 5]), classes.shallow_clone(), random(&[5]).abs()], |x| {
        let mean = Reduction::Mean;
        with_gradients(x, |x| {
            let (a, b) = (&x[0], &x[1]);
            let all = [
                a.log_softmax(-1, None).nll_loss(&x[2]),
                a.smooth_l1_loss(b, mean, 1.0),
                a.huber_loss(b, mean, 1.0),
                a.log_softmax(-1, None).kl_div(&b.softmax(-1, None), mean, false),
                a.cross_entropy_loss(&x[2], Some(&x[3].detach()), mean, -100, 0.0),
                a.l1_loss(b, mean),
                Tensor::cosine_similarity(a, b, 1, 1e-8).sum(Kind::Float),
                Tensor::triplet_margin_loss(a, b, &(b * 2), 1.0, 2.0, 1e-6, false, mean),
            ];
            Tensor::stack(&all, 0)
        })
    });
    let tokens = Tensor::from_slice(&[0i64, 3, 1, 3, 2, 6]);
    same(&[random(&[7, 3]), tokens, Tensor::from_slice(&[0i64, 2])], |x| {
        with_gradients(x, |x| {
            Tensor::embedding_bag(&x[0], &x[1], &x[2], false, 1, false, None::<Tensor>, false).0
        })
    });
    same(&[random(&[6, 2, 5]).log_softmax(-1, None)], |x| {
        let targets = Tensor::from_slice(&[1i64, 2, 3, 1]).view([2, 2]).to_device(x[0].device());
        let lengths = |length: i64| [length, length];
        with_gradients(x, |x| {
            Tensor::ctc_loss(&x[0], &targets, lengths(6), lengths(2), 0, Reduction::Sum, false)
        })
    });
    same(&[random(&[1, 2, 5, 5]), random(&[1, 3, 3, 2]).tanh()], |x| {
        with_gradients(x, |x| x[0].grid_sampler(&x[1], 0, 0, false))
    });
}

#[test]
fn random_numbers_are_those_of_the_generator() {
    same(&[random(&[50]).abs(), random(&[50])], |x| {
        let a = &x[0];
        let options = (Kind::Float, a.device());
        vec![
            a.bernoulli_p(0.3),
            a.multinomial(5, false),
            a.empty_like().uniform_(0.0, 1.0),
            a.empty_like().normal_(0.0, 2.0),
            a.empty_like().exponential_(1.5),
            a.empty_like().random_(),
            a.empty_like().log_normal_(0.0, 1.0),
            a.empty_like().geometric_(0.2),
            Tensor::rand([7], options),
            Tensor::randn([7], options),
            Tensor::randint(9, [7], options),
            Tensor::randperm(9, (Kind::Int64, a.device())),
            a.rand_like(),
            a.randn_like(),
            a.poisson(),
            a.alpha_dropout(0.2, true),
            a.feature_dropout(0.0, true),
        ]
    });
}
