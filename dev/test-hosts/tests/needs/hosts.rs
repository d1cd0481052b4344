//! Tests of the hosts themselves: they reach each other, faults have their effects, and nothing is left.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use brigade_test_hosts::{Disk, Network, inner_process};
use brigade_test_needs::needs;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

fn ssh(network: &Network, from: usize, to: &str) -> Command {
    let mut command = network.host(from).command("ssh");
    command.arg("-F").arg(network.ssh_config()).args(["-o", "BatchMode=yes", to]);
    command
}

#[needs(Hosts)]
fn every_host_reaches_every_other_over_ssh() {
    let network = Network::new(3);
    for from in 0..3 {
        for to in network.hosts() {
            let script = "hostname; echo $SSH_CONNECTION; echo ~";
            let output = ssh(&network, from, to.name()).arg(script).output().unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr);
            let (here, there) = (network.host(from).address(), to.address());
            let stdout = String::from_utf8(output.stdout).unwrap();
            let lines: Vec<&str> = stdout.lines().collect();
            assert_eq!(lines[0], to.name(), "{stderr}");
            assert!(lines[1].starts_with(&format!("{here} ")), "{stdout}");
            assert!(lines[1].ends_with(&format!(" {there} 22")), "{stdout}");
            assert_eq!(Path::new(lines[2]), to.home());
        }
    }
    for host in network.hosts() {
        // The last session's process may need a moment.
        wait_until(|| host.processes().is_empty());
    }
}

#[needs(Hosts)]
fn hosts_have_their_own_names_processes_and_files() {
    let network = Network::new(2);
    let [one, two] = network.hosts() else { panic!("two hosts") };
    assert_eq!(one.sh("hostname"), "node1\n");
    assert_eq!(two.sh("getent hosts node1"), "10.213.0.1      node1\n");
    assert_eq!(one.sh("cat /proc/1/comm; ls /sys/class/net"), "sh\neth0\nlo\n");

    // A file of one host is visible to the other, until it is hidden.
    let shared = network.folder().join("shared");
    fs::create_dir(&shared).unwrap();
    let file = shared.join("file");
    one.sh(&format!("echo hello >{}", file.display()));
    assert_eq!(two.sh(&format!("cat {}", file.display())), "hello\n");
    two.hide(&shared);
    assert_eq!(two.sh(&format!("ls {}", shared.display())), "");
    assert_eq!(one.sh(&format!("ls {}", shared.display())), "file\n");
    two.mount_small(&shared, "64k");
    let mut write = two.command_in(&shared, "head");
    let full = write.args(["-c", "200000", "/dev/zero"]).stdout(Stdio::null()).output().unwrap();
    assert!(full.status.success());
    let script = "head -c 200000 /dev/zero >file || echo full";
    assert_eq!(two.sh(&format!("cd {}; ({script}) 2>/dev/null", shared.display())), "full\n");

    two.set_hosts_file("127.0.0.1 localhost node2\n");
    assert_eq!(two.sh("getent hosts node2"), "127.0.0.1       localhost node2\n");
    two.set_login_variable("COLOUR", "blue");
    let output = ssh(&network, 0, "node2").arg("echo $COLOUR").output().unwrap();
    assert_eq!(output.stdout, b"blue\n");
}

