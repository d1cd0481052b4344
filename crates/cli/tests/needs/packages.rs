//! The packages that `cargo xtask package` builds, installed where nothing else is: `cargo xtask test --slow`.

mod elf;
mod fresh;
mod registry;

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use brigade_test_needs::{arm64_package, needs, packages, static_package};
use tempfile::TempDir;

use elf::Loading;
use fresh::System;
use registry::Registry;

/// The package whose file's name has this beginning and this end.
fn package(start: &str, end: &str) -> PathBuf {
    let folder = packages().unwrap();
    let names = fs::read_dir(&folder).unwrap().map(|it| it.unwrap().file_name());
    let names: Vec<String> = names.map(|it| it.into_string().unwrap()).collect();
    let fits: Vec<&String> =
        names.iter().filter(|it| it.starts_with(start) && it.ends_with(end)).collect();
    let [name] = fits[..] else { panic!("{start}*{end} among {names:?}") };
    folder.join(name)
}

/// The wheel for this processor.
fn wheel() -> PathBuf {
    wheel_for(env::consts::ARCH)
}

fn wheel_for(processor: &str) -> PathBuf {
    package(&format!("brigade-{VERSION}-"), &format!("_{processor}.whl"))
}

/// The text that a command prints; it must succeed.
fn text_of(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let (text, errors) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{command:?}: {status}\n{text}{errors}");
    text.into_owned()
}

fn unpacked(archive: &Path) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    text_of(Command::new("tar").arg("-xzf").arg(archive).arg("-C").arg(folder.path()));
    folder
}

/// A virtual environment in which nothing but pip is installed.
struct Environment {
    folder: TempDir,
}

impl Environment {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        text_of(Command::new("python3").args(["-m", "venv"]).arg(folder.path().join("venv")));
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A program of the environment, which is not active: neither in `PATH` nor in `VIRTUAL_ENV`.
    fn command(&self, program: &str, words: &[&str]) -> Command {
        let mut command = Command::new(self.path("venv/bin").join(program));
        command.args(words).current_dir(self.folder.path());
        command.env("BRIGADE_CONFIG", "/dev/null").env("PIP_DISABLE_PIP_VERSION_CHECK", "1");
        command.env("PIP_NO_INDEX", "1").env("HOME", self.folder.path());
        // rustup's cargo would make folders of its own there.
        let home = PathBuf::from(env::var_os("HOME").unwrap_or_default());
        for (name, folder) in [("CARGO_HOME", ".cargo"), ("RUSTUP_HOME", ".rustup")] {
            command.env(name, env::var_os(name).unwrap_or_else(|| home.join(folder).into()));
        }
        for name in ["BRIGADE_PROGRAM", "PYTHONPATH", "PYTHON_EXEC", "VIRTUAL_ENV"] {
            command.env_remove(name);
        }
        command
    }

    fn run(&self, program: &str, words: &[&str]) -> String {
        text_of(&mut self.command(program, words))
    }

    /// All files, without what Python compiles when it runs.
    fn files(&self) -> BTreeSet<PathBuf> {
        let mut files = BTreeSet::new();
        let mut folders = vec![self.path("venv")];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                match path.symlink_metadata().unwrap().is_dir() {
                    true if path.ends_with("__pycache__") => {}
                    true => folders.push(path),
                    false => drop(files.insert(path)),
                }
            }
        }
        files
    }
}

/// The files of compiled C++ and its licence, as a package for this processor has them in `share/brigade`.
fn compiled() -> [String; 2] {
    let entries = fs::read_dir(packages().unwrap().join("share/objects")).unwrap();
    let mut names: Vec<String> =
        entries.map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    let [license, archive] = &names[..] else { panic!("{names:?}") };
    assert_eq!(license, "LICENSE-libtorch");
    assert!(archive.starts_with("brigade-torch-") && archive.ends_with(".objects"), "{archive}");
    [license.clone(), archive.clone()]
}

