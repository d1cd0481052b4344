//! Tests of `brigade launch` with a real Python.

use std::process::Command;
use std::time::Duration;

use brigade_test_needs::{TimeLimit, needs};

use crate::job::BRIGADE;
use crate::launchers::{Hosts, finish};
use crate::person::Person;
use crate::work::Work;

const SCRIPT: &str = "#!/bin/sh\n''''exec echo shell \"$@\" # '''\n\
                      import os, sys\n\
                      print('python', sys.argv, os.environ['RANK'])\n\
                      os._exit(0)\n";

#[needs(Python)]
fn a_script_is_given_to_python_unbuffered() {
    // `os._exit` would lose the content of buffers.
    let work = Work::new(&[("train.py", SCRIPT)]);
    let run = work.run(2, &["train.py", "--lr", "0.1"]);
    for rank in 0..2 {
        let line = format!("python ['train.py', '--lr', '0.1'] {rank}");
        assert_eq!(run.lines_of(rank), [line.as_str()], "{}", run.stderr);
    }
    // Also if the file is executable, unless that is requested.
    work.allow("train.py");
    assert_eq!(work.run(1, &["./train.py"]).stdout, "[0] python ['./train.py'] 0\n");
    assert_eq!(work.run(1, &["--no-python", "./train.py", "x"]).stdout, "[0] shell x\n");
}

#[needs(Python)]
fn a_module_is_given_to_python() {
    let work = Work::new(&[
        ("pkg/__init__.py", ""),
        ("pkg/train.py", "import sys; print(__name__, __package__, sys.argv[1:])"),
    ]);
    for flag in ["-m", "--module"] {
        let run = work.run(1, &[flag, "pkg.train", "-m", "x"]);
        assert_eq!(run.stdout, "[0] __main__ pkg ['-m', 'x']\n", "{}", run.stderr);
    }
    let run = work.run(1, &["-m", "pkg.nothing"]);
    assert_eq!(run.code, 1);
    assert!(run.stderr.contains("No module named pkg.nothing"), "{}", run.stderr);
}

#[needs(Python)]
fn rank_0_is_reached_at_its_address() {
    let program = "import os, socket, time\n\
         if os.environ['RANK'] == '0':\n    \
             server = socket.socket(fileno=int(os.environ['BRIGADE_STORE_FD']))\n    \
             server.listen()\n    \
             for _ in range(2): server.accept()[0].sendall(b'hello')\n\
         else:\n    \
             place = (os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))\n    \
             while True:\n        \
                 try: client = socket.create_connection(place); break\n        \
                 except ConnectionRefusedError: time.sleep(0.01)\n    \
             print(client.recv(5).decode())\n";
    let hosts = Hosts::new();
    let start =
        |node, nproc| hosts.numbered(node, 2, nproc).words(["python3", "-c", program]).start();
    let runs = finish(vec![start(0, 1), start(1, 2)]);
    assert_eq!((runs[0].code, runs[1].code), (0, 0), "{}", runs[0].stderr);
    assert_eq!(runs[1].stdout.matches("] hello\n").count(), 2, "{}", runs[1].stdout);
}

#[needs(Python)]
fn the_debugger_has_the_keyboard() {
    let _limit = TimeLimit::new("a debugger on a terminal", Duration::from_secs(100));
    let work =
        Work::new(&[("train.py", "loss = 0.25\nwhile loss:\n    pass\nprint('over', loss)\n")]);
    let mut command = Command::new("setsid");
    command.args(["--ctty", BRIGADE, "launch", "-m", "pdb", "train.py"]).current_dir(work.path());
    command
        .env("BRIGADE_CONFIG", "/dev/null")
        .env("TERM", "dumb")
        .env_remove("PYTHON_EXEC")
        .env_remove("VIRTUAL_ENV");
    let mut person = Person::answering(command);
    person.expect("(Pdb) ");
    person.types("next\n");
    person.expect("(Pdb) ");
    person.types("p loss * 2\n");
    person.expect("0.5");
    person.expect("(Pdb) ");
    person.types("continue\n");
    person.expect("continue");
    // Ctrl-C goes to the debugger, which stops the program and shows its prompt.
    person.types("\x03");
    person.expect("(Pdb) ");
    person.types("loss = 0\n");
    person.expect("(Pdb) ");
    person.types("continue\n");
    person.expect("over 0");
    person.expect("(Pdb) ");
    person.types("quit\n");
    assert_eq!(person.ends(), 0);
}
