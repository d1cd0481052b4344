//! Election through etcd: a client of its HTTP interface, and a lease that is kept alive for as long as this process is
//! the coordinator.

mod access;
mod client;
mod keys;
mod leadership;

pub use access::{EtcdAccess, EtcdError};
pub(crate) use client::{Client, ClientError, Created};
pub(crate) use keys::Keys;
pub(crate) use leadership::LeaderLease;
