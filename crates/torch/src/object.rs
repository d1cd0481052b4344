//! Collectives on objects that serde can serialise.
//!
//! Objects are sent as MessagePack with field names, so that the reader's type may have more fields than the writer's.
//! The lengths are sent first, then the bytes, padded to the longest.

use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::{Device, Kind, Tensor};

use crate::error::{Error, TorchError};
use crate::group::ProcessGroup;
use crate::memory::{elements, from_vec};

/// Value in place of a length: this rank could not serialise its object.
const FAILED: i64 = -1;

impl ProcessGroup {
    /// Broadcasts rank `root`'s object to every rank. Only the root passes one.
    ///
    /// # Errors
    /// [`crate::TorchError::Object`] on every rank if the root's object cannot be serialised;
    /// [`crate::ErrorKind::InvalidArgument`] if the root passes none; [`crate::TorchError::Collective`] if the
    /// communication fails.
    #[track_caller]
    pub fn broadcast_object<T>(&self, object: Option<&T>, root: usize) -> Result<T, Error>
    where
        T: Serialize + DeserializeOwned,
    {
        const OPERATION: &str = "broadcast_object";
        let here = root == self.rank();
        let packed = if here { object.map(|object| pack(OPERATION, object)) } else { None };
        let length = match &packed {
            Some(Ok(bytes)) => bytes.len() as i64,
            _ => FAILED,
        };
        let mut lengths = Tensor::from_slice(&[length]).f_to_device(self.device())?;
        self.broadcast(&mut lengths, root)?;
        let length = lengths.f_int64_value(&[0])?;
        let bytes = match packed {
            Some(Err(error)) => return Err(error),
            None if here => {
                return Err(Error::invalid_argument(format!(
                    "{OPERATION}: rank {root} must give an object"
                )));
            }
            Some(Ok(bytes)) => Some(bytes),
            None => None,
        };
        if length == FAILED {
            return Err(failed_elsewhere(OPERATION, root));
        }
        let mut buffer = match bytes {
            Some(bytes) => from_vec(bytes, &[length])?.f_to_device(self.device())?,
            None => Tensor::f_zeros([length], (Kind::Uint8, self.device()))?,
        };
        if length > 0 {
            self.broadcast(&mut buffer, root)?;
        }
        unpack(OPERATION, &buffer)
    }

    /// Gathers the objects of all ranks on every rank, in the order of ranks.
    ///
    /// # Errors
    /// [`crate::TorchError::Object`] on every rank if an object cannot be serialised; [`crate::TorchError::Collective`]
    /// if the communication fails.
    ///
    /// ```
    /// # use brigade_torch::{Backend, ProcessGroup, Store};
    /// # let gloo = Backend::Gloo(Default::default());
    /// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
    /// let hosts: Vec<String> = group.all_gather_object(&format!("host of rank {}", group.rank()))?;
    /// assert_eq!(hosts.len(), group.size());
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[track_caller]
    pub fn all_gather_object<T>(&self, object: &T) -> Result<Vec<T>, Error>
    where
        T: Serialize + DeserializeOwned,
    {
        const OPERATION: &str = "all_gather_object";
        let (padded, lengths) = self.announce(OPERATION, pack(OPERATION, object))?;
        let gathered = self.all_gather(&padded)?;
        gathered
            .iter()
            .zip(lengths)
            .map(|(buffer, length)| unpack(OPERATION, &buffer.f_narrow(0, 0, length)?))
            .collect()
    }

    /// Gathers the objects of all ranks on rank `root`, in the order of ranks. `None` on other ranks.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::all_gather_object`].
    #[track_caller]
    pub fn gather_object<T>(&self, object: &T, root: usize) -> Result<Option<Vec<T>>, Error>
    where
        T: Serialize + DeserializeOwned,
    {
        const OPERATION: &str = "gather_object";
        let (padded, lengths) = self.announce(OPERATION, pack(OPERATION, object))?;
        let Some(gathered) = self.gather(&padded, root)? else {
            return Ok(None);
        };
        gathered
            .iter()
            .zip(lengths)
            .map(|(buffer, length)| unpack(OPERATION, &buffer.f_narrow(0, 0, length)?))
            .collect::<Result<_, _>>()
            .map(Some)
    }

    /// Exchanges the lengths and pads this rank's bytes to the longest.
    #[track_caller]
    fn announce(
        &self,
        operation: &'static str,
        packed: Result<Vec<u8>, Error>,
    ) -> Result<(Tensor, Vec<i64>), Error> {
        let length = packed.as_ref().map_or(FAILED, |bytes| bytes.len() as i64);
        let mine = Tensor::from_slice(&[length]).f_to_device(self.device())?;
        let lengths = self.all_gather_flat(&mine)?.f_to_device(Device::Cpu)?;
        let lengths = elements::<i64>(&lengths)?.to_vec();
        let mut bytes = packed?;
        if let Some(rank) = lengths.iter().position(|&length| length == FAILED) {
            return Err(failed_elsewhere(operation, rank));
        }
        let longest = lengths.iter().copied().max().unwrap_or(0);
        bytes.resize(usize::try_from(longest).unwrap_or(0), 0);
        let padded = from_vec(bytes, &[longest])?.f_to_device(self.device())?;
        Ok((padded, lengths))
    }
}

fn pack<T: Serialize>(operation: &'static str, object: &T) -> Result<Vec<u8>, Error> {
    rmp_serde::to_vec_named(object)
        .map_err(|error| TorchError::Object { operation, detail: error.to_string() }.into())
}

fn unpack<T: DeserializeOwned>(operation: &'static str, buffer: &Tensor) -> Result<T, Error> {
    let buffer = buffer.f_to_device(Device::Cpu)?.f_contiguous()?;
    rmp_serde::from_slice(&elements::<u8>(&buffer)?.to_vec())
        .map_err(|error| TorchError::Object { operation, detail: error.to_string() }.into())
}

fn failed_elsewhere(operation: &'static str, rank: usize) -> Error {
    TorchError::Object { operation, detail: format!("rank {rank} could not turn it into bytes") }
        .into()
}
