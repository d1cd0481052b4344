//! What a process prints in a cell, in a rank, and elsewhere; and that its forms are what they say.

use std::env;
use std::io::Cursor;
use std::process::Command;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use brigade_notebook::display::Content;
use brigade_notebook::prelude::*;
use brigade_plot::{Chart, Gallery, Grid, Heatmap, Plot};
use brigade_schedule::Schedule;
use roxmltree::Document;
use tch::{Device, Kind, Tensor};

/// The forms that evcxr would read, as kind and content.
fn forms(output: &str) -> Vec<(String, String)> {
    let mut forms = Vec::new();
    let mut lines = output.lines();
    while let Some(line) = lines.next() {
        let Some(kind) = line.strip_prefix("EVCXR_BEGIN_CONTENT ") else { continue };
        let content: Vec<&str> =
            lines.by_ref().take_while(|it| *it != "EVCXR_END_CONTENT").collect();
        forms.push((kind.to_owned(), content.join("\n")));
    }
    forms
}

fn forms_of(value: &(impl CellDisplay + ?Sized)) -> Vec<(String, String)> {
    let mut bytes = Vec::new();
    value.cell_content().write_to(&mut bytes).unwrap();
    forms(&String::from_utf8(bytes).unwrap())
}

fn kinds(forms: &[(String, String)]) -> Vec<&str> {
    forms.iter().map(|(kind, _)| kind.as_str()).collect()
}

/// Checks the picture's three forms and keeps its file where one wants to look at it. Returns the SVG's texts.
fn drawn(name: &str, value: &impl CellDisplay) -> Vec<String> {
    let forms = forms_of(value);
    assert_eq!(kinds(&forms), ["text/plain", "image/svg+xml", "image/png"], "{name}");
    assert!(!forms[0].1.trim().is_empty(), "{name}");
    let document = Document::parse(&forms[1].1).unwrap();
    let png = STANDARD.decode(&forms[2].1).unwrap();
    let reader = png::Decoder::new(Cursor::new(&png)).read_info().unwrap();
    let width: u32 = document.root_element().attribute("width").unwrap().parse().unwrap();
    assert_eq!(reader.info().width, width, "{name}");
    if let Some(folder) = env::var_os("BRIGADE_TEST_PICTURES") {
        std::fs::write(std::path::Path::new(&folder).join(format!("{name}.png")), png).unwrap();
    }
    let texts = document.descendants().filter(|it| it.has_tag_name("text"));
    texts.filter_map(|it| it.text().map(str::to_owned)).collect()
}

#[test]
fn plots_are_svg_png_and_text() {
    let losses: Vec<Vec<f64>> = (0..2)
        .map(|rank| {
            (0..50)
                .map(|step| 2.0 * (-f64::from(step) / 20.0).exp() + 0.1 * f64::from(rank))
                .collect()
        })
        .collect();
    let texts = drawn("curve", &curve("Loss <train>", &losses));
    for text in ["Loss <train>", "step", "loss <train>", "rank 0", "rank 1"] {
        assert!(texts.iter().any(|it| it == text), "{text} is not in {texts:?}");
    }

    let cycle = brigade_schedule::OneCycle::new(0.1, 100);
    let texts = drawn("schedule", &schedule_plot(&Schedule::one_cycle(cycle).unwrap(), 100));
    assert!(
        ["Schedule", "Learning rate", "Momentum"].iter().all(|it| texts.iter().any(|x| x == it))
    );

    let matrix = Heatmap::confusion(&["cat", "dog & co"], vec![8, 2, 1, 9]).unwrap();
    let texts = drawn("confusion", &matrix);
    assert!(texts.iter().any(|it| it == "dog & co"), "{texts:?}");

    let chart = Chart::new("a").line("a", [(0.0, 1.0), (1.0, 2.0)]);
    drawn("grid", &Grid::new("both").panel(chart.clone()).panel(matrix));
    drawn("chart", &chart);
    drawn("gallery", &Gallery::new("nothing"));
}

