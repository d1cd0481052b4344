//! `brigade launch --hosts` on several hosts with real sshd: what its user sees, what the ranks
//! see, and that nothing is left on any host, whatever is killed or cut.

mod site;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use site::{BRIGADE, Site, site, wait_until, write_script};

/// A rank that is there, says so, and stays.
const STAY: &str = "touch $RANK; sleep 1000 & wait";

#[test]
fn ranks_are_numbered_over_the_hosts() {
    let Some(site) = site(3) else { return };
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE \
                  $GROUP_RANK/$GROUP_WORLD_SIZE $MASTER_ADDR $(hostname) $(pwd)";
    // The launcher's own host is the second: no ssh leads to it.
    let run = site.launch("node2:2,node1:1,node3:2").sh(script).run();
    assert_eq!(run.code, 0, "{}", run.stderr);
    let work = site.work.display();
    let expected = [
        format!("[node1:2] 2/5 0/1 1/3 10.213.0.2 node1 {work}"),
        format!("[node2:0] 0/5 0/2 0/3 10.213.0.2 node2 {work}"),
        format!("[node2:1] 1/5 1/2 0/3 10.213.0.2 node2 {work}"),
        format!("[node3:3] 3/5 0/2 2/3 10.213.0.2 node3 {work}"),
        format!("[node3:4] 4/5 1/2 2/3 10.213.0.2 node3 {work}"),
    ];
    assert_eq!(run.lines(), expected);
    assert_eq!(run.stderr, "");

    // On the first host itself: the others are told an address at which they reach it.
    let run = site.launch("localhost,node2").args(["--nproc", "1"]).sh("echo $MASTER_ADDR").run();
    let expected = ["[localhost:0] 10.213.0.1", "[node2:1]     10.213.0.1"];
    assert_eq!(run.lines(), expected, "{}", run.stderr);
}

#[test]
fn a_hostfile() {
    let Some(site) = site(2) else { return };
    let file = site.work.join("hosts");
    fs::write(&file, "# two\nnode1 slots=1\nnode2 slots=2 max-slots=4\n").unwrap();
    let run = site.launch_with(&["--hostfile", "hosts"]).sh("echo $RANK").run();
    assert_eq!(run.lines(), ["[node1:0] 0", "[node2:1] 1", "[node2:2] 2"], "{}", run.stderr);

    fs::write(&file, "node1 slots=1\n\nnode2 slot=2\n").unwrap();
    let run = site.launch_with(&["--hostfile", "hosts"]).sh("touch started").run();
    assert_eq!(run.code, 2);
    assert_eq!(run.stderr, "brigade: hosts, line 3: `slot=2`: expected `slots=N`\n");
    assert!(!site.work.join("started").exists());
}

#[test]
fn variables_are_passed_by_a_list() {
    let Some(site) = site(2) else { return };
    fs::write(site.work.join(".deepspeed_env"), "FROM_FILE=a b\n").unwrap();
    let run = site
        .launch("node2:1")
        .args(["--env", "OWN", "--env", "NEW=it's \"$HOME\"\n;", "--env", "FAMILY_*"])
        .env("OWN", "1")
        .env("FAMILY_A", "2")
        .env("NCCL_DEBUG", "INFO")
        .env("SECRET", "3")
        .env("CUDA_VISIBLE_DEVICES", "0")
        .sh("env -0 | tr '\\n' '_' | tr '\\0' '\\n'")
        .run();
    assert_eq!(run.code, 0, "{}", run.stderr);
    let value = |name: &str| {
        let start = format!("[node2:0] {name}=");
        run.stdout.lines().find_map(|line| line.strip_prefix(&start))
    };
    assert_eq!(value("OWN"), Some("1"));
    assert_eq!(value("NEW"), Some("it's \"$HOME\"_;"));
    assert_eq!(value("FAMILY_A"), Some("2"));
    assert_eq!(value("NCCL_DEBUG"), Some("INFO"));
    assert_eq!(value("FROM_FILE"), Some("a b"));
    assert_eq!(value("SECRET"), None);
    assert_eq!(value("CUDA_VISIBLE_DEVICES"), None);
    assert_eq!(value("HOME"), site.host(1).home().to_str());
    assert_eq!(value("PWD"), site.work.to_str());
}