#[needs(Hosts)]
fn programs_are_found_from_outside() {
    let network = Network::new(1);
    let host = network.host(0);
    let mut command = host.command("sh");
    command.args(["-c", "trap 'exit 7' TERM; echo here; while :; do sleep 0.01; done"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let program = inner_process(child.id().cast_signed()).unwrap();
    let seen = host.processes();
    assert!(seen.iter().any(|it| it.pid == program && it.command[0] == "sh"), "{seen:?}");
    kill(Pid::from_raw(program), Signal::SIGTERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(7));
    wait_until(|| host.processes().is_empty());
}

#[needs(Hosts)]
fn faults() {
    let network = Network::new(2);
    let [one, two] = network.hosts() else { panic!("two hosts") };
    // From outside with a time limit: ssh's own applies to the connection, not to the login.
    let reaches_within = |seconds: &str| {
        let mut command = one.command("timeout");
        command.args([seconds, "ssh", "-F"]).arg(network.ssh_config());
        command.args(["-o", "BatchMode=yes", "node2", "true"]).output().unwrap().status.success()
    };
    // A success may take long on a busy machine; a failure is not waited for.
    let reaches = || reaches_within("60");
    type Fault<'a> = (&'a str, &'a dyn Fn(), &'a dyn Fn());
    let table: [Fault<'_>; 7] = [
        ("cut", &|| two.cut(), &|| two.restore()),
        ("unplug", &|| one.unplug(), &|| one.plug_in_again()),
        ("drop a port", &|| two.drop_port(22), &|| two.clear_filters()),
        ("reject a port", &|| two.reject_port(22), &|| two.clear_filters()),
        ("drop a host", &|| one.drop_from(two), &|| one.clear_filters()),
        ("lose all", &|| two.lose(100), &|| two.clear_filters()),
        // ssh sends larger packets during the key exchange.
        ("drop large packets", &|| two.drop_larger_than(400), &|| two.clear_filters()),
    ];
    wait_until(reaches);
    for (name, make, undo) in table {
        make();
        assert!(!reaches_within("2"), "{name}: has no effect");
        undo();
        wait_until(reaches);
    }
    one.set_mtu(1280);
    assert!(one.sh("ip link show eth0").contains("mtu 1280"));
    wait_until(reaches);
}

#[needs(Hosts, Shaping)]
fn slow_links() {
    let network = Network::new(2);
    let two = network.host(1);
    let reaches = || {
        let mut command = ssh(&network, 0, two.name());
        command.arg("true").output().unwrap().status.success()
    };
    two.limit_rate(1000);
    assert!(two.sh("tc qdisc show dev eth0").contains("rate 1Mbit"));
    assert!(reaches());
    two.clear_shaping();
    two.delay(20);
    assert!(two.sh("tc qdisc show dev eth0").contains("delay 20ms"));
    assert!(reaches());
}

#[needs(Hosts)]
fn sessions_are_killed_without_a_word() {
    let network = Network::new(2);
    let mut session = ssh(&network, 0, "node2");
    session.arg("echo here; exec cat").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut session = session.stderr(Stdio::null()).spawn().unwrap();
    let mut stdout = BufReader::new(session.stdout.take().unwrap());
    stdout.read_line(&mut String::new()).unwrap();
    assert!(network.host(1).kill_sshd_sessions() >= 1);
    assert_eq!(stdout.read_to_end(&mut Vec::new()).unwrap(), 0);
    assert_eq!(session.wait().unwrap().code(), Some(255));
    wait_until(|| network.host(1).processes().is_empty());
    assert!(ssh(&network, 0, "node2").arg("true").status().unwrap().success(), "sshd is there");
}

#[needs(Hosts)]
fn nothing_is_left() {
    let network = Network::new(2);
    let folder = network.folder().to_owned();
    let mark = format!("HOSTKIT_TEST={}", folder.display());
    let marked = || {
        let entries = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
        entries
            .filter(|entry| {
                let environ = fs::read(entry.path().join("environ")).unwrap_or_default();
                environ.split(|byte| *byte == 0).any(|var| var == mark.as_bytes())
            })
            .count()
    };
    let mut stays = network.host(1).command("setsid");
    stays.args(["sh", "-c", "trap '' TERM HUP INT; echo here; sleep 1000"]);
    stays.env("HOSTKIT_TEST", &folder);
    let mut stays = stays.stdout(Stdio::piped()).spawn().unwrap();
    BufReader::new(stays.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
    assert!(marked() >= 2);
    drop(network);
    assert!(!stays.wait().unwrap().success());
    assert_eq!(marked(), 0);
    assert!(!folder.exists());
}

#[needs(Hosts)]
fn nothing_is_left_of_a_killed_test() {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--part", "hosts::victim"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut folder = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut folder).unwrap();
    let folder = folder.trim_end();
    let in_use = || {
        let entries = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
        entries
            .map(|entry| fs::read(entry.path().join("cmdline")).unwrap_or_default())
            .any(|line| line.windows(folder.len()).any(|window| window == folder.as_bytes()))
    };
    assert!(in_use());
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until(|| !in_use());
    // Another test may have removed it by now.
    drop(Network::new(1));
    assert!(!Path::new(folder).exists());
}

/// Creates a network, prints the path of its files, and runs until it is killed or nothing waits for it.
#[brigade_test_needs::part]
fn victim() {
    let network = Network::new(1);
    println!("{}", network.folder().display());
    let _ = std::io::stdin().read(&mut [0]);
}

#[track_caller]
fn wait_until(mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(90), "has never come about");
        thread::sleep(Duration::from_millis(1));
    }
}

#[needs(Fuse)]
fn a_disk_that_stops_answering() {
    let disk = Disk::mount();
    let folder = disk.path().join("a/b");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("file"), "text").unwrap();
    let sh = |script: &str| {
        let mut command = Command::new("sh");
        command.args(["-ec", script]).current_dir(&folder).stdout(Stdio::piped());
        command
    };
    let output =
        sh("ls; cat file; echo more >>file; cat file; mkdir c; rmdir c; rm file; ls").output();
    let output = output.unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "file\ntexttextmore\n");

    disk.freeze();
    let mut child = Command::new("touch").arg(folder.join("late")).spawn().unwrap();
    while !disk.is_waited_for() {
        thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    let stat = format!("/proc/{}/stat", child.id());
    let state = || fs::read_to_string(&stat).unwrap().rsplit_once(") ").unwrap().1[..1].to_owned();
    while state() != "D" {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(child.try_wait().unwrap(), None, "not even SIGKILL ends it");
    disk.thaw();
    child.wait().unwrap();
}
