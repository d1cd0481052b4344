//! The error file, with which a failing rank reports its error to its launcher, in torchelastic's JSON.
//!
//! The launcher gives every rank a path in [`env::TORCHELASTIC_ERROR_FILE`]. Python programs write
//! it with `torch.distributed.elastic`'s `@record`, Rust programs with [`record`]; the launcher
//! shows what is in there, which is the cause itself and not merely the last lines of output.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt::{Debug, Display};
use std::fs::{self, File};
use std::io::{self, Read};
use std::panic::{self, AssertUnwindSafe, PanicHookInfo};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::env;

/// Runs the program and, when it fails or panics, writes its error to the error file that the launcher reads.
///
/// Wraps everything in `main`. Without a launcher it changes nothing. `T` and `E` pass unchanged, and a panic continues
/// to unwind. `{error:#}` becomes the message, so that an `anyhow::Error` shows its whole chain, and `{error:?}`
/// becomes the call stack.
///
/// # Errors
/// Returns the error of `main` unchanged.
///
/// ```
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     brigade_rank_env::record(|| {
///         let steps: u32 = "100".parse()?;
///         println!("{steps} steps");
///         Ok(())
///     })
/// }
/// ```
pub fn record<T, E: Display + Debug>(main: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    let Some(path) = std::env::var_os(env::TORCHELASTIC_ERROR_FILE).filter(|p| !p.is_empty())
    else {
        return main();
    };
    let path = PathBuf::from(path);
    let (result, panicked) = with_panics_noted(&path, main);
    match (&result, panicked) {
        (Ok(Ok(_)), _) | (Err(_), None) => {}
        (Ok(Err(error)), _) => {
            let (message, details) = (format!("{error:#}"), format!("{error:?}"));
            let callstack = (details != message).then_some(details);
            leave(&path, &ErrorRecord { message, callstack, code: None });
        }
        (Err(_), Some(panicked)) => leave(&path, &panicked),
    }
    result.unwrap_or_else(|payload| panic::resume_unwind(payload))
}

/// Error report of a failed rank: the content of its error file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ErrorRecord {
    /// Error message, as in `ValueError: no such layer`.
    pub message: String,
    /// Call stack of the error: Python's traceback, Rust's `Debug` of the error, or a backtrace.
    pub callstack: Option<String>,
    /// Exit code that the program reports for the error.
    pub code: Option<i32>,
}

impl ErrorRecord {
    /// Reads an error file in torchelastic's format, or with a plain string as the message.
    ///
    /// Returns `None` for anything else: no file, not a regular file, more than a megabyte, not JSON.
    #[must_use]
    pub fn read(path: &Path) -> Option<Self> {
        // A rank may have made anything of the path: opening a named pipe would hang us.
        if !fs::metadata(path).ok()?.is_file() {
            return None;
        }
        let file = File::open(path).ok()?;
        let mut bytes = Vec::new();
        file.take(LONGEST + 1).read_to_end(&mut bytes).ok()?;
        if bytes.len() as u64 > LONGEST {
            return None;
        }
        Self::parse(&serde_json::from_slice(&bytes).ok()?)
    }

    fn parse(file: &Value) -> Option<Self> {
        let outer = file.get("message")?;
        if let Some(message) = outer.as_str() {
            return Some(Self { message: message.to_owned(), ..Self::default() });
        }
        // torchelastic writes the code beside the message; some of its readers expect it outside.
        let code = outer.get("errorCode").or_else(|| file.get("errorCode"));
        Some(Self {
            message: outer.get("message")?.as_str()?.to_owned(),
            callstack: outer
                .pointer("/extraInfo/py_callstack")
                .and_then(Value::as_str)
                .map(str::to_owned),
            code: code.and_then(Value::as_i64).and_then(|code| i32::try_from(code).ok()),
        })
    }

    /// Writes an error file in the format that torchelastic's agent reads, too.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let mut message = json!({
            "message": self.message,
            "extraInfo": {
                "py_callstack": self.callstack.as_deref().unwrap_or_default(),
                "timestamp": now.to_string(),
            },
        });
        if let Some(code) = self.code {
            message["errorCode"] = code.into();
        }
        fs::write(path, json!({ "message": message }).to_string())
    }
}

