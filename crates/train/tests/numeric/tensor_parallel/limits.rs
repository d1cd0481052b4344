//! What does not fit a mesh is refused by name before anything has changed.
