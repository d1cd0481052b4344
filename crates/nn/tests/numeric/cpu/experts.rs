//! Mixtures of experts: against dense layers and finite differences, and with experts on several ranks.

mod parallel;

use brigade_nn::{
    ExpertLoad, Experts, ExpertsOptions, Init, Model, ModelBuilder, ModelError, StateDict,
    load_balancing_loss, router_z_loss,
};
use brigade_test_device::fake;
use brigade_testkit::assert_close;
use brigade_torch::{Activation, Autocast, backward, gradient};
use tch::{Device, Kind, Tensor};

const HIDDEN: i64 = 5;
const INNER: i64 = 7;
const EXPERTS: i64 = 12;

/// Distinct numbers between -1 and 1.
fn wave(shape: &[i64], phase: f64) -> Tensor {
    let count = shape.iter().product::<i64>();
    ((Tensor::arange(count, (Kind::Double, Device::Cpu)) * 0.73 + phase).sin()).view(shape)
}

fn options(chosen: i64) -> ExpertsOptions {
    ExpertsOptions { experts: EXPERTS, experts_per_token: chosen, ..Default::default() }
}

/// All experts with values of their own, or this rank's of them.
fn model(builder: ModelBuilder, options: ExpertsOptions) -> Model<Experts> {
    let builder = builder.kind(Kind::Double);
    let mut model = builder.build(|path| Experts::new(path, HIDDEN, INNER, options)).unwrap();
    let mut state = StateDict::new();
    for (phase, (name, _)) in model.state_dict().iter().enumerate() {
        let size = model.whole_size(name).unwrap();
        state.insert(name, wave(&size, phase as f64)).unwrap();
    }
    model.load_state_dict(&state).unwrap();
    model
}

/// Sends tokens with a large first number to `expert` before all others.
fn prefer(model: &Model<Experts>, expert: i64) {
    tch::no_grad(|| {
        let _ = model.tensor("gate.weight").unwrap().get(expert).get(0).fill_(100.0);
    });
}

fn tokens(count: i64, phase: f64) -> Tensor {
    let tokens = wave(&[count, HIDDEN], phase) * 1.3;
    if count > 0 {
        let _ = tokens.select(1, 0).abs_();
    }
    tokens
}

/// Every expert of every token, most of them times 0.
fn dense(model: &Model<Experts>, tokens: &Tensor, options: &ExpertsOptions) -> Tensor {
    let weight = |name: &str| model.tensor(name).unwrap();
    let shares = tokens.matmul(&weight("gate.weight").tr()).softmax(-1, Kind::Double);
    let (mut values, chosen) = shares.topk(options.experts_per_token, -1, true, true);
    if options.normalize {
        values = &values / values.sum_dim_intlist(-1, true, None::<Kind>);
    }
    let weights = shares.zeros_like().scatter(1, &chosen, &values);
    let mut sum = tokens.zeros_like();
    for expert in 0..options.experts {
        let gate_up = weight("experts.gate_up_proj").get(expert);
        let down = weight("experts.down_proj").get(expert);
        let gate = tokens.matmul(&gate_up.narrow(0, 0, INNER).tr());
        let up = tokens.matmul(&gate_up.narrow(0, INNER, INNER).tr());
        let output = (gate.silu() * up).matmul(&down.tr());
        sum += output * weights.select(1, expert).unsqueeze(1);
    }
    sum
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().reshape([-1])).unwrap()
}

#[track_caller]
fn same(found: &Tensor, expected: &Tensor) {
    assert_eq!(found.size(), expected.size());
    assert_close(&values(found), &values(expected), 1e-12, 1e-13);
}

fn leaf(values: &Tensor) -> Tensor {
    values.copy().set_requires_grad(true)
}

fn take_gradients<M>(model: &Model<M>) -> Vec<Tensor> {
    let taken = model.parameters().into_iter().map(|mut parameter| {
        let found = gradient(&parameter.tensor).unwrap().expect("every parameter has a gradient");
        let found = found.copy();
        parameter.tensor.zero_grad();
        found
    });
    taken.collect()
}

