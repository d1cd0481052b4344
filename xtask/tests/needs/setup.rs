//! Tests of `cargo xtask setup` with the real pip, tiny wheels and all possible failures.
//!
//! The wheels are in a folder, so no network is used.

mod fixture;

use std::fs;

use brigade_test_needs::needs;
use fixture::{Block, Fixture};

#[needs(Python)]
fn a_fetch_makes_an_install_and_the_second_run_does_nothing() {
    let fixture = Fixture::new();
    let first = fixture.setup().run();
    let folder = fixture.fetched("2.13.0-cpu/torch");
    first.succeeds_saying(&format!("libtorch 2.13.0 (cpu) is in {}", folder.display()));
    assert_eq!(
        fixture.files("2.13.0-cpu"),
        [
            "VERSION",
            "nvidia/cu13/lib/libcudart.so.13",
            "nvidia_cuda_runtime-13.0.96.dist-info/licenses/LICENSE",
            "torch-2.13.0.dist-info/licenses/LICENSE",
            "torch/include/ATen/ATen.h",
            "torch/lib/libtorch.so",
            "torch/lib/libtorch_cpu.so",
            "torch/version.py",
        ]
    );
    let linked = fs::read_to_string(folder.join("lib/libtorch.so")).unwrap();
    assert_eq!(linked, "INPUT(libtorch_cpu.so)\n");
    let config = fixture.read(".cargo/libtorch.toml");
    assert!(config.contains(&format!("LIBTORCH = \"{}\"\n", folder.display())), "{config}");
    assert!(config.contains(&format!("link-arg={}\"", folder.join("lib").display())), "{config}");
    // With flags for everything that rustc links, cargo would rebuild xtask.
    assert!(!config.contains("rustflags ="), "{config}");
    assert_eq!(fixture.in_cache(), ["2.13.0-cpu"]);

    // Even Python is missing now.
    let second = fixture.setup().path("").run();
    second.succeeds_saying("libtorch 2.13.0 (cpu) is in");
    assert!(!second.text.contains("fetching"), "{}", second.text);
}

#[needs(Python)]
fn cargos_own_libtorch_variable_does_not_override() {
    let fixture = Fixture::new();
    let own = fixture.fetched("2.13.0-cpu/torch");
    fixture.setup().env("LIBTORCH", &own).run().succeeds_saying("fetching libtorch 2.13.0 (cpu)");
    // A libtorch that `brigade setup --libtorch` has written is kept, too.
    let theirs = fixture.users_libtorch("2.12.0");
    let file = fixture.root().join(".cargo/libtorch.toml");
    fs::write(&file, format!("[env]\nLIBTORCH = \"{}\"\n", theirs.display())).unwrap();
    let outcome = fixture.setup().env("LIBTORCH", &theirs).run();
    outcome.succeeds_saying(".cargo/libtorch.toml: libtorch 2.12.0 in");
    assert!(fixture.read(".cargo/libtorch.toml").contains(theirs.to_str().unwrap()));
}

#[needs(Python)]
fn cuda_serves_where_cpu_is_wanted() {
    let fixture = Fixture::new();
    fixture.setup().cuda().run().succeeds_saying("libtorch 2.13.0 (cuda) is in");
    let read = |path| fs::read_to_string(fixture.fetched("2.13.0-cuda").join(path)).unwrap();
    assert_eq!(read("torch/lib/libtorch.so"), "stub");
    assert_eq!(read("nvidia/cu13/include/cuda.h"), "// cuda\n");
    fixture.setup().run().succeeds_saying("libtorch 2.13.0 (cuda) is in");
    assert_eq!(fixture.in_cache(), ["2.13.0-cuda"]);
    fs::remove_file(fixture.fetched("2.13.0-cuda/torch/lib/libtorch_cuda.so")).unwrap();
    let repair = fixture.setup().cuda().run();
    repair.succeeds_saying(
        "2.13.0-cuda is fetched again: torch/lib/libtorch_cuda.so is missing from it",
    );
}

