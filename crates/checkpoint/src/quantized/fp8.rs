//! The type `float8_e4m3fn`: a sign, 4 bits of exponent with bias 7, 3 bits of mantissa, no infinities.

/// Largest finite value.
pub(super) const MAX: f32 = 448.0;

/// Returns the bits of the nearest value, ties to even. Saturates at the largest value.
pub(super) fn from_f32(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let size = value.abs();
    if size.is_nan() {
        return sign | 0x7f;
    }
    if size >= MAX {
        return sign | 0x7e;
    }
    // Below 2^-6, all values are multiples of 2^-9. Above, they are multiples of 2^-3 of their power of two.
    let exponent = (size.to_bits() >> 23).cast_signed() - 127;
    let exponent = exponent.max(-6);
    let steps = (size * power_of_two(3 - exponent)).round_ties_even() as u8;
    // 8 steps are the implicit bit. 16, after rounding up, carry into the exponent.
    let place = if steps < 8 { steps } else { (((exponent + 6) as u8) << 3) + steps };
    sign | place
}

/// Converts bits to float32.
pub(super) fn to_f32(bits: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 3 & 0xf), f32::from(bits & 7));
    let size = if bits & 0x7f == 0x7f {
        f32::NAN
    } else if exponent == 0 {
        mantissa * power_of_two(-9)
    } else {
        (8.0 + mantissa) * power_of_two(exponent - 10)
    };
    if bits & 0x80 == 0 { size } else { -size }
}

fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_its_own_nearest() {
        for bits in 0..=255u8 {
            let value = to_f32(bits);
            if !value.is_nan() {
                assert_eq!(from_f32(value), bits, "{value}");
            }
        }
        assert_eq!(to_f32(0x7e), MAX);
        assert_eq!(to_f32(1), 2f32.powi(-9));
        assert!(to_f32(from_f32(f32::NAN)).is_nan());
    }

    #[test]
    fn values_between_two_go_to_the_nearest_and_ties_to_even() {
        for bits in 0..0x7eu8 {
            let (low, high) = (to_f32(bits), to_f32(bits + 1));
            let middle = f32::midpoint(low, high);
            let even = if bits % 2 == 0 { bits } else { bits + 1 };
            assert_eq!(from_f32(middle), even, "{low} {high}");
            assert_eq!(from_f32(middle.next_down()), bits, "{low} {high}");
            assert_eq!(from_f32(-middle.next_up()), 0x80 | (bits + 1), "{low} {high}");
        }
        assert_eq!((from_f32(1e9), from_f32(f32::NEG_INFINITY)), (0x7e, 0xfe));
    }
}
