//! File system that can be slow or stop answering, like one on a remote host that was lost.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem,
    FopenFlags, Generation, INodeNo, LockOwner, MountOption, OpenFlags, RenameFlags, ReplyAttr,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyWrite, Request, TimeOrNow,
    WriteFlags,
};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use parking_lot::{Condvar, Mutex, MutexGuard};
use tempfile::TempDir;

/// File system in memory, which can be slowed down and frozen.
///
/// It is mounted for the thread that creates it and for processes that this thread starts from then on, and for nothing
/// else, so that nothing of it remains, however the test ends.
pub struct Disk {
    // Fields are dropped in this order: the folder last.
    session: Option<BackgroundSession>,
    shared: Arc<Shared>,
    folder: TempDir,
}

impl Disk {
    /// Mounts a file system.
    ///
    /// # Panics
    /// Panics when this machine has no FUSE, or this process may not mount: tests that use it name
    /// `brigade_test_needs::Need::Fuse`.
    #[must_use]
    pub fn mount() -> Self {
        unshare(CloneFlags::CLONE_NEWNS).expect("a mount namespace for this thread");
        let none: Option<&str> = None;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
            .expect("mounts of this process alone");
        let folder = tempfile::tempdir().expect("a folder to mount it on");
        let shared = Arc::new(Shared::default());
        let files = Files { shared: Arc::clone(&shared), content: Mutex::new(Content::new()) };
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("brigade-test-hosts".to_owned())];
        let session = fuser::spawn_mount(files, folder.path(), &config)
            .expect("mount a file system of FUSE's");
        Self { session: Some(session), shared, folder }
    }

    /// Returns the folder where it is mounted.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Stops answering requests. A process with a request sleeps in the kernel, and not even SIGKILL ends the first
    /// one.
    pub fn freeze(&self) {
        self.shared.gate.lock().frozen = true;
    }

    /// Delays every further request by this time; zero removes the delay.
    pub fn slow_down(&self, delay: Duration) {
        self.shared.gate.lock().delay = delay;
    }

    /// Continues to answer requests.
    pub fn thaw(&self) {
        self.shared.gate.lock().frozen = false;
        self.shared.changed.notify_all();
    }

    /// Returns `true` if a process waits for an answer.
    #[must_use]
    pub fn is_waited_for(&self) -> bool {
        self.shared.gate.lock().waiting > 0
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.thaw();
        if let Some(session) = self.session.take() {
            // Fails while a process uses it: the mount is removed with the last of them.
            let _ = session.umount_and_join();
        }
    }
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disk").field("path", &self.path()).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Shared {
    gate: Mutex<Gate>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Gate {
    frozen: bool,
    delay: Duration,
    waiting: usize,
}

impl Shared {
    /// Waits until the disk may answer.
    fn pass(&self) {
        let mut gate = self.gate.lock();
        gate.waiting += 1;
        while gate.frozen {
            self.changed.wait(&mut gate);
        }
        gate.waiting -= 1;
        let delay = gate.delay;
        drop(gate);
        thread::sleep(delay);
    }
}

/// Handler of the kernel's requests.
#[derive(Debug)]
struct Files {
    shared: Arc<Shared>,
    content: Mutex<Content>,
}

#[derive(Debug)]
struct Content {
    nodes: BTreeMap<u64, Node>,
    next: u64,
}

#[derive(Debug)]
struct Node {
    kind: FileType,
    perm: u16,
    bytes: Vec<u8>,
    children: BTreeMap<OsString, u64>,
    changed: SystemTime,
}

impl Content {
    fn new() -> Self {
        let root = Node::new(FileType::Directory, 0o777);
        Self { nodes: [(INodeNo::ROOT.0, root)].into(), next: INodeNo::ROOT.0 + 1 }
    }

