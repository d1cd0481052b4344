//! Tests of access to a job on several hosts: its secret, its executable, its store.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use brigade_test_needs::needs;
use nix::sys::signal::Signal;

use crate::site::{Launch, Site, site, wait_until};

/// Returns one of two launchers with fixed node ranks, with the first host's address.
fn numbered<'s>(site: &'s Site, node: usize, flags: &[&str]) -> Launch<'s> {
    let (rank, address) = (format!("--node-rank={node}"), site.host(0).address().to_owned());
    let address = format!("--master-addr={address}");
    let place = ["--nnodes=2", &rank, &address, "--master-port=29500", "--nproc=1"];
    site.launch_on(node, &[&place[..], flags].concat())
}

#[needs(Hosts)]
fn a_rendezvous_on_a_network_has_a_secret_or_says_that_it_has_none() {
    let site = site(2);
    let both = |variable: Option<&str>| {
        let runs = [0, 1].map(|node| {
            let launch = numbered(&site, node, &[]);
            match variable {
                Some(secret) => launch.env("BRIGADE_RDZV_SECRET", secret),
                None => launch,
            }
            .sh("echo $RANK")
            .start()
        });
        runs.map(|run| run.finish())
    };
    let [first, second] = both(None);
    assert_eq!((first.code, second.code), (0, 0), "{}{}", first.stderr, second.stderr);
    let warning = "warning: this job has no secret: any host that reaches port 29500 can join it; \
                   run `export BRIGADE_RDZV_SECRET=$(openssl rand -hex 32)` and start all launchers \
                   with that value\n";
    assert_eq!(first.stderr.matches(warning).count(), 1, "{}", first.stderr);
    assert!(!second.stderr.contains("secret"), "once for a job: {}", second.stderr);

    let [first, second] = both(Some("known to the job's hosts"));
    assert_eq!((first.code, second.code), (0, 0), "{}{}", first.stderr, second.stderr);
    assert!(!format!("{}{}", first.stderr, second.stderr).contains("secret"), "{}", first.stderr);

    let mut first = numbered(&site, 0, &[])
        .env("BRIGADE_RDZV_SECRET", "known to the job's hosts")
        .sh("")
        .start();
    first.wait_for_stderr("waiting for other hosts");
    // Not as a job of the site, which ends when no host has a process any more.
    let mut guess = numbered(&site, 1, &["--rdzv-id=none"])
        .env("BRIGADE_RDZV_SECRET", "a guess at the secret")
        .sh("echo started");
    let guess = guess.command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let (code, out, err) = (guess.status.code(), text(guess.stdout), text(guess.stderr));
    assert_eq!((code, out.as_str()), (Some(1), ""), "{err}");
    assert!(err.contains("its job has another secret"), "{err}");
    let address = site.host(1).address();
    first.wait_for_stderr(&format!("refused {address}: it does not have the secret of this job"));
    first.send(Signal::SIGINT);
    assert_eq!(first.finish().code, 130);
}

#[needs(Hosts)]
fn over_ssh_the_secret_is_in_no_command_line_and_no_environment() {
    let site = site(2);
    // The rank, its agent, and the agent's parents: sshd, or the launcher itself.
    let script = "p=$$; while [ $p -gt 1 ]; do cat /proc/$p/cmdline /proc/$p/environ 2>/dev/null | \
                  tr '\\0' '\\n'; p=$(cut -d ' ' -f 4 /proc/$p/stat); done; echo looked";
    let run = site.launch("node1,node2").args(["--nproc", "1"]).sh(script).run();
    assert_eq!(run.code, 0, "{}", run.stderr);
    for host in ["[node1:0] looked\n", "[node2:1] looked\n"] {
        assert!(run.stdout.contains(host), "{}", run.stdout);
    }
    let is_secret = |word: &str| word.len() == 64 && word.chars().all(|c| c.is_ascii_hexdigit());
    let words = run.stdout.split(|c: char| !c.is_ascii_alphanumeric());
    assert_eq!(words.filter(|word| is_secret(word)).count(), 0, "{}", run.stdout);
}

#[needs(Hosts, Python)]
fn the_store_listens_at_the_address_of_the_job_alone() {
    let site = site(2);
    // Rank 0 listens on the inherited socket, and prints the address of its peer.
    let program = "import os, socket, time\n\
         port = int(os.environ['MASTER_PORT'])\n\
         def reached(address):\n    \
             try: return socket.create_connection((address, port), 5) is not None\n    \
             except ConnectionRefusedError: return False\n\
         if os.environ['RANK'] == '0':\n    \
             server = socket.socket(fileno=int(os.environ['BRIGADE_STORE_FD']))\n    \
             server.listen()\n    \
             print('loopback', reached('127.0.0.1'), 'own', reached(os.environ['MASTER_ADDR']))\n    \
             open('listens', 'w').close()\n    \
             while not os.path.exists('reached'): time.sleep(0.01)\n\
         else:\n    \
             while not os.path.exists('listens'): time.sleep(0.01)\n    \
             print('over the network', reached(os.environ['MASTER_ADDR']))\n    \
             open('reached', 'w').close()\n";
    let words = ["--nproc", "1", "--", "/usr/bin/python3", "-c", program];
    let run = site.launch("node1,node2").args(words).run();
    assert_eq!(run.code, 0, "{}", run.stderr);
    let expected = ["[node1:0] loopback False own True", "[node2:1] over the network True"];
    assert_eq!(run.lines(), expected, "{}", run.stderr);
}

#[needs(Hosts)]
fn an_executable_that_others_can_replace_is_not_run() {
    let site = site(2);
    // A copy of it in a world-writable folder, at the same path on both hosts.
    let shared = site.network.folder().join("shared");
    fs::create_dir(&shared).unwrap();
    let copy = shared.join("brigade");
    fs::copy(crate::job::BRIGADE, &copy).unwrap();
    let launch = |mode| {
        fs::set_permissions(&shared, Permissions::from_mode(mode)).unwrap();
        let mut command = site.host(0).command_in(&site.work, &copy);
        command.env("PWD", &site.work).env("BRIGADE_SSH", site.ssh(""));
        command.args(["launch", "--hosts", "node2", "--nproc", "1", "--", "echo", "ran"]);
        let output = command.output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let (code, out, err) = launch(0o755);
    assert_eq!((code, out.as_str()), (Some(0), "[node2:0] ran\n"), "{err}");
    let (code, out, err) = launch(0o777);
    assert_eq!((code, out.as_str()), (Some(126), ""), "{err}");
    let expected = format!(
        "node2: {} there was not started: other users can change {}; let --sync compare and copy \
         it, or remove the write permission of other users with `chmod go-w`\n",
        copy.display(),
        shared.display()
    );
    assert!(err.ends_with(&expected), "{err}");
    wait_until("no process is left", || site.host(1).processes().is_empty());
}
