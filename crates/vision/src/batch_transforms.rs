//! What is done to a batch of images on its device.
