//! Reduction of a line's points that leaves the image the same.

/// Keeps the first, the least, the greatest and the last of the points in each column of pixels, in their order: a line
/// through them covers the same pixels.
pub(super) fn thin(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    if points.len() <= FEW {
        return points.to_vec();
    }
    let mut kept = Vec::new();
    for column in points.chunk_by(|one, other| one.0.floor() == other.0.floor()) {
        let indices = 0..column.len();
        let height = |index: &usize| column[*index].1;
        let by_height = |one: &usize, other: &usize| height(one).total_cmp(&height(other));
        let least = indices.clone().min_by(by_height).unwrap_or(0);
        let greatest = indices.max_by(by_height).unwrap_or(0);
        let mut four = [0, least, greatest, column.len() - 1];
        four.sort_unstable();
        let mut before = None;
        for index in four {
            if before != Some(index) {
                kept.push(column[index]);
            }
            before = Some(index);
        }
    }
    kept
}

/// Number of points up to which nothing is reduced.
const FEW: usize = 1000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_stay_and_the_rest_goes() {
        let mut points: Vec<(f64, f64)> =
            (0..100_000).map(|index| (f64::from(index) / 200.0, 50.0)).collect();
        points[33_333].1 = 0.0;
        points[77_777].1 = 99.0;
        let kept = thin(&points);
        assert!(kept.len() <= 4 * 500, "{}", kept.len());
        assert!(kept.contains(&points[33_333]) && kept.contains(&points[77_777]));
        assert_eq!((kept.first(), kept.last()), (points.first(), points.last()));
        assert!(kept.windows(2).all(|pair| pair[0].0 < pair[1].0));
        assert_eq!(thin(&points[..10]), points[..10]);
    }
}
