//! Rotary embeddings by the kernels of a GPU, emulated without one, against float64 and the operations that take their
//! place.

use brigade_test_device::{fake, gpu, kernels};
use brigade_torch::{BackwardOptions, GradOptions, grad, rotary, rotary_packed, rotary_pair};
use tch::{Device, Kind, Tensor};

use crate::distance::apart;

#[derive(Debug, Clone, Copy)]
struct Case {
    batch: i64,
    heads: i64,
    key_heads: i64,
    tokens: i64,
    width: i64,
    /// `true` for tables of each text.
    own_tables: bool,
    /// `true` for tables of the heads' kind, `false` for float32.
    same_kind: bool,
}

/// Halves that are vectors and that are not; one text, one head, one token; more vectors than threads of a block.
const CASES: [Case; 5] = [
    Case {
        batch: 2,
        heads: 3,
        key_heads: 1,
        tokens: 5,
        width: 16,
        own_tables: true,
        same_kind: false,
    },
    Case {
        batch: 1,
        heads: 1,
        key_heads: 1,
        tokens: 1,
        width: 2,
        own_tables: false,
        same_kind: true,
    },
    Case {
        batch: 2,
        heads: 2,
        key_heads: 2,
        tokens: 3,
        width: 10,
        own_tables: false,
        same_kind: false,
    },
    Case {
        batch: 1,
        heads: 33,
        key_heads: 11,
        tokens: 2,
        width: 128,
        own_tables: true,
        same_kind: true,
    },
    Case {
        batch: 3,
        heads: 4,
        key_heads: 2,
        tokens: 2,
        width: 34,
        own_tables: true,
        same_kind: true,
    },
];
const KINDS: [Kind; 3] = [Kind::BFloat16, Kind::Half, Kind::Float];

fn random(size: &[i64], kind: Kind) -> Tensor {
    Tensor::randn(size, (Kind::Float, Device::Cpu)).to_kind(kind)
}

/// Cosines and sines, whose halves differ, so that no mix-up of both is hidden.
fn tables(case: Case, kind: Kind) -> [Tensor; 2] {
    let batch = if case.own_tables { case.batch } else { 1 };
    let angles = random(&[batch, 1, case.tokens, case.width], Kind::Float);
    let kind = if case.same_kind { kind } else { Kind::Float };
    [angles.cos().to_kind(kind), angles.sin().to_kind(kind)]
}

/// Queries and keys as projections return them: all heads of a token are adjacent.
fn heads(case: Case, kind: Kind) -> [Tensor; 2] {
    let Case { batch, heads, key_heads, tokens, width, .. } = case;
    [heads, key_heads].map(|heads| random(&[batch, tokens, heads * width], kind))
}

fn split(product: &Tensor, width: i64) -> Tensor {
    let size = product.size();
    product.view([size[0], size[1], size[2] / width, width]).transpose(1, 2)
}

fn by_operations(x: &Tensor, [cos, sin]: [&Tensor; 2]) -> Tensor {
    let [cos, sin] = [cos, sin].map(|table| table.to_kind(x.kind()));
    let half = x.size()[3] / 2;
    let turned = Tensor::cat(&[x.narrow(-1, half, half).neg(), x.narrow(-1, 0, half)], -1);
    (x * cos).addcmul(&turned, &sin)
}

/// Runs the function with the kernels of the GPU.
fn by_kernels<R>(function: impl FnOnce() -> R) -> R {
    if fake::is_installed() { kernels::emulated(function) } else { function() }
}

/// Outputs and gradients of the leaves, on the CPU.
fn with_gradients(outputs: &[Tensor], leaves: &[&Tensor], upstream: &[Tensor]) -> Vec<Tensor> {
    let upstream: Vec<Tensor> = upstream
        .iter()
        .zip(outputs)
        .map(|(upstream, output)| upstream.to_device(output.device()).to_kind(output.kind()))
        .collect();
    let (upstream, of): (Vec<&Tensor>, Vec<&Tensor>) = upstream.iter().zip(outputs).unzip();
    let options = GradOptions { output_gradients: &upstream, ..GradOptions::default() };
    let gradients = grad(&of, leaves, options).unwrap();
    let outputs = outputs.iter().map(Tensor::detach);
    outputs
        .chain(gradients.into_iter().map(|it| it.unwrap()))
        .map(|it| it.to_device(Device::Cpu))
        .collect()
}

