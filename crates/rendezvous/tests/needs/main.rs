//! The rendezvous with a real etcd.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod etcd;
mod etcd_access;

brigade_test_needs::main!();
