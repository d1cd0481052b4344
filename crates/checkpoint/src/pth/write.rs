//! Writing of files for `torch.load(weights_only=True)`.

use std::io::{self, Seek, SeekFrom, Write};

use super::Quantizer;
use crate::dtype::{Dtype, TensorInfo, TorchType};
use crate::value::Value;

/// A tensor that can be written to a file: its type and shape, and its bytes in row-major order.
pub trait TensorData {
    /// Returns data type and shape.
    fn info(&self) -> TensorInfo;

    /// Writes the elements in row-major order, little-endian.
    ///
    /// # Errors
    /// Returns errors of the writer, and of reading the elements.
    fn write_to(&self, out: &mut dyn Write) -> io::Result<()>;

    /// Returns scales and zero points of a quantized tensor. Defaults to `None`.
    fn quantizer(&self) -> Option<Quantizer<Self>>
    where
        Self: Sized,
    {
        None
    }
}

/// Returns the reason why a `torch.save` file cannot hold a tensor, or `None` if it can.
pub(crate) fn refusal(tensor: &impl TensorData) -> Option<String> {
    let info = tensor.info();
    match info.dtype.torch() {
        None => {
            Some(format!("PyTorch has no type for {}; a safetensors file can hold it", info.dtype))
        }
        Some(_) if info.dtype == Dtype::F4 && info.shape.last().is_none_or(|row| row % 2 == 1) => {
            Some(format!(
                "PyTorch packs two values of {} into a byte, and its rows are {info}",
                info.dtype
            ))
        }
        Some(_) if info.dtype.is_quantized() && tensor.quantizer().is_none() => Some(format!(
            "the scale of {} is not known; call `dequantize()` on it in PyTorch",
            info.dtype
        )),
        Some(_) => None,
    }
}

/// Writes a value as `torch.save` does: in its default format, pickle protocol 2, with one storage per tensor.
///
/// # Errors
/// Returns errors of the writer. Fails with [`io::ErrorKind::InvalidInput`] for a [`Value::Foreign`], which has no
/// plain Python value, for a tensor that PyTorch cannot hold, and for one that writes more or fewer bytes than its
/// shape requires.
pub fn write<T: TensorData>(out: impl Write + Seek, value: &Value<T>) -> io::Result<()> {
    let mut pickler = Pickler { code: vec![0x80, 2], tensors: Vec::new() };
    pickler.value(value)?;
    pickler.code.push(b'.');

    let mut zip = Zip { out, at: 0, directory: Vec::new(), entries: 0 };
    zip.entry("data.pkl", |out| out.write_all(&pickler.code))?;
    zip.entry("byteorder", |out| out.write_all(b"little"))?;
    for (key, tensor) in pickler.tensors.iter().enumerate() {
        let tensor = match tensor {
            Part::Own(tensor) => tensor,
            Part::Given(tensor) => *tensor,
        };
        let info = tensor.info();
        let expected = info.bytes().ok_or_else(|| invalid(format!("{info} is too large")))?;
        let written = zip.entry(&format!("data/{key}"), |out| tensor.write_to(out))?;
        if written != expected {
            return Err(invalid(format!("a tensor {info} gave {written} bytes, not {expected}")));
        }
    }
    zip.entry("version", |out| out.write_all(b"3\n"))?;
    zip.finish()
}

fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, message)
}

struct Pickler<'v, T> {
    code: Vec<u8>,
    tensors: Vec<Part<'v, T>>,
}

enum Part<'v, T> {
    Given(&'v T),
    /// Scales or zero points, created on the way.
    Own(T),
}

impl<'v, T: TensorData> Pickler<'v, T> {
    fn value(&mut self, value: &'v Value<T>) -> io::Result<()> {
        match value {
            Value::None => self.code.push(b'N'),
            Value::Bool(true) => self.code.push(0x88),
            Value::Bool(false) => self.code.push(0x89),
            Value::Int(number) => self.int(*number),
            Value::Float(number) => {
                self.code.push(b'G');
                self.code.extend(number.to_be_bytes());
            }
            Value::Str(text) => self.text(text)?,
            Value::Bytes(bytes) => {
                // Protocol 2 has no bytes. Python writes this call instead.
                self.code.extend(b"c_codecs\nencode\n");
                let text: String = bytes.iter().map(|&byte| char::from(byte)).collect();
                self.text(&text)?;
                self.text("latin1")?;
                self.code.extend(b"\x86R");
            }
            Value::List(items) => {
                self.code.extend(b"](");
                items.iter().try_for_each(|item| self.value(item))?;
                self.code.push(b'e');
            }
            Value::Tuple(items) => {
                self.code.push(b'(');
                items.iter().try_for_each(|item| self.value(item))?;
                self.code.push(b't');
            }
            Value::Dict(entries) => {
                self.code.extend(b"}(");
                for (key, value) in entries {
                    self.value(key)?;
                    self.value(value)?;
                }
                self.code.push(b'u');
            }
            Value::Tensor(tensor) => self.tensor(tensor)?,
            Value::Foreign(name) => {
                return Err(invalid(format!("an object `{name}` of Python cannot be written")));
            }
        }
        Ok(())
    }

