//! Losses, embeddings and candidates of a vocabulary that is divided over ranks, against those of a whole one.

use brigade_test_device::{numeric_device, on_device};
use brigade_testkit::{World, assert_close, dist_test};
use brigade_torch::regions::{copy_to_region, gather_from_sequence_region, scatter_to_region};
use brigade_torch::{
    Autocast, CrossEntropyLoss, CrossEntropyOptions, Error, ErrorKind, Fault, ProcessGroup,
    ReduceOp, TPU, VocabularyPart, backward, cross_entropy, gradient, linear_cross_entropy,
    linear_vocabulary_parallel_cross_entropy, region_argmax, region_top_k,
    vocabulary_parallel_cross_entropy, vocabulary_parallel_embedding,
};
use tch::{Device, Kind, Reduction, Tensor};

use crate::distance::apart;
use crate::rendezvous;

const IGNORED: i64 = -100;
const EXACT: f64 = 1e-13;

/// Loss, and gradients of hidden, weight and bias.
type Results = [Tensor; 4];

/// A whole head and its inputs, equal on all ranks.
struct Head {
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
}

fn leaf(values: &Tensor) -> Tensor {
    values.detach().copy().set_requires_grad(true)
}

fn grad(leaf: &Tensor) -> Tensor {
    gradient(leaf).unwrap().unwrap()
}

fn random(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, (Kind::Double, numeric_device()))
}

/// The rows of a rank. Those beyond the vocabulary have numbers that would be noticed.
fn own_rows(whole: &Tensor, part: VocabularyPart) -> Tensor {
    let tokens = part.tokens();
    let rows = whole.narrow(0, tokens.start, tokens.end - tokens.start);
    let mut rest = whole.size();
    rest[0] = part.size - rows.size()[0];
    Tensor::cat(&[rows, Tensor::full(rest, 50.0, (whole.kind(), whole.device()))], 0)
}

/// Checks that this rank's rows of `found` are those of the whole, and that padding has zeros.
#[track_caller]
fn same_rows(found: &Tensor, whole: &Tensor, part: VocabularyPart, allowed: f64) {
    let tokens = part.tokens();
    let count = tokens.end - tokens.start;
    assert_eq!(found.size()[0], part.size);
    let padding = found.narrow(0, count, part.size - count);
    assert!(padding.equal(&padding.zeros_like()), "{part:?}: {padding}");
    close(&found.narrow(0, 0, count), &whole.narrow(0, tokens.start, count), allowed);
}

#[track_caller]
fn close(found: &Tensor, expected: &Tensor, allowed: f64) {
    assert_eq!(found.size(), expected.size());
    if found.numel() > 0 && !found.equal(expected) {
        let apart = apart(found, expected);
        assert!(apart <= allowed, "{apart}");
    }
}

/// Checks that all ranks have the same bits.
#[track_caller]
fn same_everywhere(group: &ProcessGroup, value: &Tensor) {
    let bits = value.detach().reshape([-1]).view_dtype(Kind::Uint8);
    let all = group.all_gather(&bits).unwrap();
    assert!(all.iter().all(|other| other.equal(&all[0])), "{all:?}");
}

impl Head {
    fn new(rows: i64, width: i64, vocabulary: i64, every_ignored: Option<i64>) -> Self {
        tch::manual_seed(5);
        let targets = Tensor::randint(vocabulary, [rows], (Kind::Int64, numeric_device()));
        let targets = match every_ignored {
            Some(every) => {
                let place = Tensor::arange(rows, (Kind::Int64, numeric_device()));
                targets.masked_fill(&place.remainder(every).eq(1), IGNORED)
            }
            None => targets,
        };
        Self {
            hidden: random(&[rows, width]),
            weight: random(&[vocabulary, width]) * 0.3,
            bias: random(&[vocabulary]),
            targets,
        }
    }

