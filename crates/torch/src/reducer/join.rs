//! Join of ranks with unequal inputs: some ranks have run out of data while others still train.
//!
//! In a join, every forward that records gradients begins with a small all-reduce of which ranks still have data and
//! whose backward will reduce. A rank without data takes part in it and then in the operations of the others' reducers:
//! the buffers' broadcast, and the all-reduce of every bucket, with zeros. This is DistributedDataParallel's join, with
//! one message instead of three.

use tch::{Kind, Tensor};

use super::Reducer;
use crate::bridge::{ffi, own};
use crate::collective::ReduceOp;
use crate::error::{Error, Fault, Thrown, TorchError};
use crate::memory::elements;

/// Options of a join: how gradients are averaged, and what happens at the first rank without data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JoinOptions {
    /// `true` if sums of gradients are divided by the number of all ranks, so that each sample keeps its weight;
    /// `false` if they are divided by the number of ranks that still have data. Defaults to `true`. With a
    /// communication hook they are always divided by the number of all ranks.
    pub divide_by_initial_world_size: bool,
    /// `true` if the first rank without data ends the join with an error on every rank. Defaults to `false`.
    pub throw_on_early_termination: bool,
}

impl Default for JoinOptions {
    fn default() -> Self {
        Self { divide_by_initial_world_size: true, throw_on_early_termination: false }
    }
}

/// Result of [`Reducer::shadow`]: the iteration of the other ranks in which this rank took part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shadowed {
    /// The end of the join: no rank has any data left.
    Ended,
    /// A forward whose backward does not reduce gradients.
    WithoutReduction,
    /// A forward and its backward, in which gradients were reduced.
    Reduced {
        /// `true` if the gradients were finite in the element in which a [`crate::LossFlag`] signals a non-finite loss.
        finite: bool,
    },
}

/// A join in progress.
#[derive(Debug, Clone)]
pub(crate) struct Join {
    options: JoinOptions,
    /// Last active rank at the most recent roll that had one.
    authority: Option<usize>,
}

/// Values that the ranks send at a roll.
const GONE: i64 = 0;
const WITHOUT_REDUCTION: i64 = 1;
const WITH_REDUCTION: i64 = 2;

/// Result of a roll, known to all ranks.
struct Roll {
    /// Ranks that still have data.
    active: usize,
    /// Last of these ranks, whose buffers the others take.
    authority: Option<usize>,
    /// `true` if their backward reduces gradients.
    reduces: bool,
}

impl Reducer {
    /// Begins a join: from now on ranks may have unequal numbers of iterations, if each rank without more data calls
    /// [`Reducer::shadow`] until it returns [`Shadowed::Ended`]. Every rank calls it.
    pub fn begin_join(&self, options: JoinOptions) {
        self.join.replace(Some(Join { options, authority: None }));
    }

    /// Takes part in one iteration of the other ranks, on a rank that has run out of data.
    ///
    /// # Errors
    /// [`crate::TorchError::Collective`] if a peer was lost; [`crate::TorchError::EarlyTermination`] with
    /// [`JoinOptions::throw_on_early_termination`]; [`crate::ErrorKind::InvalidArgument`] if the other ranks differ in
    /// whether they reduce, or outside of a join; the error of a [`crate::GradientHook`].
    pub fn shadow(&self) -> Result<Shadowed, Error> {
        let roll = self.roll(GONE)?;
        if roll.active == 0 {
            return Ok(Shadowed::Ended);
        }
        self.rebuild()?;
        self.send_buffers(roll.authority.unwrap_or(0))?;
        self.forward_sync.set(roll.reduces);
        if !roll.reduces {
            return Ok(Shadowed::WithoutReduction);
        }
        let failed = |error: cxx::Exception| Error::libtorch("join", &error);
        self.group().take_hook_error();
        let finite = ffi::reducer_shadow_backward(self.raw())
            .map_err(|error| self.group().take_hook_error().unwrap_or_else(|| failed(error)))?;
        let options = self.options();
        if options.find_unused_parameters && !options.static_graph {
            let map = ffi::reducer_used_map(self.raw()).map_err(failed)?;
            let mut map = own(map);
            self.group().unchecked().all_reduce(&mut map, ReduceOp::Sum)?;
        }
        ffi::reducer_push_rebuilt(self.raw()).map_err(failed)?;
        Ok(Shadowed::Reduced { finite })
    }

