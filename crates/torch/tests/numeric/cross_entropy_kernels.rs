//! The GPU kernels of the cross-entropy, compiled for the CPU, against float64 and against libtorch's operations.

use brigade_test_device::kernels::{CrossEntropy, kept_by_dropout};
use tch::{Device, Kind, Tensor};

const IGNORED: i64 = -100;
const KINDS: [Kind; 3] = [Kind::BFloat16, Kind::Half, Kind::Float];

/// Rows, classes, columns: a power of two and beside it, one, whole vectors and not, with and without padding.
const SHAPES: [[i64; 3]; 9] = [
    [5, 301, 320],
    [3, 301, 301],
    [1, 1, 1],
    [4, 1, 8],
    [2, 7, 7],
    [2, 8, 8],
    [3, 33, 40],
    [2, 2083, 2112],
    [0, 10, 16],
];

#[derive(Debug, Clone, Copy)]
struct Options {
    label_smoothing: f64,
    z_loss: f64,
    count: Option<i64>,
    in_place: bool,
}

const PLAIN: Options = Options { label_smoothing: 0.0, z_loss: 0.0, count: None, in_place: true };
const ALL: [Options; 4] = [
    PLAIN,
    Options { label_smoothing: 0.1, count: Some(3), ..PLAIN },
    Options { label_smoothing: 0.2, z_loss: 1e-3, in_place: false, ..PLAIN },
    Options { count: Some(0), in_place: false, ..PLAIN },
];
const SCALE: f64 = 0.5;

/// Losses and gradient.
struct Results {
    losses: Tensor,
    gradient: Tensor,
}

/// Runs the kernels on a copy of the logits.
fn by_kernels(logits: &Tensor, classes: i64, targets: &Tensor, options: Options) -> Results {
    let own = Tensor::empty_strided(logits.size(), logits.stride(), (logits.kind(), Device::Cpu));
    let own = own.set_data_of(logits);
    let apart = (!options.in_place).then(|| {
        let place =
            Tensor::empty_strided(logits.size(), logits.stride(), (logits.kind(), Device::Cpu));
        place.set_to(f64::NAN)
    });
    let count = options.count.map(Tensor::from);
    let kernels = CrossEntropy {
        logits: &own,
        classes,
        targets,
        count: count.as_ref(),
        gradient: Some(apart.as_ref().unwrap_or(&own)),
        ignore_index: IGNORED,
        label_smoothing: options.label_smoothing,
        z_loss: options.z_loss,
        scale: SCALE,
    };
    let losses = kernels.run().unwrap();
    Results { losses, gradient: apart.unwrap_or(own) }
}

/// The operations, computed in a type, with the gradient rounded to that of the logits.
fn by_operations(
    logits: &Tensor,
    classes: i64,
    targets: &Tensor,
    options: Options,
    kind: Kind,
) -> Results {
    let Options { label_smoothing, z_loss, count, .. } = options;
    let ignored = targets.eq(IGNORED);
    let places = targets.masked_fill(&ignored, 0).unsqueeze(1);
    let rows = logits.narrow(1, 0, classes);
    let logs = rows.log_softmax(1, kind);
    let mut losses = logs.gather(1, &places, false) * -(1.0 - label_smoothing);
    let spread = label_smoothing / classes as f64;
    if label_smoothing > 0.0 {
        losses -= logs.sum_dim_intlist(1, true, kind) * spread;
    }
    let mut gradient = logs.exp();
    if z_loss > 0.0 {
        let log_sum = rows.to_kind(kind).logsumexp(1, true);
        losses += log_sum.square() * z_loss;
        gradient *= log_sum * (2.0 * z_loss) + 1.0;
    }
    gradient -= spread;
    let hit = Tensor::full(places.size(), -(1.0 - label_smoothing), (kind, Device::Cpu));
    gradient = gradient.scatter_add(1, &places, &hit) * SCALE;
    gradient /= count.unwrap_or(1).max(1) as f64;
    let whole = Tensor::zeros(logits.size(), (kind, Device::Cpu));
    whole.narrow(1, 0, classes).copy_(&gradient.masked_fill(&ignored.unsqueeze(1), 0.0));
    let losses = losses.squeeze_dim(1).masked_fill(&ignored, 0.0);
    let of_logits = if kind == Kind::Double { kind } else { logits.kind() };
    Results { losses, gradient: whole.to_kind(of_logits) }
}