/// Runs `main` and records the message of its panic. A panic of another thread, or one that `main` catches itself, is
/// not a failure.
fn with_panics_noted<T>(
    path: &Path,
    main: impl FnOnce() -> T,
) -> (thread::Result<T>, Option<ErrorRecord>) {
    let last = Arc::new(Mutex::new(None));
    let before: Arc<Hook> = Arc::from(panic::take_hook());
    let thread = thread::current().id();
    let (note, next, path) = (Arc::clone(&last), Arc::clone(&before), path.to_owned());
    panic::set_hook(Box::new(move |info| {
        if thread::current().id() == thread {
            let panicked = describe(info);
            // A program that aborts does not come back from its `main`.
            if cfg!(panic = "abort") {
                leave(&path, &panicked);
            }
            *note.lock() = Some(panicked);
        }
        next(info);
    }));
    let result = panic::catch_unwind(AssertUnwindSafe(main));
    panic::set_hook(Box::new(move |info| before(info)));
    let panicked = last.lock().take();
    (result, panicked)
}

fn describe(info: &PanicHookInfo<'_>) -> ErrorRecord {
    let text = info.payload_as_str().unwrap_or("no message");
    let place = info.location().map_or_else(String::new, |place| format!(" at {place}"));
    let backtrace = Backtrace::capture();
    let callstack =
        (backtrace.status() == BacktraceStatus::Captured).then(|| backtrace.to_string());
    ErrorRecord { message: format!("panicked{place}: {text}"), callstack, code: None }
}

/// Writes the error file. A failure to write is ignored: the error itself must still be returned.
fn leave(path: &Path, error: &ErrorRecord) {
    let _ = error.write(path);
}

type Hook = dyn Fn(&PanicHookInfo<'_>) + Sync + Send;

/// Maximum size of an error file, in bytes: more than any traceback has.
const LONGEST: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Option<ErrorRecord> {
        ErrorRecord::parse(&serde_json::from_str(text).unwrap())
    }

    #[test]
    fn forms() {
        let torchelastic = r#"{"message": {"message": "ValueError: x", "extraInfo": {
            "py_callstack": "Traceback\n  f()\n", "timestamp": "1700000000"}, "errorCode": 3}}"#;
        let full = ErrorRecord {
            message: "ValueError: x".to_owned(),
            callstack: Some("Traceback\n  f()\n".to_owned()),
            code: Some(3),
        };
        assert_eq!(parse(torchelastic), Some(full));
        let plain = ErrorRecord { message: "lost".to_owned(), ..Default::default() };
        assert_eq!(parse(r#"{"message": "lost"}"#), Some(plain.clone()));
        assert_eq!(parse(r#"{"message": {"message": "lost"}}"#), Some(plain));
        for nothing in ["{}", "[]", "3", r#"{"message": 3}"#, r#"{"message": {"message": []}}"#] {
            assert_eq!(parse(nothing), None, "{nothing}");
        }
    }

    #[test]
    fn files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("error.json");
        assert_eq!(ErrorRecord::read(&path), None, "no file");
        assert_eq!(ErrorRecord::read(folder.path()), None, "a folder");
        assert_eq!(ErrorRecord::read(Path::new("/dev/zero")), None, "a device");
        let error =
            ErrorRecord {
                message: "é\n\"".to_owned(), callstack: Some("f".into()), code: Some(9)
            };
        error.write(&path).unwrap();
        assert_eq!(ErrorRecord::read(&path), Some(error));
        for broken in [&b""[..], b"\xff", b"{\"message\": \"cut of"] {
            fs::write(&path, broken).unwrap();
            assert_eq!(ErrorRecord::read(&path), None);
        }
        let huge = format!("{{\"message\": \"{}\"}}", "x".repeat(1 << 20));
        fs::write(&path, huge).unwrap();
        assert_eq!(ErrorRecord::read(&path), None, "huge");
        let deep = "[".repeat(100_000);
        fs::write(&path, deep).unwrap();
        assert_eq!(ErrorRecord::read(&path), None, "deep");
    }
}