#[needs(Packages)]
fn the_compiled_code_names_no_folder_of_the_machine() {
    let folder = packages().unwrap();
    let [_, name] = compiled();
    let archive = fs::read(folder.join("share/objects").join(name)).unwrap();
    assert!(archive.starts_with(b"brigade objects "));
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let home = PathBuf::from(env::var_os("HOME").unwrap());
    for place in [folder.as_path(), &checkout, &home] {
        let text = format!("{}/", place.display());
        let is_named = archive.windows(text.len()).any(|it| it == text.as_bytes());
        assert!(!is_named, "{text}");
    }
}

#[needs(Packages, Python)]
fn the_wheel_has_what_it_should_and_nothing_else() {
    check_contents(&wheel(), &compiled());
}

/// Checks the size, the tags and the contents of a wheel, which has these files in `share/brigade` of an environment.
fn check_contents(wheel: &Path, shared: &[String]) {
    let megabytes = wheel.metadata().unwrap().len() as f64 / 1e6;
    assert!(megabytes <= 12.0, "{megabytes} MB");
    let name = wheel.file_name().unwrap().to_str().unwrap();
    let runs_everywhere = name.contains("-py3-none-") && name.contains("manylinux_2_17_");
    assert!(runs_everywhere, "{name}: for any Python 3, and glibc 2.17");

    let list =
        "import sys, zipfile; print(*sorted(zipfile.ZipFile(sys.argv[1]).namelist()), sep='\\n')";
    let listed = text_of(Command::new("python3").args(["-c", list]).arg(wheel));
    let found: BTreeSet<&str> = listed.lines().filter(|it| !it.ends_with('/')).collect();
    let info = format!("brigade-{VERSION}.dist-info");
    let mut expected: BTreeSet<String> =
        ["METADATA", "RECORD", "WHEEL", "licenses/LICENSE-APACHE", "licenses/LICENSE-MIT"]
            .map(|file| format!("{info}/{file}"))
            .into();
    expected.insert(format!("brigade-{VERSION}.data/scripts/brigade"));
    let shared = shared.iter();
    expected.extend(shared.map(|it| format!("brigade-{VERSION}.data/data/share/brigade/{it}")));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python/brigade");
    for entry in fs::read_dir(source).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name != "__pycache__" {
            expected.insert(format!("brigade/{name}"));
        }
    }
    // maturin adds a list of the crates in the program.
    let is_bill = |it: &&str| it.starts_with(&format!("{info}/sboms/"));
    let found: BTreeSet<&str> = found.into_iter().filter(|it| !is_bill(it)).collect();
    assert_eq!(found, expected.iter().map(String::as_str).collect());

    let read =
        "import sys, zipfile; print(zipfile.ZipFile(sys.argv[1]).read(sys.argv[2]).decode())";
    let member = |name: &str| {
        text_of(Command::new("python3").args(["-c", read]).arg(wheel).arg(format!("{info}/{name}")))
    };
    let metadata = member("METADATA");
    let (version, license) =
        (format!("Version: {VERSION}"), "License-Expression: MIT OR Apache-2.0".to_owned());
    for line in [version, license, "License-File: LICENSE-MIT".to_owned()] {
        assert!(metadata.lines().any(|it| it == line), "{line} is missing:\n{metadata}");
    }
    assert!(!metadata.contains("Requires-Dist: torch"), "{metadata}");
    assert!(member("licenses/LICENSE-MIT").contains("Permission is hereby granted"));
}