#[test]
fn outputs_and_gradients_are_those_of_dense_layers() {
    for (chosen, normalize, count) in [(1, true, 9), (1, false, 9), (2, true, 40), (3, false, 2)] {
        let options = ExpertsOptions { normalize, ..options(chosen) };
        let model = model(Model::builder(), options);
        let target = wave(&[count, HIDDEN], 0.4);
        let (ours, theirs) = (leaf(&tokens(count, 0.2)), leaf(&tokens(count, 0.2)));
        let expected = dense(&model, &theirs, &options);
        backward(&(&expected * &target).sum(Kind::Double)).unwrap();
        let gradients = take_gradients(&model);
        let output = model.forward(&ours).unwrap();
        same(&output, &expected);
        backward(&(&output * &target).sum(Kind::Double)).unwrap();
        same(&gradient(&ours).unwrap().unwrap(), &gradient(&theirs).unwrap().unwrap());
        for (found, expected) in take_gradients(&model).iter().zip(&gradients) {
            same(found, expected);
        }
    }
}

#[test]
fn gradients_are_finite_differences() {
    let options = ExpertsOptions { shared_intermediate_size: Some(3), ..options(2) };
    let model = model(Model::builder(), options);
    let input = leaf(&tokens(6, 0.9));
    let target = wave(&[6, HIDDEN], 0.1);
    let loss = |input: &Tensor| {
        let (output, routing) = model.module().forward_routed(input).unwrap();
        let balance = load_balancing_loss(&[&routing.logits], 2, None).unwrap();
        let small = router_z_loss(&[&routing.logits], None).unwrap();
        (output * &target).sum(Kind::Double) + balance * 0.7 + small * 0.3
    };
    backward(&loss(&input)).unwrap();
    let gradients = take_gradients(&model);
    let parameters = model.parameters().into_iter().map(|it| (it.name, it.tensor));
    let checked = parameters.zip(gradients);
    let own = gradient(&input).unwrap().unwrap();
    let checked = checked.chain([(("input".to_owned(), input.shallow_clone()), own)]);
    for ((name, tensor), gradient) in checked {
        let (flat, gradient) = (tensor.detach().view([-1]), values(&gradient));
        for place in (0..flat.numel()).step_by(1 + flat.numel() / 40) {
            let before = flat.double_value(&[place as i64]);
            let at = |value: f64| {
                let _ = flat.get(place as i64).fill_(value);
                tch::no_grad(|| loss(&input)).double_value(&[])
            };
            let slope = (at(before + 1e-6) - at(before - 1e-6)) / 2e-6;
            at(before);
            let found = gradient[place];
            assert!((found - slope).abs() < 1e-7, "{name} {place}: {found} and {slope}");
        }
    }
}

#[test]
fn all_tokens_may_go_to_one_expert_and_none_to_the_others() {
    let options = options(1);
    let model = model(Model::builder(), options);
    prefer(&model, 7);
    let input = tokens(6, 0.9);
    let output = model.forward(&input).unwrap();
    same(&output, &dense(&model, &input, &options));
    let mut expected = vec![0; EXPERTS as usize];
    expected[7] = 6;
    assert_eq!(model.module().load(), Some(ExpertLoad { tokens: expected, dropped: 0 }));
    backward(&output.sum(Kind::Double)).unwrap();
    let of_experts = take_gradients(&model).remove(1);
    for expert in 0..EXPERTS {
        let largest = of_experts.get(expert).abs().max().double_value(&[]);
        assert_eq!(largest > 0.0, expert == 7, "{expert}");
    }
}

#[test]
fn no_tokens_are_no_output_and_gradients_of_zero() {
    let model = model(Model::builder(), options(2));
    let input = leaf(&Tensor::zeros([3, 0, HIDDEN], (Kind::Double, Device::Cpu)));
    let output = model.forward(&input).unwrap();
    assert_eq!(output.size(), [3, 0, HIDDEN]);
    backward(&output.sum(Kind::Double)).unwrap();
    for gradient in take_gradients(&model) {
        assert_eq!(gradient.abs().sum(Kind::Double).double_value(&[]), 0.0);
    }
    let load = model.module().load().unwrap();
    assert_eq!((load.tokens, load.dropped), (vec![0; EXPERTS as usize], 0));
}

