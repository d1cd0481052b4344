//! PowerSGD: gradient matrices as products of two low-rank factors.

mod factors;
mod state;

use std::collections::BTreeMap;
use std::mem;

use brigade_torch::{
    Bucket, Error, GradientHook, NamedTensor, ProcessGroup, ReduceOp, Result, Work,
};
use parking_lot::Mutex;
use tch::Tensor;

use factors::{normal, orthogonal};

/// [PowerSGD](https://arxiv.org/abs/1905.13727) gradient compression: a matrix of n by m values is sent as one of n by
/// r and one of m by r. The error of this approximation is added to the next step's gradients.
///
/// The names are those of PyTorch's `PowerSGDState`. Vectors and small matrices are sent uncompressed.
#[derive(Debug, Clone, PartialEq)]
pub struct PowerSgd {
    /// Rank r of the low-rank factors. Defaults to 1.
    pub matrix_approximation_rank: i64,
    /// Number of first steps whose gradients are sent uncompressed (`start_powerSGD_iter`). Defaults to 1000. At least
    /// 2 with error feedback or warm start, as in PyTorch: the very first gradients differ most from the next.
    pub start_iteration: u64,
    /// Minimum compression rate: a matrix is compressed if that makes it more than this many times smaller. Defaults to
    /// 2.
    pub min_compression_rate: f64,
    /// `true` if the compression error is added to the next gradients. Defaults to `true`.
    pub use_error_feedback: bool,
    /// `true` if each step starts from the factor of the step before instead of random numbers. Defaults to `true`.
    pub warm_start: bool,
    /// Value added to divisors in the orthogonalisation. Defaults to 0.
    pub orthogonalization_epsilon: f64,
    /// Seed of the random first factors, the same on all ranks. Defaults to 0.
    pub random_seed: u64,
}

impl Default for PowerSgd {
    fn default() -> Self {
        Self {
            matrix_approximation_rank: 1,
            start_iteration: 1000,
            min_compression_rate: 2.0,
            use_error_feedback: true,
            warm_start: true,
            orthogonalization_epsilon: 0.0,
            random_seed: 0,
        }
    }
}

impl PowerSgd {
    pub(super) fn check(&self) -> Result<()> {
        if self.matrix_approximation_rank < 1 {
            return Err(Error::invalid_argument(format!(
                "PowerSGD's matrix_approximation_rank is {}, but must be at least 1",
                self.matrix_approximation_rank
            )));
        }
        if (self.use_error_feedback || self.warm_start) && self.start_iteration < 2 {
            return Err(Error::invalid_argument(format!(
                "PowerSGD's start_iteration is {}, but must be at least 2 with error feedback or warm \
                 start, as in PyTorch",
                self.start_iteration
            )));
        }
        if !(self.min_compression_rate > 0.0 && self.orthogonalization_epsilon >= 0.0) {
            return Err(Error::invalid_argument(format!(
                "PowerSGD's min_compression_rate is {} and its orthogonalization_epsilon {}; the first \
                 must be above 0, the second not below",
                self.min_compression_rate, self.orthogonalization_epsilon
            )));
        }
        Ok(())
    }

    /// Returns the rank of the approximation of an n by m matrix, or `None` if the matrix is sent uncompressed.
    fn rank(&self, n: i64, m: i64) -> Option<i64> {
        let rank = self.matrix_approximation_rank.min(n).min(m);
        let small = ((n + m) * rank) as f64 * self.min_compression_rate;
        (rank > 0 && small < (n * m) as f64).then_some(rank)
    }
}

/// The hook with its state.
///
/// A bucket takes three calls: its left factors are sent in its own call, its right factors in the next bucket's, and
/// the call of the last bucket waits for all. So messages are in flight while backward computes the gradients of other
/// buckets. PyTorch continues in a callback of the first message instead: with Gloo it runs as soon as the message has
/// ended, so ranks could send in different orders.
pub(super) struct PowerSgdHook {
    options: PowerSgd,
    /// Parameters in the reducer's order.
    parameters: Vec<Parameter>,
    state: Mutex<State>,
}

/// A parameter with the shape of the matrix as which its gradient is compressed.
struct Parameter {
    name: String,
    n: i64,
    m: i64,
}

/// State by parameter, not by position in buckets: buckets are rebuilt after the first backward, including the first
/// one of a resumed run.
#[derive(Default)]
struct State {
    iteration: u64,
    /// Compression errors, `[n, m]`.
    errors: BTreeMap<usize, Tensor>,
    /// Factors `[m, r]`, which the next step starts from.
    factors: BTreeMap<usize, Tensor>,
    /// The buckets of this backward.
    underway: Vec<Underway>,
}

