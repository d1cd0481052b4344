//! Pickled lists of strings.

use std::path::Path;

use super::pickle::{Dialect, Node, Pickle, Value};
use crate::Error;
use crate::fault::Fault;

/// Reads a pickled list of strings, as Python's `pickle.dump` writes it in protocols 2 to 5. Also reads fastai's
/// vocabularies, which may be an `L` of fastcore. Nothing in it is executed.
///
/// `path` is the file that the bytes are from, used in errors.
///
/// ```
/// use std::path::Path;
///
/// let pickle = b"\x80\x04\x95\x11\0\0\0\0\0\0\0]\x94(\x8c\x05xxunk\x94\x8c\x01a\x94e.";
/// let strings = brigade_checkpoint::pth::strings(Path::new("vocab.pkl"), pickle)?;
/// assert_eq!(strings, ["xxunk", "a"]);
/// # Ok::<(), brigade_checkpoint::Error>(())
/// ```
///
/// # Errors
/// Fails with [`Error::Damaged`], or with [`Error::Unsupported`] for a pickle of anything else.
pub fn strings<'a>(path: &Path, bytes: &'a [u8]) -> Result<Vec<&'a str>, Error> {
    read(bytes).map_err(|fault| fault.at(path))
}

fn read(bytes: &[u8]) -> Result<Vec<&str>, Fault> {
    let pickle = Pickle::read(bytes, Dialect::Strings)?;
    let not_strings = || Fault::unsupported("its pickle is not a list of strings");
    let Value::Node(index) = pickle.root() else { return Err(not_strings()) };
    let Some(Node::List(items) | Node::Tuple(items)) = pickle.node(index) else {
        return Err(not_strings());
    };
    // Two bytes of the pickle can recall a string, any number of times.
    let mut left = MAX_COPIES * bytes.len() + FREE_BYTES;
    let mut strings = Vec::with_capacity(items.len());
    for item in items {
        let Value::Str(text) = *item else { return Err(not_strings()) };
        left = left.checked_sub(text.len()).ok_or_else(|| {
            Fault::unsupported("its pickle repeats long strings until they are many times its size")
        })?;
        strings.push(text);
    }
    Ok(strings)
}

/// Maximum total size of the strings, as a multiple of the pickle.
const MAX_COPIES: usize = 16;
/// Total size allowed in addition for every pickle.
const FREE_BYTES: usize = 64 << 10;
