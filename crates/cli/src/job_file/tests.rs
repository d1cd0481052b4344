//! Tests of job files against golden files, and with parsers of their formats. After an intended change,
//! `UPDATE_GOLDEN=1 cargo nextest run -p brigade-cli emit::` rewrites the golden files.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use brigade_launch::Secret;
use serde_json::Value;

use super::{JobFile, Target, time_limit};

fn words(text: &str) -> Vec<OsString> {
    text.split_whitespace().map(Into::into).collect()
}

/// Returns a job with every option of the target.
fn full(target: Target) -> JobFile {
    let slurm = target == Target::Slurm;
    JobFile {
        name: Some("mnist-2".to_owned()),
        nodes: 4..=4,
        nproc: Some("8".to_owned()),
        flags: words("--nproc 8 --max-restarts 3"),
        command: words("./train --epochs 4"),
        cpus: Some(64),
        gpus: Some(8),
        time_limit: Some(Duration::from_secs(36 * 3600)),
        shutdown_timeout: Duration::from_secs(120),
        env: vec![
            ("NCCL_DEBUG".to_owned(), "INFO".to_owned()),
            ("NOTE".to_owned(), "it's $HOME".to_owned()),
        ],
        partition: slurm.then(|| "gpu".to_owned()),
        account: slurm.then(|| "lab-7".to_owned()),
        image: Some("registry.example.org/train:1".to_owned()),
        secret: Some(Secret::new("0123456789abcdef").unwrap()),
    }
}

fn small() -> JobFile {
    JobFile {
        nproc: Some("2".to_owned()),
        flags: words("--nproc 2"),
        command: words("python3 scripts/Train_MNIST.py --lr 0.1"),
        ..Default::default()
    }
}

#[test]
fn files() {
    use Target::{JobSet, PyTorchJob, Slurm};
    let elastic = JobFile { nodes: 1..=4, ..small() };
    for (file, target, job) in [
        ("slurm.sh", Slurm, small()),
        ("slurm-full.sh", Slurm, full(Slurm)),
        ("pytorchjob.yaml", PyTorchJob, small()),
        ("pytorchjob-full.yaml", PyTorchJob, full(PyTorchJob)),
        ("pytorchjob-elastic.yaml", PyTorchJob, elastic),
        ("jobset.yaml", JobSet, small()),
        ("jobset-full.yaml", JobSet, full(JobSet)),
    ] {
        let found = job.emit(target).unwrap();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/emit").join(file);
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, &found).unwrap();
        }
        let expected = fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
        assert!(expected == found, "{file} changed; it is now:\n{found}");
    }
    let elastic = JobFile { nodes: 1..=4, ..small() };
    assert!(elastic.emit(Slurm).unwrap().contains("#SBATCH --nodes=1-4\n"));
    // A single launcher needs no authentication.
    for target in [Slurm, PyTorchJob, JobSet] {
        let alone = JobFile { secret: full(target).secret, ..small() };
        assert_eq!(alone.emit(target), small().emit(target));
    }
}

#[test]
fn a_script_starts_the_launchers_of_all_hosts() {
    let job = JobFile {
        nodes: 2..=2,
        flags: words("--nproc 4"),
        command: vec!["./train".into(), "--note".into(), "two words".into()],
        ..Default::default()
    };
    let script = job.emit(Target::Slurm).unwrap();
    assert!(script.contains("#SBATCH --nodes=2\n"), "{script}");
    let launch = "brigade launch --nproc 4 -- ./train --note 'two words'\n";
    assert!(script.contains(launch), "{script}");
}

/// Arguments with special characters of a shell, YAML or Kubernetes.
const HARD: [&str; 20] = [
    "",
    "two words",
    "it's",
    "\"",
    "\\",
    "$HOME",
    "$(HOME)",
    "$$(HOME)",
    "$$",
    "`id`",
    "*",
    "a\nb",
    "\t",
    "é",
    "\u{2028}",
    "\u{85}",
    "no",
    "0x10",
    "# x: y",
    "-",
];

#[test]
fn a_container_of_slurm_has_the_folder_of_the_command() {
    let job = JobFile { image: Some("registry#repo/it's:1".to_owned()), ..small() };
    let script = job.emit(Target::Slurm).unwrap();
    let srun = script.lines().find(|line| line.starts_with("srun ")).unwrap();
    let found = shlex::split(srun).unwrap();
    let expected = [
        "--container-image=registry#repo/it's:1",
        "--container-mounts=$PWD:$PWD",
        "--container-workdir=$PWD",
        "brigade",
        "launch",
    ];
    assert_eq!(found[3..8], expected);
}

#[test]
fn the_shell_reads_what_was_meant() {
    let mut command = vec![OsString::from("./train")];
    command.extend(HARD.map(OsString::from));
    command.push(OsString::from_vec(b"\xff'\xfe".to_vec()));
    let env = vec![("HARD".to_owned(), HARD.concat())];
    let job = JobFile { command: command.clone(), env, ..small() };

    let folder = tempfile::tempdir().unwrap();
    let srun = folder.path().join("srun");
    fs::write(&srun, "#!/bin/bash\nprintf '%s\\0' \"$HARD\" \"$@\"\n").unwrap();
    fs::set_permissions(&srun, fs::Permissions::from_mode(0o755)).unwrap();
    let script = folder.path().join("script");
    fs::write(&script, job.emit(Target::Slurm).unwrap()).unwrap();
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let output = Command::new("bash").arg(&script).env("PATH", path).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let mut found: Vec<OsString> = output
        .stdout
        .strip_suffix(b"\0")
        .unwrap()
        .split(|byte| *byte == 0)
        .map(|word| OsString::from_vec(word.to_vec()))
        .collect();
    assert_eq!(found.remove(0), OsString::from(HARD.concat()));
    let mut expected =
        words("--ntasks-per-node=1 --kill-on-bad-exit=1 brigade launch --nproc 2 --");
    expected.extend(command);
    assert_eq!(found, expected);
}

