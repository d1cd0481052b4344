//! Tests of `brigade setup` and `brigade new`, with a simulated libtorch. The package `templates` compiles and tests
//! the content of new projects; that they build and train is measured by `cargo xtask bench newcomer`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use tempfile::TempDir;

/// Folder with a libtorch of that version in it.
struct Fixture(TempDir);

impl Fixture {
    fn new(version: &str) -> Self {
        let fixture = Self(TempDir::new().unwrap());
        let libtorch = fixture.libtorch();
        for folder in ["lib", "include"] {
            fs::create_dir_all(libtorch.join(folder)).unwrap();
        }
        fs::write(libtorch.join("lib/libtorch_cpu.so"), "").unwrap();
        fs::write(libtorch.join("build-version"), version).unwrap();
        fixture
    }

    fn folder(&self) -> &Path {
        self.0.path()
    }

    fn libtorch(&self) -> PathBuf {
        self.folder().join("libtorch")
    }

    fn brigade(&self, folder: &str, arguments: &[&str]) -> Output {
        self.start(Path::new(env!("CARGO_BIN_EXE_brigade")), folder, arguments)
    }

    fn start(&self, program: &Path, folder: &str, arguments: &[&str]) -> Output {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(self.folder().join(folder));
        self.environment(&mut command);
        command.output().unwrap()
    }

    fn environment(&self, command: &mut Command) {
        command.env("XDG_CACHE_HOME", self.folder().join("cache"));
        for name in [
            "BRIGADE_OBJECT_CACHE",
            "CARGO_ENCODED_RUSTFLAGS",
            "LIBTORCH",
            "LIBTORCH_USE_PYTORCH",
            "RUSTFLAGS",
        ] {
            command.env_remove(name);
        }
    }

    fn succeeds(&self, folder: &str, arguments: &[&str]) -> String {
        let output = self.brigade(folder, arguments);
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        text
    }

    /// Returns the exit code, and the only line of output.
    fn fails(&self, folder: &str, arguments: &[&str]) -> (i32, String) {
        let output = self.brigade(folder, arguments);
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        (output.status.code().unwrap(), text.trim().to_owned())
    }
}