fn leaves(of: &[Tensor], device: Device, kind: Kind) -> Vec<Tensor> {
    of.iter()
        .map(|it| it.to_device(device).to_kind(kind).detach().set_requires_grad(true))
        .collect()
}

/// One unit in the last place.
fn unit(kind: Kind) -> f64 {
    match kind {
        Kind::Half => 2f64.powi(-10),
        Kind::BFloat16 => 2f64.powi(-7),
        _ => 2f64.powi(-23),
    }
}

/// Checks results against float64: the error is at most that of the operations and a unit in the last place.
fn check(found: &[Tensor], plain: &[Tensor], exact: &[Tensor], what: &str) {
    assert_eq!(found.len(), exact.len());
    for (index, found) in found.iter().enumerate() {
        assert_eq!((found.kind(), found.size()), (plain[index].kind(), plain[index].size()));
        let allowed = apart(&plain[index], &exact[index]) + unit(found.kind());
        let apart = apart(found, &exact[index]);
        assert!(apart <= allowed, "{index}: {apart:e} > {allowed:e}, {what}");
    }
}

#[test]
fn pairs_are_no_further_from_float64_than_the_operations_in_16_bits_and_float32() {
    let (device, _alone) = gpu();
    for (case, kind) in CASES.into_iter().flat_map(|case| KINDS.map(|kind| (case, kind))) {
        tch::manual_seed(5);
        let inputs = heads(case, kind);
        let tables = tables(case, kind);
        let upstream = inputs.each_ref().map(|it| random(&split(it, case.width).size(), kind));
        let run = |device: Device, kind: Kind, fused: bool| {
            let own = leaves(&inputs, device, kind);
            let [cos, sin] = tables.each_ref().map(|table| {
                let table = table.to_device(device);
                if kind == Kind::Double { table.to_kind(kind) } else { table }
            });
            let [queries, keys] = [0, 1].map(|index| split(&own[index], case.width));
            let outputs = if fused {
                let (queries, keys) = rotary_pair(&queries, &keys, &cos, &sin).unwrap();
                [queries, keys]
            } else {
                [queries, keys].map(|heads| by_operations(&heads, [&cos, &sin]))
            };
            with_gradients(&outputs, &own.iter().collect::<Vec<_>>(), &upstream)
        };
        let found = by_kernels(|| run(device, kind, true));
        let again = by_kernels(|| run(device, kind, true));
        assert!(found.iter().zip(&again).all(|(one, other)| one.equal(other)), "{case:?}");
        let (plain, exact) = (run(Device::Cpu, kind, false), run(Device::Cpu, Kind::Double, false));
        check(&found, &plain, &exact, &format!("{case:?} of {kind:?}"));
    }
}

#[test]
fn packed_products_are_rotated_in_place_in_16_bits() {
    let (device, _alone) = gpu();
    for (case, kind) in CASES.into_iter().flat_map(|case| KINDS.map(|kind| (case, kind))) {
        tch::manual_seed(5);
        let Case { batch, heads, key_heads, tokens, width, .. } = case;
        let rotated = heads + key_heads;
        let product = random(&[batch, tokens, (rotated + key_heads) * width], kind);
        let weight = random(&[tokens, 1], kind);
        let tables = tables(case, kind);
        let upstream = [random(&product.size(), kind)];
        let run = |device: Device, kind: Kind, fused: bool| {
            let own = leaves(&[product.shallow_clone()], device, kind);
            let [cos, sin] = tables.each_ref().map(|table| {
                let table = table.to_device(device);
                if kind == Kind::Double { table.to_kind(kind) } else { table }
            });
            // Made by an operation that does not keep it.
            let mut made = &own[0] * weight.to_device(device).to_kind(kind);
            let address = made.data_ptr();
            let output = if fused {
                rotary_packed(&mut made, rotated, &cos, &sin).unwrap();
                assert_eq!(made.data_ptr(), address, "a new product: {case:?}");
                made
            } else {
                let all = split(&made, width);
                let turned = by_operations(&all.narrow(1, 0, rotated), [&cos, &sin]);
                let rest = all.narrow(1, rotated, key_heads);
                Tensor::cat(&[turned, rest], 1).transpose(1, 2).reshape(made.size())
            };
            with_gradients(&[output], &[&own[0]], &upstream)
        };
        let found = by_kernels(|| run(device, kind, true));
        let (plain, exact) = (run(Device::Cpu, kind, false), run(Device::Cpu, Kind::Double, false));
        check(&found, &plain, &exact, &format!("{case:?} of {kind:?}"));
    }
}

