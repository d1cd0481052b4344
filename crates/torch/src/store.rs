//! Key-value stores, through which ranks find each other and exchange small values.

use std::fmt;
use std::io;
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cxx::UniquePtr;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::socket::sockopt::{AcceptConn, SockType};
use nix::sys::socket::{self, SockaddrStorage, getpeername, getsockname, getsockopt};
use parking_lot::Mutex;

use crate::bridge::ffi;
use crate::error::{Error, Thrown, TorchError};

/// A key-value store shared by the ranks of a job. A clone is a handle to the same store.
///
/// Every operation is atomic. Values are bytes; those of [`Store::add`] are decimal text. One handle serves one
/// operation at a time: a `get` that waits makes other threads' calls on the same TCP connection wait.
///
/// ```
/// use std::time::Duration;
/// use brigade_torch::Store;
///
/// let store = Store::hash()?;
/// store.set("answer", b"42")?;
/// assert_eq!(store.get("answer")?, b"42");
/// assert_eq!(store.add("arrived", 2)?, 2);
/// assert!(store.wait(&["never"], Duration::from_millis(10)).is_err());
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Clone)]
pub struct Store {
    handle: Arc<Handle>,
    description: Arc<str>,
    /// Server of a TCP store.
    server: Option<Arc<StoreServer>>,
}

/// The server of a TCP store.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreServer {
    /// Host and port of the server, as this process has connected to it.
    pub address: String,
    /// Rank of the job whose process is the server, if it is known. See [`TcpStore::hosted_by`].
    pub rank: Option<usize>,
}

struct Handle(UniquePtr<ffi::Store>);

// SAFETY: the C++ object is a counted pointer to a c10d::Store. TCPStore, FileStore and HashStore lock a
// mutex in every operation and PrefixStore only forwards to one of them; the count is atomic.
unsafe impl Send for Handle {}
// SAFETY: as above; no operation hands out a reference into the store.
unsafe impl Sync for Handle {}

/// Options of a TCP store, as a server or a client.
#[derive(Debug)]
pub struct TcpStore {
    host: String,
    port: u16,
    server: bool,
    listener: Option<OwnedFd>,
    world_size: Option<usize>,
    wait_for_workers: bool,
    timeout: Duration,
    hosted_by: Option<usize>,
}

/// Default time limit of stores, 5 minutes, as c10d's.
pub const DEFAULT_STORE_TIMEOUT: Duration = Duration::from_secs(300);

impl TcpStore {
    /// Returns the options of a server that listens on all addresses of this host at `port`; with 0 the system chooses
    /// a port, which [`Store::port`] returns. `host` is the name by which this process itself connects to it.
    #[must_use]
    pub fn server(host: impl Into<String>, port: u16) -> Self {
        Self { server: true, ..Self::client(host, port) }
    }

    /// Returns the options of a server on a socket that is already bound (and may already be listening), so that no
    /// other process can take the port in between.
    ///
    /// # Errors
    /// Fails if the port of the socket cannot be read.
    pub fn server_on(listener: TcpListener) -> Result<Self, Error> {
        let address = listener.local_addr().map_err(|e| {
            Error::invalid_argument(format!("the store's socket has no address: {e}"))
        })?;
        let host = if address.ip().is_unspecified() {
            "localhost".to_owned()
        } else {
            address.ip().to_string()
        };
        Ok(Self { listener: Some(listener.into()), ..Self::server(host, address.port()) })
    }

