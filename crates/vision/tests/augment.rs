//! Transforms of batches: what is random follows from the samples, masks follow their images.

#![allow(clippy::unwrap_used)] // tests

use brigade_torch::{Device, Kind, Tensor};
use brigade_vision::Size;
use brigade_vision::augment::{Augment, Geometric, Mix, Padding, RandomErasing};
use brigade_vision::transforms::Normalize;

fn images(rows: i64) -> Tensor {
    tch::manual_seed(5);
    Tensor::rand([rows, 3, 24, 32], (Kind::Float, Device::Cpu))
}

#[test]
fn rows_follow_from_their_seeds_wherever_they_are() {
    let augment =
        Augment::fastai().erasing(RandomErasing::default()).normalize(Normalize::IMAGENET);
    let images = images(4);
    let whole = augment.draw(&[11, 12, 13, 14], &images).unwrap();
    let result = augment.apply(&images, &whole).unwrap();
    // The last column before the mixture's: a row's own place is part of that.
    let half = augment.draw(&[13, 14], &images.narrow(0, 2, 2)).unwrap();
    assert_eq!(half.narrow(1, 0, 16), whole.narrow(0, 2, 2).narrow(1, 0, 16));
    let part = augment.apply(&images.narrow(0, 2, 2), &half).unwrap();
    assert_eq!(part, result.narrow(0, 2, 2));
    assert_ne!(whole.get(0), whole.get(1));
}

#[test]
fn masks_follow_their_images() {
    let augment = Augment::new()
        .then(Geometric::Flip { p: 0.5 })
        .then(Geometric::Rotate { max_degrees: 30.0, p: 1.0 })
        .then(Geometric::Warp { magnitude: 0.2, p: 1.0 })
        .padding(Padding::Border);
    // A disc, as an image and as a mask.
    let options = (Kind::Float, Device::Cpu);
    let (xs, ys) = (Tensor::arange(64, options), Tensor::arange(48, options));
    let distance = (xs.view([1, -1]) - 40.0).square() + (ys.view([-1, 1]) - 20.0).square();
    let disc = distance.lt(144.0);
    let seeds: Vec<u64> = (0..20).collect();
    let masks = disc.to_kind(Kind::Int64).expand([20, 48, 64], false).contiguous();
    let images = masks.unsqueeze(1).to_kind(Kind::Float);
    let drawn = augment.draw(&seeds, &images).unwrap();
    let mapped = augment.apply(&images, &drawn).unwrap().squeeze_dim(1);
    let masks = augment.apply_to_masks(&masks, &drawn).unwrap();
    assert_eq!(masks.kind(), Kind::Int64);
    let differs = mapped.gt(0.5).ne_tensor(&masks.gt(0));
    // Only at the edge, where a pixel is between the two.
    let share = differs.to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
    assert!(share < 0.01, "{share}");
    assert!(
        masks.sum_dim_intlist([1i64, 2].as_slice(), false, Kind::Int64).min().int64_value(&[])
            > 100
    );
}

#[test]
fn mixtures_and_their_labels_agree() {
    let images = images(6);
    let seeds: Vec<u64> = (30..36).collect();
    let labels = Tensor::from_slice(&[0i64, 1, 2, 3, 4, 5]);
    for mix in
        [Mix::MixUp { alpha: 0.4 }, Mix::MixUpBatch { alpha: 1.0 }, Mix::CutMix { alpha: 1.0 }]
    {
        let augment = Augment::new().mix(mix);
        let drawn = augment.draw(&seeds, &images).unwrap();
        let mixed = augment.apply(&images, &drawn).unwrap();
        let targets = augment.targets(&labels, &drawn).unwrap();
        let shares = targets.one_hot(6).unwrap();
        let sums = shares.sum_dim_intlist(1, false, Kind::Float);
        assert!(sums.allclose(&Tensor::ones([6], (Kind::Float, Device::Cpu)), 1e-6, 1e-6, false));
        // Each mixture's mean is that of its parts by their shares; exactly so where they are blended.
        let partners = images.index_select(0, &targets.second);
        let share = targets.share.view([-1, 1, 1, 1]);
        match mix {
            Mix::CutMix { .. } => {
                let own = mixed.eq_tensor(&images).to_kind(Kind::Float);
                let own = own.mean_dim([1i64, 2, 3].as_slice(), false, Kind::Float);
                assert!((own - &targets.share).abs().max().double_value(&[]) < 1e-3);
                let of_one = mixed.eq_tensor(&images).logical_or(&mixed.eq_tensor(&partners));
                assert!(of_one.all().int64_value(&[]) == 1);
            }
            _ => {
                let wanted: Tensor = &images * &share + &partners * (1.0 - &share);
                assert!((&mixed - &wanted).abs().max().double_value(&[]) < 1e-6);
            }
        }
        // A loss of the labels themselves shows the shares.
        let loss = targets.loss(|labels| labels.f_to_kind(Kind::Float)).unwrap().double_value(&[]);
        let values: Tensor =
            &targets.share * &targets.first + (1.0 - &targets.share) * &targets.second;
        assert!((loss - values.mean(Kind::Float).double_value(&[])).abs() < 1e-5);
    }
}

