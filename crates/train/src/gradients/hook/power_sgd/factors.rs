//! Low-rank factors: their initial values, and orthogonalization.

use brigade_sampling::stream;
use rand_distr::{Distribution, StandardNormal};
use tch::{Kind, Tensor};

/// Orthogonalizes the columns and scales them to length 1 (Gram-Schmidt), with the same span. A column without a
/// direction becomes 0, so that a gradient of 0 does not become NaN.
pub(super) fn orthogonal(matrix: &Tensor, epsilon: f64) -> brigade_torch::Result<Tensor> {
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

/// Draws normally distributed numbers, the same for a seed on every rank and machine. Does not use libtorch's
/// generator, whose state belongs to the user's program.
pub(super) fn normal([seed, path @ ..]: [u64; 3], count: usize) -> Vec<f32> {
    StandardNormal.sample_iter(stream(seed, &path)).take(count).collect()
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn columns_become_orthonormal() {
        for columns in [1, 2, 4] {
            let matrix = Tensor::from_slice(&normal([1, 2, columns as u64], 20 * columns))
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
        let numbers = normal([7, 0, 0], 40_001);
        let mean = numbers.iter().map(|&x| f64::from(x)).sum::<f64>() / 40_001.0;
        let square = numbers.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / 40_001.0;
        assert!(mean.abs() < 0.03 && (square - 1.0).abs() < 0.03, "{mean} {square}");
        assert_ne!(normal([7, 0, 0], 4), normal([7, 0, 1], 4));
    }
}