    fn attributes(&self, number: u64) -> Option<FileAttr> {
        let node = self.nodes.get(&number)?;
        let (uid, gid) = (nix::unistd::getuid().as_raw(), nix::unistd::getgid().as_raw());
        let size = node.bytes.len() as u64;
        Some(FileAttr {
            ino: INodeNo(number),
            size,
            blocks: size.div_ceil(512),
            atime: node.changed,
            mtime: node.changed,
            ctime: node.changed,
            crtime: UNIX_EPOCH,
            kind: node.kind,
            perm: node.perm,
            nlink: 1,
            uid,
            gid,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }

    fn child(&self, parent: u64, name: &OsStr) -> Option<u64> {
        self.nodes.get(&parent)?.children.get(name).copied()
    }

    fn add(&mut self, parent: u64, name: &OsStr, node: Node) -> Option<FileAttr> {
        let number = self.next;
        self.nodes.get_mut(&parent)?.children.insert(name.to_owned(), number);
        self.next += 1;
        self.nodes.insert(number, node);
        self.attributes(number)
    }

    /// Renames a file. A file with the new name is replaced; a folder there must be empty, which is not checked.
    fn rename(&mut self, (parent, name): (u64, &OsStr), to: (u64, &OsStr)) -> Option<()> {
        let number = self.child(parent, name)?;
        let (new_parent, new_name) = to;
        self.nodes.get_mut(&new_parent)?.children.insert(new_name.to_owned(), number);
        if (parent, name) != to {
            self.nodes.get_mut(&parent)?.children.remove(name);
        }
        Some(())
    }

    fn remove(&mut self, parent: u64, name: &OsStr) -> Result<(), Errno> {
        let number = self.child(parent, name).ok_or(Errno::ENOENT)?;
        if self.nodes.get(&number).is_some_and(|node| !node.children.is_empty()) {
            return Err(Errno::ENOTEMPTY);
        }
        // The node remains while it is open anywhere.
        let parent = self.nodes.get_mut(&parent).ok_or(Errno::ENOENT)?;
        parent.children.remove(name);
        Ok(())
    }
}

impl Node {
    fn new(kind: FileType, mode: u32) -> Self {
        let perm = u16::try_from(mode & 0o7777).unwrap_or(0o700);
        let (bytes, children) = (Vec::new(), BTreeMap::new());
        Self { kind, perm, bytes, children, changed: SystemTime::now() }
    }
}

impl Files {
    /// Returns the content, once the disk may answer.
    fn content(&self) -> MutexGuard<'_, Content> {
        self.shared.pass();
        self.content.lock()
    }
}

impl Filesystem for Files {
    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let content = self.content();
        match content.child(parent.0, name).and_then(|number| content.attributes(number)) {
            Some(attributes) => reply.entry(&TTL, &attributes, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(
        &self,
        _request: &Request,
        number: INodeNo,
        _handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        match self.content().attributes(number.0) {
            Some(attributes) => reply.attr(&TTL, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn setattr(
        &self,
        _request: &Request,
        number: INodeNo,
        mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let mut content = self.content();
        if let Some(node) = content.nodes.get_mut(&number.0) {
            node.perm = mode.map_or(node.perm, |mode| u16::try_from(mode & 0o7777).unwrap_or(0));
            if let Some(size) = size {
                node.bytes.resize(usize::try_from(size).unwrap_or(usize::MAX), 0);
            }
        }
        match content.attributes(number.0) {
            Some(attributes) => reply.attr(&TTL, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn mkdir(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let folder = Node::new(FileType::Directory, mode & !umask);
        match self.content().add(parent.0, name, folder) {
            Some(attributes) => reply.entry(&TTL, &attributes, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn create(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        let file = Node::new(FileType::RegularFile, mode & !umask);
        match self.content().add(parent.0, name, file) {
            Some(attributes) => {
                let (handle, flags) = (FileHandle(0), FopenFlags::empty());
                reply.created(&TTL, &attributes, Generation(0), handle, flags);
            }
            None => reply.error(Errno::ENOENT),
        }
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        match self.content().remove(parent.0, name) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        match self.content().remove(parent.0, name) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    fn read(
        &self,
        _request: &Request,
        number: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let content = self.content();
        let Some(node) = content.nodes.get(&number.0) else { return reply.error(Errno::ENOENT) };
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(node.bytes.len());
        let end = start.saturating_add(size as usize).min(node.bytes.len());
        reply.data(&node.bytes[start..end]);
    }

    fn write(
        &self,
        _request: &Request,
        number: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let mut content = self.content();
        let Some(node) = content.nodes.get_mut(&number.0) else {
            return reply.error(Errno::ENOENT);
        };
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let end = start + data.len();
        if node.bytes.len() < end {
            node.bytes.resize(end, 0);
        }
        node.bytes[start..end].copy_from_slice(data);
        node.changed = SystemTime::now();
        reply.written(u32::try_from(data.len()).unwrap_or(u32::MAX));
    }

    fn flush(
        &self,
        _request: &Request,
        _number: INodeNo,
        _handle: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        self.shared.pass();
        reply.ok();
    }

    fn fsync(
        &self,
        _request: &Request,
        _number: INodeNo,
        _handle: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        self.shared.pass();
        reply.ok();
    }

    fn rename(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        _flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        match self.content().rename((parent.0, name), (new_parent.0, new_name)) {
            Some(()) => reply.ok(),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn readdir(
        &self,
        _request: &Request,
        number: INodeNo,
        _handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let content = self.content();
        let Some(folder) = content.nodes.get(&number.0) else {
            return reply.error(Errno::ENOENT);
        };
        let skipped = usize::try_from(offset).unwrap_or(usize::MAX);
        for (index, (name, child)) in (1..).zip(&folder.children).skip(skipped) {
            let kind = content.nodes.get(child).map_or(FileType::RegularFile, |node| node.kind);
            if reply.add(INodeNo(*child), index, kind, name) {
                break;
            }
        }
        reply.ok();
    }
}

/// Time to live of cached entries: zero, so that every access is a request.
const TTL: Duration = Duration::ZERO;
