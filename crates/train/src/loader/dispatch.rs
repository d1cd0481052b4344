//! Rank 0 reads the data and sends every rank its part.

use std::panic::Location;

use brigade_data::{Batch, Epoch};
use brigade_sampling::Round;
use brigade_torch::{Error, ErrorKind, ProcessGroup, Result, TensorTree, TreeSpec};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

/// Message that rank 0 sends before a round.
#[derive(Debug, Serialize, Deserialize)]
enum Header {
    Batch {
        spec: TreeSpec,
        tensors: Vec<(Vec<i64>, i32)>,
        index: usize,
        last: bool,
        rows: Vec<usize>,
        valid: Vec<usize>,
    },
    Failed {
        reason: String,
    },
    End,
}

/// An epoch that rank 0 reads.
pub(crate) struct Dispatch<T> {
    group: ProcessGroup,
    /// The epoch's data, on rank 0 only.
    epoch: Option<Epoch<T>>,
    ended: bool,
}

impl<T: TensorTree<Owned = T>> Dispatch<T> {
    pub(crate) fn new(group: &ProcessGroup, epoch: Option<Epoch<T>>) -> Self {
        // Rank 0 and the other ranks send from different lines of this file.
        let group = group.at(Location::caller());
        Self { group, epoch, ended: false }
    }

    /// Returns the number of remaining batches, if this rank can determine it.
    pub(crate) fn remaining(&self) -> Option<usize> {
        self.epoch.as_ref().and_then(Epoch::remaining)
    }

    /// Returns the next batch. A collective: every rank calls it equally often.
    pub(crate) fn next(&mut self) -> Option<Result<Batch<T>>> {
        if self.ended {
            return None;
        }
        match self.round() {
            // After a batch that cannot be read the ranks are still in step; after the loss of a peer they are not.
            Ok(Some(read)) => Some(read),
            Ok(None) => {
                self.ended = true;
                None
            }
            Err(error) => {
                self.ended = true;
                Some(Err(error))
            }
        }
    }

    /// Runs a round. The inner error is that of a batch that could not be read, the outer one that of the
    /// communication.
    fn round(&mut self) -> Result<Option<Result<Batch<T>>>> {
        let Some(epoch) = &mut self.epoch else {
            return self.receive();
        };
        let read = epoch.next();
        let header = match &read {
            None => Header::End,
            Some(Err(error)) => Header::Failed { reason: error.to_string() },
            Some(Ok(batch)) => describe(batch)?,
        };
        self.group.broadcast_object(Some(&header), 0)?;
        let batch = match read {
            Some(Ok(batch)) => batch,
            unread => return Ok(unread),
        };
        let mut tensors = Vec::new();
        batch.visit(&mut |tensor| tensors.push(tensor.shallow_clone()));
        for tensor in tensors {
            let mut tensor = tensor.f_contiguous()?.f_to_device(self.group.device())?;
            self.group.broadcast(&mut tensor, 0)?;
        }
        Ok(self.own_part(&batch)?.map(Ok))
    }

    fn receive(&mut self) -> Result<Option<Result<Batch<T>>>> {
        match self.group.broadcast_object::<Header>(None, 0)? {
            Header::End => Ok(None),
            Header::Failed { reason } => {
                let reason = format!("rank 0, which reads for all: {reason}");
                Ok(Some(Err(Error::new(ErrorKind::Data, reason))))
            }
            Header::Batch { spec, tensors, index, last, rows, valid } => {
                let mut received = Vec::with_capacity(tensors.len());
                for (shape, kind) in tensors {
                    let kind = kind_from_number(kind)?;
                    let mut tensor = Tensor::f_empty(shape, (kind, self.group.device()))?;
                    self.group.broadcast(&mut tensor, 0)?;
                    received.push(tensor.f_to_device(Device::Cpu)?);
                }
                let data = T::from_spec(&spec, &mut received.into_iter()).map_err(|error| {
                    Error::invalid_argument(format!("rank 0 sent data of another type: {error}"))
                })?;
                let round = Round { rows, valid };
                let batch = Batch::from_parts(data, index, last, None, round);
                Ok(self.own_part(&batch)?.map(Ok))
            }
        }
    }

    fn own_part(&self, all: &Batch<T>) -> Result<Option<Batch<T>>> {
        let rank = self.group.rank();
        let part = all.part(rank)?;
        let (index, last, round) = (all.index(), all.is_last(), all.round().clone());
        Ok(Some(Batch::from_parts(part, index, last, Some(rank), round)))
    }
}

fn describe<T: TensorTree>(batch: &Batch<T>) -> Result<Header> {
    let mut tensors = Vec::new();
    let mut failed = None;
    batch.visit(&mut |tensor| match tensor.f_kind().map_err(Error::from).and_then(kind_number) {
        Ok(kind) => tensors.push((tensor.size(), kind)),
        Err(error) => failed = Some(error),
    });
    if let Some(error) = failed {
        return Err(error);
    }
    Ok(Header::Batch {
        spec: batch.spec(),
        tensors,
        index: batch.index(),
        last: batch.is_last(),
        rows: batch.round().rows.clone(),
        valid: batch.round().valid.clone(),
    })
}

/// Types that can be sent, by c10's numbers.
const KINDS: [(i32, Kind); 13] = [
    (0, Kind::Uint8),
    (1, Kind::Int8),
    (2, Kind::Int16),
    (3, Kind::Int),
    (4, Kind::Int64),
    (5, Kind::Half),
    (6, Kind::Float),
    (7, Kind::Double),
    (8, Kind::ComplexHalf),
    (9, Kind::ComplexFloat),
    (10, Kind::ComplexDouble),
    (11, Kind::Bool),
    (15, Kind::BFloat16),
];

fn kind_number(kind: Kind) -> Result<i32> {
    KINDS.iter().find(|(_, known)| *known == kind).map(|(number, _)| *number).ok_or_else(|| {
        Error::invalid_argument(format!("tensors of {kind:?} cannot be sent to other ranks"))
    })
}

fn kind_from_number(number: i32) -> Result<Kind> {
    KINDS.iter().find(|(known, _)| *known == number).map(|(_, kind)| *kind).ok_or_else(|| {
        Error::invalid_argument(format!("rank 0 sent a tensor of unknown kind {number}"))
    })
}
