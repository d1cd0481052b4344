//! What is computed on the CPU, whatever the device of the tests is.

mod learners;
