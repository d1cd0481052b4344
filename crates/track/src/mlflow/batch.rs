//! Requests to MLflow, in batches within its limits.

use std::collections::VecDeque;

use serde_json::{Value as Json, json};

use crate::run::since_1970;
use crate::value::float_as_json;
use crate::{Stamp, Value};

/// One value or file to send.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Entity {
    Metric(Json),
    Parameter(Json),
    Tag(Json),
    Artifact { path: String, bytes: Vec<u8> },
}

/// Body of a `log-batch` request, without the run's ID.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Batch {
    pub(super) metrics: Vec<Json>,
    pub(super) params: Vec<Json>,
    pub(super) tags: Vec<Json>,
}

impl Entity {
    pub(super) fn metric(name: &str, value: f64, at: Stamp) -> Self {
        Self::Metric(json!({
            "key": key(name),
            "value": float_as_json(value),
            "timestamp": milliseconds(at),
            "step": at.step.unwrap_or(0).min(i64::MAX as u64),
        }))
    }

    pub(super) fn parameter(name: &str, value: &Value) -> Self {
        Self::Parameter(
            json!({ "key": key(name), "value": shortened(&value.text(), MAX_PARAMETER_LEN) }),
        )
    }

    pub(super) fn tag(name: &str, value: &str) -> Self {
        Self::Tag(json!({ "key": key(name), "value": shortened(value, MAX_TAG_LEN) }))
    }

    /// Approximate number of bytes in memory and in a request.
    pub(super) fn weight(&self) -> usize {
        match self {
            Self::Artifact { path, bytes } => path.len() + bytes.len(),
            Self::Metric(it) | Self::Parameter(it) | Self::Tag(it) => {
                let text = |name| it[name].as_str().map_or(24, str::len);
                // A character may need up to six bytes in JSON; most need one.
                80 + text("key") + 2 * text("value")
            }
        }
    }
}

impl Batch {
    pub(super) fn len(&self) -> usize {
        self.metrics.len() + self.params.len() + self.tags.len()
    }
}

/// Takes the first batch of the queue: up to an artifact, or to one of MLflow's limits. The batch is empty when an
/// artifact is first, or the queue is empty. Also returns the weight of the batch.
pub(super) fn next(waiting: &mut VecDeque<Entity>) -> (Batch, usize) {
    let mut batch = Batch::default();
    let mut taken = 0;
    while let Some(entity) = waiting.front() {
        let weight = taken + entity.weight();
        let short = batch.len() < MOST && (weight <= LARGEST || batch.len() == 0);
        let list = match entity {
            Entity::Metric(_) if short => &mut batch.metrics,
            Entity::Parameter(_) if short && batch.params.len() < MAX_TEXTS => &mut batch.params,
            Entity::Tag(_) if short && batch.tags.len() < MAX_TEXTS => &mut batch.tags,
            _ => break,
        };
        if let Some(Entity::Metric(it) | Entity::Parameter(it) | Entity::Tag(it)) =
            waiting.pop_front()
        {
            list.push(it);
            taken = weight;
        }
    }
    (batch, taken)
}

/// Splits a list without artifacts into batches.
pub(super) fn cut(waiting: &mut VecDeque<Entity>) -> Vec<Batch> {
    std::iter::from_fn(|| Some(next(waiting).0).filter(|batch| batch.len() > 0)).collect()
}

/// Turns a name into a key that MLflow accepts.
pub(super) fn key(name: &str) -> String {
    let allowed = |it: char| it.is_alphanumeric() || "_-. :/".contains(it);
    let name: String = name.chars().map(|it| if allowed(it) { it } else { '_' }).collect();
    // MLflow uses the key as a path, which must not lead outside of the run.
    let parts = name.split('/').filter(|part| !matches!(*part, "" | "." | ".."));
    let name = shortened(&parts.collect::<Vec<_>>().join("/"), MAX_KEY_LEN).to_owned();
    if name.is_empty() { "_".to_owned() } else { name }
}

pub(super) fn milliseconds(at: Stamp) -> u64 {
    u64::try_from(since_1970(at.time).as_millis()).unwrap_or(u64::MAX)
}

fn shortened(text: &str, characters: usize) -> &str {
    text.char_indices().nth(characters).map_or(text, |(end, _)| &text[..end])
}

/// MLflow's limits per request: entities, parameters or tags, and bytes (with a margin).
const MOST: usize = 1000;
const MAX_TEXTS: usize = 100;
const LARGEST: usize = 800_000;
const MAX_KEY_LEN: usize = 250;
const MAX_PARAMETER_LEN: usize = 6000;
const MAX_TAG_LEN: usize = 5000;

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(count: usize) -> VecDeque<Entity> {
        (0..count).map(|it| Entity::metric("m", it as f64, Stamp::step(it as u64))).collect()
    }

    #[test]
    fn batches_keep_to_the_limits_and_lose_nothing() {
        let sizes = |mut waiting| cut(&mut waiting).iter().map(Batch::len).collect::<Vec<_>>();
        assert_eq!(sizes(metrics(2500)), [1000, 1000, 500]);
        assert_eq!(sizes(VecDeque::new()), [0usize; 0]);
        let words = (0..250).map(|it| Entity::tag("t", &it.to_string())).collect();
        assert_eq!(sizes(words), [100, 100, 50]);
        let long = (0..400).map(|_| Entity::parameter("p", &"x".repeat(9000).into())).collect();
        let sizes = sizes(long);
        assert!(sizes.iter().all(|&size| size <= 67) && sizes.iter().sum::<usize>() == 400);
    }

    #[test]
    fn an_artifact_waits_for_its_turn() {
        let mut waiting = metrics(2);
        waiting.push_back(Entity::Artifact { path: "a".into(), bytes: vec![1] });
        waiting.extend(metrics(1));
        let both: usize = waiting.iter().take(2).map(Entity::weight).sum();
        let (batch, weight) = next(&mut waiting);
        assert_eq!((batch.len(), weight), (2, both));
        let (batch, weight) = next(&mut waiting);
        assert_eq!((batch.len(), weight, waiting.len()), (0, 0, 2));
    }

    #[test]
    fn names_are_those_that_mlflow_takes() {
        for (name, expected) in [
            ("loss", "loss"),
            ("train/loss (mean)", "train/loss _mean_"),
            ("../x//y/.", "x/y"),
            ("", "_"),
            ("päivä=1", "päivä_1"),
        ] {
            assert_eq!(key(name), expected);
        }
        assert_eq!(key(&"é".repeat(300)).chars().count(), 250);
        let metric = Entity::metric("x", f64::NEG_INFINITY, Stamp::step(u64::MAX));
        let Entity::Metric(json) = metric else { panic!("{metric:?}") };
        assert_eq!((&json["value"], &json["step"]), (&"-Infinity".into(), &i64::MAX.into()));
    }
}