#[test]
fn a_batch_of_images_is_a_gallery() {
    let step = Tensor::arange(28, (Kind::Float, Device::Cpu)) / 27.0;
    let (across, down) = (step.view([1, 28]), step.view([28, 1]));
    let batch: Vec<Tensor> = (0..40)
        .map(|index| {
            let share = f64::from(index) / 39.0;
            let red = &across * share + &down * (1.0 - share);
            Tensor::stack(&[red, across.expand([28, 28], false), down.expand([28, 28], false)], 0)
        })
        .collect();
    let batch = Tensor::stack(&batch, 0);
    let labels = Tensor::arange(40, (Kind::Int64, Device::Cpu)).remainder(3);
    let names = ["T-shirt/top", "Ankle boot", "<bag>"];
    let texts = drawn("images", &images(&batch).labels(&labels, &names).columns(8));
    assert_eq!(texts.iter().filter(|it| *it == "<bag>").count(), 13, "{texts:?}");
    let normalised = (&batch - 0.45) / 0.22;
    drawn("images_normalised", &images(&normalised.narrow(0, 0, 9)));
    drawn("image", &images(&batch.get(0)));
}

#[test]
fn a_tensor_is_a_table() {
    let tensor = Tensor::from_slice(&[1i64, 2]);
    let html = "<p><code>Tensor [2], Int64, cpu</code></p>\n<table border=\"1\" class=\"dataframe\">\n<thead>\n\
                <tr><th>0</th><th>1</th></tr>\n</thead>\n<tbody>\n<tr><td>1</td><td>2</td></tr>\n</tbody>\n</table>";
    let expected = [
        ("text/plain".to_owned(), "Tensor [2], Int64, cpu\n0  1\n1  2".to_owned()),
        ("text/html".to_owned(), html.to_owned()),
    ];
    assert_eq!(forms_of(&tensor), expected);
    let large = Tensor::rand([3, 40, 30], (Kind::Float, Device::Cpu));
    let html = format!("<div>{}</div>", forms_of(&large)[1].1);
    let document = Document::parse(&html).unwrap();
    assert_eq!(document.descendants().filter(|it| it.has_tag_name("table")).count(), 4);
}

#[test]
fn several_values_are_shown_below_each_other() {
    let losses = [curve("Loss", &[1.0, 0.5]), curve("Loss", &[2.0])];
    let forms = forms_of(&(Tensor::from(1i64), losses.cell_content()));
    assert_eq!(kinds(&forms), ["text/plain", "text/html"]);
    let html = &forms[1].1;
    assert!(html.starts_with("<div><p><code>Tensor [], Int64, cpu: 1</code></p>"), "{html}");
    let pictures = html.split("<img src=\"data:image/svg+xml;base64,").skip(1);
    let pictures = pictures.map(|it| STANDARD.decode(it.split('"').next().unwrap()).unwrap());
    let pictures: Vec<String> = pictures.map(|it| String::from_utf8(it).unwrap()).collect();
    assert_eq!(pictures, [&losses[0], &losses[1]].map(Plot::to_svg));
    let texts = [Ok(Content::new("a < b")), Err("1 < 0")];
    let html = &forms_of(texts.as_slice())[1].1;
    assert_eq!(html, "<div><pre>a &lt; b</pre></div>\n<div><pre>Error: 1 &lt; 0</pre></div>");
    assert_eq!(forms_of(&()), []);
}

/// Displays a tensor where [`the_environment_says_what_is_printed`] starts this test by itself.
#[test]
fn shows_a_tensor() {
    Tensor::from_slice(&[1i64, 2]).evcxr_display();
}

#[test]
fn the_environment_says_what_is_printed() {
    let printed = |variables: &[&str]| {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "display::shows_a_tensor", "--nocapture"]);
        command.env_remove("EVCXR_IS_RUNTIME").env_remove("BRIGADE_NOTEBOOK_CALL");
        let output = command.envs(variables.iter().map(|it| (it, "1"))).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let cell = printed(&["EVCXR_IS_RUNTIME"]);
    assert_eq!(kinds(&forms(&cell)), ["text/plain", "text/html"], "{cell}");
    for plain in [printed(&[]), printed(&["EVCXR_IS_RUNTIME", "BRIGADE_NOTEBOOK_CALL"])] {
        assert!(plain.contains("Tensor [2], Int64, cpu\n0  1\n1  2\n"), "{plain}");
        assert!(!plain.contains("EVCXR_"), "{plain}");
    }
}
