//! Election by etcd: the first host to create the job's key becomes its coordinator, for as long as its
//! lease is kept alive.

mod access;
mod client;
mod election;
mod leadership;

pub use access::{EtcdAccess, EtcdError};
pub(crate) use election::{coordinator_record, meet};
pub(crate) use leadership::LeaderLease;
