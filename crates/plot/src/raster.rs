//! Rendering of a drawing as PNG.

use tiny_skia::{
    FillRule, IntSize, Paint, PathBuilder, Pixmap, Rect, Stroke, StrokeDash, Transform,
};

use crate::color::Color;
use crate::scene::{Anchor, Area, Pixels, Scene, Shape, Text};
use crate::{PlotError, Result, font};

/// Maximum number of pixels of an image: 268 MB while it is drawn.
const MOST_PIXELS: u64 = 1 << 26;

pub(crate) fn render(scene: &Scene) -> Result<Vec<u8>> {
    let (width, height) = (scene.width as u32, scene.height as u32);
    let too_large = || PlotError::TooLarge { width, height, most: MOST_PIXELS };
    if u64::from(width) * u64::from(height) > MOST_PIXELS {
        return Err(too_large());
    }
    let mut canvas = Pixmap::new(width.max(1), height.max(1)).ok_or_else(too_large)?;
    canvas.fill(tiny_skia::Color::WHITE);
    for shape in &scene.shapes {
        draw(&mut canvas, shape);
    }
    // Everything is opaque, so the alpha channel can be dropped.
    let bytes: Vec<u8> =
        canvas.pixels().iter().flat_map(|it| [it.red(), it.green(), it.blue()]).collect();
    encode(canvas.width(), canvas.height(), &bytes)
}

/// Encodes RGB pixels as PNG.
pub(crate) fn encode(width: u32, height: u32, pixels: &[u8]) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(pixels)?;
    writer.finish()?;
    Ok(bytes)
}

fn draw(canvas: &mut Pixmap, shape: &Shape) {
    let still = Transform::identity();
    match shape {
        Shape::Rect { area, color } => {
            if let Some(rect) = rect(area) {
                canvas.fill_rect(rect, &paint(*color), still, None);
            }
        }
        Shape::Line { points, color, width, dashed } => {
            let mut path = PathBuilder::new();
            for (index, &(x, y)) in points.iter().enumerate() {
                if index == 0 {
                    path.move_to(x as f32, y as f32);
                } else {
                    path.line_to(x as f32, y as f32);
                }
            }
            let dash = if *dashed { StrokeDash::new(vec![5.0, 4.0], 0.0) } else { None };
            let line_join = tiny_skia::LineJoin::Round;
            let stroke = Stroke { width: *width as f32, line_join, dash, ..Stroke::default() };
            if let Some(path) = path.finish() {
                canvas.stroke_path(&path, &paint(*color), &stroke, still, None);
            }
        }
        Shape::Dot { at: (x, y), radius, color } => {
            if let Some(path) = PathBuilder::from_circle(*x as f32, *y as f32, *radius as f32) {
                canvas.fill_path(&path, &paint(*color), FillRule::Winding, still, None);
            }
        }
        Shape::Text(text) => draw_text(canvas, text),
        Shape::Image { area, image } => draw_image(canvas, area, image),
    }
}

fn draw_text(canvas: &mut Pixmap, text: &Text) {
    let (x, y) = text.at;
    let width = font::width(&text.text, text.size);
    let begin = match text.anchor {
        Anchor::Start => x,
        Anchor::Middle => x - width / 2.0,
        Anchor::End => x - width,
    };
    let mut outline = Outline(PathBuilder::new());
    font::outline(&text.text, text.size, begin, y, &mut outline);
    let turn = if text.upwards {
        Transform::from_rotate_at(-90.0, x as f32, y as f32)
    } else {
        Transform::identity()
    };
    if let Some(path) = outline.0.finish() {
        canvas.fill_path(&path, &paint(text.color), FillRule::Winding, turn, None);
    }
}

fn draw_image(canvas: &mut Pixmap, area: &Area, image: &Pixels) {
    let rgba = image.bytes.chunks_exact(3).flat_map(|it| [it[0], it[1], it[2], 255]).collect();
    let size = IntSize::from_wh(image.width, image.height);
    let source = size.and_then(|size| Pixmap::from_vec(rgba, size));
    if let (Some(source), Some(_)) = (source, rect(area)) {
        let (width, height) = (f64::from(image.width), f64::from(image.height));
        let (scale_x, scale_y) = ((area.width / width) as f32, (area.height / height) as f32);
        let place = Transform::from_row(scale_x, 0.0, 0.0, scale_y, area.x as f32, area.y as f32);
        // Nearest neighbour, as `pixelated` in SVG.
        let paint = tiny_skia::PixmapPaint::default();
        canvas.draw_pixmap(0, 0, source.as_ref(), &paint, place, None);
    }
}

fn rect(area: &Area) -> Option<Rect> {
    Rect::from_xywh(area.x as f32, area.y as f32, area.width as f32, area.height as f32)
}

fn paint(color: Color) -> Paint<'static> {
    let mut paint = Paint::default();
    paint.set_color_rgba8(color.0, color.1, color.2, 255);
    paint
}

struct Outline(PathBuilder);

impl font::Pen for Outline {
    fn move_to(&mut self, (x, y): (f32, f32)) {
        self.0.move_to(x, y);
    }

    fn line_to(&mut self, (x, y): (f32, f32)) {
        self.0.line_to(x, y);
    }

    fn quad_to(&mut self, (x1, y1): (f32, f32), (x, y): (f32, f32)) {
        self.0.quad_to(x1, y1, x, y);
    }

    fn close(&mut self) {
        self.0.close();
    }
}
