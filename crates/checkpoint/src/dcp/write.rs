//! Writing of folders for `torch.distributed.checkpoint`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

use super::METADATA;
use crate::error::Error;
use crate::file_tensor::FileTensor;
use crate::pth::{
    self, DcpKey, DcpMetadata, DcpPlace, DcpTensor, TensorData, shown, write_dcp_metadata,
};
use crate::region::Region;
use crate::value::Value;

/// Writes a dictionary into a folder, as `dcp.save` does with one process: each tensor and each other value with its
/// keys. Containers with tensors are not split.
pub(crate) fn write_folder(
    folder: &Path,
    entries: &[(Vec<DcpKey>, Value<FileTensor>)],
) -> Result<(), Error> {
    let mut metadata = DcpMetadata {
        tensors: BTreeMap::new(),
        values: BTreeSet::new(),
        places: Vec::with_capacity(entries.len()),
        keys: BTreeMap::new(),
    };
    let path = folder.join(FILE);
    let file = File::create_new(&path).map_err(Error::io("write", &path))?;
    let mut out = BufWriter::with_capacity(1 << 20, &file);
    let mut start = 0;
    for (keys, value) in entries {
        let name = keys.iter().map(ToString::to_string).collect::<Vec<_>>().join(".");
        let refuse = |fact: String| Error::Unsupported {
            path: folder.to_owned(),
            fact: format!("`{}`: {fact}", shown(&name)),
        };
        if let Some(tensor) = value.as_tensor() {
            let info = tensor.info();
            if info.dtype.torch_name().is_none() {
                return Err(refuse(format!(
                    "torch.distributed.checkpoint has no tensors of {}",
                    info.dtype
                )));
            }
        }
        let mut section = Section { out: &mut out, begin: start };
        pth::write(&mut section, value).map_err(Error::io("write", &path))?;
        let end = out.stream_position().map_err(Error::io("write", &path))?;
        let mut place = DcpPlace {
            name: name.clone(),
            offset: None,
            file: FILE.to_owned(),
            start,
            length: end - start,
        };
        start = end;
        match value.as_tensor() {
            Some(tensor) => {
                let info = tensor.info();
                let whole = Region::whole(&info.shape);
                place.offset = Some(whole.offset.clone());
                let (dtype, shape) = (info.dtype, info.shape);
                let tensor = DcpTensor { dtype, shape, chunks: vec![whole] };
                metadata.tensors.insert(name.clone(), tensor);
            }
            None => {
                metadata.values.insert(name.clone());
            }
        }
        metadata.places.push(place);
        if metadata.keys.insert(name.clone(), keys.clone()).is_some() {
            return Err(refuse("two tensors or values have this name".into()));
        }
    }
    out.flush().map_err(Error::io("write", &path))?;
    drop(out);
    file.sync_all().map_err(Error::io("write", &path))?;
    // Written last: its presence marks the folder as complete.
    let path = folder.join(METADATA);
    let bytes = write_dcp_metadata(&metadata)
        .map_err(|fact| Error::Unsupported { path: folder.to_owned(), fact })?;
    let write = || {
        let mut file = File::create_new(&path)?;
        file.write_all(&bytes)?;
        file.sync_all()
    };
    write().map_err(Error::io("write", &path))
}

/// A part of a file, from `begin` on, used like a file of its own.
struct Section<'w, W> {
    out: &'w mut W,
    begin: u64,
}

impl<W: Write> Write for Section<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

impl<W: Seek> Seek for Section<'_, W> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let to = match to {
            SeekFrom::Start(at) => SeekFrom::Start(self.begin.saturating_add(at)),
            to => to,
        };
        Ok(self.out.seek(to)?.saturating_sub(self.begin))
    }
}

/// Name of the first rank's file.
const FILE: &str = "__0_0.distcp";