#[test]
fn a_packed_product_that_must_stay_is_not_written_in_16_bits() {
    let (device, _alone) = gpu();
    let case = CASES[0];
    tch::manual_seed(5);
    let [cos, sin] = tables(case, Kind::BFloat16).map(|table| table.to_device(device));
    let whole = random(&[4, 5, 80], Kind::BFloat16).to_device(device);
    let before = whole.copy();
    // A leaf; a view of a product that has a gradient; and a part of a matrix, which is not contiguous.
    let leaf = whole.narrow(0, 0, 2).set_requires_grad(true);
    let made = &leaf * 1.0;
    let view = made.view([2, 5, 80]);
    let kept = made.copy();
    by_kernels(|| {
        for product in [&leaf, &view, &whole.narrow(2, 0, 64).narrow(0, 0, 2)] {
            let mut product = product.shallow_clone();
            let address = product.data_ptr();
            rotary_packed(&mut product, 3, &cos, &sin).unwrap();
            assert_ne!(product.data_ptr(), address);
        }
    });
    assert!(whole.equal(&before) && made.equal(&kept));
}

/// The values lie within NaN; the places around them and the other heads stay as they are.
#[test]
fn nothing_beyond_the_rotated_heads_is_read_or_written_in_16_bits() {
    let (device, _alone) = gpu();
    for case in CASES {
        tch::manual_seed(5);
        let Case { batch, heads, tokens, width, .. } = case;
        let tables = tables(case, Kind::Half);
        let within = |table: &Tensor| {
            let size = table.size();
            let whole = Tensor::full(
                [size[0] + 1, 1, size[2] + 1, size[3] + 16],
                f64::NAN,
                (table.kind(), device),
            );
            let place = whole.narrow(0, 0, size[0]).narrow(2, 0, size[2]).narrow(3, 8, size[3]);
            place.shallow_clone().copy_(table);
            place
        };
        let [cos, sin] = tables.each_ref().map(within);
        let whole =
            Tensor::full([batch + 1, tokens, (heads + 2) * width], f64::NAN, (Kind::Half, device));
        let mut product = whole.narrow(0, 0, batch);
        let own = product.narrow(2, 0, heads * width);
        own.shallow_clone().copy_(&random(&own.size(), Kind::Half));
        let [before, start] = [own.copy(), whole.copy()];
        by_kernels(|| rotary_packed(&mut product, heads, &cos, &sin)).unwrap();
        let plain = by_operations(&split(&before.to_device(Device::Cpu), width), tables.each_ref());
        let exact = by_operations(
            &split(&before.to_device(Device::Cpu).to_kind(Kind::Double), width),
            tables.each_ref(),
        );
        let found = split(&own.contiguous().to_device(Device::Cpu), width);
        check(&[found], &[plain], &[exact], &format!("{case:?}"));
        own.shallow_clone().copy_(&before);
        let [whole, start] = [&whole, &start].map(|it| it.nan_to_num(9.0, None, None));
        assert!(whole.equal(&start), "{case:?}");
    }
}

#[test]
fn one_of_both_gradients_is_enough_in_16_bits() {
    let (device, _alone) = gpu();
    let case = CASES[0];
    tch::manual_seed(5);
    let [cos, sin] = tables(case, Kind::BFloat16).map(|table| table.to_device(device));
    let own = leaves(&heads(case, Kind::BFloat16), device, Kind::BFloat16);
    let [queries, keys] = [0, 1].map(|index| split(&own[index], case.width));
    let (_, rotated) = by_kernels(|| rotary_pair(&queries, &keys, &cos, &sin)).unwrap();
    let upstream = [random(&rotated.size(), Kind::BFloat16)];
    let found = by_kernels(|| with_gradients(&[rotated], &[&own[1]], &upstream));
    let alone = by_kernels(|| {
        let rotated = rotary(&split(&own[1], case.width), &cos, &sin).unwrap();
        with_gradients(&[rotated], &[&own[1]], &upstream)
    });
    assert!(found.iter().zip(&alone).all(|(one, other)| one.equal(other)));
}

