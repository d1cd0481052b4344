//! Large files written directly to the disk (`O_DIRECT`).
//!
//! A flushed file gains nothing from the system's cache: its bytes are copied there, and then the flush waits for the
//! disk. Here a few buffers are written past the cache by separate threads, while the next one is filled. The space is
//! allocated first: on ext4, writing into allocated space was four times as fast as allocating on the way.
//!
//! A file that is not flushed is written the same way: the cache would have to allocate memory for it, which took
//! longer than a fast disk, and would displace the program's own data.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, OFlags, fallocate, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

/// A file of a known size that is being written with direct I/O, which bypasses the page cache.
#[derive(Debug)]
pub(super) struct Direct {
    file: Arc<File>,
    flush: bool,
    full: Option<Sender<Piece>>,
    empty: Receiver<Piece>,
    /// Buffer that is being filled.
    piece: Piece,
    fault: Arc<Mutex<Option<io::Error>>>,
    threads: Vec<JoinHandle<()>>,
}

/// A buffer of bytes for a place in the file.
#[derive(Debug)]
struct Piece {
    memory: Vec<u8>,
    /// Start of the aligned part of the memory.
    begin: usize,
    filled: usize,
    offset: u64,
}

impl Direct {
    /// Creates a file, which must not exist, with space for `bytes`. Returns `None`, without a file, if the file system
    /// or the system does not support direct I/O. `flush` requires that the data is on the disk after
    /// [`finish`](Self::finish).
    pub(super) fn create(path: &Path, bytes: u64, flush: bool) -> io::Result<Option<Self>> {
        let flags = OFlags::DIRECT.bits().cast_signed();
        let file = OpenOptions::new().write(true).create_new(true).custom_flags(flags).open(path);
        let file = match file {
            Ok(file) => file,
            // Linux creates the file before it checks for direct writes.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                return match std::fs::remove_file(path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                    _ => Ok(None),
                };
            }
            Err(error) => return Err(error),
        };
        allocate(&file, bytes)?;
        let file = Arc::new(file);
        let (full, queue) = mpsc::channel();
        let (give_back, empty) = mpsc::channel();
        let queue = Arc::new(Mutex::new(queue));
        let fault = Arc::new(Mutex::new(None));
        let mut threads = Vec::new();
        for _ in 0..THREADS {
            let (file, queue) = (Arc::clone(&file), Arc::clone(&queue));
            let (fault, give_back) = (Arc::clone(&fault), give_back.clone());
            let work = move || write_pieces(&file, &queue, &give_back, &fault);
            if let Ok(thread) = std::thread::Builder::new().name("brigade-disk".into()).spawn(work)
            {
                threads.push(thread);
            }
        }
        if threads.is_empty() {
            drop(file);
            return std::fs::remove_file(path).map(|()| None);
        }
        for _ in 0..threads.len() {
            // Cannot fail: the receiver is in this function.
            let _ = give_back.send(Piece::new());
        }
        let piece = Piece::new();
        Ok(Some(Self { file, flush, full: Some(full), empty, piece, fault, threads }))
    }

    /// Appends bytes to the file.
    pub(super) fn put(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let room = self.piece.room();
            let now = room.len().min(bytes.len());
            room[..now].copy_from_slice(&bytes[..now]);
            self.piece.filled += now;
            bytes = &bytes[now..];
            if self.piece.filled == PIECE_BYTES {
                let next = self.empty.recv().map_err(|_| lost())?;
                let offset = self.piece.offset + PIECE_BYTES as u64;
                let piece = std::mem::replace(&mut self.piece, Piece { offset, ..next });
                self.send(piece)?;
            }
        }
        Ok(())
    }

    /// Completes the file of `bytes`. Waits until the disk has it if it is flushed.
    pub(super) fn finish(mut self, bytes: u64) -> io::Result<()> {
        if self.piece.filled > 0 {
            let mut piece = std::mem::replace(&mut self.piece, Piece::empty());
            // Direct writes need whole blocks. The padding is truncated afterwards.
            let whole = piece.filled.next_multiple_of(ALIGNMENT);
            let padding = whole - piece.filled;
            piece.room()[..padding].fill(0);
            piece.filled = whole;
            self.send(piece)?;
        }
        self.end()?;
        self.file.set_len(bytes)?;
        if self.flush { self.file.sync_all() } else { Ok(()) }
    }

    fn send(&self, piece: Piece) -> io::Result<()> {
        if let Some(error) = self.take_fault() {
            return Err(error);
        }
        self.full.as_ref().and_then(|full| full.send(piece).ok()).ok_or_else(lost)
    }

    /// Waits until all buffers are written.
    fn end(&mut self) -> io::Result<()> {
        drop(self.full.take());
        let mut lost_one = false;
        for thread in self.threads.drain(..) {
            lost_one |= thread.join().is_err();
        }
        match self.take_fault() {
            Some(error) => Err(error),
            None if lost_one => Err(lost()),
            None => Ok(()),
        }
    }

    fn take_fault(&self) -> Option<io::Error> {
        self.fault.lock().take()
    }
}

