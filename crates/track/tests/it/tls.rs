//! Tests of MLflow's tracker over TLS, against a server with a certificate made for the test.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use brigade_track::{Mlflow, Outcome, Run, Stamp, TrackError, Tracker, Value};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

/// Simulated MLflow over TLS that accepts every request, with a certificate signed by its own authority.
struct Server {
    url: String,
    folder: tempfile::TempDir,
    answered: Arc<AtomicUsize>,
}

impl Server {
    fn start() -> Self {
        let mut authority = CertificateParams::new(Vec::new()).unwrap();
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority_key = KeyPair::generate().unwrap();
        let root = authority.self_signed(&authority_key).unwrap();
        let key = KeyPair::generate().unwrap();
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
        let issuer = Issuer::new(authority, authority_key);
        let own = CertificateParams::new(names).unwrap().signed_by(&key, &issuer).unwrap();

        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("authority.pem"), root.pem()).unwrap();
        std::fs::write(folder.path().join("key.pem"), key.serialize_pem()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let private = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![own.der().clone()], private)
            .unwrap();

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("https://localhost:{}", listener.local_addr().unwrap().port());
        let answered = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&answered);
        let config = Arc::new(config);
        // The thread ends with the process.
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (Ok(stream), config) = (stream, Arc::clone(&config)) else { continue };
                if serve(stream, config).is_some() {
                    count.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        Self { url, folder, answered }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// Serves one request.
fn serve(stream: TcpStream, config: Arc<ServerConfig>) -> Option<()> {
    stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
    let connection = ServerConnection::new(config).ok()?;
    let mut stream = StreamOwned::new(connection, stream);
    let (mut bytes, mut block) = (Vec::new(), [0; 16384]);
    let path = loop {
        let read = stream.read(&mut block).ok().filter(|&read| read > 0)?;
        bytes.extend_from_slice(&block[..read]);
        let text = String::from_utf8_lossy(&bytes);
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length = head.to_ascii_lowercase().lines().find_map(|line| {
            line.strip_prefix("content-length: ").and_then(|length| length.parse().ok())
        });
        if body.len() >= length.unwrap_or(0) {
            break head.split(' ').nth(1)?.to_owned();
        }
    };
    let answer = if path.contains("get-by-name") {
        r#"{"experiment":{"experiment_id":"1"}}"#
    } else if path.contains("runs/create") {
        r#"{"run":{"info":{"run_id":"r","artifact_uri":"s3://x"}}}"#
    } else {
        "{}"
    };
    let length = answer.len();
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).ok()?;
    stream.write_all(answer.as_bytes()).ok()?;
    stream.conn.send_close_notify();
    stream.flush().ok()
}

#[test]
fn a_run_goes_over_tls_to_a_server_whose_authority_is_named() {
    let server = Server::start();
    let tracker = Mlflow::new(&server.url).unwrap();
    let mut tracker = tracker.certificate(server.file("authority.pem")).unwrap().strict(true);
    tracker.start(&Run::new("demo")).unwrap();
    tracker.log(&[("loss".to_owned(), Value::from(0.5))], Stamp::step(1)).unwrap();
    tracker.finish(Outcome::Finished).unwrap();
    let until = Instant::now() + Duration::from_secs(30);
    // The experiment, the run, its values and its end.
    while server.answered.load(Ordering::Relaxed) < 4 {
        assert!(Instant::now() < until, "{:?} answered", server.answered);
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_certificate_of_an_unknown_authority_is_refused_at_once() {
    let server = Server::start();
    let error = Mlflow::new(&server.url).unwrap().start(&Run::new("demo")).unwrap_err();
    assert!(matches!(error, TrackError::Untrusted { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("is not trusted") && text.contains("UnknownIssuer"), "{text}");
    assert!(text.contains("MLFLOW_TRACKING_SERVER_CERT_PATH"), "{text}");
    // Another server's authority is not accepted either.
    let other = Server::start();
    let tracker = Mlflow::new(&server.url).unwrap();
    let mut tracker = tracker.certificate(other.file("authority.pem")).unwrap();
    let error = tracker.start(&Run::new("demo")).unwrap_err();
    assert!(matches!(error, TrackError::Untrusted { .. }), "{error:?}");
    assert_eq!(server.answered.load(Ordering::Relaxed), 0);
}

#[test]
fn a_server_without_tls_is_said_to_be_one() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for stream in listener.incoming() {
            let _ = stream.and_then(|mut stream| {
                stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")?;
                stream.read(&mut [0; 4096])
            });
        }
    });
    let error = Mlflow::new(&url).unwrap().start(&Run::new("demo")).unwrap_err();
    assert!(matches!(error, TrackError::Untrusted { .. }), "{error:?}");
}

#[test]
fn a_file_without_certificates_is_named() {
    let server = Server::start();
    let wrong =
        |file: &str| Mlflow::new(&server.url).unwrap().certificate(server.file(file)).unwrap_err();
    let text = wrong("key.pem").to_string();
    assert!(text.contains("key.pem holds no certificates") && text.contains("none"), "{text}");
    assert!(wrong("missing.pem").to_string().starts_with("cannot read /"));
}
