//! MLflow's tracker against a real server, and against one that fails.
//!
//! The Python is that in `BRIGADE_TRACK_PYTHON`, or that of `cargo xtask install trackers`.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use brigade_test_needs::{Need, needs};
use brigade_track::{
    Config, Credentials, Image, Mlflow, Outcome, Run, Stamp, Table, TrackError, Tracker, Value,
    Values,
};
use parking_lot::Mutex;
use serde_json::{Value as Json, json};

/// Process group of `mlflow server`, which starts workers.
struct Server {
    process: Child,
    url: String,
    _folder: tempfile::TempDir,
}

impl Server {
    fn start() -> Self {
        use std::os::unix::process::CommandExt;

        let python = brigade_test_needs::python(Need::Trackers).unwrap();
        let folder = tempfile::tempdir().unwrap();
        // Free now; it is unlikely to be taken until the server binds it.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let process = Command::new(python)
            .args(["-m", "mlflow", "server", "--host", "127.0.0.1", "--workers", "1"])
            .args(["--port", &port.to_string(), "--backend-store-uri", "sqlite:///runs.db"])
            .current_dir(folder.path())
            .env("MLFLOW_DISABLE_TELEMETRY", "true")
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .process_group(0)
            .spawn()
            .unwrap();
        let mut server = Self { process, url: format!("http://127.0.0.1:{port}"), _folder: folder };
        let until = Instant::now() + Duration::from_secs(200);
        while get(&server.url, "/health").is_none_or(|answer| !answer.contains("OK")) {
            let ended = server.process.try_wait().unwrap();
            assert!(ended.is_none() && Instant::now() < until, "mlflow: {}", server.log());
            thread::sleep(Duration::from_millis(200));
        }
        server
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self._folder.path().join("log")).unwrap()
    }

    fn ask(&self, path: &str) -> Json {
        let answer = get(&self.url, &format!("/api/2.0/mlflow/{path}")).unwrap();
        serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1.trim()).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The process group belongs to this test, and its leader has not been waited for: the ID is not reused.
        let _ = Command::new("kill")
            .args(["-KILL", "--", &format!("-{}", self.process.id())])
            .stderr(Stdio::null())
            .status();
        let _ = self.process.wait();
    }
}

/// Returns the whole answer, headers included, of a server that closes the connection.
fn get(url: &str, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(url.strip_prefix("http://").unwrap()).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer)
}