#[test]
fn heads_of_any_layout_are_rotated_in_16_bits() {
    let (device, _alone) = gpu();
    tch::manual_seed(5);
    let kind = Kind::BFloat16;
    let (cos, sin) = {
        let angles = Tensor::randn([1, 1, 4, 16], (Kind::Float, device));
        (angles.cos(), angles.sin())
    };
    let whole = Tensor::randn([2, 3, 4, 48], (Kind::Float, device)).to_kind(kind);
    for (index, heads) in [
        whole.narrow(3, 16, 16),
        whole.narrow(3, 5, 16),
        whole.narrow(3, 0, 16).contiguous().transpose(1, 2).contiguous().transpose(1, 2),
        whole.narrow(3, 0, 16).transpose(2, 3).contiguous().transpose(2, 3),
        whole.narrow(3, 0, 16).narrow(1, 0, 1).expand([2, 3, 4, 16], false),
    ]
    .iter()
    .enumerate()
    {
        let upstream = [random(&[2, 3, 4, 16], kind)];
        let [found, expected] = [heads.shallow_clone(), heads.contiguous()].map(|heads| {
            let leaf = heads.detach().set_requires_grad(true);
            by_kernels(|| {
                let output = rotary(&leaf, &cos, &sin).unwrap();
                with_gradients(&[output], &[&leaf], &upstream)
            })
        });
        for (found, expected) in found.iter().zip(&expected) {
            assert!(found.equal(expected), "layout {index}");
        }
    }
}

#[test]
fn gradients_of_gradients_go_by_operations_in_16_bits() {
    let (device, _alone) = gpu();
    let case = CASES[0];
    tch::manual_seed(5);
    let kind = Kind::BFloat16;
    let [cos, sin] = tables(case, kind);
    let inputs = heads(case, kind);
    let second = |device: Device, kind: Kind, packed: bool, fused: bool| {
        let leaf = inputs[0].to_device(device).to_kind(kind).set_requires_grad(true);
        let [cos, sin] = [&cos, &sin].map(|table| table.to_device(device).to_kind(kind));
        let mut made = &leaf * &leaf;
        let output = match (fused, packed) {
            (true, true) => {
                rotary_packed(&mut made, 2, &cos, &sin).unwrap();
                made
            }
            (true, false) => rotary(&split(&made, case.width), &cos, &sin).unwrap(),
            (false, _) => {
                let all = split(&made, case.width);
                let rotated = if packed { 2 } else { all.size()[1] };
                let turned = by_operations(&all.narrow(1, 0, rotated), [&cos, &sin]);
                let rest = all.narrow(1, rotated, all.size()[1] - rotated);
                Tensor::cat(&[turned, rest], 1)
            }
        };
        let options = GradOptions {
            backward: BackwardOptions { create_graph: true, ..BackwardOptions::default() },
            ..GradOptions::default()
        };
        let loss = output.to_kind(Kind::Double).square().sum(Kind::Double);
        let first = grad(&[&loss], &[&leaf], options).unwrap().remove(0).unwrap();
        let penalty = first.to_kind(Kind::Double).square().sum(Kind::Double);
        let second = grad(&[&penalty], &[&leaf], GradOptions::default()).unwrap().remove(0);
        second.unwrap().to_device(Device::Cpu)
    };
    for packed in [true, false] {
        let found = by_kernels(|| second(device, kind, packed, true));
        let plain = second(Device::Cpu, kind, packed, false);
        let exact = second(Device::Cpu, Kind::Double, packed, false);
        // Rounded in each of the two directions.
        let allowed = apart(&plain, &exact) + 2.0 * unit(kind);
        assert!(
            apart(&found, &exact) <= allowed,
            "packed {packed}: {} > {allowed}",
            apart(&found, &exact)
        );
    }
}

#[test]
fn infinities_and_nan_stay_in_their_pairs_in_16_bits() {
    let (device, _alone) = gpu();
    for case in [CASES[0], CASES[2]] {
        tch::manual_seed(5);
        let [cos, sin] = tables(case, Kind::BFloat16);
        let size = [case.batch, case.heads, case.tokens, case.width];
        let x = random(&size, Kind::BFloat16);
        for (place, value) in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY].into_iter().enumerate() {
            let _ = x.view([-1]).narrow(0, 3 + 2 * case.width * place as i64, 1).fill_(value);
        }
        let upstream = [x.flip([0])];
        let run = |device: Device, fused: bool| {
            let own = leaves(&[x.shallow_clone()], device, Kind::BFloat16);
            let [cos, sin] = [&cos, &sin].map(|table| table.to_device(device));
            let output = if fused {
                rotary(&own[0], &cos, &sin).unwrap()
            } else {
                by_operations(&own[0], [&cos, &sin])
            };
            with_gradients(&[output], &[&own[0]], &upstream)
        };
        let found = by_kernels(|| run(device, true));
        for (found, plain) in found.iter().zip(&run(Device::Cpu, false)) {
            for kind_of in [Tensor::isnan, Tensor::isinf] {
                assert!(kind_of(found).equal(&kind_of(plain)), "{case:?}");
            }
            assert!(bool::try_from(found.isnan().any()).unwrap());
        }
    }
}