#[needs(Python)]
fn another_version_has_a_folder_of_its_own() {
    let fixture = Fixture::with_version("2.12.0");
    fixture.setup().run().succeeds_saying("libtorch 2.12.0 (cpu)");
    fixture.make_wheels("2.13.0");
    fixture.setup().run().succeeds_saying("libtorch 2.13.0 (cpu)");
    assert_eq!(fixture.in_cache(), ["2.12.0-cpu", "2.13.0-cpu"]);
    assert!(fixture.read(".cargo/libtorch.toml").contains("2.13.0-cpu/torch\""));
}

#[needs(Python)]
fn a_damaged_library_is_fetched_anew() {
    let fixture = Fixture::new();
    fixture.setup().run().succeeds_saying("fetching");
    fs::write(fixture.fetched("2.13.0-cpu/torch/lib/libtorch_cpu.so"), "short").unwrap();
    let repair = fixture.setup().run();
    repair.succeeds_saying("libtorch_cpu.so in it has 5 bytes instead of 3000000");
}

#[needs(Python)]
fn another_package_of_the_same_libtorch_is_fetched_anew() {
    let fixture = Fixture::new();
    fixture.setup().run().succeeds_saying("fetching");
    let stamp = fixture.fetched("2.13.0-cpu/VERSION");
    let text = fs::read_to_string(&stamp).unwrap();
    fs::write(&stamp, text.replace("13.0.96", "13.0.95")).unwrap();
    let update = fixture.setup().run();
    update.succeeds_saying("it has nvidia-cuda-runtime==13.0.95 instead of");
}

#[needs(Python)]
fn a_folder_that_was_not_fetched_is_left_alone() {
    let fixture = Fixture::new();
    let folder = fixture.fetched("2.13.0-cpu");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("mine"), "mine").unwrap();
    fixture.setup().run().fails_saying("was not fetched by Brigade");
    assert_eq!(fs::read_to_string(folder.join("mine")).unwrap(), "mine");
}

#[needs(Python)]
fn without_its_variable_the_cache_is_in_the_home_folder() {
    let fixture = Fixture::new();
    let home = fixture.root();
    // A relative path in the variable is ignored.
    let setup = fixture.setup().env("XDG_CACHE_HOME", "relative").env("HOME", &home);
    setup.run().succeeds_saying("fetching");
    assert!(home.join(".cache/brigade/libtorch/2.13.0-cpu/torch/version.py").exists());
    fixture.installs_nothing();
}

#[needs(Python)]
fn no_python() {
    let fixture = Fixture::new();
    fixture.setup().path("").run().fails_saying("python3 is missing");
    fixture.installs_nothing();
}

#[needs(Python)]
fn no_pip() {
    let fixture = Fixture::new();
    // -S: without the folder in which pip is installed.
    fixture.fake_python("exec \"$REAL_PYTHON\" -S \"$@\"");
    fixture.setup().run().fails_saying("has no pip");
    fixture.installs_nothing();
}

#[needs(Python)]
fn a_python_that_does_not_run() {
    let fixture = Fixture::new();
    fixture.fake_python("echo 'no version is selected' >&2; exit 127");
    fixture.setup().run().fails_saying("no version is selected");
    fixture.installs_nothing();
}

#[needs(Python)]
fn no_network() {
    let fixture = Fixture::new();
    // A port on which no process listens.
    let setup = fixture.setup().without_wheels().env("PIP_INDEX_URL", "http://127.0.0.1:9/simple");
    let outcome = setup.env("PIP_RETRIES", "0").run(); // by default pip tries for some seconds
    outcome.fails_saying("torch==2.13.0: pip cannot reach the package index");
    fixture.installs_nothing();
}

#[needs(Python)]
fn a_package_that_the_index_does_not_have() {
    let fixture = Fixture::new();
    fixture
        .setup()
        .without_wheels()
        .env("PIP_NO_INDEX", "1")
        .run()
        .fails_saying("does not have it");
    fixture.installs_nothing();
}

#[needs(Python)]
fn a_wheel_with_another_checksum() {
    let fixture = Fixture::new();
    let pins = fixture.pins();
    let text = fs::read_to_string(&pins).unwrap();
    let at = text.find("\"sha256\": \"").unwrap() + "\"sha256\": \"".len();
    let other = format!("{}{}{}", &text[..at], "0".repeat(64), &text[at + 64..]);
    fs::write(&pins, other).unwrap();
    fixture
        .setup()
        .run()
        .fails_saying("torch==2.13.0: the sha256 of the wheel that pip got is not");
    fixture.installs_nothing();
}

