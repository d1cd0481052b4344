//! Attention that computes its weights again, against the operations with the same weights dropped.

use brigade_test_device::{assert_same, numeric_device};
use brigade_torch::{
    AttentionOptions, Autocast, attention, make_products_reproducible, rng_state, set_rng_state,
};
use tch::{Device, Kind, Tensor};

use super::alone;

use crate::distance::apart;

struct Case {
    name: &'static str,
    /// Queries, keys and values.
    leaves: [Tensor; 3],
    mask: Option<Tensor>,
    causal: bool,
    scale: Option<f64>,
}

fn options() -> (Kind, Device) {
    (Kind::Float, numeric_device())
}

impl Case {
    /// `[batch, heads, queries, width]`, and heads, keys and width of the values.
    fn new(name: &'static str, queries: [i64; 4], values: [i64; 3]) -> Self {
        tch::manual_seed(11);
        let [batch, _, _, width] = queries;
        let [heads, keys, out] = values;
        let random = |[batch, heads, length, width]: [i64; 4]| {
            Tensor::randn([batch, length, heads, width], options()).transpose(1, 2)
        };
        let leaves = [
            random(queries),
            random([batch, heads, keys, width]),
            random([batch, heads, keys, out]),
        ];
        Self { name, leaves, mask: None, causal: false, scale: None }
    }

    /// On the CPU, whose own loops drop by numbers of 16 bits; which weights a GPU's kernels drop, and whether a
    /// kernel drops the same for values of another width, is theirs.
    fn all_on_cpu() -> Vec<Self> {
        let cpu = |case: Self| Self {
            leaves: case.leaves.map(|leaf| leaf.to_device(Device::Cpu)),
            mask: case.mask.map(|mask| mask.to_device(Device::Cpu)),
            ..case
        };
        Self::all().into_iter().map(cpu).collect()
    }

    fn all() -> Vec<Self> {
        let seen = |shape: &[i64]| Tensor::rand(shape, options()).gt(0.4);
        // The second query of the first row sees no key at all.
        let hides_all = seen(&[2, 1, 5, 9]);
        let _ = hides_all.get(0).get(0).get(1).fill_(0);
        vec![
            Self::new("plain", [2, 3, 5, 4], [3, 9, 6]),
            Self { causal: true, ..Self::new("causal blocks", [2, 2, 300, 8], [2, 300, 8]) },
            Self { causal: true, ..Self::new("fewer keys", [1, 2, 140, 8], [2, 33, 8]) },
            Self { scale: Some(0.7), ..Self::new("grouped", [2, 6, 5, 4], [2, 200, 6]) },
            Self { mask: Some(hides_all), ..Self::new("bool mask", [2, 3, 5, 4], [3, 9, 6]) },
            Self {
                mask: Some(seen(&[5, 9]).to_kind(Kind::Float).log()),
                ..Self::new("added mask", [2, 3, 5, 4], [3, 9, 6])
            },
            Self {
                mask: Some(seen(&[2, 1, 1, 150]).expand([2, 1, 130, 150], false)),
                ..Self::new("padding", [2, 2, 130, 8], [2, 150, 8])
            },
        ]
    }

    fn attend(&self, leaves: &[Tensor; 3], dropout: f64) -> Tensor {
        let options = AttentionOptions { dropout, causal: self.causal, scale: self.scale };
        let [queries, keys, values] = leaves;
        attention(queries, keys, values, self.mask.as_ref(), &options).unwrap()
    }

    /// Where weights are kept: what comes of values that are the rows of a unit matrix.
    fn kept(&self, dropout: f64) -> Tensor {
        let [queries, keys, _] = &self.leaves;
        let device = queries.device();
        let before = rng_state(device).unwrap();
        let size = keys.size();
        let unit = Tensor::eye(size[2], (queries.kind(), device))
            .expand([size[0], size[1], -1, -1], false);
        let dropped = self.attend(&[queries.shallow_clone(), keys.shallow_clone(), unit], dropout);
        set_rng_state(device, &before).unwrap();
        dropped.ne(0.0)
    }