#[needs(Packages, Python)]
fn a_wheel_is_installed_launches_and_leaves_nothing_behind() {
    let environment = Environment::new();
    let before = environment.files();
    environment.run("pip", &["install", "--quiet", wheel().to_str().unwrap()]);

    has_compiled_code(&environment.path("venv"));
    let version = environment.run("brigade", &["--version"]);
    assert!(version.starts_with(&format!("brigade {VERSION} (commit ")), "{version}");
    assert_eq!(environment.run("python", &["-m", "brigade", "--version"]), version);

    // Each rank names its Python, which is that of the environment although the environment is not active.
    let script =
        "import os, sys\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.prefix)\n";
    fs::write(environment.path("train.py"), script).unwrap();
    let launch = ["launch", "--nproc", "2", "train.py"];
    let module = [&["-m", "brigade"][..], &launch].concat();
    let prefix = environment.path("venv").canonicalize().unwrap();
    let prefix = prefix.display();
    for (program, words) in [("brigade", &launch[..]), ("python", &module)] {
        let said = environment.run(program, words);
        let lines: BTreeSet<&str> = said.lines().collect();
        let expected = [0, 1].map(|rank| format!("[{rank}] {rank} 2 {prefix}"));
        assert_eq!(lines, expected.iter().map(String::as_str).collect(), "{program}");
    }
    // An environment that is active comes first.
    let other = Environment::new();
    let mut launch = environment.command("brigade", &launch);
    let said = text_of(launch.env("VIRTUAL_ENV", other.path("venv")));
    let prefix = other.path("venv").canonicalize().unwrap();
    assert!(said.contains(&format!("[1] 1 2 {}\n", prefix.display())), "{said}");

    let call = "import brigade; print(brigade.launch('true', nproc=2).code)";
    assert_eq!(environment.run("python", &["-c", call]), "0\n");
    // Its exit code tells of this machine.
    let doctor = environment.command("brigade", &["doctor"]).output().unwrap();
    assert!(matches!(doctor.status.code(), Some(0 | 1)), "{doctor:?}");

    environment.run("pip", &["uninstall", "--quiet", "--yes", "brigade"]);
    let left: Vec<_> = environment.files().difference(&before).cloned().collect();
    assert!(left.is_empty(), "{left:?}");
    let empty: Vec<_> = fs::read_dir(environment.folder.path()).unwrap().flatten().collect();
    let names: BTreeSet<_> = empty.iter().map(fs::DirEntry::file_name).collect();
    assert_eq!(names, ["train.py", "venv"].map(Into::into).into());
}

/// As PyTorch's wheel has it, as far as `brigade setup` looks.
#[needs(Packages, Python)]
fn the_pytorch_of_an_environment_is_set_up_for_a_rust_project() {
    let environment = Environment::new();
    environment.run("pip", &["install", "--quiet", wheel().to_str().unwrap()]);
    let ask = "import sysconfig; print(sysconfig.get_path('purelib'))";
    let library = environment.run("python", &["-c", ask]);
    let torch = Path::new(library.trim()).join("torch");
    for (name, text) in [
        ("__init__.py", ""),
        ("version.py", "__version__ = '2.13.0+cpu'\n"),
        ("lib/libtorch_cpu.so", ""),
        ("lib/libtorch.so", ""),
        ("lib/libc10.so", ""),
        (
            "include/torch/csrc/api/include/torch/version.h",
            "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 13\n#define TORCH_VERSION_PATCH 0\n#define TORCH_VERSION \"2.13.0\"\n",
        ),
        ("include/torch/torch.h", ""),
    ] {
        let file = torch.join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }
    let project = environment.path("project");
    fs::create_dir(&project).unwrap();
    let manifest = "[package]\nname = \"demo\"\nversion = \"0.1.0\"\nedition = \"2024\"\n[lib]\npath = \"lib.rs\"\n";
    fs::write(project.join("Cargo.toml"), manifest).unwrap();
    fs::write(project.join("lib.rs"), "").unwrap();
    let mut setup = environment.command("brigade", &["setup", "--pytorch"]);
    let said = text_of(setup.current_dir(&project));
    let written = fs::read_to_string(project.join(".cargo/libtorch.toml")).unwrap();
    assert!(written.contains(torch.to_str().unwrap()), "{said}{written}");
}

/// Starts a program of this processor.
fn native(program: &Path) -> Command {
    Command::new(program)
}