    fn int(&mut self, number: i64) {
        if let Ok(byte) = u8::try_from(number) {
            self.code.extend([b'K', byte]);
        } else if let Ok(number) = i32::try_from(number) {
            self.code.push(b'J');
            self.code.extend(number.to_le_bytes());
        } else {
            self.code.extend([0x8a, 8]);
            self.code.extend(number.to_le_bytes());
        }
    }

    fn text(&mut self, text: &str) -> io::Result<()> {
        let bytes = u32::try_from(text.len()).map_err(|_| invalid("a string over 4 GiB".into()))?;
        self.code.push(b'X');
        self.code.extend(bytes.to_le_bytes());
        self.code.extend(text.as_bytes());
        Ok(())
    }

    fn tensor(&mut self, tensor: &'v T) -> io::Result<()> {
        self.rebuild(tensor)?;
        self.tensors.push(Part::Given(tensor));
        self.quantizer(tensor)
    }

    /// Writes the call that creates the next tensor of the list: `_rebuild_tensor_v2(storage, 0, size, stride, False,
    /// OrderedDict())`. For types without a storage class, writes `_rebuild_tensor_v3`, which has the dtype at the end.
    /// For quantized tensors, writes the arguments of `_rebuild_qtensor` up to the quantizer, which precedes False.
    fn rebuild(&mut self, tensor: &T) -> io::Result<()> {
        if let Some(refusal) = refusal(tensor) {
            return Err(invalid(refusal));
        }
        let mut info = tensor.info();
        if info.dtype == Dtype::F4
            && let Some(row) = info.shape.last_mut()
        {
            *row /= 2;
        }
        let too_large = || invalid(format!("{info} is too large"));
        let elements = info.elements().and_then(|n| i64::try_from(n).ok()).ok_or_else(too_large)?;
        let bytes = tensor.info().bytes().and_then(|n| i64::try_from(n).ok());
        let bytes = bytes.ok_or_else(too_large)?;
        let mut strides = vec![1i64; info.shape.len()];
        for place in (0..info.shape.len().saturating_sub(1)).rev() {
            let size = i64::try_from(info.shape[place + 1]).map_err(|_| too_large())?;
            strides[place] = strides[place + 1].checked_mul(size.max(1)).ok_or_else(too_large)?;
        }
        let (function, storage, count) = match info.dtype.torch() {
            Some(TorchType::Storage(storage, _)) if info.dtype.is_quantized() => {
                // Storages of packed elements count bytes.
                let count = if info.dtype.bits() < 8 { bytes } else { elements };
                ("_rebuild_qtensor", format!("ctorch\n{storage}\n"), count)
            }
            Some(TorchType::Storage(storage, _)) => {
                ("_rebuild_tensor_v2", format!("ctorch\n{storage}\n"), elements)
            }
            _ => ("_rebuild_tensor_v3", "ctorch.storage\nUntypedStorage\n".to_owned(), bytes),
        };
        self.code.extend(format!("ctorch._utils\n{function}\n((").as_bytes());
        self.text("storage")?;
        self.code.extend(storage.as_bytes());
        self.text(&self.tensors.len().to_string())?;
        self.text("cpu")?;
        self.int(count);
        self.code.extend(b"tQ");
        self.int(0);
        self.code.push(b'(');
        for &size in &info.shape {
            self.int(size.cast_signed());
        }
        self.code.extend(b"t(");
        for stride in strides {
            self.int(stride);
        }
        self.code.push(b't');
        if info.dtype.is_quantized() {
            return Ok(());
        }
        self.code.extend(b"\x89ccollections\nOrderedDict\n)R");
        if let Some(TorchType::Untyped(name)) = info.dtype.torch() {
            self.code.extend(format!("ctorch\n{name}\n").as_bytes());
        }
        self.code.extend(b"tR");
        Ok(())
    }

    /// Writes the rest of `_rebuild_qtensor` for a quantized tensor.
    fn quantizer(&mut self, tensor: &T) -> io::Result<()> {
        if !tensor.info().dtype.is_quantized() {
            return Ok(());
        }
        match tensor.quantizer() {
            Some(Quantizer::PerTensor { scale, zero_point }) => {
                self.code.extend(b"(ctorch\nper_tensor_affine\nG");
                self.code.extend(scale.to_be_bytes());
                self.int(zero_point);
            }
            Some(Quantizer::PerChannel { scales, zero_points, axis }) => {
                self.code.extend(b"(ctorch\nper_channel_affine\n");
                for part in [scales, zero_points] {
                    if part.info().dtype.is_quantized() {
                        return Err(invalid("a scale cannot be quantized".into()));
                    }
                    self.rebuild(&part)?;
                    self.tensors.push(Part::Own(part));
                }
                self.int(axis);
            }
            None => return Err(invalid("a quantized tensor without its scale".into())),
        }
        self.code.extend(b"t\x89ccollections\nOrderedDict\n)RtR");
        Ok(())
    }
}

