//! Where the ranks meet: the key-value store that every process group starts from.

use std::os::fd::RawFd;

/// Address of the store and who serves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreEndpoint {
    /// Host name or address of the server, as in `MASTER_ADDR`.
    pub addr: String,
    /// Port of the server. 0 only for a program that runs alone: whoever listens picks a free one.
    pub port: u16,
    /// Who serves it.
    pub host: StoreHost,
}

impl StoreEndpoint {
    /// A store for one process: on the loopback, at a port that the listener picks.
    #[must_use]
    pub fn alone() -> Self {
        Self { addr: "127.0.0.1".to_owned(), port: 0, host: StoreHost::Rank0 }
    }
}

/// Who serves the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreHost {
    /// The launcher serves it and every rank is a client: torchrun with
    /// `TORCHELASTIC_USE_AGENT_STORE=True`.
    Agent,
    /// Rank 0 binds the port and serves; the others are clients.
    Rank0,
    /// Rank 0 serves on this inherited socket, which is bound to the port and does not listen yet.
    /// Only rank 0 sees this value; the descriptor is its own and may be closed with the store.
    Rank0Fd(RawFd),
}