/// Unpacks an archive for a target, checks its contents, and returns the program. `start` returns the command that starts
/// a program of the target.
fn program_of(
    archive: &Path,
    target: &str,
    start: impl Fn(&Path) -> Command,
) -> (TempDir, PathBuf) {
    let folder = unpacked(archive);
    let root = folder.path().join(format!("brigade-{VERSION}-{target}"));
    for name in [
        "LICENSE-APACHE",
        "LICENSE-MIT",
        "README.md",
        "completions/_brigade",
        "completions/brigade.bash",
        "completions/brigade.fish",
        "man/brigade.1",
        "man/brigade-launch.1",
    ] {
        assert!(root.join(name).metadata().unwrap().len() > 200, "{name}");
    }
    let program = root.join("brigade");
    let version = text_of(start(&program).arg("--version"));
    assert!(version.ends_with(&format!(", {target})\n")), "{version}");
    // Where cargo-binstall looks.
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    let manifest: toml_edit::DocumentMut = fs::read_to_string(manifest).unwrap().parse().unwrap();
    let filled = |key: &str| {
        let text = manifest["package"]["metadata"]["binstall"][key].as_str().unwrap().to_owned();
        [("version", VERSION), ("target", target), ("bin", "brigade"), ("binary-ext", "")]
            .into_iter()
            .fold(text, |text, (name, value)| text.replace(&format!("{{ {name} }}"), value))
    };
    let file = archive.file_name().unwrap().to_str().unwrap();
    let url = filled("pkg-url");
    assert!(url.ends_with(&format!("/v{VERSION}/{file}")), "{url}");
    assert_eq!(folder.path().join(filled("bin-dir")), program);
    (folder, program)
}

#[needs(Packages)]
fn the_archive_has_program_licences_completions_and_manual() {
    let target = format!("{}-unknown-linux-gnu", env::consts::ARCH);
    let archive = package(&format!("brigade-{VERSION}-{target}"), ".tar.gz");
    let (_folder, program) = program_of(&archive, &target, native);
    has_compiled_code(program.parent().unwrap());
    let loading = Loading::of(&program);
    assert!(loading.has_interpreter && loading.libraries > 0, "{loading:?}");
}

/// Checks that a folder has the compiled C++ where `brigade setup` looks for it.
#[track_caller]
fn has_compiled_code(root: &Path) {
    for name in compiled() {
        let carried = fs::read(root.join("share/brigade").join(&name)).unwrap();
        let original = fs::read(packages().unwrap().join("share/objects").join(&name)).unwrap();
        assert!(carried == original, "{name}");
    }
}

#[needs(StaticPackage)]
fn the_static_program_needs_no_library_and_launches() {
    let target = format!("{}-unknown-linux-musl", env::consts::ARCH);
    let (folder, program) = program_of(&static_package().unwrap(), &target, native);
    has_compiled_code(program.parent().unwrap());
    let loading = Loading::of(&program);
    assert_eq!(loading, Loading { has_interpreter: false, libraries: 0 });
    let run = |words: &[&str]| {
        let mut command = Command::new(&program);
        command.args(words).current_dir(folder.path()).env_clear().env("PATH", "/usr/bin:/bin");
        text_of(command.env("HOME", folder.path()).env("BRIGADE_CONFIG", "/dev/null"))
    };
    assert!(run(&["doctor", "--help"]).contains("Usage: brigade doctor"));
    assert_eq!(run(&["launch", "--nproc", "2", "true"]), "");
    let said = run(&["launch", "--nproc", "2", "sh", "-c", "echo $RANK of $WORLD_SIZE"]);
    let lines: BTreeSet<&str> = said.lines().collect();
    assert_eq!(lines, BTreeSet::from(["[0] 0 of 2", "[1] 1 of 2"]));
}