#[test]
fn a_full_expert_drops_later_tokens_and_second_choices() {
    // Even shares of 4 tokens with 2 choices over 2 experts are 4; half of them are kept.
    let options = ExpertsOptions { experts: 2, capacity_factor: Some(0.5), ..options(2) };
    let model = model(Model::builder(), options);
    prefer(&model, 0);
    let input = tokens(4, 0.9);
    let output = model.forward(&input).unwrap();
    let load = model.module().load().unwrap();
    assert_eq!((load.tokens, load.dropped), (vec![2, 2], 4));
    // Expert 0 is each token's first choice, and 1 its second: the first two tokens have both, the others none.
    let expected = dense(&model, &input, &options);
    same(&output.narrow(0, 0, 2), &expected.narrow(0, 0, 2));
    assert_eq!(output.narrow(0, 2, 2).abs().sum(Kind::Double).double_value(&[]), 0.0);
    let weight = model.tensor("gate.weight").unwrap();
    backward(&output.sum(Kind::Double)).unwrap();
    assert!(gradient(&weight).unwrap().is_some());

    // Second choices come after all first ones: the last token's first choice is kept, the first token's second is not.
    let turned = Tensor::cat(&[input.narrow(0, 0, 1), -input.narrow(0, 0, 1)], 0);
    let options = ExpertsOptions { capacity_factor: Some(0.5), ..options };
    let model = self::model(Model::builder(), options);
    prefer(&model, 0);
    let output = model.forward(&turned).unwrap();
    let load = model.module().load().unwrap();
    assert_eq!((load.tokens, load.dropped), (vec![1, 1], 2));
    assert!(output.get(1).abs().sum(Kind::Double).double_value(&[]) > 0.0);
}

#[test]
fn a_large_capacity_drops_nothing() {
    let input = tokens(30, 0.9);
    let exact = model(Model::builder(), options(2)).forward(&input).unwrap();
    let wide = ExpertsOptions { capacity_factor: Some(f64::MAX), ..options(2) };
    let model = model(Model::builder(), wide);
    assert_eq!(values(&model.forward(&input).unwrap()), values(&exact));
    assert_eq!(model.module().load().unwrap().dropped, 0);
}

#[test]
fn the_number_of_threads_does_not_change_a_bit_of_the_sum() {
    // Whole numbers: products are exact, whose sums MKL divides among threads otherwise. Weights of experts are not whole.
    let options = ExpertsOptions { activation: Activation::Relu, ..options(3) };
    let run = |threads: i32| {
        tch::set_num_threads(threads);
        let model = model(Model::builder(), options);
        for parameter in model.parameters() {
            let whole = (parameter.tensor.detach() * 3.0).round();
            tch::no_grad(|| parameter.tensor.shallow_clone().copy_(&whole));
        }
        values(&model.forward(&(tokens(3000, 0.2) * 3.0).round()).unwrap())
    };
    let before = tch::get_num_threads();
    let all = [1, 2, 5].map(run);
    tch::set_num_threads(before);
    assert!(all[0].iter().any(|value| value.fract() != 0.0));
    assert!(all.iter().all(|found| *found == all[0]));
}

#[test]
fn losses_of_routers_follow_their_definitions() {
    let layers = [wave(&[6, 4], 0.3) * 2.0, wave(&[6, 4], 1.9) * 2.0];
    let mask = Tensor::from_slice(&[1i64, 1, 0, 1, 0, 1]).view([2, 3]);
    let logits: Vec<&Tensor> = layers.iter().collect();
    for (mask, counted) in [(None, vec![0i64, 1, 2, 3, 4, 5]), (Some(&mask), vec![0, 1, 3, 5])] {
        let (mut used, mut shares, mut squares) = ([0.0; 4], [0.0; 4], 0.0);
        for layer in &layers {
            for &token in &counted {
                let row: Vec<f64> = Vec::try_from(layer.get(token)).unwrap();
                let sum: f64 = row.iter().map(|logit| logit.exp()).sum();
                squares += sum.ln().powi(2);
                let mut order = [0, 1, 2, 3];
                order.sort_by(|&left, &right| row[right].total_cmp(&row[left]));
                order[..2].iter().for_each(|&expert| used[expert] += 1.0);
                row.iter().zip(&mut shares).for_each(|(logit, share)| *share += logit.exp() / sum);
            }
        }
        let tokens = (2 * counted.len()) as f64;
        let balance: f64 = used.iter().zip(shares).map(|(used, share)| used * share).sum();
        let found = load_balancing_loss(&logits, 2, mask).unwrap();
        let found = [found, router_z_loss(&logits, mask).unwrap()].map(|it| it.double_value(&[]));
        let expected = [4.0 * balance / tokens.powi(2), squares / tokens];
        assert_close(&found, &expected, 1e-13, 0.0);
    }
    let error = load_balancing_loss(&[], 2, None).unwrap_err().to_string();
    assert!(error.contains("at least one router"), "{error}");
}