#[test]
fn arguments_and_noisy_logins() {
    let Some(site) = site(2) else { return };
    write_script(&site.work.join("a 'program' \\ $x"), "#!/bin/sh\nprintf '%s|' \"$0\" \"$@\"\n");
    // What a login may print before the agent has its say.
    fs::write(site.host(1).home().join(".ssh/rc"), "printf 'Welcome\\n\\nto node2'\n").unwrap();
    let arguments =
        ["./a 'program' \\ $x", "", "it's", "$HOME `id`", "a\nb", "!x", "--nproc", "\\"];
    let run = site.launch("node2:1").args(["--"]).args(arguments).run();
    assert_eq!(run.code, 0, "{}", run.stderr);
    let expected = "[node2:0] ./a 'program' \\ $x||it's|$HOME `id`|a\n[node2:0] b|!x|--nproc|\\|\n";
    assert_eq!(run.stdout, expected);
}

#[test]
fn lines_of_several_hosts_stay_whole() {
    let Some(site) = site(3) else { return };
    let script = "i=0; while [ $i -lt 3000 ]; do i=$((i+1)); echo $i of $RANK ......................; \
                  echo $i >&2; done; head -c 700000 /dev/zero | tr '\\0' x; echo";
    let run = site.launch("node1:1,node2:2,node3:1").sh(script).run();
    assert_eq!(run.code, 0, "{}", run.stderr);
    for (host, rank) in [("node1", 0), ("node2", 1), ("node2", 2), ("node3", 3)] {
        let prefix = format!("[{host}:{rank}] ");
        let of = |text: &str| -> Vec<String> {
            text.lines().filter_map(|line| line.strip_prefix(&prefix)).map(str::to_owned).collect()
        };
        let lines = of(&run.stdout);
        let expected = (1..=3000).map(|i| format!("{i} of {rank} ......................"));
        assert!(lines[..3000].iter().cloned().eq(expected), "{host}");
        let long: usize = lines[3000..].iter().map(String::len).sum();
        assert_eq!(long, 700_000, "{host}");
        assert!(of(&run.stderr).into_iter().eq((1..=3000).map(|i| i.to_string())), "{host}");
    }
}

#[test]
fn a_rank_fails_on_another_host() {
    let Some(site) = site(2) else { return };
    let script = "touch $RANK; [ $RANK = 2 ] || { sleep 1000 & wait; }; \
                  while [ $(ls | wc -l) -lt 3 ]; do sleep 0.01; done; echo broken >&2; exit 7";
    let run = site.launch("node1:2,node2:1").sh(script).run();
    assert_eq!(run.code, 7, "{}", run.stderr);
    assert!(run.stderr.contains("rank 2 on node2 (local rank 0, pid "), "{}", run.stderr);
    assert!(run.stderr.contains("failed: exit code 7"), "{}", run.stderr);
    assert!(run.stderr.ends_with("its last lines on stderr:\n  broken\n"), "{}", run.stderr);
}

#[test]
fn signals_stop_everything_everywhere() {
    let Some(site) = site(3) else { return };
    for (signal, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        let job = site.launch("node1:1,node2:1,node3:1").sh(STAY).start();
        site.wait_for_files(3);
        job.send(signal);
        let run = job.finish();
        assert_eq!(run.code, code, "{}", run.stderr);
        assert!(run.stderr.contains(&format!("stopped by {signal}")), "{}", run.stderr);
        empty(&site.work);
    }

    // Ranks that do not listen: the second time they are killed.
    let mut job = site
        .launch("node2:1,node3:1")
        .sh("trap '' INT; touch $RANK; while :; do sleep 1; done")
        .start();
    site.wait_for_files(2);
    job.send(Signal::SIGINT);
    job.wait_for_stderr("SIGINT");
    job.send(Signal::SIGINT);
    let run = job.finish();
    assert_eq!(run.code, 130, "{}", run.stderr);
}