    fn in_kind(&self, kind: Kind) -> Self {
        Self {
            hidden: self.hidden.to_kind(kind),
            weight: self.weight.to_kind(kind),
            bias: self.bias.to_kind(kind),
            targets: self.targets.shallow_clone(),
        }
    }

    fn vocabulary(&self) -> i64 {
        self.weight.size()[0]
    }

    /// Uneven parts, and parts with padding.
    fn parts(&self, group: &ProcessGroup) -> [VocabularyPart; 2] {
        let (rank, size) = (group.rank(), group.size());
        [
            VocabularyPart::even(self.vocabulary(), rank, size).unwrap(),
            VocabularyPart::padded(self.vocabulary(), 8, rank, size).unwrap(),
        ]
    }

    fn whole(&self, options: &CrossEntropyOptions, upstream: f64) -> Results {
        let [hidden, weight, bias] = [&self.hidden, &self.weight, &self.bias].map(leaf);
        let found = linear_cross_entropy(&hidden, &weight, Some(&bias), &self.targets, options);
        let loss = found.unwrap().loss;
        backward(&(&loss * upstream)).unwrap();
        [loss.detach(), grad(&hidden), grad(&weight), grad(&bias)]
    }

    /// The same with this rank's rows; `edge` leads `hidden` to them.
    fn divided(
        &self,
        group: &ProcessGroup,
        part: VocabularyPart,
        options: &CrossEntropyOptions,
        upstream: f64,
        edge: impl Fn(&Tensor) -> Tensor,
    ) -> Results {
        let hidden = leaf(&self.hidden);
        let [weight, bias] = [&self.weight, &self.bias].map(|whole| leaf(&own_rows(whole, part)));
        let CrossEntropyLoss { loss, count } = linear_vocabulary_parallel_cross_entropy(
            group,
            &edge(&hidden),
            &weight,
            Some(&bias),
            &self.targets,
            part,
            options,
        )
        .unwrap();
        let counted = self.targets.ne(IGNORED).sum(Kind::Int64);
        assert_eq!(count.int64_value(&[]), counted.int64_value(&[]));
        same_everywhere(group, &loss);
        backward(&(&loss * upstream)).unwrap();
        [loss.detach(), grad(&hidden), grad(&weight), grad(&bias)]
    }

    fn copied(
        &self,
        group: &ProcessGroup,
        part: VocabularyPart,
        options: &CrossEntropyOptions,
        upstream: f64,
    ) -> Results {
        self.divided(group, part, options, upstream, |x| copy_to_region(group, x).unwrap())
    }
}

#[track_caller]
fn same_results(found: &Results, whole: &Results, part: VocabularyPart, allowed: f64) {
    for (found, whole) in found.iter().zip(whole).take(2) {
        assert_eq!(found.kind(), whole.kind());
        close(found, whole, allowed);
    }
    for (found, whole) in found.iter().zip(whole).skip(2) {
        assert_eq!(found.kind(), whole.kind());
        same_rows(found, whole, part, allowed);
    }
}

fn all_options() -> impl Iterator<Item = CrossEntropyOptions> {
    let reductions = [Reduction::Mean, Reduction::Sum];
    reductions.into_iter().flat_map(|reduction| {
        [(0.0, 0.0), (0.1, 0.0), (1.0, 0.0), (0.0, 0.01), (0.2, 0.5)].map(
            |(label_smoothing, z_loss)| CrossEntropyOptions {
                reduction,
                label_smoothing,
                z_loss,
                ..Default::default()
            },
        )
    })
}

fn divided_is_whole(world: &World) {
    let group = rendezvous::group(world);
    // 23 tokens in parts of 8: the last of four ranks has padding alone. 2503: lanes and parts that are not full.
    for head in [Head::new(9, 5, 23, Some(3)), Head::new(7, 4, 2503, None)] {
        for (part, options) in
            head.parts(&group).into_iter().flat_map(|part| all_options().map(move |o| (part, o)))
        {
            for upstream in [1.0, -2.5] {
                let whole = head.whole(&options, upstream);
                let found = head.copied(&group, part, &options, upstream);
                same_results(&found, &whole, part, EXACT);
            }
            logits_are_not_needed_whole(&group, &head, part, &options);
        }
    }
}

