//! See brigade-fuzzkit.
#![no_main]

brigade_fuzz::fuzz!("legacy");
