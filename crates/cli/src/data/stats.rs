//! `brigade data stats`: classes, sizes, broken files, mean and standard deviation.

use std::fmt::Write;

use brigade_images::ImageStats;
use brigade_images::decode::DecodeOptions;
use brigade_rank_env::text::{counted, escaped};
use clap::Args;
use serde_json::json;

use super::{Part, Progress, SourceArgs, broken_lines, threads};

/// Print classes, sizes, formats, broken files, mean and deviation of a set of images
///
/// Decodes every image, with one thread per core. Mean and standard deviation are over all pixels, from 0 to 1, as the
/// arguments of `Normalize`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct StatsArgs {
    #[command(flatten)]
    source: SourceArgs,

    /// Print as JSON, with all classes and all broken files
    #[arg(long)]
    json: bool,
}

impl StatsArgs {
    pub(super) fn run(&self) -> anyhow::Result<String> {
        let mut parts = Vec::new();
        for part in self.source.open()? {
            let progress = Progress::new(part.images.len());
            let options = DecodeOptions::default();
            let stats = ImageStats::with(part.images.source(), &options, threads(), |done| {
                progress.set(done);
            })?;
            parts.push((part, stats));
        }
        if self.json {
            let parts: Vec<_> = parts.iter().map(|(part, stats)| as_json(part, stats)).collect();
            return Ok(format!("{:#}\n", json!({ "parts": parts })));
        }
        let texts: Vec<String> = parts.iter().map(|(part, stats)| self.text(part, stats)).collect();
        Ok(texts.join("\n"))
    }

    fn text(&self, part: &Part, stats: &ImageStats) -> String {
        let images = &part.images;
        let mut text = escaped(&self.source.images).to_string();
        if let Some(name) = part.name {
            let _ = write!(text, ", {name}");
        }
        let _ = writeln!(
            text,
            ": {} in {}",
            counted(images.len(), "image"),
            counted(images.categories().len(), "class")
        );
        let counts = images.class_counts();
        let names: Vec<String> =
            images.categories().names().iter().map(|name| escaped(name).to_string()).collect();
        let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0).min(40);
        let listed = names.iter().zip(&counts);
        for (name, count) in listed.take(SHOWN) {
            let _ = writeln!(text, "  {name:width$}  {count:>7}");
        }
        if let Some(rest) = counts.get(SHOWN..).filter(|rest| !rest.is_empty()) {
            let (least, most) = (rest.iter().min(), rest.iter().max());
            let (least, most) = (least.copied().unwrap_or(0), most.copied().unwrap_or(0));
            let _ = writeln!(
                text,
                "  and {} more, of {least} to {most} images; --json lists all",
                counted(rest.len(), "class")
            );
        }
        let formats: Vec<String> =
            stats.formats.iter().map(|(name, count)| format!("{count} {name}")).collect();
        if let Some((widths, heights)) = stats.spread() {
            let row = |name, [least, middle, most]: [u32; 3]| {
                format!("{name}  {least} to {most}, in the middle {middle}\n")
            };
            let _ = writeln!(text, "formats  {}", formats.join(", "));
            text.push_str(&row("width  ", widths));
            text.push_str(&row("height ", heights));
            let triple =
                |numbers: [f64; 3]| numbers.map(|number| format!("{number:.3}")).join(", ");
            let _ = writeln!(text, "mean     {}", triple(stats.mean));
            let _ = writeln!(text, "std      {}", triple(stats.std));
        }
        let _ = writeln!(text, "broken   {}", stats.broken.len());
        text.push_str(&broken_lines(images.source(), &stats.broken));
        if !stats.damaged.is_empty() {
            let _ = writeln!(text, "damaged  {}, read with wrong pixels", stats.damaged.len());
            text.push_str(&broken_lines(images.source(), &stats.damaged));
        }
        text
    }
}

/// Maximum number of classes in the table.
const SHOWN: usize = 20;

fn as_json(part: &Part, stats: &ImageStats) -> serde_json::Value {
    let images = &part.images;
    let names = images.categories().names().iter();
    let classes: Vec<_> = names
        .zip(images.class_counts())
        .map(|(name, count)| json!({ "name": name, "images": count }))
        .collect();
    let listed = |images_with_reasons: &[(usize, String)]| -> Vec<_> {
        let named = |(index, reason): &(usize, String)| json!({ "image": images.source().name(*index), "reason": reason });
        images_with_reasons.iter().map(named).collect()
    };
    let spread = stats.spread().map(|(width, height)| {
        let of = |[min, median, max]: [u32; 3]| json!({ "min": min, "median": median, "max": max });
        (of(width), of(height))
    });
    json!({
        "part": part.name,
        "images": images.len(),
        "classes": classes,
        "formats": stats.formats,
        "width": spread.as_ref().map(|spread| &spread.0),
        "height": spread.as_ref().map(|spread| &spread.1),
        "mean": stats.mean,
        "std": stats.std,
        "broken": listed(&stats.broken),
        "damaged": listed(&stats.damaged),
    })
}

const EXAMPLES: &str = "\
Examples:
  brigade data stats imagewoof2-320
  brigade data stats images --label '^(.+)_[0-9]+[.]jpg$'
  brigade data stats 'shards-{000..009}.tar' --json";
