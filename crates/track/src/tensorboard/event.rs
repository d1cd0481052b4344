//! Messages of TensorBoard's `event.proto`, `summary.proto` and the plugin "hparams".
//!
//! Field numbers are written where they are used: each is used once.

use super::proto::Message;
use crate::{Image, Stamp, Value};

/// Record of an event file.
#[derive(Debug)]
pub(super) struct Event(Vec<u8>);

impl Event {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the first record of a file.
    pub(super) fn version(at: Stamp) -> Self {
        // file_version
        Self(stamp(at).bytes(3, "brain.Event:2").into_bytes())
    }

    pub(super) fn scalar(tag: &str, value: f64, at: Stamp) -> Self {
        // simple_value
        Self::summary(&Message::new().bytes(1, tag).float(2, value as f32), at)
    }

    pub(super) fn text(tag: &str, text: &str, at: Stamp) -> Self {
        // dtype DT_STRING, a shape of one, string_val
        let shape = Message::new().message(2, &Message::new().varint(1, 1));
        let tensor = Message::new().varint(1, 7).message(2, &shape).bytes(8, text);
        let value = Message::new().bytes(1, format!("{tag}/text_summary"));
        Self::summary(&value.message(9, &metadata("text", &[])).message(8, &tensor), at)
    }

    pub(super) fn image(tag: &str, image: &Image, png: &[u8], at: Stamp) -> Self {
        let image = Message::new()
            .varint(1, u64::from(image.height()))
            .varint(2, u64::from(image.width()))
            .varint(3, u64::from(image.channels()))
            .bytes(4, png);
        Self::summary(&Message::new().bytes(1, tag).message(4, &image), at)
    }

    /// Returns the record with the hyperparameters' values. As long as no record lists the hyperparameters, TensorBoard
    /// derives the list from these values, and takes all scalars as metrics.
    pub(super) fn session_start(config: &[(String, Value)], at: Stamp) -> Self {
        let mut start = Message::new();
        for (name, value) in config {
            // google.protobuf.Value: number_value, string_value, bool_value
            let value = match value {
                Value::Bool(value) => Message::new().varint(4, u64::from(*value)),
                Value::Text(value) => Message::new().bytes(3, value),
                Value::Float(value) => Message::new().double(2, *value),
                Value::Int(value) => Message::new().double(2, *value as f64),
            };
            start = start.message(1, &Message::new().bytes(1, name).message(2, &value));
        }
        // start_time_secs
        Self::hparams("_hparams_/session_start_info", 3, &start.double(5, at.seconds()), at)
    }

    pub(super) fn session_end(finished: bool, at: Stamp) -> Self {
        // STATUS_SUCCESS, STATUS_FAILURE; end_time_secs
        let end = Message::new().varint(1, if finished { 1 } else { 2 }).double(2, at.seconds());
        Self::hparams("_hparams_/session_end_info", 4, &end, at)
    }

    /// Returns a record with one part of an HParamsPluginData message.
    fn hparams(tag: &str, field: u32, part: &Message, at: Stamp) -> Self {
        let data = Message::new().message(field, part).into_bytes();
        let value = Message::new().bytes(1, tag).message(9, &metadata("hparams", &data));
        Self::summary(&value, at)
    }

    fn summary(value: &Message, at: Stamp) -> Self {
        Self(stamp(at).message(5, &Message::new().message(1, value)).into_bytes())
    }
}

/// Returns `SummaryMetadata { plugin_data { plugin_name, content } }`.
fn metadata(plugin: &str, content: &[u8]) -> Message {
    Message::new().message(1, &Message::new().bytes(1, plugin).bytes(2, content))
}

/// Returns a message with the fields wall_time and step.
fn stamp(at: Stamp) -> Message {
    // The step's field is an int64.
    let step = at.step.unwrap_or(0).min(i64::MAX as u64);
    Message::new().double(1, at.seconds()).varint(2, step)
}
