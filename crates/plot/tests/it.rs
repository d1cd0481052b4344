//! Tests of plots as files: SVG that parsers accept, PNG of the right size, text that fits.

#![allow(clippy::unwrap_used)] // clippy.toml allows it in tests, but knows only functions marked so

use brigade_plot::{
    Bars, Chart, ColorMap, Gallery, Grid, Heatmap, Panel, Picture, Plot, PlotError, Style,
    TextOptions,
};
use proptest::prelude::*;
use roxmltree::Document;

/// Returns the texts of an SVG with their positions and sizes.
fn texts(svg: &str) -> Vec<(String, f64, f64)> {
    let document = Document::parse(svg).unwrap();
    let number =
        |node: &roxmltree::Node<'_, '_>, name| node.attribute(name).unwrap().parse().unwrap();
    let nodes = document.descendants().filter(|node| node.has_tag_name("text"));
    nodes
        .map(|node| {
            (node.text().unwrap_or_default().to_owned(), number(&node, "x"), number(&node, "y"))
        })
        .collect()
}

fn count(svg: &str, tag: &str) -> usize {
    let document = Document::parse(svg).unwrap();
    document.descendants().filter(|node| node.has_tag_name(tag)).count()
}

fn png_size(bytes: &[u8]) -> (u32, u32) {
    let reader = png::Decoder::new(std::io::Cursor::new(bytes)).read_info().unwrap();
    (reader.info().width, reader.info().height)
}

fn lines_of(chart: &Chart) -> usize {
    let svg = chart.to_svg();
    // Axes and grids are one pixel wide.
    svg.matches("stroke-width=\"1.6\"").count()
}

#[test]
fn a_chart_shows_its_texts_ticks_and_markers() {
    let chart = Chart::new("Finder")
        .x("learning rate")
        .log_x()
        .y("loss")
        .line("loss", [(1e-7, 2.0), (1e-3, 1.0), (10.0, 4.0)])
        .vertical(1e-2, "valley")
        .point(1e-3, 1.0, "minimum");
    let texts = texts(&chart.to_svg());
    for text in ["Finder", "learning rate", "loss", "valley", "minimum", "1e-7", "0.1", "10"] {
        assert!(texts.iter().any(|it| it.0 == text), "{text} is not in {texts:?}");
    }
    // The only series is named by the axis, so there is no legend.
    assert_eq!(texts.iter().filter(|it| it.0 == "loss").count(), 1);
    let place = |text: &str| texts.iter().find(|it| it.0 == text).unwrap();
    // Equal ratios have equal distances, and larger values are further up or right.
    let ratio = (place("1e-5").1 - place("1e-7").1) / (place("0.1").1 - place("1e-5").1);
    assert!((ratio - 0.5).abs() < 0.01, "{ratio}");
    assert!(place("2").2 > place("4").2);
    assert_eq!(png_size(&chart.to_png().unwrap()), (640, 420));
}

#[test]
fn what_is_not_finite_is_a_gap() {
    let chart =
        Chart::new("").line("a", [(0.0, 1.0), (1.0, 2.0), (2.0, f64::NAN), (3.0, 1.0), (4.0, 2.0)]);
    assert_eq!(lines_of(&chart), 2);
    // A point between two gaps is a dot.
    let alone = Chart::new("").line("a", [(0.0, f64::INFINITY), (1.0, 2.0), (2.0, f64::NAN)]);
    assert_eq!((lines_of(&alone), count(&alone.to_svg(), "circle")), (0, 1));
    // Zero cannot be shown on a logarithmic axis.
    let log = Chart::new("")
        .log_y()
        .line("a", [(0.0, 1.0), (1.0, 2.0), (2.0, 0.0), (3.0, 1.0), (4.0, 5.0)]);
    assert_eq!(lines_of(&log), 2);
}