    /// Returns the options of a server on a bound socket that this process inherited from its launcher. See
    /// [`inherited_socket`].
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] if the system cannot use the socket.
    ///
    /// ```no_run
    /// use brigade_torch::{TcpStore, inherited_socket};
    /// let socket = inherited_socket(std::env::var("BRIGADE_STORE_FD")?.parse()?)?;
    /// let store = TcpStore::server_on_socket(socket)?.open()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn server_on_socket(socket: OwnedFd) -> Result<Self, Error> {
        Self::server_on(TcpListener::from(socket))
    }

    /// Returns the options of a client of the server at `host:port`. It retries to connect until the time limit.
    #[must_use]
    pub fn client(host: impl Into<String>, port: u16) -> Self {
        Self {
            host: host.into(),
            port,
            server: false,
            listener: None,
            world_size: None,
            wait_for_workers: false,
            timeout: DEFAULT_STORE_TIMEOUT,
            hosted_by: None,
        }
    }

    /// Sets the time limit of the connection and, later, of every operation that waits. Defaults to
    /// [`DEFAULT_STORE_TIMEOUT`].
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the number of processes that will connect, including the server's own. Defaults to an unknown number.
    #[must_use]
    pub fn world_size(mut self, world_size: usize) -> Self {
        self.world_size = Some(world_size);
        self
    }

    /// Sets whether opening the server waits until `world_size` processes are connected, including the server itself.
    /// Only processes that also set this are counted. Defaults to `false`.
    #[must_use]
    pub fn wait_for_workers(mut self, wait: bool) -> Self {
        self.wait_for_workers = wait;
        self
    }

    /// Sets the rank of the job whose process is the server. Errors name this rank when the connection to the store is
    /// lost, because the rank has ended then. Defaults to none, as for a store that a launcher's process hosts.
    #[must_use]
    pub fn hosted_by(mut self, rank: usize) -> Self {
        self.hosted_by = Some(rank);
        self
    }

    /// Opens the store: starts the server, or connects as a client.
    ///
    /// # Errors
    /// [`crate::TorchError::Store`] of operation `connect`: the port is taken, the host is unknown, or the server did
    /// not respond within the time limit.
    pub fn open(self) -> Result<Store, Error> {
        let address = format!("{}:{}", self.host, self.port);
        let waited = if self.server { Duration::ZERO } else { self.wait_until_it_listens() };
        let options = ffi::TcpStoreOptions {
            host: &self.host,
            port: self.port,
            is_server: self.server,
            num_workers: self.world_size.and_then(|n| i64::try_from(n).ok()).unwrap_or(0),
            wait_workers: self.wait_for_workers,
            timeout_ms: milliseconds(self.timeout - waited),
            // libtorch owns the socket from here on and closes it with the server.
            listen_fd: self.listener.map_or(-1, IntoRawFd::into_raw_fd),
        };
        let operation = if self.server { "listen" } else { "connect" };
        let begun = Instant::now();
        let handle = ffi::tcp_store(&options).map_err(|error| {
            late_error(operation, address.clone(), &error, begun, self.timeout - waited)
        })?;
        let mut store = Store::new(handle, format!("tcp://{address}"));
        store.server = Some(Arc::new(StoreServer { address, rank: self.hosted_by }));
        if waited > Duration::ZERO {
            store.set_timeout(self.timeout)?;
        }
        Ok(store)
    }

    /// Waits until the server listens. Ranks start at the same time as the server, and libtorch pauses half a second or
    /// more between two attempts to connect; the pauses here are milliseconds. Any other error, and a late server, is
    /// left to libtorch, with the remaining time.
    fn wait_until_it_listens(&self) -> Duration {
        let begun = Instant::now();
        let limit = MAX_WAIT.min(self.timeout / 2);
        let mut pause = Duration::from_millis(2);
        // Tries all addresses of the name.
        let refused = || {
            let addresses = (self.host.as_str(), self.port).to_socket_addrs();
            addresses.is_ok_and(|mut addresses| {
                addresses.all(|address| {
                    let tried = TcpStream::connect_timeout(&address, limit);
                    tried.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
                })
            })
        };
        if limit.is_zero() {
            return Duration::ZERO;
        }
        while begun.elapsed() < limit && refused() {
            std::thread::sleep(pause);
            pause = (2 * pause).min(Duration::from_millis(100));
        }
        // An attempt that began within the limit may have ended after it.
        begun.elapsed().min(limit)
    }
}

/// Takes over a socket that the launcher has bound and that this process has inherited under the number `fd`: bound to
/// a port, neither connected nor listening, and not marked to be closed by `exec`. Each number can be taken once.
///
/// # Errors
/// [`crate::ErrorKind::InvalidArgument`] for a number that is not that of such a socket (for example from an
/// environment variable of another process), and for one that was taken before.
pub fn inherited_socket(fd: RawFd) -> Result<OwnedFd, Error> {
    static GIVEN: Mutex<Vec<RawFd>> = Mutex::new(Vec::new());
    let stale = |reason: String| {
        Error::invalid_argument(format!(
            "BRIGADE_STORE_FD names descriptor {fd} as the store's socket, but {reason}; start the program \
             with `brigade launch`, or unset BRIGADE_STORE_FD"
        ))
    };
    // Locked until the end, so that no other thread takes over the same socket.
    let mut given = GIVEN.lock();
    if given.contains(&fd) {
        return Err(stale("it was taken over before".into()));
    }
    let address = getsockname::<SockaddrStorage>(fd)
        .map_err(|errno| stale(format!("system error: {}", errno.desc())))?;
    let port = match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
        (Some(v4), _) => v4.port(),
        (_, Some(v6)) => v6.port(),
        _ => return Err(stale("it is not a TCP socket".into())),
    };
    if port == 0 {
        return Err(stale("it is not bound to a port".into()));
    }
    if getpeername::<SockaddrStorage>(fd).is_ok() {
        return Err(stale("it is a connection".into()));
    }
    // SAFETY: the descriptor is open and a socket, as was just checked, and lent for the next calls alone.
    let lent = unsafe { BorrowedFd::borrow_raw(fd) };
    if getsockopt(&lent, SockType) != Ok(socket::SockType::Stream) {
        return Err(stale("it is not a TCP socket".into()));
    }
    if getsockopt(&lent, AcceptConn).unwrap_or(true) {
        return Err(stale("it listens already".into()));
    }
    if fcntl(lent, FcntlArg::F_GETFD).is_ok_and(|flags| flags & FdFlag::FD_CLOEXEC.bits() != 0) {
        return Err(stale("it was not inherited".into()));
    }
    given.push(fd);
    // SAFETY: a bound TCP socket that neither listens nor is connected and is not closed by `exec` is none that
    // another part of the program owns: the standard library's listeners listen and its streams are connected,
    // and what it and the crates for sockets make here is closed by `exec`. By the contract of the variable that
    // names it the launcher has left it to this process for the store, and no number is given twice.
    let inherited = unsafe { OwnedFd::from_raw_fd(fd) };
    // Duplicated with the close-on-exec flag, because programs that inherited the socket would keep the port in use.
    inherited.try_clone().map_err(|error| stale(format!("it cannot be used: {error}")))
}

