//! Tied weights: a model has them under two names, of which a file holds one.
//!
//! safetensors does not allow tensors that share memory, so Accelerate writes one name of a tied weight and drops the
//! others. The program's own checkpoint has all of them and shows which are the same.

use super::FileTensor;
use super::Weights;
use crate::error::Error;
use crate::pth::TensorData;

/// Fills in tied parameters: a name missing from `theirs` takes the tensor of a name that shares its bytes in `ours`.
/// Returns one message per filled name. Names without such a partner stay missing and are reported by the caller's
/// comparison.
///
/// # Errors
/// Fails with [`Error::Io`] if the program's checkpoint cannot be read.
pub(super) fn fill(
    object: &str,
    ours: &Weights,
    theirs: &mut Weights,
) -> Result<Vec<String>, Error> {
    let mut lines = Vec::new();
    let known = theirs.clone();
    for (name, tensor) in ours {
        if known.iter().any(|(known, _)| known == name) {
            continue;
        }
        let info = tensor.info();
        let mut bytes = None;
        for (partner, value) in &known {
            let Some((_, other)) = ours.iter().find(|(own, _)| own == partner) else { continue };
            if other.info() != info || value.info() != info {
                continue;
            }
            let bytes = match &mut bytes {
                Some(bytes) => bytes,
                none => none.insert(read(name, tensor)?),
            };
            // Biases that are still all zero and norms that are all one are equal without being tied.
            let element = bytes.len() / info.elements().unwrap_or(1).max(1) as usize;
            if bytes.chunks(element.max(1)).all(|value| *value == bytes[..element]) {
                break;
            }
            if read(partner, other)? == *bytes {
                lines.push(format!(
                    "{object}: `{name}` from `{partner}`, which is the same tensor in the program"
                ));
                theirs.push((name.clone(), value.clone()));
                break;
            }
        }
    }
    Ok(lines)
}

fn read(name: &str, tensor: &FileTensor) -> Result<Vec<u8>, Error> {
    tensor.read().map_err(Error::io("read", name))
}
