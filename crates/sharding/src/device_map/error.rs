//! Reasons for which a device map cannot be applied to a model.

use brigade_rank_env::text::escaped;

use super::Place;
use crate::byte_size::in_bytes;
use crate::error::first_of;

/// A device map that does not suit a model or the devices, or a list of tensors that is not a model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceMapError {
    /// A text that is not a place.
    #[error("`{}` is not a place for weights: write cuda:N, cpu or disk", escaped(.text))]
    UnknownPlace {
        /// The text.
        text: String,
    },

    /// A device that this machine does not have.
    #[error("the device map uses {place}, which does not exist: there are {}", list(.known))]
    NoSuchDevice {
        /// The device.
        place: Place,
        /// The devices that exist.
        known: Vec<Place>,
    },

    /// A limit that is not a number of bytes.
    #[error("the limit `{}` of {place} is {reason}", escaped(.text))]
    Limit {
        /// The device.
        place: Place,
        /// The limit.
        text: String,
        /// What is wrong with it.
        reason: String,
    },

    /// A map without limits for a machine of which free memory is not known.
    #[error(
        "the device map has no limits, and free memory is not known here: give a limit for each device"
    )]
    NoLimits,

    /// Two limits of one device.
    #[error("{place} has two limits: leave one of them out")]
    TwoLimits {
        /// The device.
        place: Place,
    },

    /// JSON that is not a device map.
    #[error(
        "not a device map in JSON: {}; write an object of names and places such as {{\"lm_head\": \"cpu\"}}",
        escaped(.message)
    )]
    Json {
        /// What the parser found.
        message: String,
    },

    /// A name of a map that no module and no tensor has.
    #[error(
        "the device map names `{}`, which the model does not have; near it are {}",
        escaped(.name), first_of(.near)
    )]
    UnknownName {
        /// The name or pattern.
        name: String,
        /// Names of the model that are like it.
        near: Vec<String>,
    },

    /// Tensors for which a map has no place.
    #[error(
        "the device map has no place for {}: name them, or give all that is left a place with the empty name",
        first_of(.names)
    )]
    Uncovered {
        /// Names of the tensors.
        names: Vec<String>,
    },

    /// Two patterns of a map that give one module two places.
    #[error(
        "the patterns `{}` and `{}` of the device map give {} two places: make one of them narrower",
        escaped(.first), escaped(.second), escaped(.name)
    )]
    Overlap {
        /// A pattern.
        first: String,
        /// Another one.
        second: String,
        /// The module or tensor.
        name: String,
    },

    /// Tied weights with two places.
    #[error(
        "{} and {} are one tied weight, and the device map puts one on {first_place} and the other on {second_place}: give \
         both the same place",
        escaped(.first), escaped(.second)
    )]
    TiedApart {
        /// The first name of the weight.
        first: String,
        /// Its place.
        first_place: Place,
        /// Another name of the weight.
        second: String,
        /// Its place.
        second_place: Place,
    },

    /// A layer that is offloaded and does not fit where it is computed.
    #[error(
        "{place} is limited to {}, and {} with its {} would have to be moved there to be computed: give {place} at least {} \
         ({needed} bytes)",
        in_bytes(*.limit), escaped(.unit), in_bytes(*.bytes), in_bytes(*.needed)
    )]
    UnitTooLarge {
        /// The device that computes.
        place: Place,
        /// Its limit in bytes.
        limit: u64,
        /// The largest layer.
        unit: String,
        /// Its bytes.
        bytes: u64,
        /// The smallest limit that would do, in bytes.
        needed: u64,
    },

    /// A map by hand that puts more on a device than its limit.
    #[error(
        "the device map puts {} on {place}, whose limit is {}: move a layer to another place, or raise the limit",
        in_bytes(*.bytes), in_bytes(*.limit)
    )]
    OverLimit {
        /// The device.
        place: Place,
        /// Bytes that the map puts there.
        bytes: u64,
        /// The limit in bytes.
        limit: u64,
    },

    /// A model without tensors.
    #[error("there are no tensors to place")]
    Empty,

    /// A tensor without a name.
    #[error("a tensor of shape {shape:?} has no name")]
    Nameless {
        /// Its shape.
        shape: Vec<u64>,
    },

    /// A name that is there twice.
    #[error("two tensors have the name {}", escaped(.name))]
    DuplicateName {
        /// The name.
        name: String,
    },

    /// A name that is a tensor and a module.
    #[error("{} is a tensor, and a module with tensors of its own", escaped(.name))]
    TensorIsModule {
        /// The name.
        name: String,
    },

    /// A tie to a tensor that is not the first of its weight.
    #[error(
        "tensor {} is tied to {}, which is not a tensor of the model that is stored itself",
        escaped(.name), escaped(.tied_to)
    )]
    Tie {
        /// The tensor.
        name: String,
        /// The name to which it is tied.
        tied_to: String,
    },

    /// A unit that is not a module.
    #[error("the model has no module {}, which is named as a unit", escaped(.name))]
    NoSuchUnit {
        /// The name.
        name: String,
    },

    /// A type for a tensor that does not exist.
    #[error("the device map gives {} a type, which is not a tensor of the model", escaped(.name))]
    NoSuchTensor {
        /// The name.
        name: String,
    },

    /// Tensors with more bytes than can be counted.
    #[error("with tensor {} the model has more bytes than can be counted", escaped(.name))]
    TooLarge {
        /// The tensor with which the sum is too large.
        name: String,
    },
}

fn list(places: &[Place]) -> String {
    let texts: Vec<_> = places.iter().map(Place::to_string).collect();
    texts.join(", ")
}