/// Time during which a client itself checks whether the server listens.
const MAX_WAIT: Duration = Duration::from_secs(5);

impl Store {
    fn new(handle: UniquePtr<ffi::Store>, description: String) -> Self {
        Self { handle: Arc::new(Handle(handle)), description: description.into(), server: None }
    }

    /// Opens a store in a file that `world_size` processes of one host (or one shared folder) open. The last of them to
    /// drop its store removes the file.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] when the file's folder does not exist; [`crate::TorchError::Store`] when
    /// it cannot be written.
    pub fn file(path: impl AsRef<Path>, world_size: usize) -> Result<Self, Error> {
        let path = path.as_ref();
        let text = path.to_str().ok_or_else(|| {
            Error::invalid_argument(format!("the store's path {} is not UTF-8", path.display()))
        })?;
        // libtorch would retry until its time limit.
        if !path.parent().is_none_or(|folder| folder.as_os_str().is_empty() || folder.is_dir()) {
            return Err(Error::invalid_argument(format!(
                "the store's file {text} has no folder to be in"
            )));
        }
        let world = i32::try_from(world_size)
            .map_err(|_| Error::invalid_argument(format!("a store for {world_size} processes")))?;
        let handle = ffi::file_store(text, world)
            .map_err(|error| store_error("open", text.to_owned(), &error))?;
        Ok(Self::new(handle, format!("file://{text}")))
    }

    /// Creates a store in memory for the threads of this process.
    ///
    /// # Errors
    /// [`crate::TorchError::Store`] if libtorch cannot create it.
    pub fn hash() -> Result<Self, Error> {
        let handle =
            ffi::hash_store().map_err(|error| store_error("open", "hash".into(), &error))?;
        Ok(Self::new(handle, "hash".into()))
    }

    /// Returns the same store with `prefix/` before every key.
    ///
    /// # Errors
    /// [`crate::TorchError::Store`] if libtorch cannot create it.
    pub fn prefix(&self, prefix: &str) -> Result<Self, Error> {
        let handle = ffi::prefix_store(prefix, &self.handle.0)
            .map_err(|error| store_error("prefix", prefix.to_owned(), &error))?;
        let store = Self::new(handle, format!("{}/{prefix}", self.description));
        Ok(Self { server: self.server.clone(), ..store })
    }

    /// Returns the port of a TCP store. `None` for other stores.
    #[must_use]
    pub fn port(&self) -> Option<u16> {
        ffi::tcp_store_port(&self.handle.0).ok().filter(|&port| port != 0)
    }

    /// Sets the value of a key.
    ///
    /// # Errors
    /// [`crate::TorchError::Store`] if the server is not available.
    pub fn set(&self, key: &str, value: impl AsRef<[u8]>) -> Result<(), Error> {
        ffi::store_set(&self.handle.0, key, value.as_ref())
            .map_err(|error| store_error("set", key.to_owned(), &error))
    }

    /// Returns the value of a key, and waits for it up to the store's time limit.
    ///
    /// # Errors
    /// [`crate::TorchError::Store`], with [`crate::Fault::Timeout`] when no rank set the key in time.
    pub fn get(&self, key: &str) -> Result<Vec<u8>, Error> {
        let begun = Instant::now();
        ffi::store_get(&self.handle.0, key).map_err(|error| {
            let limit = self.timeout().unwrap_or(Duration::MAX);
            late_error("get", key.to_owned(), &error, begun, limit)
        })
    }