#[test]
fn odd_charts_are_drawn() {
    let huge = [(0.0, -f64::MAX), (1e300, f64::MAX), (f64::MIN_POSITIVE, 0.0)];
    for chart in [
        Chart::new(""),
        Chart::new("empty").line("a", []).points("b", []).log_x().log_y(),
        Chart::new("nothing").line("a", [(f64::NAN, 1.0), (0.0, f64::NAN)]),
        Chart::new("one").line("a", [(3.0, 3.0)]).step("b", [(3.0, 3.0)]),
        Chart::new("huge").line("a", huge).points("b", huge).step("c", huge),
        Chart::new("close").line("a", [(1e9, 1.0), (1e9 + 1e-7, 1.0 + 1e-16)]),
        Chart::new("small").size(1, 1).x("x").y("y").line("a", [(0.0, 1.0), (1e9, 2e9)]),
        Chart::new("outside")
            .x_range(0.0, 1.0)
            .y_range(0.0, 1.0)
            .line("a", [(2.0, 2.0), (3.0, 9.0)]),
        Chart::new("marks").vertical(f64::NAN, "a").point(f64::NAN, 1.0, "b").vertical(1.0, ""),
    ] {
        let svg = chart.to_svg();
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        let (width, height) = png_size(&chart.to_png().unwrap());
        assert!(width >= 160 && height >= 120);
        Document::parse(&svg).unwrap();
        assert!(chart.to_text(40, 10).lines().count() <= 10);
        assert!(!chart.to_text(0, 0).is_empty());
    }
}

#[test]
fn labels_of_ticks_do_not_overlap() {
    for (first, last) in
        [(0.0, 1.0), (1e9, 1e9 + 1.0), (-1e-7, 1e5), (123_456.0, 123_457.0), (0.0, 1e12)]
    {
        for width in [160, 320, 640, 2000] {
            let chart = Chart::new("").line("", [(first, 0.0), (last, 1.0)]).size(width, 300);
            let texts = texts(&chart.to_svg());
            // The labels of the horizontal axis have a common baseline.
            let baseline = texts.iter().map(|it| it.2).fold(0.0, f64::max);
            let across: Vec<_> = texts.iter().filter(|it| it.2 == baseline).collect();
            // DejaVu Sans' digits take 0.64 of the size, 11 pixels.
            let half = |text: &str| text.len() as f64 * 0.62 * 11.0 / 2.0;
            for pair in across.windows(2) {
                assert!(pair[0].1 + half(&pair[0].0) < pair[1].1 - half(&pair[1].0), "{across:?}");
            }
            for (text, middle, _) in &across {
                assert!(
                    middle + half(text) < f64::from(width) + 1.0,
                    "{width}: {text:?} at {middle}"
                );
            }
        }
    }
}

#[test]
fn a_long_series_keeps_its_peak_in_a_small_file() {
    let peak = |step: u32| if step == 654_321 { 9.0 } else { 1.0 };
    let points = (0..1_000_000).map(|step| (f64::from(step), peak(step)));
    let chart = Chart::new("").line("a", points).y_range(0.0, 10.0);
    let svg = chart.to_svg();
    assert!(svg.len() < 100_000, "{} bytes", svg.len());
    let line = Document::parse(&svg).unwrap();
    let line = line.descendants().find(|it| it.attribute("stroke-width") == Some("1.6")).unwrap();
    let heights: Vec<f64> = line
        .attribute("points")
        .unwrap()
        .split(' ')
        .map(|point| point.split_once(',').unwrap().1.parse().unwrap())
        .collect();
    let (least, greatest) =
        heights.iter().fold((f64::MAX, 0.0_f64), |it, y| (it.0.min(*y), it.1.max(*y)));
    assert!(greatest - least > 200.0, "{least} {greatest}");
}

#[test]
fn a_legend_with_many_names_says_how_many_are_left_out() {
    let series =
        |chart: Chart, index: usize| chart.line(format!("a metric with the number {index}"), []);
    let chart = (0..50).fold(Chart::new("many"), series);
    let texts = texts(&chart.to_svg());
    let shown = texts.iter().filter(|it| it.0.starts_with("a metric")).count();
    let more = format!("and {} more", 50 - shown);
    assert!(texts.iter().any(|it| it.0 == more), "{texts:?}");
}

