//! The book: its links, commands and names.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod book;
mod events;
mod guide;
