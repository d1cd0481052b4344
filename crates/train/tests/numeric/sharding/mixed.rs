//! Precision of sharded models: what autocast does inside of units.

use brigade_nn::{Linear, Model, Module, ParamPath, Unit};
use brigade_sharding::{MixedPrecision, Sharding};
use brigade_torch::Result;
use brigade_train::Accelerator;
use tch::{Kind, Tensor};

/// A unit that records the types of its weight, of its input and of the product.
struct Recording(Unit, Linear, std::cell::RefCell<Vec<Kind>>);

impl Module<&Tensor> for Recording {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let Self(unit, linear, kinds) = self;
        unit.run(|| {
            let product = linear.forward(input)?;
            *kinds.borrow_mut() = vec![linear.weight().kind(), input.kind(), product.kind()];
            Ok(product)
        })
    }
}

/// Inside of a unit the weights have 16 bits already, so that autocast converts inputs alone.
#[test]
fn autocast_converts_no_weights_of_a_unit() {
    let run = |sharding: Sharding| {
        let accelerator =
            Accelerator::builder().cpu(true).quiet(true).sharding(sharding).build().unwrap();
        let unit = |path: &ParamPath<'_>| {
            let path = path / "block";
            Recording(
                path.unit(),
                Linear::new(&path / "linear", 4, 4),
                std::cell::RefCell::default(),
            )
        };
        let model = accelerator.prepare(Model::new(unit).unwrap()).unwrap();
        let input = Tensor::ones([2, 4], (Kind::Float, accelerator.device()));
        let output = model.forward(&input).unwrap();
        (model.inner().module().2.borrow().clone(), output.kind())
    };
    for sharding in [Sharding::zero2(), Sharding::zero3()] {
        let (kinds, output) = run(sharding.clone().mixed(MixedPrecision::bf16()));
        assert_eq!(kinds, [Kind::BFloat16, Kind::Float, Kind::BFloat16]);
        assert_eq!(output, Kind::Float);
        let (kinds, _) = run(sharding);
        assert_eq!(kinds, [Kind::Float; 3]);
    }
}

/// A module with a floating-point buffer keeps its weight in 32 bits, which autocast casts for each operation. Its cache
/// would keep the cast weights of all units until the end of the forward.
#[cfg(not(feature = "cuda"))]
#[test]
fn casts_of_weights_end_with_their_unit() {
    use brigade_nn::Init;
    use brigade_test_device::fake;

    const WIDTH: i64 = 256;
    const UNITS: i64 = 12;

    struct Block {
        unit: Unit,
        weight: Tensor,
        scale: Tensor,
    }
    struct Deep(Vec<Block>);
    impl Module<&Tensor> for Deep {
        type Output = Tensor;
        fn forward(&self, input: &Tensor) -> Result<Tensor> {
            let mut x = input.shallow_clone();
            for Block { unit, weight, scale } in &self.0 {
                x = unit.run(|| Ok(x.f_matmul(weight)?.f_mul(scale)?.f_tanh()?))?;
            }
            Ok(x)
        }
    }
    fake::install(1).unwrap();
    let model = Model::deferred(|path| {
        let block = |number: i64| {
            let path = path / "blocks" / number;
            Block {
                unit: path.unit(),
                weight: path.parameter("weight", &[WIDTH, WIDTH], Init::Constant(0.01)),
                scale: path
                    .buffer("scale", &Tensor::ones([WIDTH], (Kind::Float, tch::Device::Cpu))),
            }
        };
        Deep((0..UNITS).map(block).collect())
    })
    .unwrap();
    let sharding = Sharding::zero3().mixed(MixedPrecision::bf16());
    let accelerator = Accelerator::builder().quiet(true).sharding(sharding).build().unwrap();
    let model = accelerator.prepare(model).unwrap();
    let input = Tensor::ones([2, WIDTH], (Kind::Float, accelerator.device()));
    let before = fake::memory(0).unwrap();
    let _output = tch::no_grad(|| model.forward(&input)).unwrap();
    let cast = (WIDTH * WIDTH * 2) as u64;
    let more = fake::memory(0).unwrap().peak - before.allocated;
    // Cast weights of one or two units, and small activations.
    assert!(more < 4 * cast, "{more} bytes, {cast} for one unit, {before:?}");
}