fn logits_are_not_needed_whole(
    group: &ProcessGroup,
    head: &Head,
    part: VocabularyPart,
    options: &CrossEntropyOptions,
) {
    let logits = head.hidden.linear(&head.weight, Some(&head.bias));
    let whole = leaf(&logits);
    let expected = cross_entropy(&whole, &head.targets, options).unwrap();
    backward(&(&expected.loss * 3.0)).unwrap();

    // As [1, rows, part].
    let own = leaf(&own_rows(&logits.transpose(0, 1), part).transpose(0, 1).unsqueeze(0));
    let before = own.detach().copy();
    let targets = head.targets.unsqueeze(0);
    let found = vocabulary_parallel_cross_entropy(group, &own, &targets, part, options).unwrap();
    same_everywhere(group, &found.loss);
    assert_eq!(found.count, expected.count);
    close(&found.loss, &expected.loss, EXACT);
    backward(&(&found.loss * 3.0)).unwrap();
    let by_rows = |gradient: Tensor| gradient.squeeze_dim(0).transpose(0, 1);
    same_rows(&by_rows(grad(&own)), &grad(&whole).transpose(0, 1), part, EXACT);
    assert!(own.detach().equal(&before), "logits keep their values");
}

dist_test!(world = 1, dist_one_rank_has_the_whole_loss, |world| divided_is_whole(&world));
dist_test!(world = 2, dist_two_ranks_divide_a_vocabulary, |world| divided_is_whole(&world));
dist_test!(world = 3, dist_three_ranks_divide_a_vocabulary, |world| divided_is_whole(&world));
dist_test!(world = 4, dist_four_ranks_divide_a_vocabulary, |world| divided_is_whole(&world));

fn goes_through_chunks(world: &World) {
    let group = rendezvous::group(world);
    // A chunk has 479 rows at most of a quarter of the vocabulary, and 128 of all of it.
    let head = Head::new(600, 2, 140_000, Some(29));
    let options = CrossEntropyOptions { label_smoothing: 0.1, z_loss: 0.01, ..Default::default() };
    let part = VocabularyPart::even(140_000, group.rank(), group.size()).unwrap();
    let found = head.copied(&group, part, &options, 1.0);
    same_results(&found, &head.whole(&options, 1.0), part, EXACT);
}

dist_test!(world = 2, seconds = 120, dist_two_ranks_go_through_chunks, |world| {
    goes_through_chunks(&world);
});
dist_test!(world = 4, seconds = 120, dist_four_ranks_go_through_chunks, |world| {
    goes_through_chunks(&world);
});

dist_test!(world = 1, dist_one_rank_has_the_bits_of_the_whole_functions, |world| {
    let group = rendezvous::group(&world);
    let part = VocabularyPart::even(3001, 0, 1).unwrap();
    for kind in [Kind::Float, Kind::BFloat16] {
        let head = Head::new(40, 16, 3001, Some(7)).in_kind(kind);
        for options in all_options() {
            let whole = head.whole(&options, 1.0);
            let found = head.copied(&group, part, &options, 1.0);
            assert!(found.iter().zip(&whole).all(|(one, other)| one.equal(other)), "{options:?}");
        }
    }
});

dist_test!(world = 3, dist_a_sequence_is_gathered_before_the_head, |world| {
    let group = rendezvous::group(&world);
    let head = Head::new(9, 5, 23, Some(3));
    let options = CrossEntropyOptions::default();
    let part = VocabularyPart::even(23, group.rank(), group.size()).unwrap();
    let found = head.divided(&group, part, &options, 1.0, |hidden| {
        let own = scatter_to_region(&group, hidden, 0).unwrap();
        gather_from_sequence_region(&group, &own, 0).unwrap()
    });
    same_results(&found, &head.whole(&options, 1.0), part, EXACT);
});

