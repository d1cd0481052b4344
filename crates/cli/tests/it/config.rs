//! Tests of `brigade config`: files, layers, and the questionnaire on a terminal.

mod home;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use home::Home;

use crate::person::Person;

/// Returns a row of the table without its padding.
fn row(table: &str, name: &str) -> String {
    let line = table.lines().find(|line| line.split_whitespace().next() == Some(name));
    let line = line.unwrap_or_else(|| panic!("no {name} in {table}"));
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn default_writes_a_file_that_launch_reads() {
    let home = Home::new();
    let said = home.answer(&["config", "default", "--mixed-precision", "bf16"]);
    assert_eq!(said, "wrote ~/.config/brigade/config.toml\n");
    let text = fs::read_to_string(home.own()).unwrap();
    assert!(text.contains("version = 1\n") && text.contains("mixed-precision = \"bf16\"\n"));

    let shown = home.answer(&["config", "show"]);
    let line = 1 + text.lines().position(|it| it.starts_with("mixed-precision")).unwrap();
    assert_eq!(
        row(&shown, "mixed-precision"),
        format!("mixed-precision bf16 ~/.config/brigade/config.toml:{line}")
    );
    assert_eq!(row(&shown, "max-restarts"), "max-restarts 0 default");
    assert_eq!(row(&shown, "hosts"), "hosts - not set");

    let error = home.refusal(&["config", "default"], 2);
    assert_eq!(
        error,
        "brigade: ~/.config/brigade/config.toml already exists: pass --force to overwrite it"
    );
    home.answer(&["config", "default", "--force"]);
    assert!(fs::read_to_string(home.own()).unwrap().contains("mixed-precision = \"no\"\n"));
}

#[test]
fn one_setting_is_written_and_read() {
    let home = Home::new();
    assert_eq!(home.answer(&["config", "get", "role"]), "default\n");
    assert_eq!(home.refusal(&["config", "get", "nproc"], 1), "brigade: nproc is not set");
    let said = home.answer(&["config", "set", "nproc", "2"]);
    assert_eq!(said, "nproc is 2 in ~/.config/brigade/config.toml\n");
    home.answer(&["config", "set", "env.NCCL_DEBUG", "WARN"]);
    let said = home.answer(&["config", "set", "env.HF_TOKEN", "hf_abc"]);
    assert_eq!(
        said,
        "env.HF_TOKEN is (not shown: its name marks it as a secret) in \
         ~/.config/brigade/config.toml\n"
    );
    assert!(fs::read_to_string(home.own()).unwrap().contains("HF_TOKEN = \"hf_abc\"\n"));
    home.answer(&["config", "set", "max_restarts", "3"]);
    assert_eq!(home.answer(&["config", "get", "nproc"]), "2\n");
    assert_eq!(home.answer(&["config", "get", "env.NCCL_DEBUG"]), "WARN\n");
    // As in `brigade launch`: a variable takes precedence over the file.
    let mut command = home.command(&["config", "get", "max-restarts"]);
    command.env("BRIGADE_MAX_RESTARTS", "1");
    assert_eq!(command.output().unwrap().stdout, b"1\n");

    let file = home.file("job.toml", "version = 1\n[ranks]\nnproc = 2 # mine\n");
    home.answer(&["config", "set", "nproc", "4", "--config", &file]);
    let text = fs::read_to_string(&file).unwrap();
    assert_eq!(text, "version = 1\n[ranks]\nnproc = 4 # mine\n");
    let error = home.refusal(&["config", "set", "nproc", "0", "--config", &file], 2);
    assert!(error.starts_with("brigade: nproc is `0`: expected a whole number"), "{error}");
    let error = home.refusal(&["config", "get", "nprc"], 2);
    assert_eq!(error, "brigade: no setting is called `nprc`: did you mean `nproc`?");
    let error = home.refusal(&["config", "get", "accelerate.fsdp_versoin"], 2);
    assert_eq!(
        error,
        "brigade: no setting is called `accelerate.fsdp_versoin`: did you mean `accelerate.fsdp-version`?"
    );
    assert_eq!(fs::read_to_string(&file).unwrap(), text);
}

#[test]
fn a_file_of_accelerates_is_not_hidden() {
    let home = Home::new();
    let accelerate = ".cache/huggingface/accelerate/default_config.yaml";
    home.file(accelerate, "num_processes: 2\ndistributed_type: MULTI_CPU\n");
    assert_eq!(home.answer(&["config", "get", "nproc"]), "2\n");
    let error = home.refusal(&["config", "set", "nproc", "4"], 2);
    assert!(error.contains("an Accelerate settings file: run `brigade config update`"), "{error}");
    assert!(!home.own().exists());
}

#[test]
fn the_last_layer_wins() {
    let home = Home::new();
    let text =
        "version = 1\n[ranks]\nnproc = 2\nrole = \"actor\"\n[env]\nA = \"file\"\nB = \"file\"\n";
    let file = home.file("job.toml", text);
    let mut command = home.command(&["launch", "--config", &file, "--env", "B=flag"]);
    command.args(["--max-restarts", "1", "--explain", "true"]);
    command.env("BRIGADE_NPROC", "3").env("PET_ROLE", "critic").env("BRIGADE_MAX_RESTARTS", "2");
    let shown = home.without_home(&command.output().unwrap().stdout);
    for expected in [
        "nproc 3 environment BRIGADE_NPROC",
        "role critic environment PET_ROLE",
        "max-restarts 1 flag --max-restarts",
        "shutdown-timeout 30 default",
        "env.A file ~/job.toml:6",
        "env.B flag flag --env",
    ] {
        let name = expected.split(' ').next().unwrap();
        assert_eq!(row(&shown, name), expected);
    }
    assert!(shown.starts_with("settings file: ~/job.toml (flag --config)\n"), "{shown}");
    assert!(shown.ends_with("nothing was started\n"), "{shown}");
}

#[test]
fn settings_reach_the_ranks() {
    let home = Home::new();
    let text = "version = 1\n[ranks]\nnproc = 2\ncpu = true\n[training]\nmixed-precision = \"bf16\"\n\
                dynamo-backend = \"inductor\"\ndebug-collectives = true\n[env]\nGREETING = \"hello\"\nOMP_NUM_THREADS = 7\n";
    home.file(".config/brigade/config.toml", text);
    let script = "echo $GREETING $OMP_NUM_THREADS $ACCELERATE_MIXED_PRECISION $ACCELERATE_USE_CPU \
                  $ACCELERATE_DYNAMO_BACKEND $ACCELERATE_DEBUG_MODE $ACCELERATE_DYNAMO_MODE.";
    let stdout = home.answer_of_ranks(&["launch", "--", "sh", "-c", script]);
    let line = "hello 7 bf16 True INDUCTOR true .";
    assert_eq!(stdout, [format!("[0] {line}"), format!("[1] {line}")]);
}

#[test]
fn accelerates_file_is_read_without_another_one() {
    let home = Home::new();
    let text = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_machines: 1\n\
                num_processes: 3\nuse_cpu: true\nmixed_precision: 'no'\ntpu_name: pod\n";
    let path = ".cache/huggingface/accelerate/default_config.yaml";
    home.file(path, text);
    let shown = home.answer(&["config", "show"]);
    let reason = "Accelerate's default, because there is no Brigade settings file";
    assert!(shown.starts_with(&format!("settings file: ~/{path} ({reason})\n")), "{shown}");
    assert_eq!(row(&shown, "nproc"), format!("nproc 3 ~/{path}:4"));
    assert!(shown.contains(&format!("~/{path}:7: tpu_name has no effect: it is for TPUs only")));
    assert_eq!(home.answer_of_ranks(&["launch", "true"]), Vec::<String>::new());

    let said = home.answer(&["config", "update"]);
    assert!(said.contains("line 4: num_processes: 3 -> nproc = 3\n"), "{said}");
    assert!(
        said.ends_with(&format!("wrote ~/.config/brigade/config.toml, left ~/{path} as it is\n"))
    );
    let shown = home.answer(&["config", "show"]);
    assert!(shown.starts_with("settings file: ~/.config/brigade/config.toml"), "{shown}");
    assert_eq!(home.answer(&["config", "update"]), "~/.config/brigade/config.toml is current\n");
}

#[test]
fn an_unusable_default_file_is_a_warning() {
    let home = Home::new();
    let path = ".cache/huggingface/accelerate/default_config.yaml";
    let file = home.file(path, "distributed_type: XLA\ntpu_use_cluster: true\n");
    let output = home.run(&["launch", "--nproc", "1", "true"]);
    assert_eq!(output.status.code(), Some(0));
    let stderr = home.without_home(&output.stderr);
    let expected = format!(
        "brigade: warning: ~/{path}:1: not used: ~/{path} cannot be used: line 2: tpu_use_cluster: Brigade does \
         not start jobs by gcloud"
    );
    assert!(stderr.starts_with(&expected), "{stderr}");

    let error = home.refusal(&["launch", "--config", &file, "true"], 2);
    assert!(error.starts_with(&format!("brigade: ~/{path} cannot be used: line 2: ")), "{error}");
}

#[test]
fn old_files_are_renewed_and_kept() {
    let home = Home::new();
    let file = home.file("old.toml", "nproc_per_node = 4\n");
    let error = home.refusal(&["launch", "--config", &file, "true"], 2);
    assert!(error.contains("or run `brigade config update --config ~/old.toml`"), "{error}");
    let said = home.answer(&["config", "update", "--config", &file]);
    assert_eq!(
        said,
        "line 1: nproc_per_node = 4 -> nproc = 4 in [ranks]\n\
         wrote ~/old.toml, kept the old one as ~/old.toml.bak\n"
    );
    let kept = fs::read_to_string(format!("{file}.bak")).unwrap();
    assert_eq!(kept, "nproc_per_node = 4\n");
    let shown = home.answer(&["config", "show", "--config", &file]);
    assert!(row(&shown, "nproc").starts_with("nproc 4 ~/old.toml:"), "{shown}");

    let yaml = home.file("a.yaml", "distributed_type: 'NO'\nnum_processes: 2\n");
    home.answer(&["config", "update", "--config", &yaml]);
    assert!(home.path().join("a.toml").exists() && Path::new(&yaml).exists());
    let error = home.refusal(&["config", "update", "--config", &yaml], 2);
    assert_eq!(error, "brigade: ~/a.toml already exists: pass --force to overwrite it");
}

#[test]
fn shown_as_json() {
    let home = Home::new();
    let text = "version = 1\n[hosts]\nmaster-port = 29501\nnnodes = \"1:2\"\n[env]\nA = \"b\"\n";
    let file = home.file("job.toml", text);
    let shown = home.answer(&["config", "show", "--json", "--config", &file]);
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    let settings = &shown["settings"];
    assert_eq!(settings["master-port"]["value"], 29501);
    assert_eq!(settings["master-port"]["source"], "~/job.toml:3");
    assert_eq!(settings["nnodes"]["value"], "1:2");
    assert_eq!(settings["quiet"]["value"], false);
    assert_eq!(settings["hosts"]["value"], serde_json::Value::Null);
    assert_eq!(shown["env"]["A"]["value"], "b");
    assert_eq!(shown["settings_file"]["because"], "flag --config");
}

#[test]
fn errors_are_one_line() {
    let home = Home::new();
    let broken = home.file("broken.toml", "version = 1\n[ranks]\nnprc = 2\n");
    let yaml = home.file("broken.yaml", "distributed_type: [\n");
    let locked = home.path().join("locked");
    fs::create_dir(&locked).unwrap();
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o555)).unwrap();
    let table: [(&[&str], i32, &str); 12] = [
        (
            &["launch", "--config", "none.toml", "true"],
            2,
            "brigade: cannot read none.toml (flag --config): No such file",
        ),
        (
            &["launch", "--config", "/", "true"],
            2,
            "brigade: cannot read / (flag --config): Is a directory",
        ),
        (
            &["launch", "--config", "/dev/zero", "true"],
            2,
            "brigade: cannot read /dev/zero (flag --config): ",
        ),
        (
            &["launch", "--config", &broken, "true"],
            2,
            "brigade: ~/broken.toml:3: unknown key `nprc`: did you mean `nproc`?",
        ),
        (&["launch", "--config", &yaml, "true"], 2, "brigade: ~/broken.yaml:1: this is not YAML: "),
        (&["config", "show", "--config", &broken], 2, "brigade: ~/broken.toml:3: unknown key"),
        (&["config", "update", "--config", "none.toml"], 2, "brigade: cannot read none.toml"),
        (
            &["config", "update"],
            2,
            "brigade: there is no settings file to update: run `brigade config default` to write one",
        ),
        (
            &["config", "default", "--config", "no/such/a.toml"],
            1,
            "brigade: cannot write no/such/a.toml: there is no folder no/such: make it with `mkdir -p no/such`",
        ),
        (
            &["config", "default", "--mixed-precision", "fp8"],
            2,
            "brigade: invalid value 'fp8' for '--mixed-precision <TYPE>'",
        ),
        (
            &["config"],
            2,
            "brigade: `brigade config` asks questions, which needs a terminal: use `brigade config default`",
        ),
        (
            &["config", "defualt"],
            2,
            "brigade: unrecognized subcommand 'defualt'; a similar subcommand exists: 'default'",
        ),
    ];
    for (args, code, expected) in table {
        let error = home.refusal(args, code);
        assert!(error.starts_with(expected), "{args:?}: {error}");
    }
    let mut homeless = home.command(&["config", "default"]);
    let output = homeless.env_remove("HOME").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("set HOME, or name a file with --config")
    );
}

