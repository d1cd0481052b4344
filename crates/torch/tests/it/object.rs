//! Objects between ranks, also those that cannot be carried.

use std::collections::{BTreeMap, HashMap};

use brigade_testkit::dist_test;
use brigade_torch::{Error, ErrorKind, Fault, TorchError};
use serde::{Deserialize, Serialize};

use crate::rendezvous::{self, assert_fault};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Event {
    Nothing,
    Step(u64),
    Loss { value: f64, parts: Vec<Self> },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct State {
    name: String,
    event: Event,
    maybe: Option<i8>,
    numbers: BTreeMap<String, Vec<f32>>,
    by_key: HashMap<u32, (bool, char)>,
    bytes: Vec<u8>,
}

fn state(rank: usize) -> State {
    let inner = Event::Loss { value: f64::NEG_INFINITY, parts: vec![Event::Nothing] };
    State {
        name: "é".repeat(rank),
        event: Event::Loss {
            value: -0.0,
            parts: vec![inner, Event::Step(u64::MAX), Event::Nothing],
        },
        maybe: (rank == 1).then_some(-3),
        numbers: BTreeMap::from([("a b".into(), vec![1.5; rank]), (String::new(), Vec::new())]),
        by_key: HashMap::from([(7, (true, '🪣')), (u32::MAX, (false, '\0'))]),
        bytes: vec![rank as u8; 10 * rank],
    }
}

/// Cannot be written on the rank that holds it.
#[derive(Debug, Deserialize)]
struct Refuses(bool);

impl Serialize for Refuses {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0 {
            return Err(serde::ser::Error::custom("this one refuses"));
        }
        serializer.serialize_newtype_struct("Refuses", &false)
    }
}

dist_test!(world = 3, dist_objects, |world| {
    let group = rendezvous::group(&world);
    let rank = group.rank();
    let all: Vec<State> = (0..3).map(state).collect();
    assert_eq!(group.all_gather_object(&state(rank)).unwrap(), all);
    for root in 0..3 {
        let given = state(rank);
        let got = group.broadcast_object((rank == root).then_some(&given), root).unwrap();
        assert_eq!(got, all[root]);
        let gathered = group.gather_object(&given, root).unwrap();
        assert_eq!(gathered, (rank == root).then(|| all.clone()));
    }

    let numbers = group.all_gather_object(&[f64::NAN, -0.0, f64::MIN_POSITIVE]).unwrap();
    for [nan, zero, small] in numbers {
        assert!(
            nan.is_nan() && zero == 0.0 && zero.is_sign_negative() && small == f64::MIN_POSITIVE
        );
    }
    assert_eq!(group.all_gather_object(&()).unwrap(), [(); 3]);
    assert_eq!(
        group.all_gather_object(&Vec::<u8>::new()).unwrap(),
        [(); 3].map(|()| Vec::<u8>::new())
    );
    assert_eq!(group.broadcast_object((rank == 1).then_some(&String::new()), 1).unwrap(), "");

    // 5 MB, 1 byte and nothing.
    let lengths = [5_000_000, 1, 0];
    let large: Vec<u64> = (0..lengths[rank] as u64).collect();
    let got = group.all_gather_object(&large).unwrap();
    assert_eq!(got.iter().map(Vec::len).collect::<Vec<_>>(), lengths);
    assert_eq!(got[0][4_999_999], 4_999_999);
    let got = group.broadcast_object((rank == 0).then_some(&large), 0).unwrap();
    assert_eq!(got.len(), 5_000_000);
    assert_eq!(
        group.gather_object(&large, 2).unwrap().map(|all| all[0].len()),
        (rank == 2).then_some(5_000_000)
    );
});

dist_test!(world = 3, dist_an_object_that_cannot_be_written, |world| {
    let group = rendezvous::group(&world);
    let rank = group.rank();
    let refuses = Refuses(rank == 1);
    let check = |result: Result<(), Error>, operation: &str| match result {
        Err(error) if matches!(error.downcast_ref(), Some(TorchError::Object { .. })) => {
            let text = error.to_string();
            assert!(text.starts_with(operation), "{text}");
            let reason = if rank == 1 { "this one refuses" } else { "rank 1 could not" };
            assert!(text.contains(reason), "{text}");
        }
        other => panic!("rank {rank}: {other:?}"),
    };
    check(group.all_gather_object(&refuses).map(drop), "all_gather_object");
    check(group.gather_object(&refuses, 2).map(drop), "gather_object");
    check(group.broadcast_object((rank == 1).then_some(&refuses), 1).map(drop), "broadcast_object");

    // A root without an object: an error everywhere, too.
    let nothing = group.broadcast_object::<State>(None, 0).unwrap_err();
    if rank == 0 {
        assert_eq!(nothing.kind(), ErrorKind::InvalidArgument, "{nothing}");
    } else {
        assert!(matches!(nothing.downcast_ref(), Some(TorchError::Object { .. })), "{nothing}");
    }
    assert_fault(group.broadcast_object(Some(&1), 3), Fault::Invalid);
    assert_fault(group.gather_object(&1, 3), Fault::Invalid);
    // Bytes of another type are an error of the reader.
    if rank == 0 {
        let text = "text".to_owned();
        assert_eq!(group.broadcast_object(Some(&text), 0).unwrap(), text);
    } else {
        assert!(matches!(
            group.broadcast_object::<u8>(None, 0).unwrap_err().downcast_ref(),
            Some(TorchError::Object { .. })
        ));
    }
    group.barrier().unwrap();
});