/// A zip archive with uncompressed entries, in zip64 throughout, since no size is known before it is written.
struct Zip<W> {
    out: W,
    at: u64,
    directory: Vec<u8>,
    entries: u64,
}

impl<W: Write + Seek> Zip<W> {
    /// Writes an entry and returns the number of bytes that `write` wrote. Contents begin at multiples of 64, as in
    /// PyTorch, so that a memory map of the file can be used in place.
    fn entry(
        &mut self,
        name: &str,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<u64> {
        let name = format!("{FOLDER}/{name}");
        let start = self.at;
        let fixed = LOCAL_BYTES + name.len() as u64 + WIDE_BYTES + EXTRA_BYTES;
        let padding = (start + fixed).next_multiple_of(ALIGNMENT) - (start + fixed);
        let local = |crc32: u32, bytes: u64| {
            let mut header = Vec::new();
            header.extend(b"PK\x03\x04");
            header.extend(45u16.to_le_bytes());
            // UTF-8, stored, and the earliest date that a zip file can have.
            header.extend([0, 8, 0, 0, 0, 0, 0x21, 0]);
            header.extend(crc32.to_le_bytes());
            header.extend([0xff; 8]);
            header.extend((name.len() as u16).to_le_bytes());
            header.extend(((WIDE_BYTES + EXTRA_BYTES + padding) as u16).to_le_bytes());
            header.extend(name.as_bytes());
            header.extend([1, 0, 16, 0]);
            header.extend(bytes.to_le_bytes());
            header.extend(bytes.to_le_bytes());
            header.extend(b"FB");
            header.extend((padding as u16).to_le_bytes());
            header.resize(header.len() + padding as usize, b'Z');
            header
        };
        let header = local(0, 0);
        self.out.write_all(&header)?;
        let mut counted = Counted { out: &mut self.out, crc: crc32fast::Hasher::new(), bytes: 0 };
        write(&mut counted)?;
        let (crc32, bytes) = (counted.crc.finalize(), counted.bytes);
        let end = start + header.len() as u64 + bytes;
        self.out.seek(SeekFrom::Start(start))?;
        self.out.write_all(&local(crc32, bytes))?;
        self.out.seek(SeekFrom::Start(end))?;
        self.at = end;
        self.entries += 1;

        let directory = &mut self.directory;
        directory.extend(b"PK\x01\x02");
        directory.extend([45, 0, 45, 0, 0, 8, 0, 0, 0, 0, 0x21, 0]);
        directory.extend(crc32.to_le_bytes());
        directory.extend([0xff; 8]);
        directory.extend((name.len() as u16).to_le_bytes());
        directory.extend(28u16.to_le_bytes());
        directory.extend([0; 10]);
        directory.extend([0xff; 4]);
        directory.extend(name.as_bytes());
        directory.extend([1, 0, 24, 0]);
        for number in [bytes, bytes, start] {
            directory.extend(number.to_le_bytes());
        }
        Ok(bytes)
    }

    fn finish(mut self) -> io::Result<()> {
        let (begin, bytes) = (self.at, self.directory.len() as u64);
        let mut end = std::mem::take(&mut self.directory);
        end.extend(b"PK\x06\x06");
        end.extend(44u64.to_le_bytes());
        end.extend([45, 0, 45, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        for number in [self.entries, self.entries, bytes, begin] {
            end.extend(number.to_le_bytes());
        }
        end.extend(b"PK\x06\x07\0\0\0\0");
        end.extend((begin + bytes).to_le_bytes());
        end.extend(1u32.to_le_bytes());
        end.extend(b"PK\x05\x06\0\0\0\0");
        end.extend([0xff; 12]);
        end.extend([0, 0]);
        self.out.write_all(&end)?;
        self.out.flush()
    }
}

struct Counted<W> {
    out: W,
    crc: crc32fast::Hasher,
    bytes: u64,
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.crc.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Name of the folder around all entries. PyTorch takes the name of the file.
const FOLDER: &str = "archive";
const LOCAL_BYTES: u64 = 30;
/// Size of the zip64 block in a local header.
const WIDE_BYTES: u64 = 20;
/// Size of the header of the padding block.
const EXTRA_BYTES: u64 = 4;
const ALIGNMENT: u64 = 64;
