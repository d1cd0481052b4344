//! Tests that compare computed numbers.

mod from_accelerate;
