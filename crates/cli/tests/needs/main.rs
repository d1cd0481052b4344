//! The program `brigade` with hosts, schedulers, file systems and other programs that not every machine has.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod checkpoint;
mod cluster;
mod containers;
mod doctor;
mod doctor_cluster;
mod doctor_hosts;
mod doctor_network;
mod etcd;
mod faults;
mod full_disk;
mod hosts;
mod ipv6;
#[path = "../common/job.rs"]
mod job;
#[path = "../common/launchers.rs"]
mod launchers;
mod memory;
mod packages;
mod peers;
#[path = "../common/person.rs"]
mod person;
mod python;
mod python_package;
mod schedulers;
mod site;
mod stalls;
#[path = "../common/work.rs"]
mod work;

brigade_test_needs::main!();
