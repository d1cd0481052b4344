//! Agreement between ranks: all continue, or all return the error.

use brigade_torch::Result;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::TrainError;
use crate::processes::Processes;

impl Processes {
    /// Returns every rank's value. If a rank has failed, it returns its own error, and the others
    /// [`crate::TrainError::Leader`].
    pub(crate) fn agree<T>(&self, scope: &'static str, mine: Result<T>) -> Result<Vec<T>>
    where
        T: Serialize + DeserializeOwned,
    {
        let Some(group) = self.group() else {
            return Ok(vec![mine?]);
        };
        let (message, mine) = match mine {
            Ok(value) => (Ok(value), None),
            Err(error) => (Err(error.to_string()), Some(error)),
        };
        let all: Vec<Result<T, String>> = group.all_gather_object(&message)?;
        if let Some(error) = mine {
            return Err(error);
        }
        let all = all.into_iter().enumerate();
        all.map(|(rank, answer)| {
            answer.map_err(|reason| TrainError::Leader { scope, rank, reason }.into())
        })
        .collect()
    }
}