fn fewer_bits(world: &World) {
    let group = rendezvous::group(world);
    let double = Head::new(40, 64, 301, Some(7));
    for (kind, digit) in [(Kind::Float, 1e-6), (Kind::BFloat16, 2_f64.powi(-8))] {
        let rounded = double.in_kind(kind);
        let reference = rounded.in_kind(Kind::Double);
        for (part, options) in
            double.parts(&group).into_iter().flat_map(|part| all_options().map(move |o| (part, o)))
        {
            let exact = reference.whole(&options, 1.0);
            let whole = rounded.whole(&options, 1.0);
            let found = rounded.copied(&group, part, &options, 1.0);
            // Each rank rounds its part of the gradient of `hidden`, which may be larger than the sum.
            let own = reference.divided(&group, part, &options, 1.0, Tensor::shallow_clone);
            let mut parts = own[1].abs().max();
            group.all_reduce(&mut parts, ReduceOp::Sum).unwrap();
            let conditioning = (parts / exact[1].abs().max()).double_value(&[]).max(1.0);
            for (index, (found, exact)) in found.iter().zip(&exact).enumerate() {
                assert_eq!(found.kind(), if index == 0 { Kind::Float } else { kind });
                let allowed = (2.0 * digit * if index == 1 { conditioning } else { 1.0 })
                    .max(2.0 * apart(&whole[index], exact));
                if index < 2 {
                    close(found, exact, allowed);
                } else {
                    // A part has smaller numbers than the whole, which it is measured by.
                    let tokens = part.tokens();
                    let count = tokens.end - tokens.start;
                    let of_part = exact.narrow(0, tokens.start, count);
                    if count > 0 {
                        let larger = (exact.abs().max() / of_part.abs().max()).double_value(&[]);
                        same_rows(found, exact, part, allowed * larger);
                    }
                }
            }
        }
    }
}

dist_test!(world = 2, dist_two_ranks_with_fewer_bits, |world| fewer_bits(&world));
dist_test!(world = 3, dist_three_ranks_with_fewer_bits, |world| fewer_bits(&world));

dist_test!(world = 2, dist_autocast_changes_no_kind_of_a_gradient, |world| {
    let group = rendezvous::group(&world);
    let single = Head::new(40, 64, 301, Some(7)).in_kind(Kind::Float);
    let options = CrossEntropyOptions { z_loss: 0.01, ..Default::default() };
    let part = VocabularyPart::padded(301, 8, group.rank(), 2).unwrap();
    let exact = single.in_kind(Kind::Double).whole(&options, 1.0);
    let [whole, found] = {
        let _scope = Autocast::enter(numeric_device(), Kind::BFloat16, true).unwrap();
        [single.whole(&options, 1.0), single.copied(&group, part, &options, 1.0)]
    };
    for (found, whole) in found.iter().zip(&whole) {
        assert_eq!((found.kind(), whole.kind()), (Kind::Float, Kind::Float));
    }
    // Products of 16 bits, rounded once more by each rank.
    let allowed = |index: usize| 3.0 * apart(&whole[index], &exact[index]).max(2_f64.powi(-8));
    close(&found[0], &exact[0], allowed(0));
    close(&found[1], &exact[1], allowed(1));
    same_rows(&found[2], &exact[2].to_kind(Kind::Float), part, allowed(2));
    same_rows(&found[3], &exact[3].to_kind(Kind::Float), part, allowed(3));
});

