//! Tests of every path through the questionnaire.

use super::*;
use crate::settings::TABLE;

/// Answers in order; every question must be the next one.
fn hold(answers: &[(Question, &str)]) -> Questionnaire {
    let mut questionnaire = Questionnaire::new(Machine { gpus: 4, device_word: "GPU", cores: 8 });
    for (question, text) in answers {
        assert_eq!(questionnaire.next(), Some(*question), "before {text}");
        questionnaire.answer(*question, text).unwrap();
    }
    assert_eq!(questionnaire.next(), None);
    questionnaire
}

fn said(settings: &Settings) -> String {
    let of = |name: &str| Some(format!("{name}={}", settings.text(name)?));
    TABLE.iter().filter_map(|it| of(it.name)).collect::<Vec<_>>().join(" ")
}

#[test]
fn every_way_through() {
    use Question as Q;
    let table: [(&[(Question, &str)], &str); 5] = [
        (
            &[
                (Q::Where, "here"),
                (Q::Cpu, "no"),
                (Q::Processes, "4"),
                (Q::Devices, "all"),
                (Q::Precision, "bf16"),
                (Q::Compile, "no"),
            ],
            "nproc=4 cpu=false mixed-precision=bf16",
        ),
        (
            &[
                (Q::Where, "here"),
                (Q::Cpu, "yes"),
                (Q::Processes, "auto"),
                (Q::Precision, "no"),
                (Q::Compile, "no"),
            ],
            "nproc=auto cpu=true mixed-precision=no",
        ),
        (
            &[
                (Q::Where, "hosts"),
                (Q::Hosts, "a:4,b:4"),
                (Q::Cpu, "no"),
                (Q::Devices, "0,2"),
                (Q::Precision, "no"),
                (Q::Compile, "no"),
            ],
            "cpu=false devices=0,2 hosts=a:4,b:4 mixed-precision=no",
        ),
        (
            &[
                (Q::Where, "each"),
                (Q::Machines, "2"),
                (Q::Rank, "1"),
                (Q::Address, "10.0.0.1"),
                (Q::Port, "29500"),
                (Q::Cpu, "no"),
                (Q::Processes, "gpu"),
                (Q::Devices, "all"),
                (Q::Precision, "no"),
                (Q::Compile, "yes"),
                (Q::CompileBackend, "inductor"),
                (Q::CompileMode, "default"),
                (Q::CompileGraph, "no"),
                (Q::CompileShapes, "no"),
                (Q::CompileBlocks, "yes"),
            ],
            "nproc=gpu cpu=false nnodes=2 node-rank=1 master-addr=10.0.0.1 master-port=29500 mixed-precision=no \
             dynamo-backend=inductor dynamo-mode=default dynamo-use-fullgraph=false dynamo-use-dynamic=false \
             dynamo-use-regional-compilation=true",
        ),
        (
            &[
                (Q::Where, "each"),
                (Q::Machines, "1:4"),
                (Q::Backend, "builtin"),
                (Q::Endpoint, "node1:29400"),
                (Q::Restarts, "3"),
                (Q::Cpu, "no"),
                (Q::Processes, "2"),
                (Q::Devices, "all"),
                (Q::Precision, "no"),
                (Q::Compile, "no"),
            ],
            "nproc=2 cpu=false nnodes=1:4 rdzv-backend=builtin rdzv-endpoint=node1:29400 max-restarts=3 mixed-precision=no",
        ),
    ];
    for (answers, expected) in table {
        assert_eq!(said(&hold(answers).settings()), expected);
    }
}

#[test]
fn defaults_are_answers() {
    let mut questionnaire = Questionnaire::new(Machine { gpus: 0, device_word: "GPU", cores: 8 });
    while let Some(question) = questionnaire.next() {
        let text = match questionnaire.kind(question) {
            Kind::Choice { options, default } => options[default].0.to_owned(),
            Kind::YesNo { default } => bool::text(&default),
            Kind::Text { default, .. } => default.unwrap(),
        };
        questionnaire.answer(question, &text).unwrap();
    }
    assert_eq!(said(&questionnaire.settings()), "nproc=1 cpu=true mixed-precision=no");
}

#[test]
fn wrong_answers_are_told_at_once() {
    use Question as Q;
    let mut questionnaire = Questionnaire::new(Machine { gpus: 0, device_word: "GPU", cores: 1 });
    questionnaire.answer(Q::Where, "each").unwrap();
    let table = [
        (Q::Where, "there", "expected one of the words"),
        (Q::Hosts, "a,b:x", "expected a number of ranks after `:`, found \"b:x\""),
        (Q::Machines, "1", "expected a number of machines from 2, or MIN:MAX"),
        (Q::Machines, "4:2", "expected a number of machines from 2, or MIN:MAX"),
        (Q::Address, "", "expected a name or an address"),
        (Q::Address, "a b", "expected a name or an address"),
        (Q::Port, "0", "expected a port, from 1 to 65535"),
        (Q::Port, "65536", "expected a port, from 1 to 65535"),
        (Q::Endpoint, "node1:port", "expected HOST:PORT"),
        (Q::Endpoint, ":29400", "expected HOST:PORT"),
        (Q::Restarts, "-1", "expected a whole number"),
        (Q::Cpu, "perhaps", "expected yes or no"),
        (Q::Processes, "0", "expected a whole number from 1, or auto, gpu or cpu"),
    ];
    for (question, text, expected) in table {
        assert_eq!(questionnaire.answer(question, text), Err(expected.to_owned()), "{text}");
    }
    questionnaire.answer(Q::Machines, "3").unwrap();
    let expected = "expected a whole number from 0 to 2".to_owned();
    assert_eq!(questionnaire.answer(Q::Rank, "3"), Err(expected));
    assert!(questionnaire.back());
    assert_eq!(questionnaire.next(), Some(Q::Machines));
    assert!(questionnaire.back() && !questionnaire.back());
}

#[test]
fn a_machine_with_tpus_is_asked_about_tpus() {
    use Question as Q;
    let machine = Machine { gpus: 4, device_word: "TPU", cores: 96 };
    assert_eq!(machine.words(), "4 TPUs and 96 cores");
    let mut questionnaire = Questionnaire::new(machine);
    assert_eq!(questionnaire.prompt(Q::Devices), "Which TPUs?");
    let words = |questionnaire: &Questionnaire| match questionnaire.kind(Q::Precision) {
        Kind::Choice { options, .. } => options.iter().map(|it| it.0).collect(),
        other => vec![format!("{other:?}").leak() as &str],
    };
    assert_eq!(words(&questionnaire), ["no", "bf16"]);
    questionnaire.answer(Q::Where, "here").unwrap();
    questionnaire.answer(Q::Cpu, "yes").unwrap();
    assert_eq!(words(&questionnaire), ["no", "fp16", "bf16"]);
}