#[needs(Trackers)]
fn a_real_server_has_all_that_was_logged() {
    let server = Server::start();
    let config = json!({ "lr": 0.1, "model": { "name": "cnn", "widths": [8, 16] }, "fused": true });
    let run = Run::new("demo / ä").config(Config::of(&config).unwrap());
    let mut tracker = Mlflow::new(&server.url).unwrap().run_name("first").strict(true);
    tracker.start(&run).unwrap();
    let id = tracker.run_id().unwrap().to_owned();
    for step in 0..2500 {
        let values: Values = vec![("train/loss".to_owned(), Value::from(f64::from(step) / 7.0))];
        tracker.log(&values, Stamp::step(step as u64)).unwrap();
    }
    let odd: Values = vec![
        ("nan".to_owned(), f64::NAN.into()),
        ("inf".to_owned(), f64::INFINITY.into()),
        ("a(b)".to_owned(), 1.into()),
        ("stage".to_owned(), "late".into()),
    ];
    tracker.log(&odd, Stamp::step(7)).unwrap();
    tracker.log_text("note", "hello", Stamp::step(1)).unwrap();
    let image = Image::new(2, 1, 1, vec![0, 255]).unwrap();
    tracker.log_image("picture", &image, Stamp::step(2)).unwrap();
    let table = Table::new(["n"], vec![vec![1.into()]]).unwrap();
    tracker.log_table("table", &table, Stamp::now()).unwrap();
    tracker.finish(Outcome::Finished).unwrap();

    let found = server.ask(&format!("runs/get?run_id={id}"));
    let (info, data) = (&found["run"]["info"], &found["run"]["data"]);
    assert_eq!((&info["status"], &info["run_name"]), (&json!("FINISHED"), &json!("first")));
    let experiment = server.ask("experiments/get-by-name?experiment_name=demo%20%2F%20%C3%A4");
    assert_eq!(experiment["experiment"]["experiment_id"], info["experiment_id"]);
    let pairs = |list: &Json| -> std::collections::BTreeMap<String, Json> {
        let pair = |it: &Json| (it["key"].as_str().unwrap().to_owned(), it["value"].clone());
        list.as_array().unwrap().iter().map(pair).collect()
    };
    let parameters = pairs(&data["params"]);
    let expected = json!({
        "lr": "0.1", "model.name": "cnn", "model.widths": "[8,16]", "fused": "true",
    });
    assert_eq!(json!(parameters), expected);
    let metrics = pairs(&data["metrics"]);
    assert_eq!(metrics["train/loss"], json!(2499.0 / 7.0));
    assert_eq!((&metrics["a_b_"], &metrics["nan"]), (&json!(1.0), &json!("NaN")), "{metrics:?}");
    assert!(metrics.contains_key("inf"));
    assert_eq!(pairs(&data["tags"])["stage"], "late");
    let history = server
        .ask(&format!("metrics/get-history?run_id={id}&metric_key=train%2Floss&max_results=25000"));
    let mut steps: Vec<(u64, f64)> = history["metrics"]
        .as_array()
        .unwrap()
        .iter()
        .map(|metric| (metric["step"].as_u64().unwrap(), metric["value"].as_f64().unwrap()))
        .collect();
    steps.sort_by_key(|(step, _)| *step);
    assert_eq!(steps, (0..2500).map(|step| (step, step as f64 / 7.0)).collect::<Vec<_>>());
    let files = server.ask(&format!("artifacts/list?run_id={id}"));
    let names: Vec<&str> =
        files["files"].as_array().unwrap().iter().map(|it| it["path"].as_str().unwrap()).collect();
    assert_eq!(names, ["images", "note-1.txt", "table.json"]);
    let note = get(&server.url, &format!("/get-artifact?path=note-1.txt&run_id={id}")).unwrap();
    assert!(note.ends_with("hello"), "{note}");

    // The run is resumed: neither the same settings nor other ones are an error.
    for lr in [0.1, 0.2] {
        let run = Run::new("demo / ä").config(Config::of(&json!({ "lr": lr })).unwrap());
        let mut next = Mlflow::new(&server.url).unwrap().resume(&id).strict(true);
        next.start(&run).unwrap();
        assert_eq!(
            server.ask(&format!("runs/get?run_id={id}"))["run"]["info"]["status"],
            "RUNNING"
        );
        next.log(&[("late".to_owned(), Value::from(lr))], Stamp::step(9000)).unwrap();
        // Dropped without `finish`: the run failed, but its values are stored.
        drop(next);
        let found = server.ask(&format!("runs/get?run_id={id}"));
        assert_eq!(found["run"]["info"]["status"], "FAILED");
        assert_eq!(pairs(&found["run"]["data"]["metrics"])["late"], json!(lr));
    }
    let error = Mlflow::new(&server.url).unwrap().resume("0123").start(&run).unwrap_err();
    assert!(matches!(error, TrackError::Refused { status: 404, .. }), "{error}");
}

/// Simulated server with configurable answers, which stores the requests.
struct Double {
    url: String,
    asked: Arc<Mutex<Vec<(String, String)>>>,
}

impl Double {
    fn start(answer: impl Fn(usize, &str) -> (u16, String) + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let theirs = Arc::clone(&asked);
        // Ends with the process.
        thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { continue };
                let Some((head, body)) = request(&mut stream) else { continue };
                let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
                let number = {
                    let mut asked = theirs.lock();
                    asked.push((head, body));
                    asked.len() - 1
                };
                let (status, text) = answer(number, &path);
                let _ = write!(
                    stream,
                    "HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{text}",
                    text.len()
                );
            }
        });
        Self { url, asked }
    }

    fn bodies(&self, path: &str) -> Vec<Json> {
        let asked = self.asked.lock();
        let bodies = asked.iter().filter(|(head, _)| head.contains(path));
        bodies.map(|(_, body)| serde_json::from_str(body).unwrap()).collect()
    }
}

fn request(stream: &mut TcpStream) -> Option<(String, String)> {
    let mut bytes = Vec::new();
    let mut block = [0; 65536];
    loop {
        let read = stream.read(&mut block).ok().filter(|&read| read > 0)?;
        bytes.extend_from_slice(&block[..read]);
        let text = String::from_utf8_lossy(&bytes);
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length = head
            .lines()
            .find_map(|line| {
                line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok()
            })
            .unwrap_or(0);
        if body.len() >= length {
            return Some((head.to_owned(), body.to_owned()));
        }
    }
}