dist_test!(world = 2, dist_without_a_target_that_counts_gradients_are_zero, |world| {
    let group = rendezvous::group(&world);
    let targets = Tensor::full([9], IGNORED, (Kind::Int64, numeric_device()));
    let head = Head { targets, ..Head::new(9, 5, 23, None) };
    for part in head.parts(&group) {
        for reduction in [Reduction::Mean, Reduction::Sum] {
            let options = CrossEntropyOptions { reduction, ..Default::default() };
            let found = head.copied(&group, part, &options, 1.0);
            let loss = found[0].double_value(&[]);
            assert!(if reduction == Reduction::Mean { loss.is_nan() } else { loss == 0.0 });
            assert!(found[1..].iter().all(|gradient| gradient.equal(&gradient.zeros_like())));
        }
    }
});

dist_test!(world = 2, dist_extreme_logits_are_as_whole_ones, |world| {
    let group = rendezvous::group(&world);
    let part = VocabularyPart::even(4, group.rank(), 2).unwrap();
    let (infinite, nan) = (f64::INFINITY, f64::NAN);
    let rows = [
        [0.0, 1.0, -infinite, -infinite],
        [-infinite, -infinite, -infinite, 3.0],
        [1e30, 0.0, 1e30, -1e30],
        [-800.0, -801.0, 900.0, 0.0],
        [-infinite, -infinite, -infinite, -infinite],
        [0.0, 1.0, nan, 2.0],
        [infinite, 0.0, 1.0, 2.0],
    ];
    for (row, target) in rows.iter().flat_map(|row| (0..4_i64).map(move |target| (row, target))) {
        for z_loss in [0.0, 0.1] {
            let options = CrossEntropyOptions { z_loss, ..Default::default() };
            let targets = on_device(&Tensor::from_slice(&[target]));
            let whole = leaf(&on_device(&Tensor::from_slice(row).view([1, 4])));
            let expected = cross_entropy(&whole, &targets, &options).unwrap().loss;
            backward(&expected).unwrap();
            let own = leaf(&whole.narrow(1, part.start, part.size));
            let found =
                vocabulary_parallel_cross_entropy(&group, &own, &targets, part, &options).unwrap();
            backward(&found.loss).unwrap();
            let place = format!("{row:?}, {target}, {z_loss}");
            // The logarithm of a sum ends where the largest logit does.
            let sizes = row.iter().filter(|logit| logit.is_finite()).map(|logit| logit.abs());
            let digit = 2.0 * f64::EPSILON * sizes.fold(0.0, f64::max);
            assert!(found.loss.allclose(&expected, EXACT, digit, true), "{place}: {}", found.loss);
            let expected = grad(&whole).narrow(1, part.start, part.size);
            assert!(grad(&own).allclose(&expected, EXACT, EXACT, true), "{place}: {}", grad(&own));
        }
    }
});

dist_test!(world = 2, dist_slopes_of_the_z_loss_are_finite_differences, |world| {
    let group = rendezvous::group(&world);
    let head = Head::new(4, 3, 7, Some(4));
    let options = CrossEntropyOptions {
        z_loss: 0.3,
        label_smoothing: 0.1,
        reduction: Reduction::Sum,
        ..Default::default()
    };
    let part = VocabularyPart::padded(7, 5, group.rank(), 2).unwrap();
    let logits =
        own_rows(&head.hidden.linear(&head.weight, Some(&head.bias)).transpose(0, 1), part)
            .transpose(0, 1)
            .contiguous();
    let loss = |logits: &Tensor| {
        vocabulary_parallel_cross_entropy(&group, logits, &head.targets, part, &options)
            .unwrap()
            .loss
    };
    let x = leaf(&logits);
    backward(&loss(&x)).unwrap();
    let found = Vec::<f64>::try_from(grad(&x).reshape([-1])).unwrap();
    // Each rank's elements in turn.
    for mover in 0..2 {
        for (place, slope) in found.iter().enumerate() {
            let moved = |step: f64| {
                let shifted = logits.copy();
                if group.rank() == mover {
                    let _ = shifted.view([-1]).get(place as i64).g_add_scalar_(step);
                }
                tch::no_grad(|| loss(&shifted)).double_value(&[])
            };
            let difference = (moved(1e-6) - moved(-1e-6)) / 2e-6;
            if group.rank() == mover {
                assert!((slope - difference).abs() < 1e-7, "{place}: {slope} and {difference}");
            }
        }
    }
});

