//! Rendering of a drawing as SVG.

use std::fmt::Write;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::color::Color;
use crate::escape_markup;
use crate::raster::encode;
use crate::scene::{Anchor, Scene, Shape};

pub(crate) fn render(scene: &Scene) -> String {
    let (width, height) = (Number(scene.width), Number(scene.height));
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"DejaVu Sans, Verdana, sans-serif\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n"
    );
    for shape in &scene.shapes {
        // Writing to a string does not fail.
        let _ = element(&mut svg, shape);
    }
    svg + "</svg>\n"
}

fn element(svg: &mut String, shape: &Shape) -> std::fmt::Result {
    match shape {
        Shape::Rect { area, color } => {
            let [x, y, width, height] = [area.x, area.y, area.width, area.height].map(Number);
            writeln!(
                svg,
                r#"<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{}"/>"#,
                Hex(*color)
            )
        }
        Shape::Line { points, color, width, dashed } => {
            write!(svg, r#"<polyline points=""#)?;
            for (index, (x, y)) in points.iter().enumerate() {
                let space = if index == 0 { "" } else { " " };
                write!(svg, "{space}{},{}", Number(*x), Number(*y))?;
            }
            let dash = if *dashed { r#" stroke-dasharray="5 4""# } else { "" };
            writeln!(
                svg,
                r#"" fill="none" stroke="{}" stroke-width="{}" stroke-linejoin="round"{dash}/>"#,
                Hex(*color),
                Number(*width)
            )
        }
        Shape::Dot { at: (x, y), radius, color } => {
            let [x, y, radius] = [*x, *y, *radius].map(Number);
            writeln!(svg, r#"<circle cx="{x}" cy="{y}" r="{radius}" fill="{}"/>"#, Hex(*color))
        }
        Shape::Text(text) => {
            let (x, y) = (Number(text.at.0), Number(text.at.1));
            let anchor = match text.anchor {
                Anchor::Start => "",
                Anchor::Middle => r#" text-anchor="middle""#,
                Anchor::End => r#" text-anchor="end""#,
            };
            let turn = if text.upwards {
                format!(r#" transform="rotate(-90 {x} {y})""#)
            } else {
                String::new()
            };
            writeln!(
                svg,
                r#"<text x="{x}" y="{y}" font-size="{}" fill="{}"{anchor}{turn}>{}</text>"#,
                Number(text.size),
                Hex(text.color),
                escape_markup(&text.text)
            )
        }
        Shape::Image { area, image } => {
            let [x, y, width, height] = [area.x, area.y, area.width, area.height].map(Number);
            // An image whose size the encoder refuses is left out.
            let Ok(png) = encode(image.width, image.height, &image.bytes) else { return Ok(()) };
            write!(
                svg,
                r#"<image x="{x}" y="{y}" width="{width}" height="{height}" preserveAspectRatio="none" "#
            )?;
            write!(svg, r#"style="image-rendering:pixelated" href="data:image/png;base64,"#)?;
            STANDARD.encode_string(png, svg);
            writeln!(svg, r#""/>"#)
        }
    }
}

/// Coordinate, rounded to a hundredth of a pixel and without trailing zeros.
struct Number(f64);

impl std::fmt::Display for Number {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let rounded = (self.0 * 100.0).round() / 100.0;
        // Not "-0".
        write!(formatter, "{}", rounded + 0.0)
    }
}

struct Hex(Color);

impl std::fmt::Display for Hex {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Color(red, green, blue) = self.0;
        write!(formatter, "#{red:02x}{green:02x}{blue:02x}")
    }
}
