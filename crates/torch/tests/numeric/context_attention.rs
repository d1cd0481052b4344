//! Attention of a sequence of which each rank has a part is attention of one rank to the whole sequence.

use brigade_test_device::numeric_device;
use brigade_testkit::{assert_close, dist_test};
use brigade_torch::{
    AttentionOptions, ErrorKind, ProcessGroup, attention, backward, context_attention, gradient,
};
use tch::{Kind, Tensor};

use crate::rendezvous;

const BATCH: i64 = 2;
const HEADS: i64 = 4;
const WIDTH: i64 = 8;

fn wave(heads: i64, length: i64, phase: f64, kind: Kind) -> Tensor {
    let size = [BATCH, heads, length, WIDTH];
    let places = Tensor::arange(size.iter().product::<i64>(), (Kind::Double, numeric_device()));
    ((places * 0.37 + phase).sin() * 2.0).view(size).to_kind(kind)
}

/// The tokens of this rank: neighbours, or an early and a late chunk.
fn own(group: &ProcessGroup, whole: &Tensor, causal: bool) -> Tensor {
    let (rank, ranks) = (group.rank(), group.size());
    if !causal {
        return whole.chunk(ranks as i64, 2)[rank].contiguous();
    }
    let chunks = whole.chunk(2 * ranks as i64, 2);
    Tensor::cat(&[&chunks[rank], &chunks[2 * ranks - 1 - rank]], 2)
}

fn leaf(values: &Tensor) -> Tensor {
    values.detach().contiguous().copy().set_requires_grad(true)
}

fn grad(leaf: &Tensor) -> Tensor {
    gradient(leaf).unwrap().unwrap()
}

fn same(found: &Tensor, expected: &Tensor, tolerance: f64) {
    let values = |tensor: &Tensor| {
        Vec::<f64>::try_from(tensor.detach().to_kind(Kind::Double).reshape([-1])).unwrap()
    };
    assert_eq!(found.size(), expected.size());
    assert_close(&values(found), &values(expected), tolerance, tolerance);
}

fn is_that_of_the_whole(group: &ProcessGroup, kind: Kind, tolerance: f64) {
    let length = 12 * group.size() as i64;
    for (causal, ring, shared, scale) in [
        (false, false, HEADS, None),
        (false, true, HEADS, Some(0.7)),
        (true, false, 2, None),
        (true, true, 2, None),
        (true, true, 1, Some(0.2)),
        (true, false, HEADS, None),
    ] {
        let options = AttentionOptions { causal, scale, ..Default::default() };
        let whole = [(HEADS, 0.1), (shared, 0.2), (shared, 0.3)]
            .map(|(heads, phase)| leaf(&wave(heads, length, phase, kind)));
        let target = wave(HEADS, length, 0.4, kind);
        let expected = attention(&whole[0], &whole[1], &whole[2], None, &options).unwrap();
        backward(&(&expected * &target).sum(Kind::Double)).unwrap();

        let part = |tensor: &Tensor| own(group, tensor, causal);
        let [queries, keys, values] = [0, 1, 2].map(|place| leaf(&part(&whole[place].detach())));
        let output = context_attention(group, &queries, &keys, &values, ring, &options).unwrap();
        assert_eq!(output.kind(), kind);
        same(&output, &part(&expected), tolerance);
        backward(&(&output * part(&target)).sum(Kind::Double)).unwrap();
        for (own, whole) in [&queries, &keys, &values].into_iter().zip(&whole) {
            same(&grad(own), &part(&grad(whole)), tolerance);
        }
    }
}

dist_test!(world = 2, dist_two_ranks_attend_to_one_sequence, |world| {
    is_that_of_the_whole(&rendezvous::group(&world), Kind::Double, 1e-13);
});
dist_test!(world = 3, dist_three_ranks_attend_to_one_sequence, |world| {
    is_that_of_the_whole(&rendezvous::group(&world), Kind::Double, 1e-13);
});
dist_test!(world = 4, dist_four_ranks_attend_to_one_sequence, |world| {
    is_that_of_the_whole(&rendezvous::group(&world), Kind::Double, 1e-13);
});
dist_test!(world = 2, dist_attention_of_parts_in_fewer_bits, |world| {
    let group = rendezvous::group(&world);
    is_that_of_the_whole(&group, Kind::Float, 1e-4);
    // The fake device has no flash attention, which a GPU computes 16 bits with.
    if !brigade_test_device::fake::is_installed() {
        is_that_of_the_whole(&group, Kind::BFloat16, 0.06);
    }
});

dist_test!(world = 2, dist_attention_of_parts_refuses_what_does_not_fit, |world| {
    let group = rendezvous::group(&world);
    let [queries, keys, values] = [0.1, 0.2, 0.3].map(|phase| wave(HEADS, 3, phase, Kind::Float));
    let dropped = AttentionOptions { dropout: 0.1, ..Default::default() };
    let error = context_attention(&group, &queries, &keys, &values, false, &dropped).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let causal = AttentionOptions { causal: true, ..Default::default() };
    let error = context_attention(&group, &queries, &keys, &values, true, &causal).unwrap_err();
    assert!(error.to_string().contains("each rank has 3 tokens"), "{error}");
    let short = keys.narrow(2, 0, 2);
    let error = context_attention(&group, &queries, &short, &short, true, &causal).unwrap_err();
    assert!(error.to_string().contains("expected [batch, heads, own tokens, size]"), "{error}");
});