#[track_caller]
fn refused<T: std::fmt::Debug>(outcome: Result<T, Error>, kind: ErrorKind, text: &str) {
    let error = outcome.unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(text), "{error}");
}

dist_test!(world = 2, dist_what_does_not_fit_is_named_on_every_rank, |world| {
    let group = rendezvous::group(&world);
    let head = Head::new(4, 5, 23, None);
    let part = VocabularyPart::padded(23, 8, group.rank(), 2).unwrap();
    let weight = own_rows(&head.weight, part);
    let loss = |targets: &Tensor, part, options: &CrossEntropyOptions| {
        let (hidden, bias) = (&head.hidden, None);
        linear_vocabulary_parallel_cross_entropy(
            &group, hidden, &weight, bias, targets, part, options,
        )
    };
    let options = CrossEntropyOptions::default();
    if numeric_device() == Device::Cpu {
        // 23 is a row of padding.
        for wrong in [23_i64, 32, -1] {
            let targets = Tensor::from_slice(&[0, wrong, 1, 2]);
            let error = loss(&targets, part, &options).unwrap_err();
            assert_eq!(error.fault(), Some(Fault::Invalid));
            let text = format!("target {wrong} is none of the classes 0 to 22");
            assert!(error.to_string().contains(&text), "{error}");
            let ids = Tensor::from_slice(&[0, wrong]);
            let rows = vocabulary_parallel_embedding(&group, &ids, &weight, part, None);
            refused(rows, ErrorKind::Tensor, "index out of range");
        }
    }
    let targets = &head.targets;
    for z_loss in [-0.1, f64::NAN, f64::INFINITY] {
        let options = CrossEntropyOptions { z_loss, ..options };
        refused(loss(targets, part, &options), ErrorKind::Tensor, "z_loss is");
    }
    let none = CrossEntropyOptions { reduction: Reduction::None, ..options };
    refused(loss(targets, part, &none), ErrorKind::InvalidArgument, "expected the reduction");
    let empty = VocabularyPart { size: 0, ..part };
    let text = format!("0 rows from {} on, of 23 tokens", part.start);
    refused(loss(targets, empty, &options), ErrorKind::InvalidArgument, &text);
    let other = VocabularyPart { size: 9, ..part };
    refused(loss(targets, other, &options), ErrorKind::Tensor, "weight has 16 classes");
    let ids = on_device(&Tensor::from_slice(&[0_i64, 22]));
    for (wrong, text) in [(empty, text.as_str()), (other, "has 16 rows of the vocabulary")] {
        let rows = vocabulary_parallel_embedding(&group, &ids, &weight, wrong, None);
        refused(rows, ErrorKind::InvalidArgument, text);
        refused(
            region_argmax(&group, &weight.transpose(0, 1), wrong),
            ErrorKind::InvalidArgument,
            text,
        );
    }
    for k in [0, 24] {
        let found = region_top_k(&group, &weight.transpose(0, 1), part, k);
        refused(found, ErrorKind::InvalidArgument, &format!("k is {k}, and the vocabulary has 23"));
    }
    let scalar = Tensor::from(1.0);
    refused(region_argmax(&group, &scalar, part), ErrorKind::InvalidArgument, "no rows");
    // Nothing was sent: the next messages still match.
    same_everywhere(&group, &loss(targets, part, &options).unwrap().loss);

    // Gradients are released, like those of the whole function.
    let weight = leaf(&weight);
    let again = || {
        let hidden = &head.hidden;
        linear_vocabulary_parallel_cross_entropy(
            &group, hidden, &weight, None, targets, part, &options,
        )
        .unwrap()
        .loss
    };
    let once = again();
    Tensor::f_run_backward(&[&once], &[&weight], true, false).unwrap();
    let twice = Tensor::f_run_backward(&[&once], &[&weight], true, false).unwrap_err().to_string();
    assert!(twice.contains("already differentiated"), "{twice}");
    let slopes = Tensor::f_run_backward(&[again()], &[&weight], true, true).unwrap_err();
    assert!(slopes.to_string().contains("no gradients of gradients"), "{slopes}");
});