impl Drop for Direct {
    /// Waits for the threads, so that none writes when the folder is removed.
    fn drop(&mut self) {
        let _ = self.end();
    }
}

impl Piece {
    fn new() -> Self {
        let memory = vec![0; PIECE_BYTES + ALIGNMENT];
        let begin = memory.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Self { memory, begin, filled: 0, offset: 0 }
    }

    fn empty() -> Self {
        Self { memory: Vec::new(), begin: 0, filled: 0, offset: 0 }
    }

    fn room(&mut self) -> &mut [u8] {
        &mut self.memory[self.begin + self.filled..self.begin + PIECE_BYTES]
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[self.begin..self.begin + self.filled]
    }
}

/// Writes buffers until the sender is dropped. After an error, continues to return buffers without writing, because the
/// other side waits for them.
fn write_pieces(
    file: &File,
    queue: &Mutex<Receiver<Piece>>,
    give_back: &Sender<Piece>,
    fault: &Mutex<Option<io::Error>>,
) {
    let mut failed = false;
    loop {
        let next = queue.lock().recv();
        let Ok(mut piece) = next else { return };
        if !failed && let Err(error) = write(file, &piece) {
            failed = true;
            fault.lock().get_or_insert(error);
        }
        piece.filled = 0;
        // The receiver may be gone after the last buffer.
        let _ = give_back.send(piece);
    }
}

fn write(file: &File, piece: &Piece) -> io::Result<()> {
    match file.write_all_at(piece.bytes(), piece.offset) {
        // Some file systems report only now that they cannot write directly, or need larger blocks: use the cache.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            let flags = fcntl_getfl(file)?;
            fcntl_setfl(file, flags - OFlags::DIRECT)?;
            file.write_all_at(piece.bytes(), piece.offset)
        }
        written => written,
    }
}

/// Allocates the space of a file of `bytes`, so that a full disk fails before anything is written. Does nothing on file
/// systems that cannot allocate ahead.
pub(super) fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    match fallocate(file, FallocateFlags::empty(), 0, bytes.max(1)) {
        Err(error @ (Errno::NOSPC | Errno::DQUOT | Errno::FBIG)) => Err(error.into()),
        _ => Ok(()),
    }
}

fn lost() -> io::Error {
    io::Error::other("a thread that wrote the file is gone")
}

/// Block size of today's disks. Addresses, offsets and lengths must be multiples.
const ALIGNMENT: usize = 4096;
/// Number of writing threads: two with 8 MB each keep a disk busy, and more were not faster.
const THREADS: usize = 2;
const PIECE_BYTES: usize = 8 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn content(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|i| (i % 251) as u8).collect()
    }

    #[test]
    fn a_file_has_every_byte_at_its_place() {
        let folder = tempfile::tempdir().unwrap();
        for (number, bytes) in
            [0, 1, ALIGNMENT, PIECE_BYTES, 5 * PIECE_BYTES + 3, 9 * PIECE_BYTES + 5]
                .into_iter()
                .enumerate()
        {
            let path = folder.path().join(number.to_string());
            let flush = number % 2 == 0;
            let made = Direct::create(&path, bytes as u64, flush).unwrap();
            let Some(mut file) = made else { return };
            let expected = content(bytes);
            for part in expected.chunks(PIECE_BYTES / 3 + 1) {
                file.put(part).unwrap();
            }
            file.finish(bytes as u64).unwrap();
            assert!(std::fs::read(&path).unwrap() == expected, "{bytes} bytes");
            assert!(Direct::create(&path, 1, flush).is_err(), "it already exists");
        }
    }

    #[test]
    fn a_fault_of_the_disk_ends_the_writing() {
        // Opened only for reading: every write fails, as on a disk that was removed.
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "").unwrap();
        let file = File::open(&path).unwrap();
        let (full, queue) = mpsc::channel();
        let (give_back, empty) = mpsc::channel();
        let (queue, fault) = (Mutex::new(queue), Mutex::new(None));
        for _ in 0..3 {
            full.send(Piece { filled: ALIGNMENT, ..Piece::new() }).unwrap();
        }
        drop(full);
        write_pieces(&file, &queue, &give_back, &fault);
        assert_eq!(empty.try_iter().count(), 3, "all pieces come back");
        assert!(fault.lock().is_some());
    }

    #[test]
    fn a_refusal_at_the_first_write_goes_through_the_cache() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let flags = OFlags::DIRECT.bits().cast_signed();
        let file = OpenOptions::new().write(true).create_new(true).custom_flags(flags).open(&path);
        let Ok(file) = file else { return };
        // Not a whole block: fails like our blocks on a disk with larger ones.
        let mut piece = Piece::new();
        piece.room()[..777].copy_from_slice(&content(777));
        piece.filled = 777;
        write(&file, &piece).unwrap();
        assert!(std::fs::read(&path).unwrap() == content(777));
        piece.offset = 777;
        write(&file, &piece).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 2 * 777);
    }
}
