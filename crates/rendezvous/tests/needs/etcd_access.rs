//! A real etcd with certificates and users: what is accepted, and how each refusal is named.

use std::time::Duration;

use brigade_rendezvous::{
    DiscoveryMethod, EtcdAccess, EtcdError, Rendezvous, RendezvousError, RendezvousNotice,
    RendezvousPlan, Secret, TimeLimits,
};
use brigade_test_hosts::{Authority, Etcd};
use brigade_test_needs::needs;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use ureq::tls::{ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};

/// An etcd with a certificate of this authority.
fn etcd_of(authority: &Authority) -> Etcd {
    let [ca, certificate, key] =
        ["ca.pem", "server.pem", "server-key.pem"].map(|name| authority.file(name));
    Etcd::start_over_tls(&certificate, &key, Some(&ca))
}

/// How a client speaks to it that has all it needs.
fn access_of(authority: &Authority) -> EtcdAccess {
    EtcdAccess {
        tls: true,
        ca_file: Some(authority.file("ca.pem")),
        cert_file: Some(authority.file("client.pem")),
        key_file: Some(authority.file("client-key.pem")),
        ..EtcdAccess::default()
    }
}

/// What becomes of the first agent of a job: it is elected and serves, or fails.
fn elect(endpoint: &str, access: EtcdAccess) -> Result<(), RendezvousError> {
    elect_within(Duration::from_secs(60), endpoint, access)
}

