//! The thin matrices: their first values, and columns at right angles.

use brigade_torch::{Kind, Tensor};

/// The same span, with columns of length 1 at right angles. A column without a direction becomes 0: a
/// gradient that is 0 must not become NaN.
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

/// Normally distributed numbers, the same for a seed on every rank and machine. Not libtorch's
/// generator: that one belongs to the user's program.
pub(super) fn normal(seed: [u64; 3], count: usize) -> Vec<f32> {
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