/// Returns the first container of a manifest, at any depth.
fn container(node: &Value) -> Option<&Value> {
    match node {
        Value::Object(table) => match table.get("containers") {
            Some(containers) => containers.get(0),
            None => table.values().find_map(container),
        },
        Value::Array(items) => items.iter().find_map(container),
        _ => None,
    }
}

/// Kubernetes replaces `$$` by `$`.
fn unescaped(word: &Value) -> String {
    word.as_str().expect("a text").replace("$$", "$")
}

#[test]
fn yaml_reads_what_was_meant() {
    let mut command = vec![OsString::from("./train")];
    command.extend(HARD.map(OsString::from));
    let env = vec![("HARD".to_owned(), HARD.concat())];
    for target in [Target::PyTorchJob, Target::JobSet] {
        let job = JobFile { nodes: 2..=2, command: command.clone(), env: env.clone(), ..small() };
        let manifest = job.emit(target).unwrap();
        let manifest: Value = serde_saphyr::from_str(&manifest).unwrap();
        let container = container(&manifest).unwrap();
        let found: Vec<String> =
            container["command"].as_array().unwrap().iter().map(unescaped).collect();
        let mut expected = vec!["brigade", "launch", "--nproc", "2", "--", "./train"];
        expected.extend(HARD);
        assert_eq!(found, expected);
        assert_eq!(unescaped(&container["env"][0]["value"]), HARD.concat());
    }
}

#[test]
fn names_come_from_the_program() {
    for (command, expected) in [
        ("./train --x", "train"),
        ("bin/Train_2.exe", "train-2"),
        ("python3.11 a/b/eval.py", "eval"),
        ("python", "python"),
        ("7z", "job-7z"),
        ("./.hidden", "hidden"),
        ("./___", "job"),
        ("", "job"),
    ] {
        let script = JobFile { command: words(command), ..small() }.emit(Target::Slurm).unwrap();
        assert!(
            script.contains(&format!("#SBATCH --job-name={expected}\n")),
            "{command}: {script}"
        );
    }
}

#[test]
fn refusals() {
    let refuse = |target, job: JobFile| job.emit(target).expect_err("refused").to_string();
    let set = |value: &str| Some(value.to_owned());
    let table = [
        (
            Target::PyTorchJob,
            JobFile { partition: set("a"), ..small() },
            "--partition does not apply to a PyTorchJob",
        ),
        (
            Target::JobSet,
            JobFile { account: set("a"), ..small() },
            "--account does not apply to a JobSet",
        ),
        (
            Target::JobSet,
            JobFile { nodes: 1..=4, ..small() },
            "--nnodes 1:4: a JobSet has a fixed number of pods; use --nnodes 4, or",
        ),
        (Target::Slurm, JobFile { nodes: 0..=0, ..small() }, "--nnodes 0:0 is not possible"),
        (
            Target::Slurm,
            JobFile { name: set("My Job"), ..small() },
            "--job-name \"My Job\" is not a valid job name",
        ),
        (
            Target::Slurm,
            JobFile { partition: set("a b"), ..small() },
            "partition \"a b\" is not a name that Slurm takes",
        ),
        (
            Target::Slurm,
            JobFile { env: vec![("A-B".to_owned(), String::new())], ..small() },
            "--env \"A-B\" is not a variable's name",
        ),
        (
            Target::PyTorchJob,
            JobFile { command: vec![OsString::from_vec(vec![0xff])], ..small() },
            "the word \"\u{fffd}\" is not Unicode",
        ),
    ];
    for (target, job, expected) in table {
        let found = refuse(target, job);
        assert!(found.starts_with(expected), "gave {found}\nexpected {expected}");
    }
}

/// The default number of ranks is that of `brigade launch`.
#[test]
fn ranks_for_each_gpu_else_one() {
    let said = |nproc: Option<&str>, gpus| {
        let job = JobFile { nproc: nproc.map(str::to_owned), gpus, ..small() };
        let manifest = job.emit(Target::PyTorchJob).unwrap();
        let line = manifest.lines().find_map(|it| it.trim().strip_prefix("nprocPerNode: "));
        line.unwrap().to_owned()
    };
    assert_eq!(said(None, None), "\"1\"");
    assert_eq!(said(None, Some(8)), "\"8\"");
    assert_eq!(said(Some("auto"), Some(8)), "\"auto\"");
}

#[test]
fn time_limits() {
    for (text, expected) in [
        ("30s", Some(30)),
        ("90m", Some(5400)),
        ("2h", Some(7200)),
        ("3d", Some(259_200)),
        ("2:30:00", Some(9000)),
        ("1-12:00:05", Some(129_605)),
        ("90", None),
        ("2:30", None),
        ("0m", None),
        ("2:60:00", None),
        ("1:2:3:4", None),
        ("1-12", None),
        ("h", None),
        ("-1h", None),
        ("99999999999999999999d", None),
        ("999999999999999999d", None),
        ("2 h", None),
        ("é", None),
        ("", None),
    ] {
        let expected = expected.map(Duration::from_secs);
        assert_eq!(time_limit(text).ok(), expected, "{text}");
    }
}
