//! Election by etcd: who creates the job's key first becomes its coordinator, for as long as its
//! lease is kept alive.

mod client;
mod election;
mod seat;

pub(crate) use election::meet;
pub(crate) use seat::Seat;