trait Filled {
    fn set_data_of(self, other: &Tensor) -> Tensor;
    fn set_to(self, value: f64) -> Tensor;
}

impl Filled for Tensor {
    fn set_data_of(mut self, other: &Tensor) -> Tensor {
        self.copy_(other);
        self
    }

    fn set_to(mut self, value: f64) -> Tensor {
        let _ = self.fill_(value);
        self
    }
}

/// Returns the unit in the last place of a value.
fn unit(value: f64, kind: Kind) -> f64 {
    // Bits of the significand, and the smallest step of values near zero.
    let (bits, step) = match kind {
        Kind::BFloat16 => (8, 2f64.powi(-133)),
        Kind::Half => (11, 2f64.powi(-24)),
        _ => (24, 2f64.powi(-149)),
    };
    if value == 0.0 { step } else { (2f64.powi(1 - bits) * value.log2().floor().exp2()).max(step) }
}

/// Checks that infinities and NaN are those of the exact values, and that the largest error is at most that of the
/// operations and one unit in the last place: of the largest value in its type, and of the largest term in float32, the
/// type in which terms are added, since they may cancel.
fn check(
    name: &str,
    fused: &Tensor,
    operations: &Tensor,
    exact: &Tensor,
    kind: Kind,
    largest_term: f64,
) {
    let [fused, operations] = [fused, operations].map(|it| it.to_kind(Kind::Double));
    let special = exact.isfinite().logical_not();
    let as_exact = fused.eq_tensor(exact).logical_or(&fused.isnan().logical_and(&exact.isnan()));
    let wrong = special.logical_and(&as_exact.logical_not()).any();
    assert!(!bool::try_from(wrong).unwrap(), "{name}: {fused} is not as {exact}");
    if exact.numel() == 0 {
        return;
    }
    let finite = |tensor: &Tensor| tensor.masked_fill(&special, 0.0);
    let largest = |tensor: Tensor| finite(&tensor).abs().max().double_value(&[]);
    let unit = unit(largest(exact.copy()), kind).max(unit(largest_term, Kind::Float));
    let errors = [largest(&fused - exact), largest(&operations - exact)];
    assert!(errors[0] <= errors[1] + unit, "{name}: {errors:?}, unit {unit:e}");
}

fn compare(name: &str, logits: &Tensor, classes: i64, targets: &Tensor, options: Options) {
    let kind = logits.kind();
    let name = format!("{name}, {:?} of {kind:?}, {options:?}", logits.size());
    let fused = by_kernels(logits, classes, targets, options);
    let operations = by_operations(logits, classes, targets, options, Kind::Float);
    let exact = by_operations(logits, classes, targets, options, Kind::Double);
    let rows = logits.narrow(1, 0, classes).to_kind(Kind::Double);
    let finite = rows.masked_fill(&rows.isfinite().logical_not(), 0.0);
    let largest_logit =
        if finite.numel() == 0 { 0.0 } else { finite.abs().max().double_value(&[]) };
    check(
        &format!("losses, {name}"),
        &fused.losses,
        &operations.losses,
        &exact.losses,
        Kind::Float,
        largest_logit,
    );
    check(
        &format!("gradient, {name}"),
        &fused.gradient,
        &operations.gradient,
        &exact.gradient,
        kind,
        SCALE / options.count.unwrap_or(1).max(1) as f64,
    );
    let padding = fused.gradient.narrow(1, classes, logits.size()[1] - classes);
    let is_zero = padding.numel() == 0 || padding.abs().max().double_value(&[]) == 0.0;
    assert!(is_zero, "{name}: padding is not zero");
    let again = by_kernels(logits, classes, targets, options);
    let same = |one: &Tensor, other: &Tensor| {
        one.eq_tensor(other).logical_or(&one.isnan().logical_and(&other.isnan())).all()
    };
    assert!(bool::try_from(same(&again.losses, &fused.losses)).unwrap(), "{name}: twice");
    assert!(bool::try_from(same(&again.gradient, &fused.gradient)).unwrap(), "{name}: twice");
}