#[needs(Python)]
fn too_little_disk_is_seen_before_anything_is_fetched() {
    let fixture = Fixture::new();
    let pins = fixture.pins();
    let text = fs::read_to_string(&pins).unwrap();
    let huge = text.replacen("\"installed_bytes\": ", "\"installed_bytes\": 99999999999", 1);
    fs::write(&pins, huge).unwrap();
    let outcome = fixture.setup().run();
    outcome.fails_saying("of free disk, and");
    assert!(!outcome.text.contains("to download"), "{}", outcome.text);
    fixture.installs_nothing();
}

#[needs(Python, Mounts)]
fn a_disk_that_fills_while_unpacking() {
    let fixture = Fixture::new();
    // 2 MB: the wheels fit, the 3 MB library in one of them does not. The pins must not contain the size.
    let pins = fixture.pins();
    let text = fs::read_to_string(&pins).unwrap();
    let at = text.find("\"installed_bytes\": ").unwrap() + "\"installed_bytes\": ".len();
    let digits = text[at..].find(',').unwrap();
    fs::write(&pins, format!("{}1000{}", &text[..at], &text[at + digits..])).unwrap();
    let outcome = fixture.setup().on_small_disk(2_000_000);
    outcome.fails_saying("torch==2.13.0: the disk is full");
}

#[needs(Python)]
fn killed_while_pip_downloads() {
    killed(Block::Download);
}

#[needs(Python)]
fn killed_while_unpacking() {
    killed(Block::Unpack);
}

fn killed(block: Block) {
    let fixture = Fixture::new();
    let mut running = fixture.setup().block_in(block).start();
    running.wait_until_blocked();
    running.kill();
    assert!(!fixture.root().join(".cargo/libtorch.toml").exists());
    let left = fixture.in_cache();
    assert!(left.len() == 1 && left[0].starts_with("partial-"), "{left:?}");
    // The child that outlived it holds the lock until it ends.
    running.unblock();
    fixture.setup().run().succeeds_saying("fetching");
    assert_eq!(fixture.in_cache(), ["2.13.0-cpu"]);
}

#[needs(Python)]
fn two_at_once_fetch_once() {
    let fixture = Fixture::new();
    let mut first = fixture.setup().block_in(Block::Download).start();
    first.wait_until_blocked();
    let mut second = fixture.setup().start();
    second.wait_for_line("waiting for another");
    first.unblock();
    first.finish().succeeds_saying("fetching");
    let second = second.finish();
    second.succeeds_saying("(cpu) is in");
    assert!(!second.text.contains("fetching"), "{}", second.text);
    assert_eq!(fixture.in_cache(), ["2.13.0-cpu"]);
}

#[needs(Python)]
fn libtorch_of_the_user_wins() {
    let fixture = Fixture::new();
    let theirs = fixture.users_libtorch("2.13.0+cpu");
    let outcome = fixture.setup().env("LIBTORCH", &theirs).run();
    outcome.succeeds_saying("nothing is fetched");
    fixture.installs_nothing();
    let config = fixture.read(".cargo/libtorch.toml");
    assert!(config.contains(&format!("link-arg={}/lib\"", theirs.display())), "{config}");
    assert!(!config.contains("[env]"), "{config}");

    // After the variable is removed, it leaves no trace.
    fixture.setup().run().succeeds_saying("fetching");
    assert!(!fixture.read(".cargo/libtorch.toml").contains(theirs.to_str().unwrap()));
    fixture.setup().env("LIBTORCH", &theirs).run().succeeds_saying("nothing is fetched");
    assert!(fixture.read(".cargo/libtorch.toml").contains(theirs.to_str().unwrap()));
}

#[needs(Python)]
fn an_older_libtorch_of_the_user_passes_tchs_version_check() {
    let fixture = Fixture::new();
    let theirs = fixture.users_libtorch("2.11.0");
    let outcome = fixture.setup().env("LIBTORCH", theirs).run();
    outcome.succeeds_saying("cargo update -p tch");
    assert!(fixture.read(".cargo/libtorch.toml").contains("LIBTORCH_BYPASS_VERSION_CHECK = \"1\""));
}

