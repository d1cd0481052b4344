//! Transforms of batches: what is random follows from the samples, masks follow their images.

use brigade_torch::is_channels_last;
use brigade_vision::Size;
use brigade_vision::augment::{Augment, Geometric, Hue, Lighting, Mix, Padding, RandomErasing};
use brigade_vision::transforms::Normalize;
use tch::{Device, Kind, Tensor};

fn images(rows: i64) -> Tensor {
    tch::manual_seed(5);
    Tensor::rand([rows, 3, 24, 32], (Kind::Float, Device::Cpu))
}

#[test]
fn rows_follow_from_their_seeds_wherever_they_are() {
    let augment = Augment::fastai()
        .lighting(Lighting::Saturation { max: 0.3, p: 0.9 })
        .hue(Hue::default())
        .erasing(RandomErasing { p: 1.0, ..RandomErasing::fastai() })
        .normalize(Normalize::IMAGENET);
    let images = images(4);
    let whole = augment.draw(&[11, 12, 13, 14], &images).unwrap();
    let result = augment.apply(&images, &whole).unwrap();
    // The last column before the mixture's: a row's own position is part of that one.
    let half = augment.draw(&[13, 14], &images.narrow(0, 2, 2)).unwrap();
    assert_eq!(half.narrow(1, 0, 20), whole.narrow(0, 2, 2).narrow(1, 0, 20));
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
fn erased_rectangles_are_noise_of_their_mean_and_deviation() {
    let noise = RandomErasing {
        p: 1.0,
        scale: [0.2, 0.3],
        value: 5.0,
        deviation: 2.0,
        ..RandomErasing::fastai()
    };
    let augment = Augment::new().erasing(noise);
    let images = Tensor::full([200, 3, 24, 32], -100.0, (Kind::Float, Device::Cpu));
    let seeds: Vec<u64> = (0..200).collect();
    let drawn = augment.draw(&seeds, &images).unwrap();
    let erased = augment.apply(&images, &drawn).unwrap();
    let mask = erased.ne(-100.0);
    // The channels of a place are erased together.
    assert_eq!(mask.select(1, 0), mask.select(1, 2));
    let values = erased.masked_select(&mask).to_kind(Kind::Double);
    let count = values.numel() as f64;
    assert!((85_000.0..115_000.0).contains(&count), "{count}");
    let (mean, deviation) = (values.mean(Kind::Double), values.std(true));
    assert!((mean.double_value(&[]) - 5.0).abs() < 0.03, "{mean:?}");
    assert!((deviation.double_value(&[]) - 2.0).abs() < 0.02, "{deviation:?}");
    let standard: Tensor = (values - 5.0) / 2.0;
    let share = |inside: f64| {
        standard.abs().lt(inside).to_kind(Kind::Double).mean(Kind::Double).double_value(&[])
    };
    for (inside, expected) in [(0.5, 0.3829), (1.0, 0.6827), (2.0, 0.9545), (3.0, 0.9973)] {
        assert!((share(inside) - expected).abs() < 0.006, "{inside}: {}", share(inside));
    }
    // Neighbouring pixels and channels are independent.
    let filled =
        Augment::new().erasing(RandomErasing { scale: [0.9, 0.9], ratio: [1.0, 1.0], ..noise });
    let square = Tensor::zeros([60, 3, 32, 32], (Kind::Float, Device::Cpu));
    let drawn = filled.draw(&seeds[..60], &square).unwrap();
    let noise: Tensor = (filled.apply(&square, &drawn).unwrap() - 5.0) / 2.0;
    let inner = noise.narrow(2, 4, 24).narrow(3, 4, 24);
    let pairs = [
        (inner.narrow(3, 0, 23), inner.narrow(3, 1, 23)),
        (inner.narrow(2, 0, 23), inner.narrow(2, 1, 23)),
        (inner.narrow(1, 0, 2), inner.narrow(1, 1, 2)),
        (inner.narrow(0, 0, 59), inner.narrow(0, 1, 59)),
    ];
    for (first, second) in pairs {
        let correlation = (first * second).mean(Kind::Double).double_value(&[]);
        assert!(correlation.abs() < 0.02, "{correlation}");
    }
}

#[test]
fn colours_of_grey_images_and_of_others_than_rgb() {
    let images = images(3);
    let colours = Augment::new()
        .lighting(Lighting::Saturation { max: 0.5, p: 1.0 })
        .hue(Hue { max: 0.4, p: 1.0 });
    let drawn = colours.draw(&[1, 2, 3], &images).unwrap();
    let changed = colours.apply(&images, &drawn).unwrap();
    assert!((&changed - &images).abs().max().double_value(&[]) > 0.1);
    assert!(changed.min().double_value(&[]) >= 0.0 && changed.max().double_value(&[]) <= 1.0);
    // Grey has no hue, and is almost its own grey (fastai's shares add up to 0.9999).
    for grey in [images.narrow(1, 0, 1), images.narrow(1, 0, 1).expand_as(&images)] {
        let changed = colours.apply(&grey, &drawn).unwrap();
        assert!((changed - &grey).abs().max().double_value(&[]) < 1e-3);
    }
    let four = images.narrow(1, 0, 1).expand([3, 4, 24, 32], false);
    let error = colours.apply(&four, &drawn).unwrap_err().to_string();
    assert_eq!(
        error,
        "saturation and hue are of images [n, c, h, w] with 3 channels, or 1, not of [3, 4, 24, 32]"
    );
}

#[test]
fn what_does_not_belong_together_is_refused() {
    let augment = Augment::fastai();
    let images = images(3);
    let error = augment.draw(&[1, 2], &images).unwrap_err().to_string();
    assert_eq!(
        error,
        "found 2 seeds for images of shape [3, 3, 24, 32]; give one for each of [n, c, h, w]"
    );
    let drawn = augment.draw(&[1, 2, 3], &images).unwrap();
    let error = augment.apply(&images.narrow(0, 0, 2), &drawn).unwrap_err().to_string();
    assert_eq!(
        error,
        "numbers of shape [3, 25] were not drawn for a batch of shape [2, 3, 24, 32]"
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

/// Slices of what torchvision's `pad` gives, by the corner that was drawn.
fn sliced(images: &Tensor, drawn: &Tensor, padding: i64, mode: &str, side: i64) -> Tensor {
    let padded = match mode {
        "constant" => images.constant_pad_nd([padding; 4]),
        mode => {
            let padded = images.to_kind(Kind::Float).pad([padding; 4], mode, None);
            padded.to_kind(images.kind())
        }
    };
    let rows: Vec<Tensor> = (0..images.size()[0])
        .map(|row| {
            let at = |column| drawn.double_value(&[row, column]).round() as i64;
            let (mirrored, top) = (at(0) < 0, at(5));
            let left = if mirrored { at(2) - (side - 1) } else { at(2) };
            let part = padded.get(row).narrow(1, top + padding, side);
            let part = part.narrow(2, left + padding, side);
            if mirrored { part.flip([2]) } else { part }
        })
        .collect();
    Tensor::stack(&rows, 0)
}

#[test]
fn padded_crops_and_flips_have_the_pixels_of_slices() {
    tch::manual_seed(2);
    let seeds: Vec<u64> = (0..64).collect();
    for (padding, mode) in [
        (Padding::Zeros, "constant"),
        (Padding::Reflection, "reflect"),
        (Padding::Border, "replicate"),
    ] {
        for side in [16, 12] {
            let images = Tensor::randint(256, [64, 3, 16, 16], (Kind::Uint8, Device::Cpu));
            let crop = Augment::new()
                .then(Geometric::PaddedCrop { padding: 4 })
                .then(Geometric::Flip { p: 0.5 })
                .size(Size::from(side as u32))
                .padding(padding);
            let drawn = crop.draw(&seeds, &images).unwrap();
            let expected = sliced(&images, &drawn, 4, mode, side);
            let floats = expected.to_kind(Kind::Float) / 255.0;
            assert_eq!(crop.apply(&images, &drawn).unwrap(), floats, "{mode} {side}");
            let masks = images.select(1, 0).to_kind(Kind::Int64);
            let expected = expected.select(1, 0).to_kind(Kind::Int64);
            assert_eq!(crop.apply_to_masks(&masks, &drawn).unwrap(), expected, "{mode} {side}");
            // Channels that come last, and half precision: values as they were.
            let half = (images.to_kind(Kind::Half) / 256.0).permute([0, 2, 3, 1]).contiguous();
            let half = half.permute([0, 3, 1, 2]);
            let moved = crop.apply(&half, &drawn).unwrap();
            assert_eq!(moved, sliced(&half, &drawn, 4, mode, side), "{mode} {side}");
            // All places, both directions.
            let distinct = |column: i64| {
                let values = Vec::<f32>::try_from(drawn.select(1, column).contiguous()).unwrap();
                values.iter().map(|it| it.round() as i64).collect::<std::collections::BTreeSet<_>>()
            };
            let tops = distinct(5);
            assert_eq!((tops.first(), tops.last()), (Some(&-4), Some(&(20 - side))), "{tops:?}");
            assert_eq!(distinct(0).len(), 2);
        }
    }
    let images = Tensor::zeros([1, 3, 16, 16], (Kind::Uint8, Device::Cpu));
    let wide = Augment::new().then(Geometric::PaddedCrop { padding: 2 }).size(Size::from(32));
    let error = wide.draw(&[1], &images).unwrap_err().to_string();
    assert_eq!(error, "images of 16 x 16 pixels with a border of 2 have no part of 32 x 32");
}

#[test]
fn symmetries_of_squares_move_pixels_and_a_size_that_is_there_changes_none() {
    let images = Tensor::rand([40, 3, 9, 9], (Kind::Float, Device::Cpu));
    let seeds: Vec<u64> = (0..40).collect();
    let turns = Augment::new().then(Geometric::Dihedral { p: 1.0 });
    let drawn = turns.draw(&seeds, &images).unwrap();
    let moved = turns.apply(&images, &drawn).unwrap();
    let mut seen = std::collections::BTreeSet::new();
    for row in 0..40 {
        let image = images.get(row);
        let turned = (0..8).find(|turn| {
            let turned = image.rot90(turn % 4, [1, 2]);
            moved.get(row).equal(&if *turn < 4 { turned } else { turned.flip([2]) })
        });
        seen.insert(turned.expect("one of the eight, to the bit"));
    }
    assert!(seen.len() > 5, "{seen:?}");
    let same = Augment::new().size(Size::from(9));
    let drawn = same.draw(&seeds, &images).unwrap();
    assert_eq!(same.apply(&images, &drawn).unwrap(), images);
}

#[test]
fn resized_crops_are_those_of_torchvision() {
    // The value of each pixel is its position, and a linear function is resampled exactly.
    let options = (Kind::Float, Device::Cpu);
    let (columns, lines) = (Tensor::arange(60, options), Tensor::arange(40, options));
    let [columns, lines] = [columns.view([1, 1, 1, 60]), lines.view([1, 1, 40, 1])];
    let image = Tensor::cat(
        &[columns.expand([1, 1, 40, 60], false), lines.expand([1, 1, 40, 60], false)],
        1,
    );
    let crop = Augment::new()
        .then(Geometric::resized_crop())
        .size(Size::from(10))
        .padding(Padding::Border);
    let (mut areas, mut ratios) = (Vec::new(), Vec::new());
    for seed in 0..300 {
        let drawn = crop.draw(&[seed], &image).unwrap();
        let number = |column: i64| drawn.double_value(&[0, column]);
        let (wide, tall) = (number(0) * 10.0, number(4) * 10.0);
        let left = number(2) + 0.5 - wide / 20.0;
        let top = number(5) + 0.5 - tall / 20.0;
        for whole in [wide, tall, left, top] {
            assert!((whole - whole.round()).abs() < 1e-3, "{whole}");
        }
        assert!(left > -1e-3 && top > -1e-3 && left + wide < 60.001 && top + tall < 40.001);
        areas.push(wide * tall / 2400.0);
        ratios.push(wide / tall);
        // As libtorch resizes the part, if no pixel outside of it has an influence.
        let part = image
            .narrow(3, left.round() as i64, wide.round() as i64)
            .narrow(2, top.round() as i64, tall.round() as i64)
            .upsample_bilinear2d([10, 10], false, None, None);
        let found = crop.apply(&image, &drawn).unwrap();
        let inner = |images: &Tensor| images.narrow(2, 1, 8).narrow(3, 1, 8);
        assert!((inner(&found) - inner(&part)).abs().max().double_value(&[]) < 1e-3);
    }
    let range = |values: &[f64]| {
        values.iter().fold((f64::MAX, 0.0f64), |(low, high), it| (low.min(*it), high.max(*it)))
    };
    let ((least, most), (slim, wide)) = (range(&areas), range(&ratios));
    assert!((0.06..0.2).contains(&least) && (0.85..=1.0).contains(&most), "{least} to {most}");
    assert!((0.7..0.85).contains(&slim) && (1.2..1.4).contains(&wide), "{slim} to {wide}");
}

#[test]
fn results_in_channels_last_and_16_bits_are_those_of_float32_rounded() {
    let plain = Augment::new().normalize(Normalize::IMAGENET);
    let moved = plain.clone().then(Geometric::PaddedCrop { padding: 2 });
    let seeds: Vec<u64> = (40..44).collect();
    for augment in [
        plain.clone(),
        moved.then(Geometric::Flip { p: 0.5 }).padding(Padding::Zeros),
        plain.clone().lighting(Lighting::Brightness { max: 0.2, p: 1.0 }),
        plain.clone().mix(Mix::MixUp { alpha: 0.4 }),
        plain.erasing(RandomErasing { p: 1.0, ..RandomErasing::fastai() }),
        Augment::fastai(),
    ] {
        for channels in [1, 3] {
            tch::manual_seed(6);
            let images = Tensor::randint(256, [4, channels, 24, 20], (Kind::Uint8, Device::Cpu));
            let drawn = augment.draw(&seeds, &images).unwrap();
            let expected = augment.apply(&images, &drawn).unwrap();
            for kind in [Kind::BFloat16, Kind::Float] {
                let last = augment.clone().channels_last(kind);
                let found = last.apply(&images, &drawn).unwrap();
                assert!(is_channels_last(&found).unwrap() || channels == 1);
                assert!(found.equal(&expected.to_kind(kind)), "{augment:?}, {channels}, {kind:?}");
            }
        }
    }
    let last = Augment::new().channels_last(Kind::Half);
    assert!(last.validation().apply(&images(2), &last.draw(&[1, 2], &images(2)).unwrap()).is_ok());
}
