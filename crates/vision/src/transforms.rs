//! What is done to one image before it is part of a batch.
