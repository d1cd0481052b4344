//! Writing of the pickle of a `.metadata` file.

use std::collections::HashMap;

use super::{DcpKey, DcpMetadata, DcpPlace, DcpTensor};

/// Encodes metadata for `torch.distributed.checkpoint`: the contents of a `.metadata` file.
///
/// # Errors
/// Returns a message for a data type that PyTorch lacks or packs into bytes, and for strings over 4 GiB.
pub fn write_dcp_metadata(metadata: &DcpMetadata) -> Result<Vec<u8>, String> {
    let mut pickler = Pickler { code: vec![0x80, 2], memo: HashMap::new() };
    pickler.metadata(metadata)?;
    pickler.code.push(b'.');
    Ok(pickler.code)
}

struct Pickler<'m> {
    code: Vec<u8>,
    /// Strings and classes written so far, with their memo indices.
    memo: HashMap<Known<'m>, u32>,
}

#[derive(PartialEq, Eq, Hash)]
enum Known<'m> {
    Text(&'m str),
    Global(&'static str, &'static str),
}

impl<'m> Pickler<'m> {
    fn metadata(&mut self, metadata: &'m DcpMetadata) -> Result<(), String> {
        let DcpMetadata { tensors, values, places, keys } = metadata;
        self.object(METADATA, "Metadata");
        self.code.extend(b"}(");
        self.text("state_dict_metadata")?;
        self.code.extend(b"}(");
        for (name, tensor) in tensors {
            self.text(name)?;
            self.tensor(tensor)?;
        }
        for name in values {
            self.text(name)?;
            self.object(METADATA, "BytesStorageMetadata");
        }
        self.code.push(b'u');
        self.text("planner_data")?;
        self.code.extend(b"}(");
        for (name, path) in keys {
            self.text(name)?;
            self.code.push(b'(');
            for key in path {
                match key {
                    DcpKey::Name(name) => self.text(name)?,
                    DcpKey::Index(index) => self.int(*index),
                }
            }
            self.code.push(b't');
        }
        self.code.push(b'u');
        self.text("storage_data")?;
        self.code.extend(b"}(");
        // An index is the number of the part within its tensor.
        let mut parts: HashMap<&str, u64> = HashMap::new();
        for place in places {
            let part = place.offset.is_some().then(|| parts.entry(&place.name).or_default());
            self.place(place, part.as_deref().copied())?;
            if let Some(part) = part {
                *part += 1;
            }
        }
        self.code.push(b'u');
        self.text("storage_meta")?;
        self.code.push(b'N');
        self.text("version")?;
        self.text("1.0.0")?;
        self.code.extend(b"ub");
        Ok(())
    }

    fn tensor(&mut self, tensor: &'m DcpTensor) -> Result<(), String> {
        let dtype = tensor
            .dtype
            .torch_name()
            .ok_or_else(|| format!("PyTorch's checkpoints have no tensors of {}", tensor.dtype))?;
        self.object(METADATA, "TensorStorageMetadata");
        self.code.extend(b"}(");
        self.text("properties")?;
        self.object(METADATA, "TensorProperties");
        self.code.push(b'(');
        self.global("torch", dtype);
        self.global("torch.serialization", "_get_layout");
        self.text("torch.strided")?;
        // Without gradient and without pinned memory.
        self.code.extend(b"\x85R\x89");
        self.global(METADATA, "_MEM_FORMAT_ENCODING");
        self.int(0);
        self.code.extend(b"\x85R\x89tb");
        self.text("size")?;
        self.size(&tensor.shape);
        self.text("chunks")?;
        self.code.extend(b"](");
        for chunk in &tensor.chunks {
            self.object(METADATA, "ChunkStorageMetadata");
            self.code.extend(b"}(");
            self.text("offsets")?;
            self.size(&chunk.offset);
            self.text("sizes")?;
            self.size(&chunk.shape);
            self.code.extend(b"ub");
        }
        self.code.extend(b"eub");
        Ok(())
    }

    fn place(&mut self, place: &'m DcpPlace, part: Option<u64>) -> Result<(), String> {
        self.object(METADATA, "MetadataIndex");
        self.code.extend(b"}(");
        self.text("fqn")?;
        self.text(&place.name)?;
        if let Some(offset) = &place.offset {
            self.text("offset")?;
            self.size(offset);
        }
        self.text("index")?;
        match part {
            Some(part) => self.int(part),
            None => self.code.push(b'N'),
        }
        self.code.extend(b"ub");
        self.object("torch.distributed.checkpoint.filesystem", "_StorageInfo");
        self.code.extend(b"}(");
        self.text("relative_path")?;
        self.text(&place.file)?;
        self.text("offset")?;
        self.int(place.start);
        self.text("length")?;
        self.int(place.length);
        self.code.extend(b"ub");
        Ok(())
    }