/// What a user does first, with the program that `PATH` has. Fails if the system has a compiler or an interpreter of
/// Python, which would hide that the program needs one.
const FIRST_STEPS: &str = "\
for other in cc gcc python3; do
    if command -v $other; then echo \"$other is here\"; exit 1; fi
done
export BRIGADE_CONFIG=/dev/null
brigade --version
brigade launch --nproc 2 -- sh -c 'echo $RANK of $WORLD_SIZE' | sort
brigade doctor >report || [ $? = 1 ]
tail -n 1 report
rm report";

/// Checks the output of [`FIRST_STEPS`].
#[track_caller]
fn first_steps_were_taken(said: &str) {
    let lines: Vec<&str> = said.lines().collect();
    let [version, first, second, report] = lines[..] else { panic!("{said}") };
    assert!(version.starts_with(&format!("brigade {VERSION} (commit ")), "{said}");
    assert_eq!([first, second], ["[0] 0 of 2", "[1] 1 of 2"], "{said}");
    assert!(report.contains("this host"), "{said}");
}

#[track_caller]
fn nothing_is_left(before: &BTreeSet<PathBuf>, system: &System) {
    let after = system.files();
    let left: Vec<_> = after.symmetric_difference(before).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[needs(Packages, FreshSystem, limit = DOWNLOADS)]
fn a_fresh_debian_installs_launches_and_purges_the_package() {
    let system = System::new(&[]);
    let before = system.files();
    let package = system.take(&package(&format!("brigade_{VERSION}"), ".deb"));
    system.run_as_root(&format!("dpkg --install {package}"));
    first_steps_were_taken(&system.run(FIRST_STEPS));
    let listed = system.run("ls /usr/share/brigade");
    assert_eq!(listed.lines().collect::<Vec<_>>(), compiled());
    let copyright = system.run("cat /usr/share/doc/brigade/copyright");
    assert!(copyright.contains("Permission is hereby granted"), "{copyright}");
    system.run_as_root("dpkg --purge brigade");
    nothing_is_left(&before, &system);
}

#[needs(StaticPackage, FreshSystem, limit = DOWNLOADS)]
fn a_fresh_debian_runs_the_static_program() {
    let target = format!("{}-unknown-linux-musl", env::consts::ARCH);
    let (_folder, program) = program_of(&static_package().unwrap(), &target, native);
    let system = System::new(&[]);
    let before = system.files();
    let program = system.take(&program);
    system.run_as_root(&format!("cp {program} /usr/local/bin/brigade"));
    first_steps_were_taken(&system.run(FIRST_STEPS));
    system.run_as_root("rm /usr/local/bin/brigade");
    nothing_is_left(&before, &system);
}

#[needs(Packages, FreshSystem, limit = DOWNLOADS)]
fn a_fresh_debian_with_python_installs_launches_and_uninstalls_the_wheel() {
    let system = System::new(&["python3-venv"]);
    let before = system.files();
    let wheel = system.take(&wheel());
    let said = system.run(&format!(
        "python3 -m venv venv; . venv/bin/activate; pip install --quiet --no-index {wheel}
         export BRIGADE_CONFIG=/dev/null; brigade --version; python -m brigade --version
         echo 'import os; print(os.environ[\"RANK\"], os.environ[\"WORLD_SIZE\"])' >train.py
         brigade launch --nproc 2 train.py | sort
         brigade doctor >report || [ $? = 1 ]; tail -n 1 report
         pip uninstall --quiet --yes brigade; find venv -iname '*brigade*'"
    ));
    let lines: Vec<&str> = said.lines().collect();
    let [version, again, first, second, report] = lines[..] else { panic!("{said}") };
    assert!(version.starts_with(&format!("brigade {VERSION} (commit ")), "{said}");
    assert_eq!([again, first, second], [version, "[0] 0 2", "[1] 1 2"], "{said}");
    assert!(report.contains("this host"), "{said}");
    system.run("rm -r venv train.py report");
    nothing_is_left(&before, &system);
}

/// Wheel and archive have the same program, which an emulator runs with Debian's libraries for aarch64.
#[needs(Arm64Package, Python)]
fn the_packages_for_aarch64_have_a_program_that_an_emulator_runs() {
    let emulated = |program: &Path| {
        let mut command = Command::new("qemu-aarch64-static");
        command.args(["-L", "/usr/aarch64-linux-gnu"]).arg(program);
        command
    };
    let target = "aarch64-unknown-linux-gnu";
    let (_folder, program) = program_of(&arm64_package().unwrap(), target, emulated);
    assert_eq!(elf::machine(&program), elf::AARCH64);

    let wheel = wheel_for("aarch64");
    check_contents(&wheel, &[]);
    let folder = tempfile::tempdir().unwrap();
    let name = format!("brigade-{VERSION}.data/scripts/brigade");
    let extract = "import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extract(*sys.argv[2:])";
    let mut python = Command::new("python3");
    text_of(python.args(["-c", extract]).arg(&wheel).arg(&name).arg(folder.path()));
    let of_wheel = folder.path().join(name);
    assert!(fs::read(&of_wheel).unwrap() == fs::read(&program).unwrap(), "two programs");
    let words = ["estimate", "7B", "--nproc", "8"];
    let said = text_of(emulated(&program).args(words).env("BRIGADE_CONFIG", "/dev/null"));
    assert!(said.contains("\n8 ranks "), "{said}");
}

#[needs(Packages)]
fn lists_of_components_have_versions_licences_and_checksums() {
    for (name, kind, own, foreign) in
        [("brigade-cli", "application", "clap", "tch"), ("brigade", "library", "tch", "ratatui")]
    {
        let file = packages().unwrap().join(format!("{name}-{VERSION}.cdx.json"));
        let bill: serde_json::Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
        assert_eq!(bill["bomFormat"], "CycloneDX");
        let root = &bill["metadata"]["component"];
        assert_eq!((&root["type"], &root["version"]), (&kind.into(), &VERSION.into()), "{root}");
        assert_eq!(root["purl"], format!("pkg:cargo/{name}@{VERSION}"));
        let components = bill["components"].as_array().unwrap();
        let named = |name: &str| components.iter().find(|it| it["name"] == name);
        assert!(named(foreign).is_none(), "{name} does not need {foreign}");
        let found = named(own).unwrap();
        assert_eq!(found["hashes"][0]["content"].as_str().unwrap().len(), 64, "{found}");
        for component in components {
            let has_licence = component["licenses"][0]["expression"].is_string();
            assert!(has_licence && component["version"].is_string(), "{component}");
        }
    }
}

/// The crates come from a folder that stands for crates.io. cargo compiles Brigade and libtorch's bindings anew, and takes
/// Brigade's C++ from the package.
#[needs(Packages, limit = COMPILES)]
fn a_new_project_trains_with_the_packages_alone() {
    let target = format!("{}-unknown-linux-gnu", env::consts::ARCH);
    let archive = package(&format!("brigade-{VERSION}-{target}"), ".tar.gz");
    let (_program_folder, program) = program_of(&archive, &target, native);
    let registry = Registry::new(&packages().unwrap().join("crates"));
    let folder = tempfile::tempdir().unwrap();
    let run = |place: &str, words: &[&str]| {
        let mut command = Command::new(&program);
        command.args(words).current_dir(folder.path().join(place));
        command.env("CARGO_HOME", registry.cargo_home()).env("CARGO_PROFILE_DEV_DEBUG", "0");
        command.env("BRIGADE_CONFIG", "/dev/null").env("CARGO_INCREMENTAL", "0");
        command.env("BRIGADE_OBJECT_CACHE", folder.path().join("objects"));
        for name in ["CARGO_TARGET_DIR", "CXXFLAGS", "LIBTORCH", "RUSTFLAGS", "RUSTDOCFLAGS"] {
            command.env_remove(name);
        }
        text_of(&mut command)
    };
    // The one that the checkout is set up with; else `brigade new` finds or fetches one.
    let libtorch = env::var("LIBTORCH").ok();
    let named = libtorch.iter().flat_map(|it| ["--libtorch", it.as_str()]);
    let words: Vec<&str> = ["new", "digits"].into_iter().chain(named).collect();
    let said = run(".", &words);
    assert!(said.contains("\ndepends on Brigade ") && said.contains(" from crates.io "), "{said}");

    let source = folder.path().join("digits/src/main.rs");
    let text = fs::read_to_string(&source).unwrap();
    let short = text.replacen("train(&accelerator, 10)", "train(&accelerator, 1)", 1);
    assert_ne!(short, text);
    fs::write(&source, short).unwrap();
    let said = run("digits", &["launch", "--nproc", "2"]);
    let line = said.lines().find_map(|it| it.strip_prefix("[0] epoch 1/1, accuracy = "));
    let percent: f64 =
        line.unwrap_or_else(|| panic!("{said}")).trim_end_matches(" %").parse().unwrap();
    // Ten classes.
    assert!(percent > 50.0, "{percent} %");
    assert!(folder.path().join("digits/model.safetensors").is_file());

    // A build that compiles adds what it has compiled.
    let objects = fs::read_dir(folder.path().join("objects")).unwrap();
    let objects: Vec<_> = objects.map(|it| it.unwrap().file_name()).collect();
    let is_fetched = libtorch.is_none_or(|it| it.contains("/brigade/libtorch/"));
    assert!(!is_fetched || objects == [compiled()[1].as_str()], "{objects:?}");

    let lock = fs::read_to_string(folder.path().join("digits/Cargo.lock")).unwrap();
    let entry = lock.split("[[package]]").find(|it| it.contains("name = \"brigade\"\n")).unwrap();
    let is_published = entry.contains(&format!("version = \"{VERSION}\"\nsource = \"registry+"));
    assert!(is_published && entry.contains("\nchecksum = "), "{entry}");
}

/// What pip compiles it from; a build of it takes minutes, and is what `cargo xtask package` does in the checkout.
#[needs(Packages)]
fn the_source_distribution_is_a_whole_workspace() {
    let folder = unpacked(&package(&format!("brigade-{VERSION}"), &format!("{VERSION}.tar.gz")));
    let root = folder.path().join(format!("brigade-{VERSION}"));
    for name in [
        "LICENSE-APACHE",
        "LICENSE-MIT",
        "PKG-INFO",
        "pyproject.toml",
        "python/brigade/__main__.py",
        "python/brigade/py.typed",
    ] {
        assert!(root.join(name).is_file(), "{name}");
    }
    let mut metadata = Command::new("cargo");
    // Not --locked: without the other members of the workspace the list of versions becomes shorter.
    metadata.args(["metadata", "--offline", "--format-version", "1"]);
    let said = text_of(metadata.current_dir(&root));
    assert!(said.contains("\"name\":\"brigade-cli\""), "{said}");
    assert!(!said.contains("\"name\":\"brigade-torch\""), "the launcher needs no libtorch");
}

#[needs(Packages)]
fn every_package_has_a_checksum() {
    let folder = packages().unwrap();
    let mut check = Command::new("sha256sum");
    let said = text_of(check.args(["--check", "SHA256SUMS"]).current_dir(&folder));
    let entries = fs::read_dir(&folder).unwrap().map(|it| it.unwrap().path());
    let others = entries.filter(|it| it.is_file() && !it.ends_with("SHA256SUMS")).count();
    assert_eq!(said.lines().filter(|it| it.ends_with(": OK")).count(), others, "{said}");
}

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Seconds in which a fresh system is downloaded and unpacked, also on a slow network.
const DOWNLOADS: u64 = 1200;

/// Seconds in which a first build ends, also on a machine that is busy.
const COMPILES: u64 = 3600;
