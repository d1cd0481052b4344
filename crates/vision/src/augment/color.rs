//! Colour transforms: lighting in logits, and the hue.

use tch::{TchError, Tensor};

use crate::transforms::SampleRng;

/// Lighting transform in logits, by fastai's rules: `sigmoid(contrast · (logit(x) + brightness))`, and a blend with the
/// grey of the logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lighting {
    /// fastai's `Brightness`: adds the logit of a number that is uniform in `0.5 · (1 ± max)`.
    Brightness {
        /// Maximum change (fastai's `max_lighting`). Defaults to 0.2.
        max: f64,
        /// Probability of the transform. Defaults to 0.75.
        p: f64,
    },
    /// fastai's `Contrast`: multiplies by a number that is log-uniform from `1 − max` to its inverse.
    Contrast {
        /// Maximum change (fastai's `max_lighting`). Defaults to 0.2.
        max: f64,
        /// Probability of the transform. Defaults to 0.75.
        p: f64,
    },
    /// fastai's `Saturation`: multiplies the distance from the grey of the same pixel by a factor that is log-uniform
    /// from `1 − max` to its inverse. Images must have one channel or three.
    Saturation {
        /// Maximum change (fastai's `max_lighting`). Defaults to 0.2.
        max: f64,
        /// Probability of the transform. Defaults to 0.75.
        p: f64,
    },
}

/// fastai's `Hue`: rotates the hue by a number of turns that is log-uniform from `1 − max` to its inverse, so that only
/// its distance from 1 has an effect. It is applied after all changes of [`Lighting`]. Images must have one channel,
/// which stays unchanged, or three.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hue {
    /// Maximum change (fastai's `max_hue`). Defaults to 0.1.
    pub max: f64,
    /// Probability of the transform. Defaults to 0.75.
    pub p: f64,
}

impl Default for Hue {
    fn default() -> Self {
        Self { max: 0.1, p: 0.75 }
    }
}

/// Weights of red, green and blue in fastai's grey, which add up to a little less than 1.
const GREY: [f64; 3] = [0.2989, 0.5870, 0.1140];

/// Returns a number that is log-uniform from `1 − max` to its inverse.
fn around_one(max: f64, random: &mut SampleRng) -> f64 {
    random.uniform((1.0 - max).ln(), -(1.0 - max).ln()).exp()
}

/// Combined effect of several lighting transforms on logits: `contrast · (x + brightness) + grey · grey(x)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Light {
    pub(super) brightness: f64,
    pub(super) contrast: f64,
    pub(super) grey: f64,
}

impl Light {
    /// Draws the lighting transforms of one sample, each from the next of its streams.
    pub(super) fn drawn(changes: &[Lighting], next: &mut impl FnMut() -> SampleRng) -> Self {
        let mut light = Self { brightness: 0.0, contrast: 1.0, grey: 0.0 };
        for change in changes {
            let mut random = next();
            match *change {
                Lighting::Brightness { max, p } => {
                    let drawn = random.uniform(0.5 * (1.0 - max), 0.5 * (1.0 + max));
                    if random.chance(p) {
                        light.brightness += (drawn / (1.0 - drawn)).ln() / light.contrast;
                    }
                }
                Lighting::Contrast { max, p } => {
                    let drawn = around_one(max, &mut random);
                    if random.chance(p) {
                        light.contrast *= drawn;
                        light.grey *= drawn;
                    }
                }
                Lighting::Saturation { max, p } => {
                    let drawn = around_one(max, &mut random);
                    if random.chance(p) {
                        light.saturate(drawn);
                    }
                }
            }
        }
        light
    }

    /// Blends with the grey of the previous result.
    pub(super) fn saturate(&mut self, share: f64) {
        let (rest, whole) = (1.0 - share, GREY.iter().sum::<f64>());
        self.grey = share * self.grey + rest * (self.contrast + whole * self.grey);
        self.brightness *= (share + rest * whole) / share;
        self.contrast *= share;
    }

    /// Applies the transform to images in 0 to 1, with parameters `[n, 1, 1, 1]`.
    pub(super) fn apply(
        images: &Tensor,
        brightness: &Tensor,
        contrast: &Tensor,
        grey: Option<&Tensor>,
    ) -> Result<Tensor, TchError> {
        let logits = images.f_logit(1e-7)?;
        let changed = logits.f_add(brightness)?.f_mul(contrast)?;
        match grey {
            None => changed,
            Some(grey) => changed.f_add(&grey_of(&logits)?.f_mul(grey)?)?,
        }
        .f_sigmoid()
    }
}

/// Returns the grey `[n, 1, h, w]` of images `[n, c, h, w]`.
fn grey_of(images: &Tensor) -> Result<Tensor, TchError> {
    if images.size().get(1) == Some(&1) {
        return images.f_mul_scalar(GREY.iter().sum::<f64>());
    }
    let part = |channel: usize| images.f_narrow(1, channel as i64, 1)?.f_mul_scalar(GREY[channel]);
    part(0)?.f_add(&part(1)?)?.f_add(&part(2)?)
}

impl Hue {
    /// Draws the rotation of one sample, as a fraction of the full circle.
    pub(super) fn drawn(self, random: &mut SampleRng) -> f64 {
        let drawn = around_one(self.max, random);
        if random.chance(self.p) { drawn } else { 0.0 }
    }