    /// Writes an object of a class, without attributes.
    fn object(&mut self, module: &'static str, class: &'static str) {
        self.global(module, class);
        self.code.extend(b")\x81");
    }

    fn size(&mut self, size: &[u64]) {
        self.global("torch", "Size");
        self.code.push(b'(');
        for &number in size {
            self.int(number);
        }
        self.code.extend(b"t\x85R");
    }

    fn global(&mut self, module: &'static str, name: &'static str) {
        if self.recalled(&Known::Global(module, name)) {
            return;
        }
        self.code.extend(format!("c{module}\n{name}\n").as_bytes());
        self.remember(Known::Global(module, name));
    }

    fn text(&mut self, text: &'m str) -> Result<(), String> {
        if self.recalled(&Known::Text(text)) {
            return Ok(());
        }
        let bytes = u32::try_from(text.len()).map_err(|_| "a name is over 4 GiB".to_owned())?;
        self.code.push(b'X');
        self.code.extend(bytes.to_le_bytes());
        self.code.extend(text.as_bytes());
        self.remember(Known::Text(text));
        Ok(())
    }

    fn recalled(&mut self, known: &Known<'m>) -> bool {
        let Some(number) = self.memo.get(known) else { return false };
        self.code.push(b'j');
        self.code.extend(number.to_le_bytes());
        true
    }

    fn remember(&mut self, known: Known<'m>) {
        let Ok(number) = u32::try_from(self.memo.len()) else { return };
        self.code.push(b'r');
        self.code.extend(number.to_le_bytes());
        self.memo.insert(known, number);
    }

    fn int(&mut self, number: u64) {
        if let Ok(byte) = u8::try_from(number) {
            self.code.extend([b'K', byte]);
        } else if let Ok(number) = i32::try_from(number) {
            self.code.push(b'J');
            self.code.extend(number.to_le_bytes());
        } else {
            // Signed: one more byte keeps the largest numbers positive.
            self.code.extend([0x8a, if number.leading_zeros() == 0 { 9 } else { 8 }]);
            self.code.extend(number.to_le_bytes());
            if number.leading_zeros() == 0 {
                self.code.push(0);
            }
        }
    }
}

const METADATA: &str = "torch.distributed.checkpoint.metadata";

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::super::dcp_metadata;
    use super::*;
    use crate::dtype::Dtype;

    fn again(bytes: &[u8]) {
        let mut metadata = dcp_metadata(Path::new(".metadata"), bytes).unwrap();
        metadata.places[0].length = 1 << 40;
        let written = write_dcp_metadata(&metadata).unwrap();
        assert_eq!(dcp_metadata(Path::new(".metadata"), &written).unwrap(), metadata);
    }

    #[test]
    fn what_is_written_is_read_back() {
        again(include_bytes!("../../../tests/fixtures/dcp/torch_2_13/.metadata"));
        again(include_bytes!("../../../tests/fixtures/dcp/fsdp/pytorch_model_fsdp_0/.metadata"));
        again(include_bytes!("../../../tests/fixtures/dcp/fsdp/optimizer_0/.metadata"));
    }

    #[test]
    fn types_without_a_name_are_refused() {
        let tensor = |dtype| DcpTensor { dtype, shape: vec![2], chunks: Vec::new() };
        let metadata = |dtype| DcpMetadata {
            tensors: [("w".to_owned(), tensor(dtype))].into(),
            values: BTreeSet::new(),
            places: Vec::new(),
            keys: [("w".to_owned(), vec![DcpKey::Name("w".to_owned())])].into(),
        };
        for dtype in [Dtype::F32, Dtype::C64, Dtype::F8E4M3, Dtype::U16, Dtype::Bool] {
            assert!(write_dcp_metadata(&metadata(dtype)).is_ok(), "{dtype}");
        }
        for dtype in [Dtype::F4, Dtype::F6E2M3, Dtype::QInt8] {
            let error = write_dcp_metadata(&metadata(dtype)).unwrap_err();
            assert_eq!(error, format!("PyTorch's checkpoints have no tensors of {dtype}"));
        }
    }
}
