//! Networks beside fastai, torchvision, timm and transformers on this machine.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod awd_lstm_python;
mod pretrained_python;
mod transformers_python;

brigade_test_needs::main!();
