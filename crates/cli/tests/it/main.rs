//! Tests of the program `brigade`, started as users start it.

#![allow(clippy::unwrap_used)] // clippy.toml allows it in tests, but knows only functions marked so

mod binding;
mod book;
mod config;
mod data;
mod device_faults;
mod emit;
mod env;
mod escaped;
mod estimate;
mod explain;
mod foreign;
mod help;
mod hosts_explained;
#[path = "../common/job.rs"]
mod job;
mod kernel;
mod kernels;
mod launch;
#[path = "../common/launchers.rs"]
mod launchers;
mod logs;
mod merge;
mod nodes;
mod pages;
#[path = "../common/person.rs"]
mod person;
mod plans;
mod plugins;
mod programs;
mod reference;
mod report;
mod restart;
mod selftest_build;
mod sessions;
mod setup;
mod sharding;
mod split;
mod watch;
#[path = "../common/work.rs"]
mod work;