#[test]
fn a_heatmap_has_its_numbers_or_is_an_image() {
    let counts = vec![5, 1, 0, 7];
    let small = Heatmap::confusion(&["cat", "dog"], counts).unwrap();
    let svg = small.to_svg();
    let texts = texts(&svg);
    let place = |text: &str| texts.iter().find(|it| it.0 == text).unwrap();
    assert!(["Actual", "Predicted", "cat", "dog"].iter().all(|it| place(it).0 == *it));
    // Rows are the actual classes: cats predicted as dogs are to the right of the cats.
    assert!(place("1").1 > place("5").1 && place("1").2 == place("5").2);
    assert!(place("7").2 > place("1").2);
    assert_eq!((count(&svg, "rect"), count(&svg, "image")), (5, 0));

    let names: Vec<String> = (0..1000).map(|index| format!("class {index}")).collect();
    let large = Heatmap::confusion(&names, vec![1; 1_000_000]).unwrap();
    let svg = large.to_svg();
    assert!(svg.len() < 100_000, "{} bytes", svg.len());
    assert_eq!((count(&svg, "rect"), count(&svg, "image")), (1, 2));
    let (width, height) = png_size(&large.to_png().unwrap());
    assert!(width < 1000 && height < 1000);
    assert!(large.to_text(80, 24).lines().all(|line| line.chars().count() <= 80));

    let dense = Heatmap::new(2, 3, vec![0.0, f64::NAN, -1.0, f64::INFINITY, 1e300, 5.0]).unwrap();
    for map in
        [dense.clone(), dense.clone().log().upwards().colors(ColorMap::Magma), dense.numbers(true)]
    {
        Document::parse(&map.to_svg()).unwrap();
        assert_eq!(png_size(&map.clone().size(300, 200).to_png().unwrap()), (300, 200));
        assert!(!map.to_text(30, 10).is_empty());
    }
}

#[test]
fn a_confusion_matrix_is_a_table_in_a_terminal() {
    let matrix = Heatmap::confusion(&["cat", "a very long dog"], vec![5, 1, 0, 17]).unwrap();
    let text = matrix.to_text(50, 10);
    let expected = "\
Confusion matrix
rows: Actual, columns: Predicted
                 cat  a very long dog
cat                5                1
a very long dog    0               17
";
    assert_eq!(text, expected);
    let narrow = matrix.to_text(27, 10);
    assert!(narrow.contains("1 cat              5   1\n"), "{narrow}");
}

#[test]
fn a_gallery_shows_each_image_with_its_lines() {
    let small = Picture::grey(2, 2, vec![0, 255, 255, 0]).unwrap().caption("right").caption("0.9");
    let large = Picture::rgb(900, 300, vec![100; 810_000]).unwrap().wrong("wrong");
    let gallery = Gallery::new("Prediction").picture(small).picture(large).cell(100);
    let svg = gallery.to_svg();
    let document = Document::parse(&svg).unwrap();
    let images: Vec<_> = document.descendants().filter(|it| it.has_tag_name("image")).collect();
    let size = |at: usize, name| images[at].attribute(name).unwrap();
    assert_eq!((size(0, "width"), size(0, "height")), ("100", "100"));
    assert_eq!((size(1, "width"), size(1, "height")), ("100", "33"));
    let wrong = document.descendants().find(|it| it.text() == Some("wrong")).unwrap();
    assert_eq!(wrong.attribute("fill"), Some("#c81414"));
    // The large image is not embedded with all its pixels.
    assert!(svg.len() < 5000, "{} bytes", svg.len());

    // Enlarged with hard edges: black, and white beside it.
    let mut reader =
        png::Decoder::new(std::io::Cursor::new(gallery.to_png().unwrap())).read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    reader.next_frame(&mut pixels).unwrap();
    let width = reader.info().width as usize;
    let number = |name| size(0, name).parse::<f64>().unwrap() as usize;
    let (x, y) = (number("x"), number("y"));
    let grey = |x: usize, y: usize| pixels[3 * (y * width + x)];
    assert_eq!((grey(x + 5, y + 5), grey(x + 48, y + 48)), (0, 0));
    assert_eq!((grey(x + 52, y + 48), grey(x + 48, y + 52), grey(x + 95, y + 95)), (255, 255, 0));
    assert_eq!(gallery.to_text(80, 9), "Prediction\n1. right, 0.9 (2 x 2)\n2. wrong (900 x 300)\n");
}