#[test]
fn what_cannot_be_built_is_named() {
    let wrong = [
        (ExpertsOptions { experts: 0, ..options(1) }, "expected at least 1 expert, found 0"),
        (options(13), "expected from 1 to 12 experts per token, found 13"),
        (options(0), "expected from 1 to 12 experts per token, found 0"),
        (
            ExpertsOptions { capacity_factor: Some(f64::NAN), ..options(1) },
            "expected a capacity factor above 0, found NaN",
        ),
        (ExpertsOptions { jitter: 1.0, ..options(1) }, "jitter of at least 0 and below 1, found 1"),
    ];
    for (options, text) in wrong {
        let built = Model::new(|path| Experts::new(path / "mlp", HIDDEN, INNER, options));
        let error = built.map(drop).unwrap_err();
        let Some(ModelError::Build { problems }) = error.downcast_ref() else { panic!("{error}") };
        assert!(problems[0].starts_with("mlp: ") && problems[0].contains(text), "{problems:?}");
    }
    let model = model(Model::builder(), options(1));
    let error = model.forward(&wave(&[3, HIDDEN + 1], 0.0)).unwrap_err().to_string();
    assert!(error.contains("[3, 6]"), "{error}");
}

#[test]
fn jitter_is_for_training_alone() {
    let mut model = model(Model::builder(), ExpertsOptions { jitter: 0.3, ..options(2) });
    let input = tokens(4, 0.1);
    let expected = dense(&model, &input, &options(2));
    tch::manual_seed(3);
    let trained = model.forward(&input).unwrap();
    assert!((trained - &expected).abs().max().double_value(&[]) > 1e-4);
    model.eval();
    same(&model.forward(&input).unwrap(), &expected);
}

#[test]
fn first_values_are_those_of_linear_layers_or_as_asked_for() {
    let bound = |options: ExpertsOptions| {
        tch::manual_seed(1);
        let model = Model::new(|path| Experts::new(path, 64, 16, options)).unwrap();
        ["gate.weight", "experts.gate_up_proj", "experts.down_proj"]
            .map(|name| model.tensor(name).unwrap().abs().max().double_value(&[]))
    };
    let found = bound(options(2));
    for (found, limit) in found.into_iter().zip([0.125, 0.125, 0.25]) {
        assert!(found <= limit && found > 0.98 * limit, "{found} of {limit}");
    }
    let zeros = ExpertsOptions { first_values: Some(Init::Zeros), ..options(2) };
    assert_eq!(bound(zeros), [0.0; 3]);
}

/// Returns the number of conversions and copies of a forward on a GPU under autocast.
fn conversions(model: &Model<Experts>, tokens: &Tensor) -> u64 {
    let account = fake::account(|| {
        let _scope = Autocast::enter(tokens.device(), Kind::BFloat16, true).unwrap();
        let _ = model.forward(tokens).unwrap();
    });
    account.0.get("aten::copy_").map_or(0, |it| it.calls)
}

#[test]
fn stacks_of_weights_in_16_bits_are_cast_once_for_all_experts_and_forwards() {
    if fake::install(1).is_err() {
        return;
    }
    tch::manual_seed(4);
    let device = Device::Cuda(0);
    let model = Model::builder().device(device);
    let model = model.build(|path| Experts::new(path, HIDDEN, INNER, options(2))).unwrap();
    let tokens = Tensor::randn([6, HIDDEN], (Kind::Float, device));
    let first = conversions(&model, &tokens);
    let usual = conversions(&model, &tokens);
    assert_eq!(first, usual + 2, "the stacks of both projections");
    tch::no_grad(|| {
        for name in ["experts.gate_up_proj", "experts.down_proj"] {
            let _ = model.tensor(name).unwrap().g_mul_scalar_(2.0);
        }
    });
    assert_eq!(conversions(&model, &tokens), first, "after a write");
    assert_eq!(conversions(&model, &tokens), usual, "once");
}