fn random(rows: i64, columns: i64, kind: Kind) -> Tensor {
    (Tensor::randn([rows, columns], (Kind::Float, Device::Cpu)) * 4.0).to_kind(kind)
}

#[test]
fn losses_and_gradients_are_as_exact_as_the_operations() {
    for kind in KINDS {
        for [rows, classes, columns] in SHAPES {
            tch::manual_seed(3);
            let logits = random(rows, columns, kind);
            // Padding must not be used.
            let _ = logits.narrow(1, classes, columns - classes).fill_(f64::NAN);
            let targets = Tensor::randint(classes, [rows], (Kind::Int64, Device::Cpu));
            if rows > 2 {
                let _ = targets.narrow(0, 1, 1).fill_(IGNORED);
            }
            for options in ALL {
                compare("random", &logits, classes, &targets, options);
            }
        }
    }
}

#[test]
fn rows_may_be_any_distance_apart() {
    for kind in KINDS {
        tch::manual_seed(4);
        let wide = random(4, 105, kind);
        let targets = Tensor::from_slice(&[0i64, 99, IGNORED, 50]);
        for first in 0..2 {
            compare("strided", &wide.narrow(1, first, 100), 100, &targets, PLAIN);
        }
    }
}

#[test]
fn infinities_nan_and_ignored_rows_are_those_of_the_operations() {
    for kind in KINDS {
        tch::manual_seed(5);
        let logits = random(7, 100, kind);
        let set = |row, column, value: f64| {
            let _ = logits.narrow(0, row, 1).narrow(1, column, 1).fill_(value);
        };
        set(0, 5, f64::INFINITY);
        set(1, 6, f64::NEG_INFINITY);
        set(2, 0, f64::NEG_INFINITY);
        let _ = logits.narrow(0, 3, 1).fill_(f64::NEG_INFINITY);
        set(4, 9, f64::NAN);
        set(5, 0, f64::INFINITY);
        let _ = logits.narrow(0, 6, 1).fill_(f64::NAN);
        let targets = Tensor::zeros([7], (Kind::Int64, Device::Cpu));
        compare("special", &logits, 100, &targets, PLAIN);
        let ignored = Tensor::full([7], IGNORED, (Kind::Int64, Device::Cpu));
        for options in ALL {
            compare("all ignored", &logits, 100, &ignored, options);
        }
    }
}

#[test]
fn a_target_that_is_no_class_is_an_error() {
    let logits = random(2, 10, Kind::Float);
    for wrong in [-1, 10, i64::MAX, i64::MIN] {
        let targets = Tensor::from_slice(&[0, wrong]);
        let kernels = CrossEntropy {
            logits: &logits,
            classes: 10,
            targets: &targets,
            count: None,
            gradient: None,
            ignore_index: IGNORED,
            label_smoothing: 0.0,
            z_loss: 0.0,
            scale: 1.0,
        };
        let error = kernels.run().unwrap_err().to_string();
        assert!(error.contains("one of the classes"), "{error}");
    }
}

#[test]
fn kernels_drop_what_the_cpu_drops() {
    for (seed, row) in [(1, 0), (0x1234_5678_90ab_cdef, 77), (u64::MAX, 1 << 40)] {
        for below in [0, 6554, 32768, 65536] {
            let [kernel, cpu] = kept_by_dropout(seed, row, 5, below).unwrap();
            assert!(kernel.equal(&cpu), "seed {seed}, row {row}, below {below}");
        }
    }
}
