//! PowerSGD: matrices of gradients as products of two thin ones.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use brigade_models::StateDict;
use brigade_torch::{Bucket, GradientHook, Kind, ProcessGroup, ReduceOp, Tensor};

use super::average;
use crate::error::{Error, Result};

/// [PowerSGD](https://arxiv.org/abs/1905.13727): a matrix of n by m values goes over the wire as one of n
/// by r and one of m by r. What that loses is added to the next step's gradients.
///
/// The names are those of PyTorch's `PowerSGDState`. Vectors and small matrices go whole.
#[derive(Debug, Clone, PartialEq)]
pub struct PowerSgd {
    /// r; 1.
    pub matrix_approximation_rank: i64,
    /// Steps that are reduced whole first (`start_powerSGD_iter`); 1000. At least 2 with error feedback
    /// or warm start: the buckets are put together anew after the first step.
    pub start_iteration: u64,
    /// A matrix is compressed when that makes it more than this many times smaller; 2.
    pub min_compression_rate: f64,
    /// Adds what compression lost to the next gradients; true.
    pub use_error_feedback: bool,
    /// Begins with the last step's factor instead of random numbers; true.
    pub warm_start: bool,
    /// Added to lengths that are divided by; 0.
    pub orthogonalization_epsilon: f64,
    /// Of the random first factors, the same on all ranks; 0.
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
            return Err(Error::Misuse(format!(
                "PowerSGD's matrix_approximation_rank is {}, but must be at least 1",
                self.matrix_approximation_rank
            )));
        }
        if (self.use_error_feedback || self.warm_start) && self.start_iteration < 2 {
            return Err(Error::Misuse(format!(
                "PowerSGD's start_iteration is {}, but must be at least 2 with error feedback or warm \
                 start: the buckets change after the first step",
                self.start_iteration
            )));
        }
        if !(self.min_compression_rate > 0.0 && self.orthogonalization_epsilon >= 0.0) {
            return Err(Error::Misuse(format!(
                "PowerSGD's min_compression_rate is {} and its orthogonalization_epsilon {}; the first \
                 must be above 0, the second not below",
                self.min_compression_rate, self.orthogonalization_epsilon
            )));
        }
        Ok(())
    }

    /// The rank of the approximation of an n by m matrix, or `None` when it goes whole.
    fn rank(&self, n: i64, m: i64) -> Option<i64> {
        let rank = self.matrix_approximation_rank.min(n).min(m);
        let small = ((n + m) * rank) as f64 * self.min_compression_rate;
        (rank > 0 && small < (n * m) as f64).then_some(rank)
    }
}

/// The hook with its state.
pub(crate) struct PowerSgdHook {
    options: PowerSgd,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    iteration: u64,
    /// By bucket: what was lost, in the bucket's layout.
    errors: BTreeMap<usize, Tensor>,
    /// By bucket and place of the gradient in it: the m by r factor.
    factors: BTreeMap<(usize, usize), Tensor>,
}

impl GradientHook for PowerSgdHook {
    fn reduce(&self, group: &ProcessGroup, bucket: &mut Bucket) -> brigade_torch::Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.iteration < self.options.start_iteration {
            average(group, &mut bucket.buffer)?;
        } else {
            self.compress(&mut state, group, bucket)?;
        }
        if bucket.is_last {
            state.iteration += 1;
        }
        Ok(())
    }
}

/// A gradient that goes as two factors.
struct Matrix {
    /// In the bucket.
    place: usize,
    /// The gradient as `[n, m]`: a view.
    values: Tensor,
    /// `[m, r]`.
    factor: Tensor,
}

impl PowerSgdHook {
    pub(super) fn new(options: PowerSgd) -> Self {
        Self { options, state: Mutex::default() }
    }