    /// Rotates the hue of images in 0 to 1, by fractions `[n, 1, 1, 1]` of the full circle.
    pub(super) fn apply(images: &Tensor, turns: &Tensor) -> Result<Tensor, TchError> {
        if images.size().get(1) == Some(&1) {
            return Ok(images.shallow_clone());
        }
        let channel = |index: i64| images.f_narrow(1, index, 1);
        let (red, green, blue) = (channel(0)?, channel(1)?, channel(2)?);
        let most = images.f_amax([1i64].as_slice(), true)?;
        let range = most.f_sub(&images.f_amin([1i64].as_slice(), true)?)?;
        // The hue of a grey pixel is arbitrary.
        let divisor = range.f_masked_fill(&range.f_eq(0.0)?, 1.0)?;
        let sixths = |first: &Tensor, second: &Tensor, offset: f64| {
            first.f_sub(second)?.f_div(&divisor)?.f_add_scalar(offset)
        };
        let of_green = sixths(&blue, &red, 2.0)?;
        let of_blue = sixths(&red, &green, 4.0)?;
        let other = of_green.f_where_self(&most.f_eq_tensor(&green)?, &of_blue)?;
        let hue = sixths(&green, &blue, 0.0)?.f_where_self(&most.f_eq_tensor(&red)?, &other)?;
        let turned = hue.f_add(&turns.f_mul_scalar(6.0)?)?;
        // Each channel falls from the largest value to the smallest and rises again, a third of the circle apart.
        let turned = [5.0, 3.0, 1.0].map(|place| {
            let place = turned.f_add_scalar(place)?.f_remainder(6.0)?;
            let part = place.f_minimum(&place.f_neg()?.f_add_scalar(4.0)?)?.f_clamp(0.0, 1.0)?;
            most.f_sub(&range.f_mul(&part)?)
        });
        let [red, green, blue] = turned;
        Tensor::f_cat(&[red?, green?, blue?], 1)
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use tch::{Device, Kind};

    use super::*;

    #[derive(Deserialize)]
    struct Golden {
        shape: Vec<i64>,
        image: Vec<f32>,
        cases: std::collections::BTreeMap<String, Vec<f32>>,
    }

    fn agrees(golden: &Golden, name: &str, found: &Tensor) {
        let expected = Tensor::from_slice(&golden.cases[name]).view(golden.shape.as_slice());
        let difference = (found - expected).abs().max().double_value(&[]);
        assert!(difference < 2e-6, "{name}: {difference}");
    }

    #[test]
    fn saturation_and_hue_are_fastais() {
        let golden: Golden =
            serde_json::from_str(include_str!("../../tests/golden/batch_color.json")).unwrap();
        let image = Tensor::from_slice(&golden.image).view(golden.shape.as_slice());
        let number = |value: f64| Tensor::full([1, 1, 1, 1], value, (Kind::Float, Device::Cpu));
        let lit = |steps: &[(char, f64)]| {
            let mut light = Light { brightness: 0.0, contrast: 1.0, grey: 0.0 };
            for (kind, drawn) in steps {
                match kind {
                    'b' => light.brightness += (drawn / (1.0 - drawn)).ln() / light.contrast,
                    'c' => {
                        light.contrast *= drawn;
                        light.grey *= drawn;
                    }
                    _ => light.saturate(*drawn),
                }
            }
            let Light { brightness, contrast, grey } = light;
            let [brightness, contrast, grey] = [brightness, contrast, grey].map(number);
            Light::apply(&image, &brightness, &contrast, Some(&grey)).unwrap()
        };
        agrees(&golden, "saturation", &lit(&[('s', 0.7)]));
        agrees(&golden, "more_saturation", &lit(&[('s', 1.3)]));
        agrees(&golden, "all_lighting", &lit(&[('b', 0.55), ('c', 1.1), ('s', 0.8)]));
        agrees(&golden, "all_lighting_backwards", &lit(&[('s', 0.8), ('c', 1.1), ('b', 0.55)]));
        agrees(&golden, "saturation_twice", &lit(&[('s', 0.8), ('b', 0.45), ('s', 1.25)]));
        agrees(&golden, "hue", &Hue::apply(&image, &number(0.93)).unwrap());
        agrees(&golden, "more_hue", &Hue::apply(&image, &number(1.1)).unwrap());
        agrees(&golden, "no_hue", &Hue::apply(&image, &number(0.0)).unwrap());
    }

    #[test]
    fn draws_are_fastais_ranges() {
        let mut seed = 0;
        let mut next = || {
            seed += 1;
            SampleRng::new(seed, 0)
        };
        let (mut turns, mut shares) = (Vec::new(), Vec::new());
        for _ in 0..2000 {
            turns.push(Hue::default().drawn(&mut next()));
            let light = Light::drawn(&[Lighting::Saturation { max: 0.2, p: 0.75 }], &mut next);
            shares.push(light.contrast);
        }
        let changed = |values: &[f64], same: f64| {
            values.iter().copied().filter(|value| *value != same).collect::<Vec<f64>>()
        };
        for (values, low, high) in
            [(changed(&turns, 0.0), 0.9, 1.0 / 0.9), (changed(&shares, 1.0), 0.8, 1.25)]
        {
            assert!((1430..1570).contains(&values.len()), "{}", values.len());
            assert!(values.iter().all(|value| (low..high).contains(value)));
            let range = values.iter().fold((2.0, 0.0), |(least, most): (f64, f64), value| {
                (least.min(*value), most.max(*value))
            });
            assert!(range.0 < low + 0.01 && range.1 > high - 0.01, "{range:?}");
        }
    }
}
