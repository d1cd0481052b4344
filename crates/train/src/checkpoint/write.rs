//! Writing of a rank's files.

use std::collections::BTreeMap;
use std::path::Path;

use brigade_checkpoint::FileName;
use brigade_checkpoint::layout::{ChecksumWriter, FileFacts};
use brigade_checkpoint::safetensors::layout;
use brigade_torch::{Result, TorchError, bytes};
use parking_lot::Mutex;
use tch::Device;

use super::buffer_pool::BufferPool;
use super::capture::{Contents, FilePlan};

/// Writes the files into `folder`, two at a time, and returns their sizes and checksums. Copied tensors are returned to
/// `copies`.
pub(super) fn write_files(
    folder: &Path,
    files: Vec<FilePlan>,
    flush: bool,
    copies: Option<&BufferPool>,
) -> Result<BTreeMap<FileName, FileFacts>> {
    let threads = files.len().min(THREADS);
    let (queue, written) = (Mutex::new(files), Mutex::new(BTreeMap::new()));
    let work = || -> Result<()> {
        loop {
            let Some(file) = queue.lock().pop() else {
                return Ok(());
            };
            let outcome = write_file(folder, &file, flush);
            if let (Some(copies), Contents::Tensors(tensors)) = (copies, file.contents) {
                copies.keep(tensors.into_iter().map(|named| named.tensor));
            }
            let facts = match outcome {
                Ok(facts) => facts,
                Err(error) => {
                    // The other thread must not begin another file.
                    queue.lock().clear();
                    return Err(error);
                }
            };
            written.lock().insert(file.name, facts);
        }
    };
    std::thread::scope(|scope| {
        let helper = (threads > 1).then(|| std::thread::Builder::new().spawn_scoped(scope, work));
        let mine = work();
        // If the second thread could not start, its work remains for this one.
        let helped = match helper.and_then(|helper| helper.ok()).map(|helper| helper.join()) {
            Some(Ok(helped)) => helped,
            Some(Err(_)) => {
                Err(TorchError::Internal("the thread that wrote a file panicked".into()).into())
            }
            None => Ok(()),
        };
        mine.and(helped)
    })?;
    Ok(written.into_inner())
}

fn write_file(folder: &Path, file: &FilePlan, flush: bool) -> Result<FileFacts> {
    let path = folder.join(&file.name);
    let mut out;
    match &file.contents {
        Contents::Text(text) => {
            out = ChecksumWriter::create(&path)?;
            out.put(text)?;
        }
        Contents::Tensors(tensors) => {
            let infos: Vec<_> =
                tensors.iter().map(|named| (named.name.as_str(), named.info.clone())).collect();
            let layout = layout(&path, &infos)?;
            out = ChecksumWriter::create_sized(&path, layout.bytes, flush)?;
            out.put(&layout.header)?;
            for place in layout.order {
                // In memory order; a tensor with another layout is made contiguous first.
                let plain = tensors[place].tensor.f_to_device(Device::Cpu)?.f_contiguous()?;
                bytes(&plain)?.try_chunks(CHUNK_BYTES, |chunk| out.put(chunk))?;
            }
        }
    }
    Ok(out.finish(flush)?)
}

/// Size of the pieces in bytes, small enough for a processor's cache.
const CHUNK_BYTES: usize = 256 << 10;

/// Number of writing threads: one copies into the system's cache while another waits for the disk.
const THREADS: usize = 2;
