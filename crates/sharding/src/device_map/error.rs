//! Reasons for which a device map cannot be applied to a model.

use brigade_rank_env::text::escaped;

use super::Place;
use crate::byte_size::in_bytes;
use crate::error::first_of;

/// Error of a device map that does not suit a model or the devices, or of a list of tensors that is not a model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceMapError {
    /// A text that is not a place.
    #[error("`{}` is not a place for weights: write cuda:N, cpu or disk", escaped(.text))]
    UnknownPlace {
        /// Text that could not be parsed as a place.
        text: String,
    },

    /// A device that this machine does not have.
    #[error("the device map uses {place}, which does not exist: there are {}", list(.known))]
    NoSuchDevice {
        /// Device that does not exist.
        place: Place,
        /// Devices that exist on this machine.
        known: Vec<Place>,
    },

    /// A limit that is not a number of bytes.
    #[error("the limit `{}` of {place} is {reason}", escaped(.text))]
    Limit {
        /// Device that the limit is for.
        place: Place,
        /// Text of the limit.
        text: String,
        /// Reason why the limit is invalid.
        reason: String,
    },

    /// A map without limits on a machine whose free memory is not known.
    #[error(
        "the device map has no limits, and free memory is not known here: give a limit for each device"
    )]
    NoLimits,

    /// Two limits of one device.
    #[error("{place} has two limits: leave one of them out")]
    TwoLimits {
        /// Device that has two limits.
        place: Place,
    },

    /// JSON that is not a device map.
    #[error(
        "not a device map in JSON: {}; write an object of names and places such as {{\"lm_head\": \"cpu\"}}",
        escaped(.message)
    )]
    Json {
        /// Error message of the JSON parser.
        message: String,
    },

    /// A name of a map that no module and no tensor has.
    #[error(
        "the device map names `{}`, which the model does not have; near it are {}",
        escaped(.name), first_of(.near)
    )]
    UnknownName {
        /// Name or pattern in the map.
        name: String,
        /// Similar names in the model.
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
        /// First of the two patterns.
        first: String,
        /// Second of the two patterns.
        second: String,
        /// Name of the module or tensor that both patterns match.
        name: String,
    },

    /// Tied weights with two places.
    #[error(
        "{} and {} are one tied weight, and the device map puts one on {first_place} and the other on {second_place}: give \
         both the same place",
        escaped(.first), escaped(.second)
    )]
    TiedApart {
        /// First name of the weight.
        first: String,
        /// Place of the first name.
        first_place: Place,
        /// Another name of the weight.
        second: String,
        /// Place of the second name.
        second_place: Place,
    },

    /// A layer that is offloaded and does not fit where it is computed.
    #[error(
        "{place} is limited to {}, and {} with its {} would have to be moved there to be computed: give {place} at least {} \
         ({needed} bytes)",
        in_bytes(*.limit), escaped(.unit), in_bytes(*.bytes), in_bytes(*.needed)
    )]
    UnitTooLarge {
        /// Device that computes the layer.
        place: Place,
        /// Limit of the device in bytes.
        limit: u64,
        /// Name of the largest layer.
        unit: String,
        /// Size of the largest layer in bytes.
        bytes: u64,
        /// Smallest sufficient limit, in bytes.
        needed: u64,
    },

    /// A device map written by hand that puts more on a device than its limit, with what is reserved there.
    #[error(
        "the device map puts {} on {place}, whose limit is {}: move a layer to another place, or raise the limit",
        in_bytes(*.bytes), in_bytes(*.limit)
    )]
    OverLimit {
        /// Device whose limit is exceeded.
        place: Place,
        /// Bytes that the map puts on the device, and those that are reserved.
        bytes: u64,
        /// Limit of the device in bytes.
        limit: u64,
    },

    /// A model without tensors.
    #[error("there are no tensors to place")]
    Empty,

    /// A tensor without a name.
    #[error("a tensor of shape {shape:?} has no name")]
    Nameless {
        /// Shape of the tensor without a name.
        shape: Vec<u64>,
    },

    /// A name that two tensors share.
    #[error("two tensors have the name {}", escaped(.name))]
    DuplicateName {
        /// Name that occurs twice.
        name: String,
    },

    /// A name that is a tensor and a module.
    #[error("{} is the name of both a tensor and a module with tensors", escaped(.name))]
    TensorIsModule {
        /// Name shared by a tensor and a module.
        name: String,
    },

    /// A tie to a tensor that is not the first of its weight.
    #[error(
        "tensor {} is tied to {}, which is not an untied tensor of the model",
        escaped(.name), escaped(.tied_to)
    )]
    Tie {
        /// Name of the tied tensor.
        name: String,
        /// Name of the tensor to which it is tied.
        tied_to: String,
    },

    /// A unit that is not a module.
    #[error("the model has no module {}, which is named as a unit", escaped(.name))]
    NoSuchUnit {
        /// Name that is not a module of the model.
        name: String,
    },

    /// A type for a tensor that does not exist.
    #[error("the device map sets a type for {}, which is not a tensor of the model", escaped(.name))]
    NoSuchTensor {
        /// Name that is not a tensor of the model.
        name: String,
    },

    /// Tensors with more bytes than can be counted.
    #[error("with tensor {} the model has more bytes than can be counted", escaped(.name))]
    TooLarge {
        /// Name of the tensor with which the sum is too large.
        name: String,
    },
}

fn list(places: &[Place]) -> String {
    let texts: Vec<_> = places.iter().map(Place::to_string).collect();
    texts.join(", ")
}