/// The exponential's backward reads its output, which is not the rotated one.
#[test]
fn an_operation_that_keeps_a_rotated_product_is_an_error_of_the_backward_in_16_bits() {
    let (device, _alone) = gpu();
    let case = CASES[0];
    tch::manual_seed(5);
    let [cos, sin] = tables(case, Kind::BFloat16).map(|table| table.to_device(device));
    let leaf = random(&[2, 5, 80], Kind::BFloat16).to_device(device).set_requires_grad(true);
    let error = by_kernels(|| {
        let mut product = leaf.exp();
        rotary_packed(&mut product, 3, &cos, &sin).unwrap();
        grad(&[&product.sum(Kind::Float)], &[&leaf], GradOptions::default()).unwrap_err()
    });
    assert!(error.to_string().contains("inplace"), "{error}");
}

#[test]
fn a_pair_is_one_launch_in_each_direction() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    let case = CASES[0];
    let [cos, sin] = tables(case, Kind::BFloat16).map(|table| table.to_device(device));
    let own = leaves(&heads(case, Kind::BFloat16), device, Kind::BFloat16);
    let [queries, keys] = [0, 1].map(|index| split(&own[index], case.width));
    let upstream = [&queries, &keys].map(|it| Tensor::zeros(it.size(), (Kind::BFloat16, device)));
    let account = kernels::counted(|| {
        fake::account(|| {
            let (queries, keys) = rotary_pair(&queries, &keys, &cos, &sin).unwrap();
            let options =
                GradOptions { output_gradients: &upstream.each_ref(), ..GradOptions::default() };
            let _ = grad(&[&queries, &keys], &[&own[0], &own[1]], options).unwrap();
        })
    });
    let bytes = own.iter().map(|it| it.numel() as u64 * 2).sum::<u64>();
    assert_eq!((account.calls(), account.bytes()), (2, 2 * 2 * bytes), "{account}");
}

#[test]
fn without_kernels_a_packed_product_is_that_of_the_operations_bit_for_bit() {
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
        tch::manual_seed(5);
        let angles = Tensor::randn([1, 1, 5, 8], (Kind::Double, Device::Cpu));
        let [cos, sin] = [angles.cos(), angles.sin()].map(|it| it.to_kind(kind));
        for (heads, all) in [(2, 3), (3, 3), (0, 2)] {
            let product = random(&[2, 5, all * 8], kind).set_requires_grad(true);
            let upstream = [random(&[2, 5, all * 8], kind)];
            let mut found = &product * 1.0;
            rotary_packed(&mut found, heads, &cos, &sin).unwrap();
            let parts = split(&product, 8);
            let turned = by_operations(&parts.narrow(1, 0, heads), [&cos, &sin]);
            let rest = parts.narrow(1, heads, all - heads);
            let expected = Tensor::cat(&[turned, rest], 1).transpose(1, 2).reshape([2, 5, all * 8]);
            let [found, expected] =
                [found, expected].map(|it| with_gradients(&[it], &[&product], &upstream));
            for (found, expected) in found.iter().zip(&expected) {
                assert!(found.equal(expected), "{heads} of {all} heads of {kind:?}");
            }
        }
    }
}

#[test]
fn a_product_that_is_not_of_heads_is_an_error_and_stays() {
    let form = (Kind::Float, Device::Cpu);
    let table = Tensor::zeros([1, 1, 5, 8], form);
    for (size, heads) in
        [(vec![2, 5, 20], 1), (vec![2, 5, 16], 3), (vec![5, 16], 1), (vec![2, 5, 16], -1)]
    {
        let mut product = Tensor::ones(&size, form);
        let error = rotary_packed(&mut product, heads, &table, &table).unwrap_err().to_string();
        assert!(error.contains(&format!("{size:?}")), "{error}");
        assert_eq!(product, Tensor::ones(&size, form));
    }
    let mut product = Tensor::ones([2, 5, 16], form);
    let scalar = Tensor::from(1f32);
    assert!(rotary_packed(&mut product, 1, &scalar, &scalar).is_err());
    let wrong = Tensor::zeros([1, 1, 4, 8], form);
    assert!(rotary_packed(&mut product, 1, &wrong, &wrong).is_err());
}