/// The same for an answer that an etcd gives while it is starting, too: it is asked again until then.
fn elect_within(
    timeout: Duration,
    endpoint: &str,
    access: EtcdAccess,
) -> Result<(), RendezvousError> {
    let mut rendezvous = Rendezvous::start(RendezvousPlan {
        method: DiscoveryMethod::Etcd {
            endpoints: endpoint.into(),
            access,
            address: Some("127.0.0.1".into()),
        },
        run_id: "certified".into(),
        host: "node1".into(),
        secret: Some(Secret::generate().unwrap()),
        timeout,
        limits: TimeLimits::default(),
    })
    .unwrap();
    loop {
        let _ = poll(&mut [PollFd::new(rendezvous.fd(), PollFlags::POLLIN)], PollTimeout::NONE);
        match rendezvous.next() {
            Some(RendezvousNotice::Serve { .. }) => return Ok(()),
            Some(RendezvousNotice::Failed(error)) => return Err(error),
            Some(RendezvousNotice::Say(_)) | None => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Enough for one answer; more changes nothing.
const SHORTLY: Duration = Duration::from_secs(3);

fn refused(endpoint: &str, access: EtcdAccess) -> EtcdError {
    match elect(endpoint, access) {
        Err(RendezvousError::Etcd(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[needs(Etcd)]
fn certificates_of_both_sides() {
    let authority = Authority::new();
    let etcd = etcd_of(&authority);
    let other = Authority::new();
    elect(etcd.endpoint(), access_of(&authority)).unwrap();
    // The scheme has the same effect as the setting.
    let access = EtcdAccess { tls: false, ..access_of(&authority) };
    elect(&format!("https://{}", etcd.endpoint()), access).unwrap();

    let access = EtcdAccess { ca_file: Some(other.file("ca.pem")), ..access_of(&authority) };
    let error = refused(etcd.endpoint(), access);
    assert!(matches!(error, EtcdError::Untrusted { .. }), "{error}");
    let text = error.to_string();
    let expected =
        format!("the certificate of etcd at https://{} is not trusted (", etcd.endpoint());
    assert!(text.starts_with(&expected), "{text}");
    assert!(text.contains("--rdzv-conf cacert=FILE"), "{text}");
    // Without a configured authority, the certificate is not signed by a public one either.
    let error = refused(etcd.endpoint(), EtcdAccess { ca_file: None, ..access_of(&authority) });
    assert!(matches!(error, EtcdError::Untrusted { .. }), "{error}");

    let access = EtcdAccess { cert_file: None, key_file: None, ..access_of(&authority) };
    let error = refused(etcd.endpoint(), access);
    assert!(matches!(error, EtcdError::ClientCertificate { .. }), "{error}");
    assert!(error.to_string().contains("--rdzv-conf cert=FILE,key=FILE"), "{error}");
    let access = EtcdAccess {
        cert_file: Some(other.file("client.pem")),
        key_file: Some(other.file("client-key.pem")),
        ..access_of(&authority)
    };
    let error = refused(etcd.endpoint(), access);
    assert!(matches!(error, EtcdError::ClientCertificate { .. }), "{error}");

    // A request without TLS.
    let error =
        elect_within(SHORTLY, etcd.endpoint(), EtcdAccess::default()).unwrap_err().to_string();
    assert!(error.contains("does it accept only TLS (--rdzv-conf protocol=https)?"), "{error}");
}

#[needs(Etcd)]
fn an_etcd_without_tls_is_named() {
    let etcd = Etcd::start();
    // The server may be starting: the client tries again, and each error contains the possible reason.
    let error = elect_within(SHORTLY, etcd.endpoint(), access_of(&Authority::new()))
        .unwrap_err()
        .to_string();
    assert!(error.ends_with("does it use TLS?"), "{error}");
}

#[needs(Etcd)]
fn users_and_passwords() {
    let authority = Authority::new();
    let etcd = etcd_of(&authority);
    let admin = Admin::new(&authority, &etcd);
    for (name, password) in [("root", "admin"), ("trainer", "right"), ("reader", "right")] {
        admin.post("auth/user/add", &format!(r#"{{"name":"{name}","password":"{password}"}}"#));
    }
    // Base64 of `/brigade/`, and of the first key after all keys with that prefix.
    let (key, end) = ("L2JyaWdhZGUv", "L2JyaWdhZGUw");
    for (role, user, kind) in [("rw", "trainer", "READWRITE"), ("ro", "reader", "READ")] {
        admin.post("auth/role/add", &format!(r#"{{"name":"{role}"}}"#));
        let permission = format!(
            r#"{{"name":"{role}","perm":{{"permType":"{kind}","key":"{key}","range_end":"{end}"}}}}"#
        );
        admin.post("auth/role/grant", &permission);
        admin.post("auth/user/grant", &format!(r#"{{"user":"{user}","role":"{role}"}}"#));
    }
    admin.post("auth/role/add", r#"{"name":"root"}"#);
    admin.post("auth/user/grant", r#"{"user":"root","role":"root"}"#);
    admin.post("auth/enable", "{}");

    let access = |user: Option<&str>, password: Option<&str>| EtcdAccess {
        user: user.map(str::to_owned),
        password: password.map(str::to_owned),
        ..access_of(&authority)
    };
    elect(etcd.endpoint(), access(Some("trainer"), Some("right"))).unwrap();
    let named = EtcdAccess {
        cert_file: Some(authority.file("named.pem")),
        key_file: Some(authority.file("named-key.pem")),
        ..access(Some("trainer"), Some("right"))
    };
    let error = refused(etcd.endpoint(), named);
    assert!(matches!(error, EtcdError::ClientCertificate { .. }), "{error}");
    assert!(error.to_string().contains("rejects certificates with a CommonName"), "{error}");
    for (user, password, named) in [
        (Some("trainer"), Some("wrong"), "refuses user `trainer`: "),
        (Some("trainer"), None, "refuses user `trainer`: "),
        (Some("nothing"), Some("right"), "refuses user `nothing`: "),
        (None, None, "refuses a client without a user: "),
    ] {
        let error = refused(etcd.endpoint(), access(user, password));
        assert!(matches!(error, EtcdError::Denied { .. }), "{user:?} {password:?}: {error}");
        let text = error.to_string();
        assert!(text.contains(named) && text.contains("BRIGADE_ETCD_PASSWORD"), "{text}");
        assert!(!text.contains("wrong"), "a password is not repeated: {text}");
    }
    let error = refused(etcd.endpoint(), access(Some("reader"), Some("right")));
    assert!(matches!(error, EtcdError::Forbidden { .. }), "{error}");
    let expected = "does not let user `reader` write keys that begin with /brigade/: ";
    assert!(error.to_string().contains(expected), "{error}");
}

/// Sets an etcd up, before it has users.
struct Admin {
    http: ureq::Agent,
    url: String,
}

impl Admin {
    fn new(authority: &Authority, etcd: &Etcd) -> Self {
        let read = |name: &str| {
            let text = std::fs::read(authority.file(name)).unwrap();
            parse_pem(&text).next().unwrap().unwrap()
        };
        let certificate = |name: &str| match read(name) {
            PemItem::Certificate(certificate) => certificate,
            _ => panic!("{name}"),
        };
        let key: PrivateKey<'static> = match read("client-key.pem") {
            PemItem::PrivateKey(key) => key,
            _ => panic!("no key"),
        };
        let tls = TlsConfig::builder()
            .root_certs(RootCerts::from(vec![certificate("ca.pem")]))
            .client_cert(Some(ClientCert::new_with_certs(&[certificate("client.pem")], key)))
            .build();
        let http = ureq::Agent::config_builder().tls_config(tls).build().new_agent();
        Self { http, url: format!("https://{}/v3", etcd.endpoint()) }
    }

    fn post(&self, what: &str, body: &str) {
        let answer = self.http.post(format!("{}/{what}", self.url)).send(body);
        assert!(answer.is_ok(), "{what} {body}: {answer:?}");
    }
}

#[needs(Etcd)]
fn files_that_hold_no_certificate() {
    let authority = Authority::new();
    let wrong = |change: &dyn Fn(&mut EtcdAccess)| {
        let mut access = access_of(&authority);
        change(&mut access);
        refused("localhost:1", access).to_string()
    };
    let missing = wrong(&|it| it.ca_file = Some("/no/such.pem".into()));
    assert!(missing.starts_with("cannot read certificate from /no/such.pem: "), "{missing}");
    let none = wrong(&|it| it.ca_file = Some(authority.file("client-key.pem")));
    assert!(none.ends_with("client-key.pem holds no certificate in PEM form"), "{none}");
    let no_key = wrong(&|it| it.key_file = None);
    assert!(no_key.ends_with("client.pem holds no private key in PEM form"), "{no_key}");
    let alone = wrong(&|it| it.cert_file = None);
    assert!(alone.starts_with("a key for etcd was given ("), "{alone}");
}
