//! The first rank of a pipeline sends what the formulas of `brigade_sharding` say, among up to 1,024 stages.

use brigade_models::{Labelled, LlamaForCausalLm, LlamaOptions};
use brigade_nn::Model;
use brigade_sharding::pipeline::{ActionKind, Schedule};
use brigade_sharding::{Mesh, Phase, TransformerStep};
use brigade_torch::{Backend, GroupOptions, ProcessGroup, Store};
use brigade_train::{Pipeline, PipelineOptions};
use tch::{Device, Kind, Tensor};

/// Micro-batches of two texts of six tokens with eight hidden numbers.
#[test]
fn stages_send_one_activation_of_each_micro_batch() {
    for ranks in [2, 8, 64, 1024] {
        let store = Store::hash().unwrap();
        let group = ProcessGroup::new(&store, 0, ranks, Backend::Fake, GroupOptions::default());
        let group = group.unwrap();
        let micro_batches = (2 * ranks).min(256);
        let options = PipelineOptions::new(micro_batches).schedule(Schedule::GPipe);
        let pipeline = Pipeline::new(group, options).unwrap();
        let sends = pipeline.table().actions(0).iter();
        let sends = sends.filter(|action| action.kind == ActionKind::SendActivation).count();
        assert_eq!(sends, micro_batches);

        let options = LlamaOptions {
            vocab_size: 11,
            hidden_size: 8,
            intermediate_size: 4,
            num_hidden_layers: ranks,
            num_attention_heads: 2,
            ..Default::default()
        };
        let model = Model::builder()
            .kind(Kind::Double)
            .pipeline(pipeline.parallel())
            .without_first_values()
            .build(|path| LlamaForCausalLm::new(path, &options))
            .unwrap();
        let step = TransformerStep {
            layers: ranks as u64,
            hidden: 8,
            key_width: 8,
            heads: 2,
            vocabulary: 11,
            samples: 2,
            tokens: 6,
            element_bytes: 8,
            ..Default::default()
        };
        let mesh = Mesh::builder().pipeline(ranks).build(ranks).unwrap();
        let formula = step.messages(&mesh, 0);
        let [forward] = &formula[..] else { panic!("{formula:?}") };
        assert_eq!((forward.phase, forward.messages), (Phase::Forward, 1));
        let ids = Tensor::zeros([2 * micro_batches as i64, 6], (Kind::Int64, Device::Cpu));
        // The header with the shape is sent in the first step.
        for headers in [1, 0] {
            pipeline.group().reset_traffic();
            // Simulated ranks send no losses.
            let _ = pipeline.forward_backward(&model, &ids, |micro| {
                model.forward(Labelled::new(micro, micro))?.mean()
            });
            let sent = pipeline.group().traffic()["send"];
            assert_eq!(sent.messages, micro_batches as u64 + headers, "{ranks} ranks");
            let of_headers = headers * (1 + 4 * 10) * 8;
            assert_eq!(sent.bytes, micro_batches as u64 * forward.bytes + of_headers);
        }
    }
}