/// Returns cargo's metadata of a project's manifest.
fn metadata(project: &Path) -> serde_json::Value {
    let mut cargo = Command::new("cargo");
    cargo.args(["metadata", "--no-deps", "--format-version", "1", "--offline"]);
    let output = cargo.current_dir(project).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_new_project_is_a_package_that_knows_its_libtorch() {
    let fixture = Fixture::new("2.13.0");
    for template in ["loop", "complete", "single", "vision", "text"] {
        let libtorch = fixture.libtorch();
        let name = format!("my-{template}");
        let arguments = ["new", &name, "--template", template, "--libtorch"];
        let said = fixture.succeeds(".", &[&arguments[..], &[libtorch.to_str().unwrap()]].concat());
        assert!(said.contains(&format!("made {name}: ")), "{said}");
        let run = match template {
            "vision" | "text" => "\n  cargo run --release\n",
            _ => "\n  cargo run\n",
        };
        assert!(said.contains("nothing is fetched") && said.contains(run), "{said}");
        let project = fixture.folder().join(&name);
        let config = fs::read_to_string(project.join(".cargo/libtorch.toml")).unwrap();
        assert!(config.contains(&format!("LIBTORCH = \"{}\"", libtorch.display())), "{config}");
        let metadata = metadata(&project);
        let dependencies = metadata["packages"][0]["dependencies"].as_array().unwrap();
        let brigade = dependencies.iter().find(|it| it["name"] == "brigade").unwrap();
        // This checkout's: where the program was built.
        assert!(brigade["path"].as_str().unwrap().ends_with("crates/brigade"), "{brigade}");
        let manifest = fs::read_to_string(project.join("Cargo.toml")).unwrap();
        for profile in ["dev", "release"] {
            let table = format!("[profile.{profile}.package.torch-sys]");
            assert!(manifest.contains(&table), "{manifest}");
        }
        assert_eq!(
            metadata["packages"][0]["features"],
            serde_json::json!({ "cuda": ["brigade/cuda"] }),
            "{manifest}"
        );
        assert!(manifest.contains("\n# `cargo run --features cuda` for GPUs"), "{manifest}");
        let readme = fs::read_to_string(project.join("README.md")).unwrap();
        assert!(readme.starts_with(&format!("# {name}\n")), "{readme}");
        let ignored = fs::read_to_string(project.join(".gitignore")).unwrap();
        assert!(
            ignored.contains("/target") && ignored.contains("/.cargo/libtorch.toml"),
            "{ignored}"
        );
    }
}

/// The checkout in which the program was built exists on this machine, which must not matter.
#[test]
fn an_installed_program_depends_on_its_release_unless_it_was_installed_from_a_checkout() {
    let fixture = Fixture::new("2.13.0");
    let bin = fixture.folder().join("root/bin");
    fs::create_dir_all(&bin).unwrap();
    fs::copy(env!("CARGO_BIN_EXE_brigade"), bin.join("brigade")).unwrap();
    let new = |name: &str, arguments: &[&str]| {
        let arguments = [&["new", name, "--no-setup"][..], arguments].concat();
        let output = fixture.start(&bin.join("brigade"), ".", &arguments);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let said = String::from_utf8(output.stdout).unwrap();
        let line = said.lines().nth(1).unwrap().to_owned();
        let metadata = metadata(&fixture.folder().join(name));
        let dependencies = metadata["packages"][0]["dependencies"].as_array().unwrap().iter();
        let of_brigade =
            dependencies.filter(|it| it["name"].as_str().unwrap().starts_with("brigade"));
        (line, of_brigade.cloned().collect::<Vec<_>>())
    };
    let (minor, _) = env!("CARGO_PKG_VERSION").rsplit_once('.').unwrap();
    for template in ["loop", "vision"] {
        let (line, dependencies) = new(&format!("my-{template}"), &["--template", template]);
        assert!(line.starts_with(&format!("depends on Brigade {minor} from crates.io ")), "{line}");
        for dependency in dependencies {
            assert_eq!(dependency["req"], format!("^{minor}"), "{dependency}");
            assert!(dependency["path"].is_null(), "{dependency}");
        }
    }
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let depends = |found: &(String, Vec<serde_json::Value>)| {
        let line = format!("depends on Brigade in {}, ", checkout.display());
        assert!(found.0.starts_with(&line), "{}", found.0);
        let path = found.1[0]["path"].as_str().unwrap();
        assert_eq!(Path::new(path), checkout.join("crates/brigade"));
    };
    depends(&new("named", &["--brigade", checkout.to_str().unwrap()]));
    // As `cargo install --path` notes it.
    let package = checkout.join("crates/cli");
    let list = format!(
        "[v1]\n\"brigade-cli {} (path+file://{})\" = [\"brigade\"]\n",
        env!("CARGO_PKG_VERSION"),
        package.display()
    );
    fs::write(fixture.folder().join("root/.crates.toml"), list).unwrap();
    depends(&new("listed", &[]));
}

#[test]
fn a_project_in_a_folder_that_is_there() {
    let fixture = Fixture::new("2.13.0");
    let folder = |name: &str| {
        let folder = fixture.folder().join(name);
        fs::create_dir(&folder).unwrap();
        folder
    };
    let digits = folder("digits");
    fs::write(digits.join("README.md"), "mine\n").unwrap();
    fs::write(digits.join(".gitignore"), "/data\n").unwrap();
    let (code, said) = fixture.fails(".", &["new", "digits", "--no-setup"]);
    assert_eq!(code, 2);
    assert_eq!(said, "brigade: digits exists: run `brigade init digits` to create a project in it");
    let said = fixture.succeeds("digits", &["init", "--no-setup"]);
    assert!(said.contains("kept the existing README.md\n"), "{said}");
    assert!(said.contains("\nNext:\n  cargo run\n"), "{said}");
    assert!(said.contains("\nsrc/main.rs is the program"), "{said}");
    assert_eq!(fs::read_to_string(digits.join("README.md")).unwrap(), "mine\n");
    let ignored = fs::read_to_string(digits.join(".gitignore")).unwrap();
    assert!(ignored.starts_with("/data\n") && ignored.contains("/target"), "{ignored}");
    assert_eq!(metadata(&digits)["packages"][0]["name"], "digits");
    for words in [["init", "."], ["new", "."]] {
        let (code, said) = fixture.fails("digits", &words);
        assert_eq!(code, 2);
        assert!(
            said.contains("has a Cargo.toml, and nothing was written; run `brigade setup`"),
            "{said}"
        );
    }

    folder("empty");
    let said = fixture.succeeds("empty", &["new", ".", "--no-setup"]);
    assert!(said.starts_with("made .: the training loop"), "{said}");
    let odd = folder("2 digits");
    let (_, said) = fixture.fails("2 digits", &["init", "--no-setup"]);
    assert!(said.ends_with("give the package another name with --name"), "{said}");
    fixture.succeeds("2 digits", &["init", "--no-setup", "--name", "two-digits"]);
    assert_eq!(metadata(&odd)["packages"][0]["name"], "two-digits");
    let (code, said) = fixture.fails(".", &["init", "none"]);
    assert_eq!(code, 2);
    assert_eq!(said, "brigade: there is no folder none: run `brigade new none` to create it");
}

/// Cargo would create a package of these sources, without the program of the template.
#[test]
fn a_folder_with_rust_sources_is_left_alone() {
    let fixture = Fixture::new("2.13.0");
    let digits = fixture.folder().join("digits");
    fs::create_dir_all(digits.join("src")).unwrap();
    let named = ["init", "--no-setup", "--name", "other"];
    let unnamed = ["init", "--no-setup"];
    for (file, words) in [
        ("main.rs", &unnamed[..]),
        ("lib.rs", &unnamed),
        ("digits.rs", &unnamed),
        ("src/digits.rs", &unnamed),
        ("src/lib.rs", &unnamed),
        ("other.rs", &named),
        ("src/other.rs", &named),
    ] {
        fs::write(digits.join(file), "fn main() {}\n").unwrap();
        let (code, said) = fixture.fails("digits", words);
        assert_eq!(code, 2, "{said}");
        let expected =
            format!("brigade: . has a {file}, and nothing was written; move it away first");
        assert_eq!(said, expected);
        assert!(!digits.join("Cargo.toml").exists() && !digits.join("README.md").exists());
        fs::remove_file(digits.join(file)).unwrap();
    }
    // A source of another name is not a problem.
    fs::write(digits.join("digits.rs"), "").unwrap();
    fixture.succeeds("digits", &named);
    assert_eq!(metadata(&digits)["packages"][0]["targets"][0]["name"], "other");
}

#[test]
fn files_of_the_users_are_kept() {
    let fixture = Fixture::new("2.13.0");
    // Cargo adds lines of its own, each on a line, only if it creates a repository.
    fs::create_dir(fixture.folder().join(".cargo")).unwrap();
    fs::write(fixture.folder().join(".cargo/config.toml"), "[cargo-new]\nvcs = \"none\"\n")
        .unwrap();
    let digits = fixture.folder().join("digits");
    fs::create_dir(&digits).unwrap();
    fs::write(digits.join("digits.ipynb"), "mine\n").unwrap();
    fs::write(digits.join(".gitignore"), "/data").unwrap();
    let said = fixture.succeeds("digits", &["init", "--no-setup", "--template", "notebook"]);
    assert!(said.contains("kept the existing digits.ipynb\n"), "{said}");
    assert_eq!(fs::read_to_string(digits.join("digits.ipynb")).unwrap(), "mine\n");
    assert!(digits.join("README.md").is_file());
    let ignored = fs::read_to_string(digits.join(".gitignore")).unwrap();
    assert_eq!(ignored, "/data\n/jupyter\n.ipynb_checkpoints\n");
}

/// The notebook has the same dependencies as the package, and the program's function in a cell.
#[test]
fn a_new_notebook_has_the_programs_function() {
    let fixture = Fixture::new("2.13.0");
    let said = fixture.succeeds(".", &["new", "digits", "--template", "notebook", "--no-setup"]);
    assert!(said.contains("  brigade kernel install --prefix jupyter\n"), "{said}");
    let project = fixture.folder().join("digits");
    let notebook = fs::read(project.join("digits.ipynb")).unwrap();
    let notebook: serde_json::Value = serde_json::from_slice(&notebook).unwrap();
    assert_eq!(notebook["metadata"]["kernelspec"]["name"], "brigade");
    assert_eq!(notebook["metadata"]["language_info"]["file_extension"], ".rs");
    let cells = notebook["cells"].as_array().unwrap();
    let code = cells.iter().filter(|it| it["cell_type"] == "code");
    let code: Vec<&str> = code.map(|it| it["source"].as_str().unwrap()).collect();
    let manifest = fs::read_to_string(project.join("Cargo.toml")).unwrap();
    let dependency = manifest.lines().find(|it| it.starts_with("brigade = ")).unwrap();
    assert!(code[0].ends_with(&format!("\n:dep {dependency}")), "{}", code[0]);
    let program = fs::read_to_string(project.join("src/main.rs")).unwrap();
    let function = code.iter().find(|it| it.contains("fn train(")).unwrap();
    assert!(function.ends_with("    Ok(losses)\n}") && program.contains(function), "{function}");
    let readme = fs::read_to_string(project.join("README.md")).unwrap();
    assert!(readme.contains("jupyter/bin/jupyter notebook digits.ipynb\n"), "{readme}");
}

/// Cargo would warn about a member's profiles in each build.
#[test]
fn a_project_in_a_workspace_leaves_profiles_to_it() {
    let fixture = Fixture::new("2.13.0");
    fs::write(fixture.folder().join("Cargo.toml"), "[workspace]\nresolver = \"3\"\n").unwrap();
    fixture.succeeds(".", &["new", "member", "--no-setup"]);
    let manifest = fs::read_to_string(fixture.folder().join("member/Cargo.toml")).unwrap();
    assert!(manifest.contains("brigade") && !manifest.contains("[profile"), "{manifest}");
}

#[test]
fn a_name_that_is_taken_or_not_allowed_is_refused() {
    let fixture = Fixture::new("2.13.0");
    fs::create_dir(fixture.folder().join("there")).unwrap();
    fs::write(fixture.folder().join("there/Cargo.toml"), "").unwrap();
    let (code, line) = fixture.fails(".", &["new", "there", "--no-setup"]);
    assert_eq!(code, 2, "{line}");
    assert!(line.contains("already exists"), "{line}");
    let (code, line) = fixture.fails(".", &["new", "7 of 9", "--no-setup"]);
    assert_eq!(code, 2, "{line}");
    assert!(line.contains("invalid character"), "{line}");
    let (code, line) = fixture.fails(".", &["new", "x", "--no-setup", "--brigade", "there"]);
    assert_eq!((code, line.ends_with("not a checkout of Brigade")), (2, true), "{line}");
    assert!(!fixture.folder().join("x").exists());
}

#[test]
fn a_project_without_a_libtorch_is_made_and_says_what_is_left_to_do() {
    let fixture = Fixture::new("2.9.1");
    let libtorch = fixture.libtorch();
    let arguments = ["new", "early", "--libtorch", libtorch.to_str().unwrap()];
    let (code, line) = fixture.fails(".", &arguments);
    assert_eq!(code, 1);
    assert!(line.contains("run `brigade setup` in early: --libtorch "), "{line}");
    assert!(line.contains("is libtorch 2.9.1"), "{line}");
    assert!(fixture.folder().join("early/src/main.rs").is_file());
}

#[test]
fn setup_says_what_it_does_and_undoes_it() {
    let fixture = Fixture::new("2.13.0");
    fixture.succeeds(".", &["new", "mine", "--no-setup"]);
    let libtorch = fixture.libtorch();
    // From a folder inside of the project; relative paths are relative to the user's folder.
    let said = fixture.succeeds("mine/src", &["setup", "--libtorch", "../../libtorch"]);
    let lines: Vec<&str> = said.lines().collect();
    let first = format!("--libtorch ../../libtorch: libtorch 2.13.0 in {}", libtorch.display());
    assert!(
        lines[0].starts_with("--libtorch ../../libtorch: libtorch 2.13.0 in"),
        "{first} {said}"
    );
    assert!(lines.contains(&"wrote .cargo/libtorch.toml"), "{said}");
    assert!(lines.last().unwrap().starts_with("ready: "), "{said}");
    let removed = fixture.succeeds("mine", &["setup", "--remove"]);
    assert!(removed.contains("removed .cargo/libtorch.toml"), "{removed}");
    let again = fixture.succeeds("mine", &["setup", "--remove"]);
    assert!(again.ends_with("is not set up: nothing to remove\n"), "{again}");
}

#[test]
fn setup_outside_of_a_project_and_wrong_flags() {
    let fixture = Fixture::new("2.13.0");
    let (code, line) = fixture.fails(".", &["setup"]);
    assert_eq!(code, 1);
    assert!(line.contains("cargo finds no project in"), "{line}");
    let (code, line) = fixture.fails(".", &["setup", "--cuda", "--pytorch"]);
    assert_eq!(code, 2);
    assert!(line.contains("cannot be used with"), "{line}");
    let (code, line) = fixture.fails(".", &["setup", "--tpu=gpu"]);
    assert_eq!(code, 2);
    assert!(line.contains("expected tpu or cpu"), "{line}");
    let (code, line) = fixture.fails(".", &["setup", "--tpu", "--remove"]);
    assert_eq!(code, 2);
    assert!(line.contains("cannot be used with"), "{line}");
}

#[test]
fn torch_tpu_is_not_fetched_for_a_libtorch_that_it_does_not_know() {
    // Brigade supports it, and TorchTPU begins with the release.
    let fixture = Fixture::new("2.13.0a0");
    fixture.succeeds(".", &["new", "mine", "--no-setup"]);
    let libtorch = fixture.libtorch();
    let (code, line) =
        fixture.fails("mine", &["setup", "--tpu=cpu", "--libtorch", libtorch.to_str().unwrap()]);
    assert_eq!(code, 1);
    assert!(line.contains("is not made for libtorch 2.13.0a0, but for 2.11.0"), "{line}");
    assert!(!fixture.folder().join("cache").exists());
}

/// Program in a folder, with the compiled C++ of a package in `share/brigade` of another.
struct Package {
    fixture: Fixture,
    program: PathBuf,
    archive: PathBuf,
}

impl Package {
    fn new(program: &str, share: &str) -> Self {
        let fixture = Fixture::new("2.13.0");
        fixture.succeeds(".", &["new", "mine", "--no-setup"]);
        let program = fixture.folder().join(program);
        let share = fixture.folder().join(share);
        for folder in [program.parent().unwrap(), &share] {
            fs::create_dir_all(folder).unwrap();
        }
        fs::copy(env!("CARGO_BIN_EXE_brigade"), &program).unwrap();
        let archive = share.join(ARCHIVE);
        fs::write(&archive, "objects of the border".repeat(100_000)).unwrap();
        fs::write(share.join("LICENSE-libtorch"), "").unwrap();
        Self { fixture, program, archive }
    }

    /// Returns `brigade setup` of this program.
    fn setup(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(["setup", "--libtorch"]).arg(self.fixture.libtorch());
        command.current_dir(self.fixture.folder().join("mine"));
        self.fixture.environment(&mut command);
        command
    }

    /// Returns the line about the compiled C++, if there is one.
    fn said(&self, setup: &mut Command) -> Option<String> {
        let output = setup.output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        assert!(text.lines().last().unwrap().starts_with("ready: "), "{text}");
        text.lines().find(|line| line.contains("compiled C++")).map(str::to_owned)
    }

    fn objects(&self) -> PathBuf {
        self.fixture.folder().join("cache/brigade/objects")
    }

    /// Checks that the cache has the archive, whole, and nothing else.
    #[track_caller]
    fn is_installed(&self) {
        let entries = fs::read_dir(self.objects()).unwrap().map(|it| it.unwrap().file_name());
        assert_eq!(entries.collect::<Vec<_>>(), [ARCHIVE]);
        let installed = fs::read(self.objects().join(ARCHIVE)).unwrap();
        assert!(installed == fs::read(&self.archive).unwrap());
    }
}

const ARCHIVE: &str = "brigade-torch-0123abcd.objects";

#[test]
fn setup_installs_the_compiled_code_of_its_package() {
    for (program, share) in [
        // A wheel in an environment or in ~/.local, and a Debian package.
        ("venv/bin/brigade", "venv/share/brigade"),
        // An unpacked archive.
        ("brigade-0.1.0/brigade", "brigade-0.1.0/share/brigade"),
    ] {
        let package = Package::new(program, share);
        let copied = format!("copied Brigade's compiled C++ into {}", package.objects().display());
        assert_eq!(package.said(&mut package.setup()).as_deref(), Some(copied.as_str()));
        package.is_installed();
        // There is nothing to do, and then something to repair.
        assert_eq!(package.said(&mut package.setup()), None);
        fs::write(package.objects().join(ARCHIVE), "cut").unwrap();
        assert_eq!(package.said(&mut package.setup()).as_deref(), Some(copied.as_str()));
        package.is_installed();

        // A new project needs no further command.
        fs::remove_dir_all(package.objects()).unwrap();
        let libtorch = package.fixture.libtorch();
        let words = ["new", "other", "--libtorch", libtorch.to_str().unwrap()];
        let output = package.fixture.start(&package.program, ".", &words);
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains(&copied), "{text}");
        package.is_installed();
    }
}

