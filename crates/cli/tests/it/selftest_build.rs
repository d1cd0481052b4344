//! Tests of `brigade test` of an installed `brigade`: cargo builds the self-test for the installed libtorch. The cargo
//! here is a script, which records its arguments.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// Home folder with a project that `brigade setup` has set up, two libtorch installations, and a cargo.
struct Home(TempDir);

/// Installs a program that prints the libtorch it was built for. Fails if a file `broken` exists.
const CARGO: &str = "#!/bin/sh
if [ \"$1\" = locate-project ]; then
    [ -f Cargo.toml ] && echo \"$PWD/Cargo.toml\" && exit
    echo 'error: could not find `Cargo.toml`' >&2; exit 101
fi
echo \"$LIBTORCH $*\" >> \"$HOME/asked\"
[ -f \"$HOME/broken\" ] && echo 'error: no compiler' >&2 && exit 101
while [ $# -gt 0 ]; do
    case \"$1\" in --root) root=$2;; --target-dir) target=$2;; esac
    shift
done
mkdir -p \"$root/bin\" \"$target/release\"
printf '#!/bin/sh\\necho rank $RANK with %s\\n' \"$LIBTORCH\" > \"$root/bin/brigade-selftest\"
chmod +x \"$root/bin/brigade-selftest\"
";

impl Home {
    fn new() -> Self {
        let home = Self(tempfile::tempdir().unwrap());
        for libtorch in ["named", "projects"] {
            let folder = home.path(libtorch);
            fs::create_dir_all(folder.join("lib")).unwrap();
            fs::create_dir_all(folder.join("include")).unwrap();
            fs::write(folder.join("lib/libtorch_cpu.so"), "").unwrap();
            fs::write(folder.join("build-version"), "2.13.0\n").unwrap();
        }
        fs::create_dir_all(home.path("project/.cargo")).unwrap();
        fs::write(home.path("project/Cargo.toml"), "").unwrap();
        let text = format!("[env]\nLIBTORCH = {:?}\n", home.path("projects"));
        fs::write(home.path("project/.cargo/libtorch.toml"), text).unwrap();
        fs::create_dir(home.path("bin")).unwrap();
        fs::write(home.path("bin/cargo"), CARGO).unwrap();
        fs::set_permissions(home.path("bin/cargo"), fs::Permissions::from_mode(0o755)).unwrap();
        home
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs `brigade test` of this checkout, with arguments before those of the launch.
    fn test(&self, folder: &str, words: &[&str], launch: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_brigade"));
        let path = format!("{}:/usr/bin:/bin", self.path("bin").display());
        command.env_clear().env("PATH", path).env("HOME", self.0.path());
        command.env("BRIGADE_CONFIG", "/dev/null").env("TMPDIR", self.0.path());
        command.current_dir(self.path(folder)).arg("test");
        let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        command.arg("--brigade").arg(checkout).args(words).args(launch).output().unwrap()
    }

    /// Returns the recorded arguments of cargo.
    fn asked(&self) -> Vec<String> {
        let text = fs::read_to_string(self.path("asked")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn cargo_builds_it_once_for_each_libtorch() {
    let home = Home::new();
    let named = ["--libtorch", &home.path("named").display().to_string()].map(str::to_owned);
    let named: Vec<&str> = named.iter().map(String::as_str).collect();
    let mut before = 0;
    for (folder, words, libtorch, builds) in [
        ("", &named[..], "named", 1),
        ("", &named, "named", 1),
        ("project", &[], "projects", 2),
        ("project", &[], "projects", 2),
        ("project", &named, "named", 2),
    ] {
        let output = home.test(folder, words, &["--nproc", "2"]);
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{stderr}");
        let path = home.path(libtorch);
        for rank in 0..2 {
            let line = format!("[{rank}] rank {rank} with {}\n", path.display());
            assert!(stdout.contains(&line), "{stdout}");
        }
        let asked = home.asked();
        assert_eq!(asked.len(), builds, "{asked:?}");
        let says =
            stderr.contains("brigade: cargo builds the self-test for it, which takes some minutes");
        assert_eq!(says, builds > before, "{stderr}");
        before = builds;
    }
    let asked = home.asked();
    let words = &asked[0];
    let expected = format!("{} install --locked ", home.path("named").display());
    assert!(
        words.starts_with(&expected)
            && words.contains("/crates/brigade --bin brigade-selftest --config "),
        "{words}"
    );
    // The build files are removed; the two programs remain.
    let kept = home.path(".cache/brigade/selftest");
    let folders: Vec<PathBuf> = fs::read_dir(kept).unwrap().map(|it| it.unwrap().path()).collect();
    assert_eq!(folders.len(), 2);
    for folder in folders {
        assert!(folder.join("bin/brigade-selftest").is_file() && !folder.join("target").exists());
    }
}

#[test]
fn another_libtorch_at_the_same_path_has_it_built_again() {
    let home = Home::new();
    let builds = || {
        let output = home.test("project", &[], &["--nproc", "1"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        home.asked().len()
    };
    assert_eq!((builds(), builds()), (1, 1));
    fs::write(home.path("projects/lib/libtorch_cpu.so"), "another").unwrap();
    assert_eq!((builds(), builds()), (2, 2));
}

#[test]
fn failures_say_what_to_do() {
    let home = Home::new();
    let refused = |words: &[&str], launch: &[&str]| {
        let output = home.test("project", words, launch);
        assert!(!output.status.success());
        (output.status.code(), text(&output.stderr))
    };
    // Before anything is built.
    let (code, said) = refused(&[], &["--nprc", "2"]);
    assert_eq!(code, Some(2));
    assert!(said.contains("--nproc") && said.lines().count() == 1, "{said}");
    let (code, said) = refused(&[], &["-np", "2"]);
    assert_eq!(code, Some(2));
    let line =
        "brigade: -np is a flag of mpirun: give --nproc 2, the number of ranks on each host\n";
    assert_eq!(said, line);
    let (code, said) = refused(&["--program", "/dev/null"], &[]);
    assert_eq!(code, Some(2), "{said}");
    assert!(home.asked().is_empty());

    fs::write(home.path("broken"), "").unwrap();
    let (code, said) = refused(&[], &["--nproc", "2"]);
    assert_eq!(code, Some(1));
    assert!(said.contains("error: no compiler\n"), "{said}");
    let line = "brigade: the self-test could not be built: cargo's messages are above\n";
    assert!(said.ends_with(line), "{said}");
    // A failed build is not used.
    fs::remove_file(home.path("broken")).unwrap();
    assert!(home.test("project", &[], &["--nproc", "1"]).status.success());
    assert_eq!(home.asked().len(), 2);

    fs::remove_file(home.path("bin/cargo")).unwrap();
    let named = home.path("named").display().to_string();
    let (_, said) = refused(&["--libtorch", &named], &["--nproc", "1"]);
    assert!(
        said.contains("brigade: cargo is missing, which builds the self-test: install Rust"),
        "{said}"
    );
}
