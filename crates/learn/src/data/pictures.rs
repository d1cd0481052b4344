//! Rows of a batch as pictures and texts.

use brigade_torch::{Error, Result};
use tch::{Kind, Tensor};

use super::blocks::TargetKind;
use crate::loaders::Picture;

/// Makes a picture of an image `[1 or 3, h, w]` with values from 0 to 1.
pub(super) fn of_image(image: &Tensor) -> Result<Picture> {
    let &[_, height, width] = image.size().as_slice() else {
        return Err(Error::invalid_argument(format!(
            "{:?} is not the shape of an image",
            image.size()
        )));
    };
    let bytes = image.f_mul_scalar(255.0)?.f_round()?.f_clamp(0.0, 255.0)?;
    let bytes = bytes.f_expand([3, height, width], false)?.f_permute([1, 2, 0])?;
    let bytes = bytes.f_to_kind(Kind::Uint8)?.f_contiguous()?.f_view([-1])?;
    let rgb = Vec::<u8>::try_from(&bytes)?;
    Ok(Picture { width: width as u32, height: height as u32, rgb })
}

/// Blends the colours of a mask `[h, w]` with a picture at equal weights. Class 0, usually the background, and pixels
/// without a class leave the picture unchanged.
pub(super) fn blend(picture: &mut Picture, mask: &Tensor) -> Result<()> {
    let size = [i64::from(picture.height), i64::from(picture.width)];
    if mask.size() != size {
        return Err(Error::invalid_argument(format!(
            "a mask of shape {:?} does not fit a picture of {size:?}",
            mask.size()
        )));
    }
    let classes =
        Vec::<i64>::try_from(&mask.f_to_kind(Kind::Int64)?.f_contiguous()?.f_view([-1])?)?;
    for (pixel, class) in picture.rgb.as_chunks_mut::<3>().0.iter_mut().zip(classes) {
        if class > 0 {
            for (value, of_class) in pixel.iter_mut().zip(colour(class)) {
                *value = ((u16::from(*value) + u16::from(of_class)) / 2) as u8;
            }
        }
    }
    Ok(())
}

/// Marks points `[points, 2]` in coordinates from -1 to 1 by crosses of five red pixels. Points outside of the picture
/// are left out.
pub(super) fn mark(picture: &mut Picture, points: &Tensor) -> Result<()> {
    let points = points.f_to_kind(Kind::Double)?.f_contiguous()?.f_view([-1])?;
    let (width, height) = (i64::from(picture.width), i64::from(picture.height));
    let pixel = |place: f64, length: i64| ((place + 1.0) / 2.0 * length as f64).floor() as i64;
    for &[x, y] in Vec::<f64>::try_from(&points)?.as_chunks::<2>().0 {
        let (x, y) = (pixel(x, width), pixel(y, height));
        for (x, y) in [(x, y), (x - 1, y), (x + 1, y), (x, y - 1), (x, y + 1)] {
            if (0..width).contains(&x) && (0..height).contains(&y) {
                let start = 3 * (y * width + x) as usize;
                if let Some(rgb) = picture.rgb.get_mut(start..start + 3) {
                    rgb.copy_from_slice(&[255, 0, 0]);
                }
            }
        }
    }
    Ok(())
}

/// Returns the colour of a class in Pascal VOC's palette: the bits of the class, three at a time, from the highest bit
/// of each channel on, so that neighbouring numbers have different colours.
fn colour(class: i64) -> [u8; 3] {
    let mut colour = [0; 3];
    for place in 0..8 {
        for (channel, value) in colour.iter_mut().enumerate() {
            let bit = (class >> (3 * place + channel)) & 1;
            *value |= (bit as u8) << (7 - place);
        }
    }
    colour
}

/// Returns a target as text: for a class its name, for several their names with `;` between them, for numbers their
/// digits.
pub(super) fn text(kind: TargetKind, target: &Tensor, classes: &[String]) -> Result<String> {
    let values =
        Vec::<f64>::try_from(&target.f_to_kind(Kind::Double)?.f_contiguous()?.f_view([-1])?)?;
    let name =
        |number: usize| classes.get(number).cloned().unwrap_or_else(|| format!("class {number}"));
    let texts: Vec<String> = match kind {
        TargetKind::Category => values.iter().map(|number| name(*number as usize)).collect(),
        TargetKind::MultiCategory => {
            let chosen = values.iter().enumerate().filter(|(_, value)| **value > 0.5);
            chosen.map(|(number, _)| name(number)).collect()
        }
        TargetKind::Mask | TargetKind::Points => Vec::new(),
        TargetKind::Numbers => {
            return Ok(values
                .iter()
                .map(|number| format!("{number:.4}"))
                .collect::<Vec<_>>()
                .join(", "));
        }
    };
    Ok(texts.join(";"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_blended_in_the_colours_of_pascal() {
        // Aeroplane, bicycle, bird, boat of the Pascal VOC devkit, and the border.
        let colours = [[128, 0, 0], [0, 128, 0], [128, 128, 0], [0, 0, 128]];
        assert_eq!([1, 2, 3, 4].map(colour), colours);
        let mut picture = Picture { width: 3, height: 1, rgb: vec![100; 9] };
        blend(&mut picture, &Tensor::from_slice(&[0i64, 1, -100]).view([1, 3])).unwrap();
        assert_eq!(picture.rgb, [100, 100, 100, 114, 50, 50, 100, 100, 100]);
        assert!(blend(&mut picture, &Tensor::from_slice(&[0i64, 1])).is_err());
    }

    #[test]
    fn points_are_marked_where_they_are_on_the_picture() {
        let mut picture = Picture { width: 4, height: 2, rgb: vec![0; 24] };
        // The centre of the last pixel, and one far outside.
        let points = Tensor::from_slice(&[0.75f32, 0.5, 9.0, -9.0]).view([2, 2]);
        mark(&mut picture, &points).unwrap();
        let red: Vec<usize> = (0..8).filter(|pixel| picture.rgb[3 * pixel] == 255).collect();
        assert_eq!(red, [3, 6, 7]);
    }

    #[test]
    fn targets_are_told_in_words() {
        let classes = ["cat", "dog", "cow"].map(str::to_owned);
        let words = |kind, target: &Tensor| text(kind, target, &classes).unwrap();
        assert_eq!(words(TargetKind::Category, &Tensor::from(1i64)), "dog");
        assert_eq!(words(TargetKind::Category, &Tensor::from(7i64)), "class 7");
        let both = Tensor::from_slice(&[1.0f32, 0.0, 1.0]);
        assert_eq!(words(TargetKind::MultiCategory, &both), "cat;cow");
        assert_eq!(
            words(TargetKind::Numbers, &Tensor::from_slice(&[0.5f32, -2.0])),
            "0.5000, -2.0000"
        );
    }
}