#[test]
fn erased_rectangles_have_their_area_and_chance() {
    let augment = Augment::new().erasing(RandomErasing { value: -1.0, ..RandomErasing::default() });
    let images = images(1).expand([400, 3, 24, 32], false).contiguous();
    let seeds: Vec<u64> = (0..400).collect();
    let drawn = augment.draw(&seeds, &images).unwrap();
    let erased = augment.apply(&images, &drawn).unwrap().eq(-1.0).to_kind(Kind::Double);
    let share = erased.mean_dim([1i64, 2, 3].as_slice(), false, Kind::Double);
    let chosen = share.gt(0.0).to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
    assert!((0.4..0.6).contains(&chosen), "{chosen}");
    let largest = share.max().double_value(&[]);
    assert!((0.2..0.37).contains(&largest), "{largest}");
}

#[test]
fn what_does_not_belong_together_is_refused() {
    let augment = Augment::fastai();
    let images = images(3);
    let error = augment.draw(&[1, 2], &images).unwrap_err().to_string();
    assert_eq!(error, "2 seeds are for as many images [n, c, h, w], not for [3, 3, 24, 32]");
    let drawn = augment.draw(&[1, 2, 3], &images).unwrap();
    let error = augment.apply(&images.narrow(0, 0, 2), &drawn).unwrap_err().to_string();
    assert_eq!(
        error,
        "numbers of shape [3, 21] were not drawn for a batch of shape [2, 3, 24, 32]"
    );
}

#[test]
fn points_follow_the_images_of_their_batch() {
    // A white block of 5 x 5 pixels around the point of each image.
    let (rows, height, width) = (40, 48, 64);
    let images = Tensor::zeros([rows, 3, height, width], (Kind::Float, Device::Cpu));
    let mut points = Vec::new();
    for row in 0..rows {
        let (x, y) = (22 + row % 20, 18 + row % 11);
        let _ = images.get(row).narrow(1, y - 2, 5).narrow(2, x - 2, 5).fill_(1.0);
        let place = |at: i64, length: i64| (2.0 * (at as f64 + 0.5) / length as f64 - 1.0) as f32;
        points.extend([place(x, width), place(y, height)]);
    }
    let points = Tensor::from_slice(&points).view([rows, 1, 2]);
    let seeds: Vec<u64> = (0..rows as u64).collect();
    let maps = Augment::new()
        .then(Geometric::Dihedral { p: 0.5 })
        .then(Geometric::Warp { magnitude: 0.2, p: 1.0 })
        .then(Geometric::Rotate { max_degrees: 20.0, p: 1.0 })
        .then(Geometric::Zoom { min: 1.0, max: 1.1, p: 1.0 })
        .padding(Padding::Zeros);
    for (augment, to) in [(maps.clone(), [64, 48]), (maps.size(Size::new(80, 80)), [80, 80])] {
        let drawn = augment.draw(&seeds, &images).unwrap();
        let moved = augment.apply(&images, &drawn).unwrap();
        let places = augment.apply_to_points(&points, &drawn, &images).unwrap();
        assert_eq!((places.size(), places.kind()), (vec![rows, 1, 2], Kind::Float));
        let mut seen = 0;
        for row in 0..rows {
            let at = |axis: i64| {
                let place = places.double_value(&[row, 0, axis]);
                (place + 1.0) / 2.0 * f64::from(to[axis as usize])
            };
            let margin = 12.0;
            let inside =
                |axis: usize| (margin..f64::from(to[axis]) - margin).contains(&at(axis as i64));
            if !inside(0) || !inside(1) {
                continue;
            }
            seen += 1;
            let white = moved.get(row).get(0).to_kind(Kind::Double);
            let mass = white.sum(Kind::Double);
            let centre = |axis: i64| {
                let along =
                    Tensor::arange(white.size()[1 - axis as usize], (Kind::Double, Device::Cpu))
                        + 0.5;
                let shape = if axis == 0 { [1, -1] } else { [-1, 1] };
                ((&white * along.view(shape)).sum(Kind::Double) / &mass).double_value(&[])
            };
            let off = [centre(0) - at(0), centre(1) - at(1)].map(f64::abs);
            assert!(off[0] < 0.4 && off[1] < 0.4, "{off:?} in row {row}");
        }
        assert!(seen > 15, "{seen}");
    }
    assert!(Augment::new().apply_to_points(&points, &points, &images).is_err());
}
