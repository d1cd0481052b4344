//! Division of a model's layers into stages.

use std::collections::HashMap;
use std::ops::Range;

use super::PipelineError;
use super::clock::check_cost;

/// Divides layers into stages whose numbers of layers differ by at most one. The first stages have the additional
/// layers.
///
/// ```
/// assert_eq!(brigade_sharding::pipeline::cut_evenly(10, 4)?, [0..3, 3..6, 6..8, 8..10]);
/// # Ok::<(), brigade_sharding::pipeline::PipelineError>(())
/// ```
///
/// # Errors
/// [`PipelineError::Zero`] for no stages, and [`PipelineError::FewLayers`] for fewer layers than stages.
pub fn cut_evenly(layers: usize, stages: usize) -> Result<Vec<Range<usize>>, PipelineError> {
    check(layers, stages)?;
    let (each, more) = (layers / stages, layers % stages);
    let start = |stage: usize| stage * each + stage.min(more);
    Ok((0..stages).map(|stage| start(stage)..start(stage + 1)).collect())
}

/// Divides layers into stages so that the slowest stage is as fast as possible. `costs` has the time of each layer,
/// measured or estimated, in any unit. Memory use is proportional to the number of layers times the number of stages.
///
/// ```
/// // A large head: the last stage has it alone.
/// let costs = [1.0, 1.0, 1.0, 1.0, 1.0, 4.0];
/// assert_eq!(brigade_sharding::pipeline::cut_by_cost(&costs, 3)?, [0..2, 2..5, 5..6]);
/// # Ok::<(), brigade_sharding::pipeline::PipelineError>(())
/// ```
///
/// # Errors
/// Returns the errors of [`cut_evenly`], and [`PipelineError::Cost`] for a cost that is negative or not finite.
pub fn cut_by_cost(costs: &[f64], stages: usize) -> Result<Vec<Range<usize>>, PipelineError> {
    check(costs.len(), stages)?;
    let mut sums = vec![0.0f64];
    for (layer, &cost) in costs.iter().enumerate() {
        check_cost(cost, || format!("cost of layer {layer}"))?;
        let sum = sums[layer] + cost;
        check_cost(sum, || format!("sum of costs up to layer {layer}"))?;
        sums.push(sum);
    }
    // slowest[end] is the best time of the slowest of the stages so far, if they have the layers up to `end`. It does
    // not decrease with `end`, and the time of one more stage does not increase with its start, so the best start is
    // where the two meet.
    let layers = costs.len();
    let mut slowest = sums.clone();
    let mut starts = vec![vec![0; layers + 1]];
    for stage in 1..stages {
        let mut next = vec![f64::INFINITY; layers + 1];
        let mut start_of = vec![0; layers + 1];
        for end in stage + 1..=layers {
            let (mut low, mut high) = (stage, end - 1);
            while low < high {
                let middle = low.midpoint(high);
                if slowest[middle] >= sums[end] - sums[middle] {
                    high = middle;
                } else {
                    low = middle + 1;
                }
            }
            for start in low.saturating_sub(1).max(stage)..=low {
                let time = slowest[start].max(sums[end] - sums[start]);
                if time < next[end] {
                    (next[end], start_of[end]) = (time, start);
                }
            }
        }
        slowest = next;
        starts.push(start_of);
    }
    let mut end = layers;
    let mut stages: Vec<_> = starts
        .iter()
        .rev()
        .map(|start_of| {
            let stage = start_of[end]..end;
            end = stage.start;
            stage
        })
        .collect();
    stages.reverse();
    Ok(stages)
}

/// Divides layers into stages by name: `starts` are the names of the first layers of all stages but the first.
///
/// ```
/// let layers = ["wte", "h.0", "h.1", "ln_f"];
/// assert_eq!(brigade_sharding::pipeline::cut_at(&layers, &["h.1"])?, [0..2, 2..4]);
/// # Ok::<(), brigade_sharding::pipeline::PipelineError>(())
/// ```
///
/// # Errors
/// [`PipelineError::FewLayers`] if there are no layers, [`PipelineError::DuplicateLayer`] for two layers with one name,
/// [`PipelineError::NoSuchLayer`] for a name that no layer has, and [`PipelineError::CutOrder`] for the name of the
/// first layer, or for names that are not in the order of the layers.
pub fn cut_at(layers: &[&str], starts: &[&str]) -> Result<Vec<Range<usize>>, PipelineError> {
    check(layers.len(), 1)?;
    let mut places = HashMap::with_capacity(layers.len());
    for (place, &layer) in layers.iter().enumerate() {
        if places.insert(layer, place).is_some() {
            return Err(PipelineError::DuplicateLayer { name: layer.to_owned() });
        }
    }
    let mut stages = Vec::with_capacity(starts.len() + 1);
    let mut begin = 0;
    for (at, &name) in starts.iter().enumerate() {
        let Some(&place) = places.get(name) else {
            let mut known: Vec<String> = layers.iter().map(|&layer| layer.to_owned()).collect();
            known.sort_by_cached_key(|layer| strsim::damerau_levenshtein(layer, name));
            return Err(PipelineError::NoSuchLayer { name: name.to_owned(), known });
        };
        if place <= begin {
            let after = at.checked_sub(1).map(|before| starts[before].to_owned());
            return Err(PipelineError::CutOrder { name: name.to_owned(), after });
        }
        stages.push(begin..place);
        begin = place;
    }
    stages.push(begin..layers.len());
    Ok(stages)
}

fn check(layers: usize, stages: usize) -> Result<(), PipelineError> {
    if stages == 0 {
        return Err(PipelineError::Zero { of: "stages" });
    }
    if layers < stages {
        return Err(PipelineError::FewLayers { layers, stages });
    }
    Ok(())
}