    fn compress(
        &self,
        state: &mut State,
        group: &ProcessGroup,
        bucket: &mut Bucket,
    ) -> brigade_torch::Result<()> {
        let epsilon = self.options.orthogonalization_epsilon;
        let feedback = self.options.use_error_feedback;
        if let Some(error) = state.errors.get(&bucket.index).filter(|_| feedback) {
            let _ = bucket.buffer.f_add_(error)?;
        }
        let sent = if feedback { Some(bucket.buffer.f_detach_copy()?) } else { None };

        let (mut matrices, whole) = self.split(state, bucket)?;
        let rest = match whole.as_slice() {
            [] => None,
            whole => {
                let flat = whole.iter().map(|t| t.f_view(-1)).collect::<Result<Vec<_>, _>>()?;
                let mut flat = Tensor::f_cat(&flat, 0)?;
                let _ = flat.f_div_scalar_(group.size() as f64)?;
                Some(group.start_all_reduce(flat, ReduceOp::Sum)?)
            }
        };
        // The other factor: of no length in particular, since it is normalised next.
        let mut left = Vec::with_capacity(matrices.len());
        for matrix in &mut matrices {
            matrix.factor = orthogonal(&matrix.factor, epsilon)?;
            left.push(matrix.values.f_matmul(&matrix.factor)?);
        }
        let left = reduce_together(group, &left, false)?;
        let left = left.iter().map(|p| orthogonal(p, epsilon)).collect::<Result<Vec<_>, _>>()?;
        let right = matrices
            .iter()
            .zip(&left)
            .map(|(matrix, left)| matrix.values.f_tr()?.f_matmul(left))
            .collect::<Result<Vec<_>, _>>()?;
        let right = reduce_together(group, &right, true)?;
        for ((matrix, left), right) in matrices.iter_mut().zip(&left).zip(right) {
            matrix.values.f_copy_(&left.f_matmul(&right.f_tr()?)?)?;
            if self.options.warm_start {
                state.factors.insert((bucket.index, matrix.place), right);
            }
        }
        let mut lost = match sent {
            Some(sent) => Some(sent.f_sub(&bucket.buffer)?),
            None => None,
        };
        if let Some(rest) = rest {
            let flat = rest.wait()?;
            let mut start = 0;
            for tensor in &whole {
                let length = tensor.numel() as i64;
                let mean = flat.f_narrow(0, start, length)?.f_view_as(tensor)?;
                tensor.shallow_clone().f_copy_(&mean)?;
                start += length;
            }
        }
        if let Some(lost) = &mut lost {
            // What went whole has lost nothing. PyTorch keeps its difference from the mean there, which
            // cancels out over the ranks but for rounding.
            let mut start = 0;
            for (place, gradient) in bucket.gradients.iter().enumerate() {
                let length = gradient.numel() as i64;
                if !matrices.iter().any(|matrix| matrix.place == place) {
                    let _ = lost.f_narrow(0, start, length)?.f_zero_()?;
                }
                start += length;
            }
        }
        if let Some(lost) = lost {
            state.errors.insert(bucket.index, lost);
        }
        Ok(())
    }

    /// The gradients that are compressed, and those that go whole.
    fn split(
        &self,
        state: &State,
        bucket: &Bucket,
    ) -> brigade_torch::Result<(Vec<Matrix>, Vec<Tensor>)> {
        let mut matrices = Vec::new();
        let mut whole = Vec::new();
        for (place, gradient) in bucket.gradients.iter().enumerate() {
            let values = gradient.numel() as i64;
            let n = gradient.size().first().copied().unwrap_or(0);
            let m = if n > 0 { values / n } else { 0 };
            let Some(rank) = self.options.rank(n, m) else {
                whole.push(gradient.shallow_clone());
                continue;
            };
            let known = state.factors.get(&(bucket.index, place));
            let factor = match known.filter(|q| q.size() == [m, rank]) {
                Some(known) => known.shallow_clone(),
                None => {
                    let seed = [
                        self.options.random_seed,
                        state.iteration,
                        bucket.index as u64,
                        place as u64,
                    ];
                    let options = (gradient.f_kind()?, gradient.device());
                    Tensor::f_from_slice(&normal(seed, (m * rank) as usize))?
                        .f_view([m, rank])?
                        .f_to_device(options.1)?
                        .f_to_kind(options.0)?
                }
            };
            matrices.push(Matrix { place, values: gradient.f_view([n, m])?, factor });
        }
        Ok((matrices, whole))
    }

    pub(super) fn state_dict(&self) -> Result<StateDict> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut out = StateDict::new();
        out.insert(ITERATION, Tensor::from(state.iteration as i64))?;
        for (bucket, error) in &state.errors {
            out.insert(format!("error.{bucket}"), error.f_detach_copy()?)?;
        }
        for ((bucket, place), factor) in &state.factors {
            out.insert(format!("factor.{bucket}.{place}"), factor.f_detach_copy()?)?;
        }
        Ok(out)
    }

    pub(super) fn load_state_dict(&self, saved: &StateDict) -> Result<()> {
        let unknown = |name: &str| {
            Error::Misuse(format!(
                "load_comm_hook_state: expected `iteration`, `error.N` and `factor.N.N`, found {name:?}"
            ))
        };
        let mut state = State::default();
        let mut counted = false;
        for (name, tensor) in saved.iter() {
            let parts: Vec<&str> = name.split('.').collect();
            let number = |text: &str| text.parse::<usize>().map_err(|_| unknown(name));
            match parts.as_slice() {
                [ITERATION] => {
                    counted = true;
                    state.iteration = u64::try_from(tensor.f_int64_value(&[])?).unwrap_or(0);
                }
                ["error", bucket] => {
                    state.errors.insert(number(bucket)?, tensor.f_detach_copy()?);
                }
                ["factor", bucket, place] => {
                    let key = (number(bucket)?, number(place)?);
                    state.factors.insert(key, tensor.f_detach_copy()?);
                }
                _ => return Err(unknown(name)),
            }
        }
        if !counted {
            return Err(unknown("no `iteration`"));
        }
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
        Ok(())
    }
}

