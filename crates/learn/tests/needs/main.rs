//! The Learner beside fastai on this machine.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod fastai;

brigade_test_needs::main!();
