//! Tests of event files with the real TensorBoard.
//!
//! The Python is that in `BRIGADE_TRACK_PYTHON`, or that of `cargo xtask install trackers`.

use std::process::Command;

use brigade_test_needs::{Need, needs};
use brigade_track::{
    Config, Image, Outcome, Run, Stamp, Table, TensorBoard, Tracker, Value, Values,
};
use serde_json::{Value as Json, json};

/// Program that reads a folder of event files, checksums included, and prints their content.
const READER: &str = r#"
import json, sys
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
import glob

folder = sys.argv[1]
for path in glob.glob(folder + "/*"):
    reader = PyRecordReader_New(path)
    while True:
        try:
            reader.GetNext()  # fails where a checksum is wrong
        except EOFError:
            break
        except Exception as error:
            if "EOF" in str(error) or "OutOfRange" in type(error).__name__:
                break
            raise
events = event_accumulator.EventAccumulator(folder, size_guidance={"scalars": 0, "images": 0, "tensors": 0})
events.Reload()
tags = events.Tags()
answer = {
    "scalars": {t: [[e.step, repr(e.value), e.wall_time] for e in events.Scalars(t)] for t in tags["scalars"]},
    "images": {t: [[i.step, i.width, i.height] for i in events.Images(t)] for t in tags["images"]},
    "texts": {t: [[e.step, e.tensor_proto.string_val[0].decode()] for e in events.Tensors(t)]
              for t in tags["tensors"]},
    "first": events.FirstEventTimestamp(),
}
hparams = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
data = plugin_data_pb2.HParamsPluginData.FromString(hparams)
values = data.session_start_info.hparams
answer["hparams"] = {k: getattr(v, v.WhichOneof("kind")) for k, v in values.items()}
end = events.SummaryMetadata("_hparams_/session_end_info").plugin_data.content
answer["status"] = plugin_data_pb2.HParamsPluginData.FromString(end).session_end_info.status
print(json.dumps(answer))
"#;

#[needs(Trackers)]
fn the_real_tensorboard_reads_what_was_logged() {
    let python = brigade_test_needs::python(Need::Trackers).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let config =
        Config::of(&json!({ "lr": 0.1, "fused": true, "model": { "name": "cnn" } })).unwrap();
    let mut tracker = TensorBoard::new(folder.path());
    tracker.start(&Run::new("demo").config(config)).unwrap();
    let time = std::time::SystemTime::now();
    for step in 0..300 {
        let values: Values = vec![
            ("loss".to_owned(), Value::from(1.0 / (step + 1) as f64)),
            ("train/seen".to_owned(), Value::from(64 * step)),
        ];
        tracker.log(&values, Stamp { step: Some(step), time }).unwrap();
    }
    let odd: Values = vec![
        ("nan".to_owned(), f64::NAN.into()),
        ("inf".to_owned(), f64::NEG_INFINITY.into()),
        ("word".to_owned(), "hello".into()),
    ];
    tracker.log(&odd, Stamp { step: Some(7), time }).unwrap();
    let image = Image::new(3, 2, 3, (0..18).collect()).unwrap();
    tracker.log_image("picture", &image, Stamp { step: Some(8), time }).unwrap();
    let table = Table::new(["n"], vec![vec![1.into()]]).unwrap();
    tracker.log_table("table", &table, Stamp { step: Some(9), time }).unwrap();
    tracker.finish(Outcome::Finished).unwrap();
    // A resumed run: another file, the same run.
    let mut next = TensorBoard::new(folder.path());
    next.start(&Run::new("demo")).unwrap();
    next.log(&[("loss".to_owned(), Value::from(0.0))], Stamp { step: Some(300), time }).unwrap();
    next.finish(Outcome::Finished).unwrap();

    let output =
        Command::new(python).args(["-c", READER]).arg(folder.path().join("demo")).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let found: Json = serde_json::from_slice(&output.stdout).unwrap();
    let losses = found["scalars"]["loss"].as_array().unwrap();
    assert_eq!(losses.len(), 301);
    for (step, loss) in losses.iter().enumerate() {
        let expected = if step == 300 { 0.0 } else { 1.0 / (step + 1) as f32 };
        assert_eq!(loss[0], step);
        assert_eq!(loss[1].as_str().unwrap().parse::<f64>().unwrap(), f64::from(expected));
    }
    assert_eq!(found["scalars"]["train/seen"][299][1], "19136.0");
    assert_eq!(found["scalars"]["nan"][0][1], "nan");
    assert_eq!(found["scalars"]["inf"][0][1], "-inf");
    let wall = time.duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
    assert!((losses[5][2].as_f64().unwrap() - wall).abs() < 1e-5);
    assert_eq!(found["images"], json!({ "picture": [[8, 3, 2]] }));
    assert_eq!(found["texts"]["word/text_summary"], json!([[7, "hello"]]));
    assert_eq!(found["texts"]["table/text_summary"], json!([[9, "| n |\n| --- |\n| 1 |\n"]]));
    assert_eq!(found["hparams"], json!({ "lr": 0.1, "fused": true, "model.name": "cnn" }));
    assert_eq!(found["status"], 1);
}