    /// Ends a join on all ranks, after none has data left: all ranks receive the parameters and buffers of a rank that
    /// had data until the end.
    ///
    /// # Errors
    /// [`crate::TorchError::Collective`] if a peer was lost.
    pub fn end_join(&self) -> Result<(), Error> {
        let authority = self.leave_join().and_then(|join| join.authority);
        match authority {
            Some(rank) => self.broadcast_state(rank),
            // No rank had any data.
            None => Ok(()),
        }
    }

    /// Ends a join on this rank alone, after an error, without communication.
    pub fn abandon_join(&self) {
        self.leave_join();
    }

    /// Returns `true` if a join is in progress.
    #[must_use]
    pub fn is_joining(&self) -> bool {
        self.join.borrow().is_some()
    }

    fn leave_join(&self) -> Option<Join> {
        // Cannot fail: it only replaces a number.
        let _ = ffi::reducer_divide_by(self.raw(), 0);
        self.join.replace(None)
    }

    /// Performs the roll of a rank that has data, before its forward. Returns the rank whose buffers all ranks take.
    pub(crate) fn answer_roll(&self, sync: bool) -> Result<usize, Error> {
        let roll = self.roll(if sync { WITH_REDUCTION } else { WITHOUT_REDUCTION })?;
        let divide_by_all = self
            .join
            .borrow()
            .as_ref()
            .is_none_or(|join| join.options.divide_by_initial_world_size);
        let ranks = if divide_by_all { 0 } else { roll.active as i64 };
        ffi::reducer_divide_by(self.raw(), ranks)
            .map_err(|error| Error::libtorch("join", &error))?;
        Ok(roll.authority.unwrap_or(0))
    }

    fn roll(&self, mine: i64) -> Result<Roll, Error> {
        // Not checked in debug mode, because ranks call it from different places of the program.
        let group = self.group().unchecked();
        let mut answers = vec![0i64; group.size()];
        answers[group.rank()] = mine;
        let mut tensor = Tensor::f_from_slice(&answers)?.f_to_device(group.device())?;
        group.all_reduce(&mut tensor, ReduceOp::Sum)?;
        let tensor = tensor.f_to_device(tch::Device::Cpu)?.f_to_kind(Kind::Int64)?;
        let answers = elements::<i64>(&tensor)?.to_vec();
        let those = |answer: i64| {
            answers.iter().enumerate().filter(move |&(_, &a)| a == answer).map(|(r, _)| r)
        };
        let active = answers.len() - those(GONE).count();
        let authority = answers.iter().rposition(|&answer| answer != GONE);
        let mut join = self.join.borrow_mut();
        let Some(join) = join.as_mut() else {
            return Err(Error::invalid_argument(
                "shadow: no join is in progress; call begin_join first",
            ));
        };
        if authority.is_some() {
            join.authority = authority;
        }
        if join.options.throw_on_early_termination
            && let (1.., Some(rank)) = (active, those(GONE).next())
        {
            return Err(TorchError::EarlyTermination { rank }.into());
        }
        if let (Some(with), Some(without)) =
            (those(WITH_REDUCTION).next(), those(WITHOUT_REDUCTION).next())
        {
            return Err(Error::invalid_argument(format!(
                "join: rank {with} reduces its gradients after this forward and rank {without} does not; \
                 end accumulation windows at the same batches on all ranks that have data"
            )));
        }
        Ok(Roll { active, authority, reduces: those(WITH_REDUCTION).next().is_some() })
    }

    /// Rebuilds the buckets, with an error that is readable for the user.
    fn rebuild(&self) -> Result<(), Error> {
        ffi::reducer_rebuild_buckets(self.raw()).map(drop).map_err(|error| {
            let thrown = Thrown::read(&error);
            match thrown.fault() {
                Fault::Invalid => Error::invalid_argument(thrown.detail),
                _ => Error::libtorch("join", &error),
            }
        })
    }
}