const ITERATION: &str = "iteration";

/// Reduces several matrices in one message.
fn reduce_together(
    group: &ProcessGroup,
    matrices: &[Tensor],
    mean: bool,
) -> brigade_torch::Result<Vec<Tensor>> {
    if matrices.is_empty() {
        return Ok(Vec::new());
    }
    let flat = matrices.iter().map(|t| t.f_reshape([-1])).collect::<Result<Vec<_>, _>>()?;
    let mut flat = Tensor::f_cat(&flat, 0)?;
    if mean {
        average(group, &mut flat)?;
    } else {
        group.all_reduce(&mut flat, ReduceOp::Sum)?;
    }
    let mut start = 0;
    matrices
        .iter()
        .map(|matrix| {
            let length = matrix.numel() as i64;
            let part = flat.f_narrow(0, start, length)?.f_view(&matrix.size()[..])?;
            start += length;
            Ok(part)
        })
        .collect()
}

/// The same span, with columns of length 1 at right angles. A column without a direction becomes 0: a
/// gradient that is 0 must not become NaN.
fn orthogonal(matrix: &Tensor, epsilon: f64) -> brigade_torch::Result<Tensor> {
    let columns = matrix.size()[1];
    // libtorch has no decomposition of 16-bit floats, and for few columns this is faster.
    if columns > 2 && !matches!(matrix.f_kind()?, Kind::Half | Kind::BFloat16) {
        let (q, _) = Tensor::f_linalg_qr(matrix, "reduced")?;
        return Ok(q);
    }
    let matrix = matrix.f_detach_copy()?;
    for column in 0..columns {
        let mut this = matrix.f_narrow(1, column, 1)?;
        let length = this.f_norm()?.f_add_scalar(epsilon)?;
        let safe = length.f_where_self(&length.f_gt(0.0)?, &length.f_ones_like()?)?;
        let _ = this.f_div_(&safe)?;
        let left = columns - column - 1;
        if left > 0 {
            let mut rest = matrix.f_narrow(1, column + 1, left)?;
            let along = this.f_mul(&rest)?.f_sum_dim_intlist([0i64].as_slice(), true, None)?;
            let _ = rest.f_sub_(&this.f_mul(&along)?)?;
        }
    }
    Ok(matrix)
}

/// Normally distributed numbers, the same for a seed on every rank and machine. Not libtorch's
/// generator: that one belongs to the user's program.
fn normal(seed: [u64; 4], count: usize) -> Vec<f32> {
    let mut state = seed.into_iter().fold(0x243F_6A88_85A3_08D3u64, |state, part| {
        mix(state.wrapping_add(part)).rotate_left(17)
    });
    let mut uniform = move || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        ((mix(state) >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    };
    let mut numbers = Vec::with_capacity(count + 1);
    while numbers.len() < count {
        let (radius, angle) = ((-2.0 * uniform().ln()).sqrt(), std::f64::consts::TAU * uniform());
        numbers.push((radius * angle.cos()) as f32);
        numbers.push((radius * angle.sin()) as f32);
    }
    numbers.truncate(count);
    numbers
}

/// The finalizer of SplitMix64.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use brigade_torch::Device;

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

    #[test]
    fn columns_become_orthonormal() {
        for columns in [1, 2, 4] {
            let matrix = Tensor::from_slice(&normal([1, 2, 3, columns as u64], 20 * columns))
                .view([20, columns as i64]);
            let q = orthogonal(&matrix, 0.0).unwrap();
            let product =
                q.tr().matmul(&q) - Tensor::eye(columns as i64, (Kind::Float, Device::Cpu));
            assert!(product.abs().max().double_value(&[]) < 1e-5);
        }
        let zero = orthogonal(&Tensor::zeros([5, 2], (Kind::Half, Device::Cpu)), 0.0).unwrap();
        assert_eq!(zero.abs().sum(Kind::Float).double_value(&[]), 0.0);
    }

    #[test]
    fn random_numbers_have_the_moments_of_a_normal_distribution() {
        let numbers = normal([7, 0, 0, 0], 40_001);
        let mean = numbers.iter().map(|&x| f64::from(x)).sum::<f64>() / 40_001.0;
        let square = numbers.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / 40_001.0;
        assert!(mean.abs() < 0.03 && (square - 1.0).abs() < 0.03, "{mean} {square}");
        assert_ne!(normal([7, 0, 0, 0], 4), normal([7, 0, 0, 1], 4));
    }
}