#[test]
fn a_signal_while_hosts_are_called() {
    let Some(site) = site(2) else { return };
    site.host(1).cut();
    let job = site.launch("node1:1,node2:1").sh(STAY).start();
    let launcher = job.pid();
    wait_until("ssh", || {
        let processes = site.host(0).processes();
        processes
            .iter()
            .any(|it| it.parent == launcher && it.command.first().is_some_and(|it| it == "ssh"))
    });
    job.send(Signal::SIGINT);
    let run = job.finish();
    assert_eq!(run.code, 130, "{}", run.stderr);
    assert!(!site.work.join("0").exists());
}

#[test]
fn whatever_is_killed_nothing_is_left() {
    let Some(site) = site(3) else { return };
    let agent_of = |host: usize| {
        let processes = site.host(host).processes();
        let agent = processes.iter().find(|it| it.command.get(1).is_some_and(|it| it == "__agent"));
        agent.expect("an agent").pid
    };
    let sleeps = |host: usize| {
        site.host(host)
            .processes()
            .iter()
            .any(|it| it.command.first().is_some_and(|it| it == "sleep"))
    };
    type Blow<'a> = (&'a str, &'a dyn Fn(i32), i32, &'a str);
    let table: [Blow<'_>; 4] = [
        ("launcher", &|launcher| kill(Pid::from_raw(launcher), Signal::SIGKILL).unwrap(), 137, ""),
        ("sshd session", &|_| assert!(site.host(1).kill_sshd_sessions() >= 1), 1, "node2 is lost"),
        (
            "agent",
            &|_| kill(Pid::from_raw(agent_of(2)), Signal::SIGKILL).unwrap(),
            1,
            "node3 is lost",
        ),
        ("link", &|_| site.host(1).cut(), 1, "node2 is lost"),
    ];
    for (name, blow, code, said) in table {
        let job = site.launch("node1:1,node2:1,node3:1").sh(STAY).start();
        site.wait_for_files(3);
        wait_until("the ranks", || (0..3).all(sleeps));
        blow(job.pid());
        let start = Instant::now();
        wait_until("the ranks' end", || !(0..3).any(sleeps));
        eprintln!("{name}: no rank is left after {} ms", start.elapsed().as_millis());
        if name == "link" {
            // What is on the far side ends by itself, but sshd there still waits for the launcher.
            site.host(1).restore();
        }
        let run = job.finish();
        eprintln!("{name}: over after {} ms: {}", start.elapsed().as_millis(), run.stderr);
        assert_eq!(run.code, code, "{name}: {}", run.stderr);
        assert!(run.stderr.contains(said), "{name}: {}", run.stderr);
        empty(&site.work);
    }
}