#[test]
fn a_picture_without_end_is_refused() {
    let chart = Chart::new("").size(100_000, 100_000);
    let error = chart.to_png().unwrap_err();
    assert!(matches!(error, PlotError::TooLarge { width: 100_000, .. }), "{error}");
}

#[test]
fn panels_stand_side_by_side() {
    let chart = |name: &str| Chart::new(name).size(200, 150);
    let grid = Grid::new("all").panel(chart("one")).panel(chart("two")).panel(chart("three"));
    assert_eq!(png_size(&grid.to_png().unwrap()), (600, 180));
    let texts = texts(&grid.to_svg());
    let place = |text: &str| texts.iter().find(|it| it.0 == text).unwrap();
    assert_eq!((place("two").1 - place("one").1, place("two").2), (200.0, place("one").2));
    let column = grid.columns(1);
    assert_eq!(png_size(&column.to_png().unwrap()), (200, 480));
    assert_eq!(column.to_text(60, 10).matches("one").count(), 1);
    assert_eq!(Grid::new("none").to_text(20, 5), "none\n\n");
}

#[test]
fn the_name_of_a_file_says_what_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let chart = Chart::new("saved").line("a", [(0.0, 0.0), (1.0, 1.0)]);
    for (name, begin) in [("a.png", "\u{fffd}PNG"), ("a.SVG", "<svg"), ("a.txt", " ")] {
        let path = folder.path().join(name);
        chart.save(&path).unwrap();
        let bytes = std::fs::read(path).unwrap();
        assert!(String::from_utf8_lossy(&bytes).starts_with(begin), "{name}");
    }
    for name in ["a.jpg", "a", ".png"] {
        let error = chart.save(folder.path().join(name)).unwrap_err();
        assert!(matches!(error, PlotError::Extension { .. }), "{error}");
    }
    let error = chart.save(folder.path().join("none/a.png")).unwrap_err();
    assert!(error.to_string().contains("none/a.png"), "{error}");
}

#[test]
fn plots_are_data() {
    let chart = Chart::new("t").log_x().line("a", [(1.0, f64::NAN)]).vertical(2.0, "b");
    assert_eq!(chart.clone().series("c", [], Style::Step).series.len(), 2);
    assert_eq!(
        serde_json::to_value(&chart).unwrap(),
        serde_json::json!({
            "title": "t",
            "x": { "label": "", "scale": "log10", "range": null },
            "y": { "label": "", "scale": "linear", "range": null },
            "series": [{ "name": "a", "points": [[1.0, null]], "style": "line" }],
            "markers": [{ "vertical": { "x": 2.0, "label": "b" } }],
            "size": { "width": 640, "height": 420 },
        })
    );
    let grid = Grid::new("g").panel(chart.clone());
    assert!(matches!(&grid.panels[0], Panel::Chart(found) if found.title == chart.title));
}

