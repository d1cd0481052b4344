//! Networks against PyTorch, torchvision, timm, fastai and transformers: names, values, losses and gradients.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod awd_lstm;
mod cnn;
mod cpu;
mod fill;
mod golden;
mod resnet;
mod seed;
mod transfer;
mod transformers;
