//! Weights that a model has under two names, of which a file holds one.
//!
//! safetensors refuses tensors that share memory, so Accelerate writes one name of a tied weight and
//! drops the others. The checkpoint of the program itself has all of them, and shows which are one.

use super::FileTensor;
use super::Weights;
use crate::error::Error;
use crate::pth::TensorData;

/// Gives a name that `theirs` lacks the tensor of another one which has the same bytes in `ours`; one
/// line for each. Names without such a partner stay missing, for the caller's comparison to report.
///
/// # Errors
/// [`Error::Io`] when the program's checkpoint cannot be read.
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
            // Biases that are still all zero, norms that are all one: equal, and no sign of a tie.
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