#[test]
fn the_questionnaire_on_a_terminal() {
    let home = Home::new();
    let mut person = Person::answering(home.command(&["config"]));
    person.expect("Where will the job run?");
    // Down twice: one command on each machine.
    person.types("\x1b[B\x1b[B\r");
    person.expect("How many machines?");
    person.types("0\r");
    person.expect("expected a number of machines from 2, or MIN:MAX");
    person.types("\x7f3\r");
    person.expect("What is the number of this machine?");
    person.types("1\r");
    person.expect("What is the name or address of machine 0?");
    person.types("node1\r");
    person.expect("On which port of machine 0 do they meet?");
    // Esc: back to the address.
    person.types("\x1b");
    person.expect("What is the name or address of machine 0?");
    person.types("10.0.0.1\r");
    person.expect("On which port");
    person.types("\r");
    person.expect("Train on the CPU only");
    person.types("y\r");
    person.expect("How many processes on each machine?");
    person.types("4\r");
    person.expect("Which mixed precision?");
    person.types("\x1b[B\x1b[B\r");
    person.expect("Compile models");
    person.types("\r");
    assert_eq!(person.ends(), 0);

    let shown = home.answer(&["config", "show"]);
    for expected in [
        "nnodes 3",
        "node-rank 1",
        "master-addr 10.0.0.1",
        "master-port 29500",
        "cpu true",
        "nproc 4",
        "mixed-precision bf16",
    ] {
        let found = row(&shown, expected.split(' ').next().unwrap());
        assert!(found.starts_with(&format!("{expected} ~/.config/")), "{found}");
    }
}

#[test]
fn ctrl_c_writes_nothing() {
    let home = Home::new();
    let mut person = Person::answering(home.command(&["config"]));
    person.expect("Where will the job run?");
    person.types("\r");
    person.expect("Train on the CPU only");
    person.types("\x03");
    person.expect("nothing was written");
    assert_eq!(person.ends(), 130);
    assert!(!home.own().exists());

    home.answer(&["config", "default"]);
    let before = fs::read_to_string(home.own()).unwrap();
    let mut person = Person::answering(home.command(&["config"]));
    person.expect("already exists. Overwrite it?");
    person.types("\r");
    assert_eq!(person.ends(), 130);
    assert_eq!(fs::read_to_string(home.own()).unwrap(), before);
}