#[test]
fn setup_without_compiled_code_or_without_a_cache_says_nothing_of_it() {
    let package = Package::new("root/bin/brigade", "elsewhere/share/brigade");
    assert_eq!(package.said(&mut package.setup()), None);
    assert!(!package.objects().exists());
    let package = Package::new("root/bin/brigade", "root/share/brigade");
    assert_eq!(package.said(package.setup().env("BRIGADE_OBJECT_CACHE", "")), None);
    assert!(!package.objects().exists());
    let named = package.fixture.folder().join("named");
    let said = package.said(package.setup().env("BRIGADE_OBJECT_CACHE", &named)).unwrap();
    assert!(said.ends_with(&format!(" into {}", named.display())), "{said}");
    assert!(named.join(ARCHIVE).is_file() && !package.objects().exists());
}

#[test]
fn setup_with_a_cache_that_cannot_be_written_is_no_failure() {
    let package = Package::new("root/bin/brigade", "root/share/brigade");
    // A file in place of the folder: permissions do not stop root.
    fs::create_dir_all(package.objects().parent().unwrap()).unwrap();
    fs::write(package.objects(), "").unwrap();
    let said = package.said(&mut package.setup()).unwrap();
    let objects = package.objects();
    let start = format!("note: cannot copy Brigade's compiled C++ into {}: ", objects.display());
    assert!(said.starts_with(&start) && said.ends_with("; the first build compiles it"), "{said}");
    assert_eq!(fs::read(objects).unwrap(), b"");
}

#[test]
fn setups_at_once_install_the_compiled_code_whole() {
    let package = Package::new("root/bin/brigade", "root/share/brigade");
    let start = |_| package.setup().stdout(Stdio::null()).spawn().unwrap();
    let started: Vec<Child> = (0..4).map(start).collect();
    let ended = started.into_iter().map(|mut child| child.wait().unwrap());
    // Not `all`, which would leave processes behind.
    let codes: Vec<Option<i32>> = ended.map(|status| status.code()).collect();
    assert_eq!(codes, [Some(0); 4]);
    package.is_installed();
}