    /// From operations, in float64.
    fn expected(&self, leaves: &[Tensor; 3], kept: &Tensor, dropout: f64) -> Tensor {
        let [queries, keys, values] = leaves.each_ref().map(|leaf| leaf.to_kind(Kind::Double));
        let repeat = queries.size()[1] / keys.size()[1];
        let [keys, values] =
            [keys, values].map(|tensor| tensor.repeat_interleave_self_int(repeat, 1, None));
        let scale = self.scale.unwrap_or(1.0 / (queries.size()[3] as f64).sqrt());
        let mut scores = queries.matmul(&keys.transpose(2, 3)) * scale;
        if self.causal {
            let seen = Tensor::ones_like(&scores).tril(0);
            scores = scores.masked_fill(&seen.eq(0.0), f64::NEG_INFINITY);
        }
        if let Some(mask) = &self.mask {
            scores = match mask.kind() {
                Kind::Bool => scores.masked_fill(&mask.logical_not(), f64::NEG_INFINITY),
                _ => scores + mask,
            };
        }
        // 0 for queries that see nothing.
        let weights = scores.softmax(-1, Kind::Double).nan_to_num(0.0, None, None);
        let below = (dropout * 65536.0).round();
        (weights * kept.to_kind(Kind::Double) * (65536.0 / (65536.0 - below))).matmul(&values)
    }
}

/// Output, and gradients of queries, keys and values.
fn run(leaves: &[Tensor; 3], attend: impl Fn(&[Tensor; 3]) -> Tensor) -> Vec<Tensor> {
    let leaves = leaves.each_ref().map(|leaf| leaf.detach().set_requires_grad(true));
    let output = attend(&leaves);
    let size = output.size();
    let upstream =
        Tensor::linspace(-1.0, 2.0, output.numel() as i64, (Kind::Double, leaves[0].device()));
    (&output * upstream.cos().view(size.as_slice())).sum(Kind::Double).backward();
    let mut results = vec![output.detach()];
    results.extend(leaves.iter().map(Tensor::grad));
    results
}

#[test]
fn it_equals_the_operations() {
    let _generator = alone();
    for case in Case::all_on_cpu() {
        for dropout in [0.25, 0.1] {
            let kept = case.kept(dropout);
            let mine = run(&case.leaves, |leaves| case.attend(leaves, dropout));
            let theirs = run(&case.leaves, |leaves| case.expected(leaves, &kept, dropout));
            for (index, (mine, theirs)) in mine.iter().zip(&theirs).enumerate() {
                assert_eq!((mine.kind(), mine.size()), (Kind::Float, theirs.size()));
                let found = apart(mine, theirs);
                assert!(found < 2e-6, "{}, dropout {dropout}, {index}: {found}", case.name);
            }
        }
    }
}

#[test]
fn it_drops_as_much_as_was_asked_for() {
    let _generator = alone();
    let case = Case::new("", [4, 8, 64, 4], [8, 200, 4]);
    let count = (4 * 8 * 64 * 200) as f64;
    let kept = case.kept(0.1).sum(Kind::Int64).int64_value(&[]) as f64;
    assert!((kept - 0.9 * count).abs() < 5.0 * (count * 0.09).sqrt(), "{kept} of {count}");
    let first = case.attend(&case.leaves, 0.1);
    assert!(!first.equal(&case.attend(&case.leaves, 0.1)));
}

/// Some of cuDNN's kernels round the probability to sixteenths.
#[test]
fn sixteen_bits_drop_as_much_as_was_asked_for() {
    let _generator = alone();
    // Values as wide as there are keys: a unit matrix of them shows the weights.
    let case = Case::new("", [4, 16, 128, 64], [16, 64, 64]);
    let count = (4 * 16 * 128 * 64) as f64;
    let mask = Tensor::ones([4, 1, 1, 64], (Kind::Bool, numeric_device()));
    for kind in [Kind::BFloat16, Kind::Half] {
        for dropout in [0.1, 0.05, 0.125] {
            for mask in [None, Some(&mask)] {
                let case = Case {
                    leaves: case.leaves.each_ref().map(|leaf| leaf.to_kind(kind)),
                    mask: mask.map(Tensor::shallow_clone),
                    ..Case::new("", [1; 4], [1; 3])
                };
                let kept = case.kept(dropout).sum(Kind::Int64).int64_value(&[]) as f64;
                let deviation = (count * dropout * (1.0 - dropout)).sqrt();
                assert!(
                    (kept - (1.0 - dropout) * count).abs() < 5.0 * deviation,
                    "{kind:?}, dropout {dropout}, mask {}: {} was dropped",
                    mask.is_some(),
                    1.0 - kept / count
                );
            }
        }
    }
}