#[test]
fn hosts_that_cannot_take_part() {
    let Some(site) = site(3) else { return };
    let refused = |launch: site::Launch<'_>, code: i32, expected: &[&str]| {
        let run = launch.sh("touch started").run();
        assert_eq!(run.code, code, "{expected:?} {run:?}");
        let lines: Vec<&str> = run.stderr.lines().collect();
        assert_eq!(lines.len(), expected.len(), "{}", run.stderr);
        for (line, expected) in lines.iter().zip(expected) {
            let (start, end) = expected.split_once("…").unwrap_or((expected, ""));
            assert!(line.starts_with(start) && line.ends_with(end), "{}", run.stderr);
        }
        assert!(!site.work.join("started").exists());
    };
    let ssh = |host: &str, more: &str| {
        let command = site.ssh(more);
        site.launch_with(&["--hosts", host, "--nproc", "1", "--ssh-command", &command])
    };

    // All of them are named, in the order of the list.
    refused(
        site.launch("node2:1,nowhere:1,node1:1,elsewhere:1"),
        1,
        &[
            "brigade: nowhere: ssh: Could not resolve hostname nowhere: … or give it an address in ~/.ssh/config",
            "brigade: elsewhere: ssh: Could not resolve hostname elsewhere: … or give it an address in ~/.ssh/config",
        ],
    );
    let folder = site.network.folder();
    let (stranger, settings) = (folder.join("stranger"), folder.join("strangers_config"));
    let mut key = Command::new("ssh-keygen");
    key.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&stranger);
    assert!(key.status().unwrap().success());
    let own = fs::read_to_string(site.network.ssh_config()).unwrap();
    fs::write(&settings, own.replace("user_key", "stranger")).unwrap();
    refused(
        site.launch("node2:1").args(["--ssh-command", &format!("ssh -F {}", settings.display())]),
        1,
        &[
            "brigade: node2: root@node2: Permission denied (publickey): log in with a key or an agent, because nobody is asked for a password here",
        ],
    );
    refused(
        ssh("node2", "-o UserKnownHostsFile=/dev/null"),
        1,
        &[
            "brigade: node2: No ED25519 host key is known for node2…Host key verification failed: connect once by hand, `ssh node2`, and accept its key",
        ],
    );
    site.host(1).reject_port(22);
    refused(
        ssh("node2", ""),
        1,
        &[
            "brigade: node2: ssh: connect to host node2 port 22: Connection refused: is sshd running there, and on that port?",
        ],
    );
    site.host(1).clear_filters();
    site.host(1).cut();
    refused(
        ssh("node2,node3", "-o ConnectTimeout=1"),
        1,
        &["brigade: node2: ssh: connect to host node2 port 22: Connection timed out"],
    );
    site.host(1).restore();
    refused(
        ssh("node2", "-o NoSuchOption=1"),
        1,
        &["brigade: node2: command-line: line 0: Bad configuration option: nosuchoption"],
    );
    refused(
        site.launch_with(&["--hosts", "node2:1", "--ssh-command", "no-such-ssh"]),
        127,
        &["brigade: node2: cannot start no-such-ssh: No such file or directory (os error 2)"],
    );
}

#[test]
fn folders_and_programs_that_are_not_there() {
    let Some(site) = site(2) else { return };
    let private = site.work.join("private");
    fs::create_dir(&private).unwrap();
    write_script(&private.join("train"), "#!/bin/sh\necho here\n");
    site.host(1).hide(&private);

    let refused = |launch: site::Launch<'_>, code: i32, expected: &str| {
        let run = launch.run();
        assert_eq!(run.code, code, "{expected:?} {run:?}");
        assert_eq!(run.stderr, format!("brigade: {expected}\n"));
        assert_eq!(run.stdout, "");
    };
    refused(
        site.launch("node1:1,node2:1").args(["private/train"]),
        127,
        "node2: program private/train not found",
    );
    refused(
        site.launch("node1:1,node2:1").args(["no-such-program"]),
        127,
        "node1: program no-such-program not found in PATH\n\
         brigade: node2: program no-such-program not found in PATH",
    );
    fs::write(site.work.join("data"), "").unwrap();
    let locked = "node2: ./data is not executable: `chmod +x` it, or give its interpreter first, \
                  as in `python3 ./data`";
    refused(site.launch("node2:1").args(["./data"]), 126, locked);
    let nowhere = private.join("nowhere").display().to_string();
    refused(
        site.launch("node2:1").args(["--workdir", &nowhere, "true"]),
        1,
        &format!(
            "node2: the working folder {nowhere} is not there: make it, or name another with \
             --workdir"
        ),
    );
    refused(
        site.launch("node2:1").args(["--workdir", "here", "true"]),
        2,
        "the working folder here is no absolute path: give one with --workdir",
    );
    let run = site.launch("node2:1").args(["--workdir", "/", "pwd"]).run();
    assert_eq!(run.stdout, "[node2:0] /\n", "{}", run.stderr);

    // The launcher's own executable is not there either, nor one in PATH.
    site.host(1).hide(Path::new(BRIGADE).parent().unwrap());
    refused(
        site.launch("node2:1").args(["true"]),
        127,
        &format!(
            "node2: brigade is neither at {BRIGADE} nor in PATH there: install it, or let --sync \
             copy it"
        ),
    );
}