/// Returns the answer of a working server to `path`.
fn sound(path: &str) -> (u16, String) {
    let answer = if path.contains("get-by-name") {
        json!({ "experiment": { "experiment_id": "1" } })
    } else if path.contains("runs/create") {
        json!({ "run": { "info": { "run_id": "r", "artifact_uri": "s3://x" } } })
    } else {
        json!({})
    };
    (200, answer.to_string())
}

fn point(value: f64) -> Values {
    vec![("loss".to_owned(), value.into())]
}

#[needs()]
fn a_server_that_is_away_at_the_start_is_one_clear_error() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("http://127.0.0.1:{port}");
    let error = Mlflow::new(&url).unwrap().start(&Run::new("demo")).unwrap_err();
    assert!(matches!(error, TrackError::Unreachable { .. }), "{error}");
    let text = error.to_string();
    assert!(text.starts_with(&format!("the MLflow server at {url} does not answer: ")), "{text}");
    let other = Double::start(|_, _| (200, "<html>hello</html>".to_owned()));
    let error = Mlflow::new(&other.url).unwrap().start(&Run::new("demo")).unwrap_err();
    assert!(matches!(error, TrackError::NotMlflow { .. }), "{error}");
    let locked = Double::start(|_, _| (401, json!({ "message": "who are you" }).to_string()));
    let error = Mlflow::new(&locked.url).unwrap().start(&Run::new("demo")).unwrap_err();
    assert!(matches!(error, TrackError::Unauthorized { status: 401, .. }), "{error}");
    assert!(error.to_string().contains("(status 401: who are you); set MLFLOW_"), "{error}");
    assert_eq!(locked.asked.lock().len(), 1);
}

#[needs()]
fn a_server_that_stumbles_gets_everything_in_the_end_and_in_batches() {
    let server = Double::start(|number, path| match number % 2 {
        0 if !path.contains("create") => (503, String::new()),
        _ => sound(path),
    });
    let secret = Credentials::Basic { user: "me".to_owned(), password: "secret".to_owned() };
    let mut tracker = Mlflow::new(&server.url).unwrap().credentials(&secret).strict(true);
    assert!(!format!("{tracker:?} {secret:?}").contains("secret\""));
    tracker.start(&Run::new("demo")).unwrap();
    for step in 0..3000 {
        tracker.log(&point(f64::from(step)), Stamp::step(step as u64)).unwrap();
    }
    let error = tracker.log_text("t", "x", Stamp::now()).unwrap_err();
    assert!(matches!(error, TrackError::Unsupported { .. }), "{error}");
    tracker.finish(Outcome::Finished).unwrap();
    let mut seen = std::collections::BTreeSet::new();
    for batch in server.bodies("log-batch") {
        let metrics = batch["metrics"].as_array().unwrap();
        assert!(metrics.len() <= 1000);
        seen.extend(metrics.iter().map(|it| it["step"].as_u64().unwrap()));
    }
    assert!(seen.into_iter().eq(0..3000));
    assert_eq!(server.bodies("runs/update").last().unwrap()["status"], "FINISHED");
    let asked = server.asked.lock();
    assert!(asked.iter().all(|(head, _)| head.to_ascii_lowercase().contains("basic bwu6c2vjcmv0")));
}

#[needs()]
fn a_server_that_goes_away_ends_no_training_unless_asked() {
    for strict in [false, true] {
        let server = Double::start(|_, path| match path {
            path if path.contains("log-batch") => (500, String::new()),
            path => sound(path),
        });
        let mut tracker = Mlflow::new(&server.url)
            .unwrap()
            .strict(strict)
            .finish_timeout(Duration::from_millis(300));
        tracker.start(&Run::new("demo")).unwrap();
        tracker.log(&point(1.0), Stamp::step(1)).unwrap();
        tracker.log(&point(2.0), Stamp::step(2)).unwrap();
        // The second attempt begins when the first one's answer is known.
        let until = Instant::now() + Duration::from_secs(60);
        while server.bodies("log-batch").len() < 2 {
            assert!(Instant::now() < until, "the batch was not sent again");
            thread::sleep(Duration::from_millis(5));
        }
        match (strict, tracker.finish(Outcome::Finished)) {
            (false, Ok(())) => {}
            (true, Err(TrackError::Lost { lost: 2, reason, .. })) => {
                assert!(reason.contains("status 500"), "{reason}");
            }
            (_, other) => panic!("strict is {strict}, and finish gave {other:?}"),
        }
    }
}

