//! Texts as batches of tensors, on one process or many, and the Learners that train on them.