struct Underway {
    matrices: Vec<Matrix>,
    /// Gradients that are sent uncompressed, or the bucket itself, and their message.
    whole: Vec<Tensor>,
    rest: Option<Work<Tensor>>,
    stage: Stage,
}

/// Stage of a bucket: the factors that are being sent, all of a bucket in one message.
enum Stage {
    Whole,
    Left(Work<Tensor>),
    Right { left: Vec<Tensor>, right: Work<Tensor> },
}

/// A gradient that is sent as two factors.
struct Matrix {
    parameter: usize,
    /// The gradient as `[n, m]`: a view.
    values: Tensor,
    /// Uncompressed gradient with the added error, with error feedback.
    wanted: Option<Tensor>,
    /// Factor `[m, r]` of the matrix.
    factor: Tensor,
}

impl GradientHook for PowerSgdHook {
    fn reduce(&self, group: &ProcessGroup, bucket: &mut Bucket) -> Result<()> {
        let mut state = self.state.lock();
        if bucket.index == 0 {
            // Operations of a backward that was interrupted.
            state.underway.clear();
        }
        let done = self.forward(&mut state, group, bucket);
        if done.is_err() {
            state.underway.clear();
        }
        done
    }
}

impl PowerSgdHook {
    pub(super) fn new(options: PowerSgd, trained: &[NamedTensor]) -> Self {
        let parameter = |NamedTensor { name, tensor }: &NamedTensor| {
            let n = tensor.size().first().copied().unwrap_or(0);
            let m = if n > 0 { tensor.numel() as i64 / n } else { 0 };
            Parameter { name: name.clone(), n, m }
        };
        let parameters = trained.iter().map(parameter).collect();
        Self { options, parameters, state: Mutex::default() }
    }

    /// Advances every bucket by one message.
    fn forward(&self, state: &mut State, group: &ProcessGroup, bucket: &Bucket) -> Result<()> {
        let epsilon = self.options.orthogonalization_epsilon;
        let next = if state.iteration < self.options.start_iteration {
            let rest = Some(start_mean(group, &bucket.buffer)?);
            let whole = vec![bucket.buffer.shallow_clone()];
            Underway { matrices: Vec::new(), whole, rest, stage: Stage::Whole }
        } else {
            self.start(state, group, bucket)?
        };
        if let Some(before) = state.underway.last_mut() {
            before.send_right(group, epsilon)?;
        }
        state.underway.push(next);
        if !bucket.is_last {
            return Ok(());
        }
        if let Some(last) = state.underway.last_mut() {
            last.send_right(group, epsilon)?;
        }
        for underway in mem::take(&mut state.underway) {
            self.finish(state, underway)?;
        }
        state.iteration += 1;
        Ok(())
    }

    /// Sends uncompressed gradients and the left factors.
    fn start(&self, state: &State, group: &ProcessGroup, bucket: &Bucket) -> Result<Underway> {
        let (mut matrices, whole) = self.split(state, bucket)?;
        let rest = match whole.as_slice() {
            [] => None,
            whole => Some(start_mean(group, &join(whole)?)?),
        };
        let mut left = Vec::with_capacity(matrices.len());
        for matrix in &mut matrices {
            matrix.factor = orthogonal(&matrix.factor, self.options.orthogonalization_epsilon)?;
            left.push(matrix.values.f_matmul(&matrix.factor)?);
        }
        let stage = match left.as_slice() {
            [] => Stage::Whole,
            // A sum suffices in place of a mean, since the factors are normalised next.
            left => Stage::Left(group.start_all_reduce(join(left)?, ReduceOp::Sum)?),
        };
        Ok(Underway { matrices, whole, rest, stage })
    }

    /// Splits a bucket into gradients to compress, with the errors of earlier steps added, and gradients to send
    /// uncompressed.
    fn split(&self, state: &State, bucket: &Bucket) -> Result<(Vec<Matrix>, Vec<Tensor>)> {
        let mut matrices = Vec::new();
        let mut whole = Vec::new();
        for (gradient, &place) in bucket.gradients.iter().zip(&bucket.parameters) {
            let known = self.parameters.get(place);
            let sizes = known.and_then(|p| Some((p.n, p.m, self.options.rank(p.n, p.m)?)));
            let Some((n, m, rank)) = sizes else {
                whole.push(gradient.shallow_clone());
                continue;
            };
            let mut values = gradient.f_view([n, m])?;
            let wanted = if self.options.use_error_feedback {
                if let Some(error) = state.errors.get(&place) {
                    let _ = values.f_add_(&error.f_to_device(values.device())?)?;
                }
                Some(values.f_detach_copy()?)
            } else {
                None
            };
            let (kind, device) = (gradient.f_kind()?, gradient.device());
            let known = state.factors.get(&place).filter(|q| q.size() == [m, rank]);
            let factor = match known {
                Some(known) => known.f_to_device(device)?.f_to_kind(kind)?,
                None => {
                    let seed = [self.options.random_seed, state.iteration, place as u64];
                    let numbers = Tensor::f_from_slice(&normal(seed, (m * rank) as usize))?;
                    numbers.f_view([m, rank])?.f_to_device(device)?.f_to_kind(kind)?
                }
            };
            matrices.push(Matrix { parameter: place, values, wanted, factor });
        }
        Ok((matrices, whole))
    }