#[test]
fn parts_cover_the_vocabulary_once() {
    for (vocabulary, ranks) in [(50257, 2), (50257, 3), (50257, 4), (7, 7), (9, 4), (1, 1)] {
        for multiple in [None, Some(1), Some(3), Some(128)] {
            let mut next = 0;
            for rank in 0..ranks {
                let part = match multiple {
                    None => VocabularyPart::even(vocabulary, rank, ranks).unwrap(),
                    Some(multiple) => {
                        VocabularyPart::padded(vocabulary, multiple, rank, ranks).unwrap()
                    }
                };
                let fair = vocabulary / ranks as i64;
                match multiple {
                    None => assert!(part.size == fair || part.size == fair + 1),
                    Some(multiple) => assert_eq!(part.size % multiple, 0),
                }
                assert!(part.start >= next);
                assert_eq!(part.tokens().start, next);
                next = part.tokens().end;
            }
            assert_eq!(next, vocabulary);
        }
    }
    let kind = ErrorKind::InvalidArgument;
    refused(VocabularyPart::even(3, 0, 4), kind, "3 tokens has no part for rank 0 of 4");
    refused(VocabularyPart::even(30, 4, 4), kind, "no part for rank 4 of 4");
    refused(VocabularyPart::padded(30, 0, 1, 4), kind, "multiples of 0");
    refused(VocabularyPart::padded(30, i64::MAX, 1, 4), kind, "cannot be padded");
}

fn embeds(world: &World) {
    let group = rendezvous::group(world);
    let head = Head::new(1, 6, 23, None);
    tch::manual_seed(7);
    let ids = Tensor::randint(23, [4, 11], (Kind::Int64, numeric_device()));
    let upstream = random(&[4, 11, 6]);
    for kind in [Kind::Double, Kind::Float, Kind::BFloat16] {
        // Zeros of both signs.
        let table = head.weight.masked_fill(&head.weight.abs().lt(0.1), -0.0).to_kind(kind);
        let table = table.masked_fill(&head.weight.abs().lt(0.05), 0.0);
        let upstream = upstream.to_kind(kind);
        for (part, padding) in
            head.parts(&group).into_iter().flat_map(|part| [(part, None), (part, Some(17))])
        {
            let whole = leaf(&table);
            let expected = Tensor::embedding(&whole, &ids, padding.unwrap_or(-1), false, false);
            backward(&(&expected * &upstream).sum(Kind::Double)).unwrap();
            for ids in [ids.shallow_clone(), ids.to_kind(Kind::Int)] {
                let own = leaf(&own_rows(&table, part));
                let found =
                    vocabulary_parallel_embedding(&group, &ids, &own, part, padding).unwrap();
                assert_eq!(found.kind(), kind);
                assert!(found.equal(&expected));
                // TorchTPU 0.2.0 keeps scalars by value: to it, -0 is the 0 that the table was filled with before.
                if numeric_device() != TPU {
                    assert!(found.signbit().equal(&expected.signbit()), "signs of zeros");
                }
                backward(&(&found * &upstream).sum(Kind::Double)).unwrap();
                same_rows(&grad(&own), &grad(&whole), part, 0.0);
            }
        }
    }
}

dist_test!(world = 1, dist_one_rank_embeds, |world| embeds(&world));
dist_test!(world = 2, dist_two_ranks_embed, |world| embeds(&world));
dist_test!(world = 3, dist_three_ranks_embed, |world| embeds(&world));
dist_test!(world = 4, dist_four_ranks_embed, |world| embeds(&world));