#[needs()]
fn a_refused_batch_is_lost_at_once_and_said() {
    let refusing = Double::start(|_, path| match path {
        path if path.contains("log-batch") => {
            (400, json!({ "message": "no such metric" }).to_string())
        }
        path => sound(path),
    });
    let mut tracker = Mlflow::new(&refusing.url).unwrap().strict(true);
    tracker.start(&Run::new("demo")).unwrap();
    tracker.log(&point(1.0), Stamp::step(1)).unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    let error = loop {
        // The loss is an error of a later call.
        if let Err(error) = tracker.log(&point(2.0), Stamp::step(2)) {
            break error;
        }
        assert!(Instant::now() < until);
        thread::sleep(Duration::from_millis(10));
    };
    assert!(error.to_string().contains("no such metric"), "{error}");
}

/// The end of a run has one time limit for everything, even if the tracker is only dropped. The bound is far above it,
/// and below the limit of one request.
#[needs()]
fn a_server_that_never_answers_does_not_hold_the_end() {
    for finish in [true, false] {
        let server = Double::start(|_, path| match path {
            path if path.contains("log-batch") || path.contains("runs/update") => {
                thread::sleep(Duration::from_secs(60));
                (200, String::new())
            }
            path => sound(path),
        });
        let limit = Duration::from_millis(800);
        let mut tracker = Mlflow::new(&server.url).unwrap().strict(true).finish_timeout(limit);
        tracker.start(&Run::new("demo")).unwrap();
        tracker.log(&point(1.0), Stamp::step(1)).unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        while server.bodies("log-batch").is_empty() {
            assert!(Instant::now() < until, "the batch was not sent");
            thread::sleep(Duration::from_millis(5));
        }
        tracker.log(&point(2.0), Stamp::step(2)).unwrap();
        let begun = Instant::now();
        if finish {
            let error = tracker.finish(Outcome::Finished).unwrap_err();
            let TrackError::Lost { lost, reason, .. } = &error else { panic!("{error}") };
            assert_eq!((*lost, reason.contains("time limit")), (2, true), "{error}");
        }
        drop(tracker);
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    }
}

#[needs()]
fn a_run_that_goes_on_says_when_it_may_not() {
    for (status, refused) in [(400, false), (401, true), (403, true), (404, true)] {
        let server = Double::start(move |_, path| match path {
            path if path.contains("log-batch") => (status, json!({ "message": "no" }).to_string()),
            path if path.contains("runs/get") => sound("runs/create"),
            path => sound(path),
        });
        let run = Run::new("demo").config(Config::of(&json!({ "lr": 0.1 })).unwrap());
        let started = Mlflow::new(&server.url).unwrap().resume("r").start(&run);
        assert_eq!(started.is_err(), refused, "{status}: {started:?}");
        if let Err(error) = started {
            let text = error.to_string();
            assert!(text.contains(&format!("status {status}")), "{text}");
        }
    }
}

#[needs()]
fn a_password_in_the_address_is_sent_and_never_shown() {
    let server = Double::start(|_, path| match path {
        path if path.contains("log-batch") => (500, String::new()),
        path => sound(path),
    });
    let url = server.url.replace("http://", "http://me:secret@");
    let mut tracker =
        Mlflow::new(&url).unwrap().strict(true).finish_timeout(Duration::from_millis(100));
    tracker.start(&Run::new("demo")).unwrap();
    tracker.log(&point(1.0), Stamp::step(1)).unwrap();
    let shown = format!("{tracker:?}");
    let error = tracker.finish(Outcome::Finished).unwrap_err();
    for text in [shown, error.to_string(), format!("{error:?}")] {
        assert!(!text.contains("secret") && !text.contains("me:"), "{text}");
    }
    let asked = server.asked.lock();
    assert!(asked.iter().all(|(head, _)| head.to_ascii_lowercase().contains("basic bwu6c2vjcmv0")));
}