#[test]
fn a_chart_in_a_terminal() {
    let chart = Chart::new("Loss")
        .x("epoch")
        .y("loss")
        .line("train", (0..=10).map(|at| (f64::from(at), f64::from(10 - at))))
        .line("valid", (0..=10).map(|at| (f64::from(at), 5.0)))
        .vertical(5.0, "half");
    let text = chart.to_text(50, 12);
    assert!(
        text.lines().count() <= 12 && text.lines().all(|it| it.chars().count() <= 50),
        "{text}"
    );
    for part in ["Loss", "a: train  b: valid", "10 ┤", "half", "epoch", "┊"] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    // Each line has its letter at its end, and there is no escape sequence.
    let ends: Vec<char> = text.lines().filter_map(|it| it.chars().last()).collect();
    assert!(ends.contains(&'a') && ends.contains(&'b') && !text.contains('\x1b'), "{text}");
    let colored = chart.to_text_with(&TextOptions::new(50, 12).color(true));
    assert!(colored.contains("\x1b[38;2;31;119;180m"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn no_text_breaks_a_file(text in any::<String>(), value in any::<f64>()) {
        let chart = Chart::new(&text).size(200, 150).x(&text).y(&text).line(&text, [(value, 1.0), (0.0, value)])
            .points("<script>\0\u{ffff}]]>&amp;\"'", [(1.0, value)]).vertical(0.0, &text);
        let map = Heatmap::confusion(&[&text], vec![3]).unwrap().title(&text);
        let picture = Picture::grey(1, 1, vec![0]).unwrap().caption(&text).wrong(&text);
        let gallery = Gallery::new(&text).picture(picture);
        let grid = Grid::new(&text).panel(chart).panel(map).panel(gallery);
        let svg = grid.to_svg();
        let document = Document::parse(&svg);
        prop_assert!(document.is_ok(), "{:?}", document.err());
        prop_assert_eq!(count(&svg, "script"), 0);
        prop_assert!(grid.to_png().is_ok());
        prop_assert!(grid.to_text(30, 10).chars().all(|it| it == '\n' || !it.is_control()));
    }
}

#[path = "../examples/ratios.rs"]
#[allow(dead_code, reason = "its `main` is for the example")]
mod ratios;

#[test]
fn the_picture_of_the_benchmarks_is_that_of_the_results() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let rows = read("bench/results/readme.jsonl");
    let now = ratios::picture(&rows).unwrap().to_svg();
    assert!(now == read("docs/images/benchmarks.svg"), "run `cargo xtask bench --picture`");

    let page = read("docs/benchmarks.md");
    for line in rows.lines() {
        let row: serde_json::Value = serde_json::from_str(line).unwrap();
        let [what, ours, other, ratio] =
            ["what", "ours", "other", "ratio"].map(|it| row[it].as_str().unwrap());
        let cells = format!("| {what} | {ours} | {other} | {ratio} |");
        assert!(page.contains(&cells), "docs/benchmarks.md has no row that begins {cells}");
    }
}

#[test]
fn bars_end_where_their_values_are() {
    let bars = Bars::new("Ratios")
        .x("times")
        .bar("first", 1.0, "1.00x")
        .muted_bar("second", 2.0, "2.00x")
        .bar("none", f64::NAN, "-")
        .reference(1.0);
    let svg = bars.to_svg();
    for text in ["Ratios", "times", "first", "second", "2.00x"] {
        assert!(texts(&svg).iter().any(|it| it.0 == text), "{text}");
    }
    let ends: Vec<f64> = ["1.00x", "2.00x", "-"]
        .iter()
        .map(|text| texts(&svg).iter().find(|label| label.0 == *text).unwrap().1)
        .collect();
    // A bar's text begins 6 pixels behind its end, and the bar of no number has none.
    assert!((ends[1] - ends[2] - 2.0 * (ends[0] - ends[2])).abs() < 0.1, "{ends:?}");
    let text = bars.to_text(40, 10);
    let blocks = |line: &str| line.matches('█').count();
    let counts: Vec<usize> = text.lines().map(blocks).collect();
    assert_eq!(counts[0], 0, "{text}");
    assert!(counts[2] >= 2 * counts[1] - 1 && counts[1] > 0 && counts[3] == 0, "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 40), "{text}");
    assert!(Bars::new("").to_png().is_ok());
}