fn finds_candidates(world: &World) {
    let group = rendezvous::group(world);
    tch::manual_seed(9);
    // Many equal ones; a row of minus infinity but for two tokens, one of it alone, and one with NaN.
    let mut logits = (random(&[2, 5, 23]) * 2.0).round();
    let _ = logits.get(0).get(1).narrow(0, 2, 20).fill_(f64::NEG_INFINITY);
    let _ = logits.get(0).get(2).fill_(f64::NEG_INFINITY);
    let head = Head::new(1, 1, 23, None);
    for kind in [Kind::Double, Kind::Float, Kind::BFloat16] {
        logits = logits.to_kind(kind);
        for part in head.parts(&group) {
            let own = |whole: &Tensor| {
                own_rows(&whole.movedim_int(-1, 0), part).movedim_int(0, -1).set_requires_grad(true)
            };
            let with_nan = logits.copy();
            // TorchTPU's `argmax` returns the place of 1 for both [NaN, 1] and [1, NaN].
            if numeric_device() != TPU {
                let _ = with_nan.get(1).get(3).narrow(0, 9, 1).fill_(f64::NAN);
            }
            for whole in [&logits, &with_nan] {
                let found = region_argmax(&group, &own(whole), part).unwrap();
                assert_eq!(found, whole.argmax(-1, false));
            }
            for k in [1, 4, 10, 23] {
                let (values, ids) = region_top_k(&group, &own(&logits), part, k).unwrap();
                assert!(values.equal(&logits.topk(k, -1, true, true).0), "{k}: {values}");
                assert!(logits.gather(-1, &ids, false).equal(&values));
                let sorted = ids.sort(-1, false).0;
                let steps = sorted.diff::<Tensor>(1, -1, None, None);
                assert!(steps.gt(0).all().int64_value(&[]) == 1, "an id stands once: {ids}");
                same_everywhere(&group, &ids);
                assert!(!values.requires_grad());
            }
        }
    }
    // One row without other dimensions.
    let part = head.parts(&group)[0];
    let row = own_rows(&logits.get(0).get(0), part);
    assert_eq!(region_argmax(&group, &row, part).unwrap(), logits.get(0).get(0).argmax(-1, false));
    assert_eq!(region_top_k(&group, &row, part, 3).unwrap().1.size(), [3]);
}

dist_test!(world = 1, dist_one_rank_finds_candidates, |world| finds_candidates(&world));
dist_test!(world = 2, dist_two_ranks_find_candidates, |world| finds_candidates(&world));
dist_test!(world = 4, dist_four_ranks_find_candidates, |world| finds_candidates(&world));

dist_test!(world = 2, dist_a_gradient_that_others_see_is_not_overwritten, |world| {
    let group = rendezvous::group(&world);
    // Both addends get one tensor as their gradient.
    let (a, b) = (leaf(&random(&[3])), leaf(&random(&[3])));
    let weights = |rank: f64| Tensor::from_slice(&[1.0, 2.0, 3.0]) * (rank + 1.0);
    let own = on_device(&weights(group.rank() as f64));
    backward(&((copy_to_region(&group, &a).unwrap() + &b) * &own).sum(Kind::Double)).unwrap();
    let values = |tensor: &Tensor| Vec::<f64>::try_from(tensor.to_device(Device::Cpu)).unwrap();
    assert_close(&values(&grad(&a)), &[3.0, 6.0, 9.0], 0.0, 0.0);
    assert_close(&values(&grad(&b)), &values(&own), 0.0, 0.0);
    // The caller's own gradient.
    let a = leaf(&a);
    let copied = copy_to_region(&group, &a).unwrap();
    let given = own.copy();
    let gradients =
        Tensor::f_run_backward(&[(&copied * &given).sum(Kind::Double)], &[&a], false, false);
    assert_close(&values(&gradients.unwrap()[0]), &[3.0, 6.0, 9.0], 0.0, 0.0);
    assert_close(&values(&given), &values(&own), 0.0, 0.0);
});
