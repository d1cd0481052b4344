//! A plan of a very large model takes neither time nor memory for each rank.

use std::alloc::System;
use std::time::{Duration, Instant};

use brigade_checkpoint::Dtype;
use brigade_sharding::{MixedPrecision, Parameter, Sharding, ShardingPlan, Workload};
use peakmem_alloc::{INSTRUMENTED_SYSTEM, PeakMemAlloc, PeakMemAllocTrait};

#[global_allocator]
static ALLOCATOR: &PeakMemAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Llama 2 70B: 80 blocks, 8192 wide, 8 heads of keys and values.
fn llama_70b() -> Vec<Parameter> {
    let block = |number: usize| {
        let shapes: [(&str, &[u64]); 9] = [
            ("self_attn.q_proj", &[8192, 8192]),
            ("self_attn.k_proj", &[1024, 8192]),
            ("self_attn.v_proj", &[1024, 8192]),
            ("self_attn.o_proj", &[8192, 8192]),
            ("mlp.gate_proj", &[28_672, 8192]),
            ("mlp.up_proj", &[28_672, 8192]),
            ("mlp.down_proj", &[8192, 28_672]),
            ("input_layernorm", &[8192]),
            ("post_attention_layernorm", &[8192]),
        ];
        let unit = format!("model.layers.{number}");
        shapes.map(|(name, shape)| {
            Parameter::new(format!("{unit}.{name}.weight"), shape, Dtype::F32).in_unit(&unit)
        })
    };
    let whole = |name: &str, shape: &[u64]| Parameter::new(name, shape, Dtype::F32);
    let mut parameters = vec![whole("model.embed_tokens.weight", &[32_000, 8192])];
    parameters.extend((0..80).flat_map(block));
    parameters.push(whole("model.norm.weight", &[8192]));
    parameters.push(whole("lm_head.weight", &[32_000, 8192]));
    parameters
}

/// The whole of it in less than 2 s and 200 MB.
#[test]
fn seventy_billion_parameters_for_1024_ranks() {
    let started = Instant::now();
    ALLOCATOR.reset_peak_memory();
    let parameters = llama_70b();
    let sharding = Sharding::zero3().mixed(MixedPrecision::bf16());
    let plan = ShardingPlan::new(&parameters, &sharding, &sharding.mesh(1024).unwrap()).unwrap();
    assert_eq!(plan.units().len(), 81);
    let elements: u64 = plan.units().iter().map(|unit| unit.elements()).sum();
    assert_eq!(elements, 68_976_648_192);
    let memory = plan.memory(Workload { states: 2, ..Workload::default() });
    // The vocabulary's 32,000 rows do not divide: 32 for each rank, where 31.25 would do.
    let vocabulary = 2 * 8192;
    let shard = (elements - 32_000 * vocabulary) / 1024 + 32 * vocabulary;
    assert_eq!(memory.parameters, 4 * shard);
    assert!(plan.volume(8).bytes() > 0);
    assert_eq!(plan.difference(&plan.description()), None);
    for rank in 0..1024 {
        let rows: u64 = plan.parameters().map(|it| plan.region(it, rank).unwrap().shape[0]).sum();
        assert!(rows > 0);
    }
    let peak = ALLOCATOR.get_peak_memory();
    assert!(peak < 200_000_000, "{peak} bytes");
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
}