#[test]
fn programs_and_libraries_are_copied_where_they_are_missing() {
    let Some(site) = site(3) else { return };
    let Some(private) = build_with_library(&site) else { return };
    let built = Path::new(BRIGADE).parent().unwrap();
    // node2 has nothing, node3 has another library of that name.
    site.host(1).hide(built);
    site.host(1).hide(&private);
    site.host(2).hide(&private);
    let other = private.join("lib/libgreet.so");
    site.host(2).sh(&format!(
        "mkdir {0}/lib; echo broken >{1}",
        private.display(),
        other.display()
    ));

    let program = private.join("train");
    let program = program.to_str().unwrap();
    let missing = site.launch("node1:1,node2:1").args([program]).run();
    assert_eq!(missing.code, 127, "{}", missing.stderr);

    let launch = || site.launch("node1:1,node2:1,node3:2").args(["--sync", program, "a b"]);
    let first = launch().run();
    assert_eq!(first.code, 0, "{}", first.stderr);
    let expected = [
        "[node1:0] rank 0: a b",
        "[node2:1] rank 1: a b",
        "[node3:2] rank 2: a b",
        "[node3:3] rank 3: a b",
    ];
    assert_eq!(first.lines(), expected);
    let mut said: Vec<&str> =
        first.stderr.lines().map(|it| it.split(" (").next().unwrap()).collect();
    said.sort_unstable();
    let copying = |host: &str, what: &str| format!("brigade: {host}: copying {what}");
    let expected = [
        copying("node2", "brigade"),
        copying("node2", "libgreet.so"),
        copying("node2", "train"),
        copying("node3", "libgreet.so"),
        copying("node3", "train"),
    ];
    assert_eq!(said, expected);

    // The second time everything is there.
    let second = launch().run();
    assert_eq!((second.code, second.stderr.as_str()), (0, ""));
    assert_eq!(second.lines(), first.lines());

    // A program that has been built anew is copied anew, the library is not.
    let source = private.join("train.c");
    fs::write(&source, fs::read_to_string(&source).unwrap().replace("rank", "new rank")).unwrap();
    assert!(compile(&private));
    let third = launch().run();
    assert_eq!(third.lines()[1], "[node2:1] new rank 1: a b", "{}", third.stderr);
    assert!(!third.stderr.contains("libgreet"), "{}", third.stderr);
}

/// A program and a library in a folder of its own, to which the program's run path leads; `None`
/// where there is no compiler.
fn build_with_library(site: &Site) -> Option<std::path::PathBuf> {
    let private = site.network.folder().join("private");
    fs::create_dir_all(private.join("lib")).unwrap();
    let library = "const char *greet(void) { return getenv(\"RANK\"); }\n";
    fs::write(private.join("greet.c"), format!("#include <stdlib.h>\n{library}")).unwrap();
    let program = "#include <stdio.h>\nconst char *greet(void);\n\
                   int main(int n, char **a) { printf(\"rank %s: %s\\n\", greet(), a[1]); }\n";
    fs::write(private.join("train.c"), program).unwrap();
    if !compile(&private) {
        eprintln!("skipped: there is no C compiler");
        return None;
    }
    Some(private)
}

fn compile(folder: &Path) -> bool {
    let script = "set -e; cc -shared -fPIC -o lib/libgreet.so greet.c; \
                  cc -o train.new train.c -Llib -lgreet \"-Wl,-rpath,$PWD/lib\"; mv train.new train";
    let status = Command::new("sh").args(["-c", script]).current_dir(folder).status();
    status.is_ok_and(|status| status.success())
}

fn empty(folder: &Path) {
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        fs::remove_file(entry.path()).unwrap();
    }
}