    /// Waits for the messages, and writes the means into the bucket.
    fn finish(&self, state: &mut State, underway: Underway) -> Result<()> {
        let Underway { matrices, whole, rest, stage } = underway;
        if let Stage::Right { left, right } = stage {
            let sizes = matrices.iter().map(|matrix| matrix.factor.size());
            let right = part(&right.wait()?, sizes)?;
            for ((mut matrix, left), right) in matrices.into_iter().zip(&left).zip(right) {
                matrix.values.f_copy_(&left.f_matmul(&right.f_tr()?)?)?;
                if let Some(wanted) = matrix.wanted {
                    state.errors.insert(matrix.parameter, wanted.f_sub(&matrix.values)?);
                }
                if self.options.warm_start {
                    state.factors.insert(matrix.parameter, right);
                }
            }
        }
        if let Some(rest) = rest {
            // Gradients that were sent uncompressed have no compression error. PyTorch keeps their difference from the
            // mean as an error, which cancels out over the ranks up to rounding.
            let means = part(&rest.wait()?, whole.iter().map(Tensor::size))?;
            for (mut gradient, mean) in whole.into_iter().zip(means) {
                gradient.f_copy_(&mean)?;
            }
        }
        Ok(())
    }
}

impl Underway {
    /// Computes the right factors once the left ones have been received, and sends them.
    fn send_right(&mut self, group: &ProcessGroup, epsilon: f64) -> Result<()> {
        self.stage = match mem::replace(&mut self.stage, Stage::Whole) {
            Stage::Left(work) => {
                let sizes = self.matrices.iter().map(|matrix| {
                    let rows = matrix.values.size().first().copied().unwrap_or(0);
                    vec![rows, matrix.factor.size().get(1).copied().unwrap_or(0)]
                });
                let left = part(&work.wait()?, sizes)?;
                let left =
                    left.iter().map(|p| orthogonal(p, epsilon)).collect::<Result<Vec<_>, _>>()?;
                let right = self.matrices.iter().zip(&left);
                let right = right
                    .map(|(matrix, left)| matrix.values.f_tr()?.f_matmul(left))
                    .collect::<Result<Vec<_>, _>>()?;
                Stage::Right { left, right: start_mean(group, &join(&right)?)? }
            }
            stage => stage,
        };
        Ok(())
    }
}

/// Starts the mean over the ranks. Divides before the sum, so that 16-bit floats do not overflow.
fn start_mean(group: &ProcessGroup, values: &Tensor) -> Result<Work<Tensor>> {
    group.start_all_reduce(values.f_div_scalar(group.size() as f64)?, ReduceOp::Sum)
}

/// Concatenates tensors into contiguous memory, so that one message suffices.
fn join(tensors: &[Tensor]) -> Result<Tensor> {
    let flat = tensors.iter().map(|t| t.f_reshape([-1])).collect::<Result<Vec<_>, _>>()?;
    Ok(Tensor::f_cat(&flat, 0)?)
}

/// Splits a flat tensor into views of these sizes, the inverse of [`join`].
fn part(flat: &Tensor, sizes: impl Iterator<Item = Vec<i64>>) -> Result<Vec<Tensor>> {
    let mut start = 0;
    sizes
        .map(|size| {
            let length = size.iter().product();
            let tensor = flat.f_narrow(0, start, length)?.f_view(&size[..])?;
            start += length;
            Ok(tensor)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_compressed() {
        let options = PowerSgd::default();
        assert_eq!(options.rank(64, 1), None, "a vector");
        assert_eq!(options.rank(4, 4), None, "16 values against 8: not more than twice");
        assert_eq!(options.rank(5, 5), Some(1));
        assert_eq!(options.rank(0, 0), None);
        let two = PowerSgd { matrix_approximation_rank: 8, ..options };
        assert_eq!(two.rank(64, 64), Some(8));
        assert_eq!(two.rank(3, 1000), None, "rank 3 saves nothing");
    }
}