#[needs(Python)]
fn folders_without_a_libtorch_are_refused() {
    let fixture = Fixture::new();
    let with = |value: &str| fixture.setup().env("LIBTORCH", value).run();
    with("").fails_saying("LIBTORCH= is empty");
    with("lib/torch").fails_saying("is a relative path");
    with("/nowhere/at/all").fails_saying("is not a folder");
    with(fixture.root().to_str().unwrap()).fails_saying("has no lib/libtorch_cpu.so");
    let old = fixture.users_libtorch("2.9.1");
    with(old.to_str().unwrap()).fails_saying("is libtorch 2.9.1, and Brigade is built with 2.11");
    fs::remove_file(old.join("build-version")).unwrap();
    with(old.to_str().unwrap()).fails_saying("has no readable version");
    fixture.installs_nothing();
}

#[needs(Python)]
fn pytorch_of_the_user_wins() {
    let fixture = Fixture::new();
    let packages = fixture.users_pytorch("2.13.0+cu130");
    let use_it = || fixture.setup().env("LIBTORCH_USE_PYTORCH", "1");
    use_it()
        .env("PYTHONPATH", &packages)
        .run()
        .succeeds_saying("LIBTORCH_USE_PYTORCH: libtorch 2.13.0");
    fixture.fake_python("exec \"$REAL_PYTHON\" -S \"$@\"");
    use_it().run().fails_saying("has no package torch");
    fixture.installs_nothing();
}

#[needs(Python)]
fn torch_tpu_is_fetched_with_a_plug_in_once() {
    let fixture = Fixture::new();
    let libtorch = fixture.users_libtorch("2.13.0+cpu");
    let install = || fixture.install_tpu(&libtorch);
    install().run().succeeds_saying("tpu: here");
    let version = fixture.torch_tpu_version();
    let read = |path: &str| fs::read_to_string(fixture.torch_tpu().join(path)).unwrap();
    assert_eq!(read("torch_tpu/csrc/common/glue_2_13_0/libpywrap_2_13_0_common.so"), "glue");
    assert_eq!(read("plugin/cpu/lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so"), "cpu");
    assert!(!fixture.torch_tpu().join("torch_tpu/__init__.py").exists());
    assert_eq!(fixture.in_tpu_cache(), [version.as_str()]);

    // Even Python is missing now.
    let second = install().path("").run();
    second.succeeds_saying("tpu: here");
    assert!(!second.text.contains("fetching"), "{}", second.text);

    // A damaged file is fetched anew, and so is what has gone with it.
    fs::write(fixture.torch_tpu().join("torch_tpu/csrc/common/libxla_base.so"), "short").unwrap();
    let repair = install().run();
    repair.succeeds_saying("torch_tpu/csrc/common/libxla_base.so in it has 5 bytes instead of 4");
    assert_eq!(read("torch_tpu/csrc/common/libxla_base.so"), "base");
    assert_eq!(read("plugin/cpu/lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so"), "cpu");
    assert_eq!(fixture.in_tpu_cache(), [version.as_str()]);
}

#[needs(Python)]
fn a_damaged_download_of_torch_tpu_is_refused() {
    let fixture = Fixture::new();
    let pins = fixture.pins();
    let text = fs::read_to_string(&pins).unwrap();
    let at = text.find("\"backend\"").unwrap();
    let at = at + text[at..].find("\"sha256\": \"").unwrap() + "\"sha256\": \"".len();
    fs::write(&pins, format!("{}{}{}", &text[..at], "0".repeat(64), &text[at + 64..])).unwrap();
    let outcome = fixture.install_tpu(&fixture.users_libtorch("2.13.0")).run();
    outcome.fails_saying("the sha256 of the wheel that pip got is not");
    assert_eq!(fixture.in_tpu_cache(), Vec::<String>::new());
}

#[needs(Python)]
fn torch_tpu_without_kernels_for_a_libtorch_is_not_fetched() {
    let fixture = Fixture::new();
    let outcome = fixture.install_tpu(&fixture.users_libtorch("2.12.1")).run();
    outcome.fails_saying("is not made for libtorch 2.12.1, but for 2.13.0");
    assert_eq!(fixture.in_tpu_cache(), Vec::<String>::new());
}