    /// Adds to the number under the key (initially 0) and returns the sum.
    ///
    /// # Errors
    /// [`crate::TorchError::Store`] if the server is not available, or the value is not a number.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64, Error> {
        ffi::store_add(&self.handle.0, key, amount)
            .map_err(|error| store_error("add", key.to_owned(), &error))
    }

    /// Sets `desired` if the value is `expected` (or if the key does not exist and `expected` is empty), and returns
    /// the value afterwards.
    ///
    /// # Errors
    /// [`crate::TorchError::Store`] if the server is not available.
    pub fn compare_set(
        &self,
        key: &str,
        expected: impl AsRef<[u8]>,
        desired: impl AsRef<[u8]>,
    ) -> Result<Vec<u8>, Error> {
        ffi::store_compare_set(&self.handle.0, key, expected.as_ref(), desired.as_ref())
            .map_err(|error| store_error("compare_set", key.to_owned(), &error))
    }

    /// Removes a key and returns `true` if it existed. (A file store always returns `true`.)
    ///
    /// # Errors
    /// [`crate::TorchError::Store`] if the server is not available.
    pub fn delete(&self, key: &str) -> Result<bool, Error> {
        ffi::store_delete(&self.handle.0, key)
            .map_err(|error| store_error("delete", key.to_owned(), &error))
    }

    /// Returns `true` if all of the keys exist. Does not wait.
    ///
    /// # Errors
    /// [`crate::TorchError::Store`] if the server is not available.
    pub fn contains(&self, keys: &[&str]) -> Result<bool, Error> {
        ffi::store_check(&self.handle.0, keys)
            .map_err(|error| store_error("contains", keys.join(", "), &error))
    }

    /// Returns the number of keys, including those of libtorch itself.
    ///
    /// # Errors
    /// [`crate::TorchError::Store`] if the server is not available.
    pub fn num_keys(&self) -> Result<i64, Error> {
        ffi::store_num_keys(&self.handle.0)
            .map_err(|error| store_error("num_keys", String::new(), &error))
    }

    /// Waits until all of the keys exist.
    ///
    /// # Errors
    /// [`crate::TorchError::Store`], with [`crate::Fault::Timeout`] after `timeout`.
    pub fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), Error> {
        let begun = Instant::now();
        ffi::store_wait(&self.handle.0, keys, milliseconds(timeout))
            .map_err(|error| late_error("wait", keys.join(", "), &error, begun, timeout))
    }

    /// Returns the default time limit of operations that wait.
    ///
    /// # Errors
    /// [`crate::TorchError::Store`] when libtorch fails.
    pub fn timeout(&self) -> Result<Duration, Error> {
        let limit = ffi::store_timeout(&self.handle.0)
            .map_err(|error| store_error("timeout", String::new(), &error))?;
        Ok(Duration::from_millis(u64::try_from(limit).unwrap_or(0)))
    }

    /// Sets the default time limit of operations that wait, for this store and its clones. A store with a prefix
    /// ([`Store::prefix`]) has a limit of its own.
    ///
    /// # Errors
    /// [`crate::TorchError::Store`] if libtorch rejects it.
    pub fn set_timeout(&self, timeout: Duration) -> Result<(), Error> {
        ffi::store_set_timeout(&self.handle.0, milliseconds(timeout))
            .map_err(|error| store_error("set_timeout", String::new(), &error))
    }

    /// Returns the server of a TCP store. `None` for other stores.
    #[must_use]
    pub fn server(&self) -> Option<&StoreServer> {
        self.server.as_deref()
    }

    pub(crate) fn raw(&self) -> &ffi::Store {
        &self.handle.0
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Store({})", self.description)
    }
}

/// Converts a limit to c10d's whole milliseconds. 0 means "no limit" there, so shorter limits become 1. Because c10d
/// adds limits to clocks that count nanoseconds in 64 bits, limits longer than a lifetime become one lifetime.
pub(crate) fn milliseconds(limit: Duration) -> i64 {
    const LIFETIME: i64 = 100 * 365 * 24 * 60 * 60 * 1000;
    i64::try_from(limit.as_millis()).unwrap_or(LIFETIME).clamp(1, LIFETIME)
}

fn store_error(operation: &'static str, key: String, error: &cxx::Exception) -> Error {
    let thrown = Thrown::read(error);
    TorchError::Store { operation, key, fault: thrown.fault(), detail: thrown.detail }.into()
}

/// Creates the error of an operation that waits in the store.
fn late_error(
    operation: &'static str,
    key: String,
    error: &cxx::Exception,
    begun: Instant,
    limit: Duration,
) -> Error {
    let thrown = Thrown::read(error);
    let fault = thrown.fault_after(begun.elapsed(), limit);
    TorchError::Store { operation, key, fault, detail: thrown.detail }.into()
}