#[test]
fn sixteen_bits_are_close_to_float64() {
    let _generator = alone();
    for case in Case::all_on_cpu() {
        let short = case.leaves.each_ref().map(|leaf| leaf.to_kind(Kind::BFloat16));
        for dropout in [0.0, 0.25] {
            let kept = if dropout > 0.0 {
                case.kept(dropout)
            } else {
                Tensor::ones([], (Kind::Bool, Device::Cpu))
            };
            let expected = run(&short, |leaves| case.expected(leaves, &kept, dropout));
            let before = rng_state(Device::Cpu).unwrap();
            let in_kind = run(&short, |leaves| case.attend(leaves, dropout));
            set_rng_state(Device::Cpu, &before).unwrap();
            // From leaves of float32, whose gradients are of that kind.
            let wide = short.each_ref().map(|leaf| leaf.to_kind(Kind::Float));
            let cast = run(&wide, |leaves| {
                let _scope = Autocast::enter(Device::Cpu, Kind::BFloat16, true).unwrap();
                case.attend(leaves, dropout)
            });
            assert_eq!(cast[0].kind(), Kind::BFloat16);
            assert_eq!(cast[1].kind(), Kind::Float);
            assert_eq!(in_kind[1].kind(), Kind::BFloat16);
            for (index, expected) in expected.iter().enumerate() {
                for mine in [&in_kind[index], &cast[index]] {
                    let found = apart(mine, expected);
                    assert!(found < 0.02, "{}, dropout {dropout}, {index}: {found}", case.name);
                }
            }
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let _generator = alone();
    // MKL's kernels for AVX2 on Intel's processors otherwise depend on the addresses of a thread's memory.
    let _ = make_products_reproducible();
    let before = tch::get_num_threads();
    let case = Case { causal: true, ..Case::new("", [2, 2, 300, 8], [1, 300, 8]) };
    let leaves = case.leaves.each_ref().map(|leaf| leaf.to_device(Device::Cpu));
    let runs = [1, 2, 3].map(|threads| {
        tch::set_num_threads(threads);
        tch::manual_seed(4);
        run(&leaves, |leaves| case.attend(leaves, 0.1))
    });
    tch::set_num_threads(before);
    for other in &runs[1..] {
        assert!(runs[0].iter().zip(other).all(|(one, other)| one.equal(other)));
    }
}

#[test]
fn heads_lie_beside_each_other() {
    let _generator = alone();
    let case = Case::new("", [2, 3, 5, 4], [3, 9, 6]);
    // Of the CPU's own loops; a GPU has libtorch's kernel.
    let leaves = case.leaves.each_ref().map(|leaf| leaf.to_device(Device::Cpu));
    let output = case.attend(&leaves, 0.1);
    assert!(output.transpose(1, 2).is_contiguous());
}

#[test]
fn without_dropout_it_is_libtorchs() {
    let _generator = alone();
    for case in Case::all() {
        let [queries, keys, values] = &case.leaves;
        let grouped = queries.size()[1] != keys.size()[1];
        let expected = Tensor::scaled_dot_product_attention(
            queries,
            keys,
            values,
            case.mask.as_ref(),
            0.0,
            case.causal,
            case.scale,
            grouped,
        );
        assert_same(&case.attend(&case.leaves, 0.0), &expected, case.name);
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let _generator = alone();
    let case = Case::new("", [2, 3, 5, 4], [3, 9, 6]);
    let [queries, keys, values] = &case.leaves;
    let options = AttentionOptions { dropout: 0.1, ..Default::default() };
    let of = |keys: &Tensor, mask: Option<&Tensor>, options: &AttentionOptions| {
        attention(queries, keys, values, mask, options).unwrap_err().to_string()
    };
    let error = of(&keys.narrow(2, 0, 8), None, &options);
    assert!(error.contains("keys [2, 3, 8, 4]"), "{error}");
    let mask = Tensor::ones([5, 9], (Kind::Bool, numeric_device()));
    let error = of(keys, Some(&mask), &AttentionOptions { causal: true, ..options });
    assert!(error.contains("a mask or causal"), "{error}");
    let error = of(keys, None, &AttentionOptions { dropout: 1.5, ..options });
    assert!(error.contains("expected 0 to 1"), "{error}");
    let error = of(keys, None, &AttentionOptions { scale: Some(f64::NAN), ..options });
    assert!(error.contains("a scale above 0"), "{error}");
    assert!(!of(keys, Some(&mask.narrow(1, 0, 4)), &options).is_empty());
}
