//! Steps of text generation that are recorded as a graph, on a GPU made of host memory: the same tokens as without.

use std::cell::Cell;

use brigade_models::{
    CacheKind, CausalModel, GenerationOptions, Gpt2LmHead, Gpt2Options, LlamaForCausalLm,
    LlamaOptions, MixtralForCausalLm, MixtralOptions, RecordedStep, Tokens, Transformer,
};
use brigade_nn::{Model, ParamPath, Weights};
use brigade_sharding::device_map::DeviceMap;
use brigade_test_device::fake;
use brigade_torch::Result;
use tch::{Device, Kind, Tensor};

const GPU: Device = Device::Cuda(0);

fn on_gpu<M>(build: impl Fn(&ParamPath<'_>) -> M) -> Model<M> {
    tch::manual_seed(11);
    let mut model = Model::builder().device(GPU).build(build).unwrap();
    model.eval();
    model
}

fn llama() -> Model<LlamaForCausalLm> {
    let options = LlamaOptions {
        vocab_size: 20,
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        initializer_range: 0.2,
        ..Default::default()
    };
    on_gpu(|path| LlamaForCausalLm::new(path, &options))
}

fn gpt2() -> Model<Gpt2LmHead> {
    let options = Gpt2Options {
        vocab_size: 20,
        n_positions: 32,
        n_embd: 16,
        n_layer: 2,
        n_head: 2,
        initializer_range: 0.2,
        ..Default::default()
    };
    on_gpu(|path| Gpt2LmHead::new(path, &options))
}

fn ids() -> Tensor {
    Tensor::from_slice(&[3i64, 7, 1, 4, 11, 5]).view([2, 3]).to_device(GPU)
}

fn mask() -> Tensor {
    Tensor::from_slice(&[1i64, 1, 1, 0, 1, 1]).view([2, 3]).to_device(GPU)
}

/// Options of each kind of generation of one token at a time.
fn streams() -> Vec<GenerationOptions> {
    let greedy = GenerationOptions { max_new_tokens: 6, ..Default::default() };
    vec![
        GenerationOptions { cache_kind: CacheKind::Int8, ..greedy.clone() },
        GenerationOptions {
            do_sample: true,
            seed: Some(3),
            num_return_sequences: 3,
            ..greedy.clone()
        },
        GenerationOptions { eos_token_id: vec![2, 5], repetition_penalty: 1.5, ..greedy.clone() },
        GenerationOptions { prefill_chunk: Some(2), ..greedy.clone() },
        greedy,
    ]
}

/// Returns the tokens with recorded steps, and whether they were recorded.
fn recorded<M: CausalModel>(
    options: &GenerationOptions,
    model: &M,
    mask: Option<&Tensor>,
) -> (Tensor, std::result::Result<(), String>) {
    let options = GenerationOptions { capture: true, ..options.clone() };
    let mut stream = options.stream(model, &ids(), mask).unwrap();
    for tokens in &mut stream {
        tokens.unwrap();
    }
    let records = stream.records().map_err(str::to_owned);
    (stream.into_ids(), records)
}

fn check<M: CausalModel>(model: &M, expected: std::result::Result<(), &str>) {
    for options in streams() {
        for mask in [None, Some(mask())] {
            let plain = options.generate(model, &ids(), mask.as_ref()).unwrap();
            let (found, records) = recorded(&options, model, mask.as_ref());
            assert_eq!(found, plain, "{options:?}, mask {mask:?}");
            match (&records, expected) {
                (Ok(()), Ok(())) => {}
                (Err(found), Err(expected)) if found.contains(expected) => {}
                _ => panic!("{records:?} is not {expected:?}"),
            }
        }
    }
    let beams = GenerationOptions {
        num_beams: 3,
        num_return_sequences: 2,
        max_new_tokens: 6,
        ..Default::default()
    };
    let captured = GenerationOptions { capture: true, ..beams.clone() };
    for mask in [None, Some(mask())] {
        let plain = beams.generate(model, &ids(), mask.as_ref()).unwrap();
        assert_eq!(captured.generate(model, &ids(), mask.as_ref()).unwrap(), plain);
    }
}

#[test]
fn recorded_steps_write_the_same_tokens() {
    if fake::install(1).is_err() {
        return;
    }
    check(&llama(), Ok(()));
    check(&gpt2(), Ok(()));
}

#[test]
fn steps_that_wait_for_the_device_write_the_same_tokens_without_a_recording() {
    if fake::install(1).is_err() {
        return;
    }
    // Experts read how many tokens each of them has. The window is shorter than the texts.
    let options = MixtralOptions {
        vocab_size: 20,
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        num_local_experts: 3,
        sliding_window: Some(4),
        initializer_range: 0.2,
        ..Default::default()
    };
    check(&on_gpu(|path| MixtralForCausalLm::new(path, &options)), Err("record a graph"));
}

/// Counts upwards, modulo 10, from a device's numbers alone.
struct Counter {
    forwards: Cell<usize>,
    refuses: bool,
}

impl CausalModel for Counter {
    type State = ();

    fn start(&self, _tokens: i64) {}

    fn next_logits(&self, tokens: Tokens<'_>, _state: &mut ()) -> Result<Tensor> {
        self.forwards.set(self.forwards.get() + 1);
        let next = tokens.ids.f_select(1, -1)?.f_add_scalar(1)?.f_remainder(10)?;
        let numbers = Tensor::f_arange(10, (Kind::Int64, GPU))?;
        Ok(next.f_unsqueeze(1)?.f_eq_tensor(&numbers)?.f_to_kind(Kind::Float)?)
    }

    fn begin_steps(
        &self,
        _state: &mut (),
        step: &RecordedStep<'_>,
    ) -> std::result::Result<(), String> {
        assert_eq!(step.position(), &Tensor::from_slice(&[3i64]).to_device(GPU));
        if self.refuses { Err("not today".to_owned()) } else { Ok(()) }
    }
}

#[test]
fn a_step_is_computed_by_the_host_until_it_is_recorded() {
    if fake::install(1).is_err() {
        return;
    }
    let options = GenerationOptions { max_new_tokens: 9, ..Default::default() };
    let model = |refuses| Counter { forwards: Cell::new(0), refuses };
    let (plain, captured, refusing) = (model(false), model(false), model(true));
    let expected = options.generate(&plain, &ids(), None).unwrap();
    assert_eq!(recorded(&options, &captured, None), (expected.shallow_clone(), Ok(())));
    let reason = Err("not today".to_owned());
    assert_eq!(recorded(&options, &refusing, None), (expected, reason));
    // The prompt, a step without a recording, and the recorded one.
    let forwards = [plain, captured, refusing].map(|model| model.forwards.get());
    assert_eq!(forwards, [9, 3, 9]);
}

#[test]
fn what_cannot_be_recorded_runs_as_it_is_and_tells_the_reason() {
    if fake::install(1).is_err() {
        return;
    }
    let options = GenerationOptions { max_new_tokens: 4, ..Default::default() };
    let model = llama();
    let expected = options.generate(&model, &ids(), None).unwrap();
    let of_module = recorded(&options, model.module(), None);
    assert_eq!(of_module.0, expected);
    assert!(of_module.1.unwrap_err().contains("not its module"));
    let folder = tempfile::tempdir().unwrap();
    LlamaForCausalLm::save_pretrained(&model, folder.path()).unwrap();
    for (places, reason) in [
        (vec![("", "cuda:0"), ("model.layers.1", "cpu")], "loads some of the weights for each use"),
        (vec![("", "cuda:0")], ""),
    ] {
        let map = DeviceMap::by_hand(places);
        let placed =
            LlamaForCausalLm::from_pretrained_on(folder.path(), &map, &Weights::default()).unwrap();
        let (found, records) = recorded(&options, &placed, None);
        assert_eq!(found, expected);
        assert_eq!(records.is_ok(), reason.is_empty(), "{records:?}");
        assert!(records.err().unwrap_or_default().contains(reason));
    }
    let captured = GenerationOptions { capture: true, ..options.clone() };
    let mut stream = captured.stream(&model, &ids(), None).unwrap().synchronized(Ok);
    assert!(stream.all(|tokens| tokens.is_ok()));
    assert_eq!(stream.records(), Err("ranks agree on each step"));
    assert_eq!(stream.into_ids(), expected);
    let stream = options.stream(&model, &ids(), None).unwrap();
    assert!(stream.records().unwrap_err().contains("capture"));
    // Ranks that agree only behind the first steps.
    let mut stream = captured.stream(&model, &ids(), None).unwrap();
    let begun = stream.by_ref().take(3).all(|tokens| tokens.is_ok());
    let agreed = Cell::new(0);
    let mut stream = stream.synchronized(|needed| {
        agreed.set(agreed.get() + usize::from(needed));
        Ok(needed)
    });
    assert!(begun && stream.all(|tokens| tokens.is_ok()));
    assert_eq!((stream.records(), agreed.get()), (Ok(()), 1));
    assert_eq!(stream.into_ids(), expected);
}
