//! `cargo xtask setup` against the real pip, tiny wheels and all that can go wrong.
//!
//! The wheels come from a folder, so nothing here uses a network.

#![expect(clippy::unwrap_used, reason = "a scene that cannot be set fails its test")]

mod scene;

use std::fs;

use scene::{Block, Scene};

brigade_suite::suite! {
    needs Python:
        a_fetch_makes_an_install_and_the_second_run_does_nothing,
        cargos_own_libtorch_variable_is_no_override,
        cuda_is_an_upgrade,
        another_version_is_named_and_replaced,
        a_damaged_library_is_fetched_anew,
        a_folder_that_setup_did_not_make_is_left_alone,
        no_python,
        no_pip,
        a_python_that_does_not_run,
        no_network,
        a_package_that_the_index_does_not_have,
        a_wheel_with_another_checksum,
        too_little_disk_is_seen_before_anything_is_fetched,
        killed_while_pip_downloads,
        killed_while_unpacking,
        two_at_once_fetch_once,
        libtorch_of_the_user_wins,
        an_older_libtorch_of_the_user_passes_tchs_version_check,
        what_is_no_libtorch_is_refused,
        pytorch_of_the_user_wins;
    needs Python Mounts: a_disk_that_fills_while_unpacking;
}

fn a_fetch_makes_an_install_and_the_second_run_does_nothing() {
    let scene = Scene::new();
    let first = scene.setup().run();
    first.succeeds_saying("libtorch 2.13.0 is ready in libtorch/");
    assert_eq!(
        scene.files("libtorch"),
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
    assert_eq!(scene.read("libtorch/torch/lib/libtorch.so"), "INPUT(libtorch_cpu.so)\n");
    let config = scene.read(".cargo/libtorch.toml");
    let run_path = scene.root().join("libtorch/torch/lib");
    assert!(config.contains("LIBTORCH = { value = \"libtorch/torch\", relative = true }"));
    assert!(config.contains(&format!("-Wl,-rpath,{}\"", run_path.display())), "{config}");
    assert_eq!(scene.leftovers(), Vec::<String>::new());

    // Not even Python is there now.
    let second = scene.setup().path("").run();
    second.succeeds_saying("ready");
    assert!(!second.text.contains("fetching"), "{}", second.text);
}

fn cargos_own_libtorch_variable_is_no_override() {
    let scene = Scene::new();
    let own = scene.root().join("libtorch/torch");
    scene.setup().env("LIBTORCH", &own).run().succeeds_saying("fetching libtorch 2.13.0 (cpu)");
}

fn cuda_is_an_upgrade() {
    let scene = Scene::new();
    scene.setup().run().succeeds_saying("(cpu)");
    let upgrade = scene.setup().cuda().run();
    upgrade.succeeds_saying("libtorch/ is fetched anew: it is for CPU only");
    assert_eq!(scene.read("libtorch/torch/lib/libtorch.so"), "stub");
    assert_eq!(scene.read("libtorch/cuda/include/cuda.h"), "// cuda\n");
    // It serves CPU work, and stays what it is when it is replaced.
    assert!(!scene.setup().run().text.contains("fetching"));
    fs::remove_file(scene.root().join("libtorch/torch/lib/libtorch_cuda.so")).unwrap();
    let repair = scene.setup().run();
    repair.succeeds_saying("torch/lib/libtorch_cuda.so is missing from it");
    repair.succeeds_saying("(cuda)");
}

fn another_version_is_named_and_replaced() {
    let scene = Scene::with_version("2.12.0");
    scene.setup().run().succeeds_saying("libtorch 2.12.0 is ready");
    scene.make_wheels("2.13.0");
    let update = scene.setup().run();
    update.succeeds_saying("it has torch==2.12.0, this checkout wants torch==2.13.0");
    assert!(scene.read("libtorch/torch/version.py").contains("2.13.0"));
    assert_eq!(scene.leftovers(), Vec::<String>::new());
}

fn a_damaged_library_is_fetched_anew() {
    let scene = Scene::new();
    scene.setup().run().succeeds_saying("ready");
    fs::write(scene.root().join("libtorch/torch/lib/libtorch_cpu.so"), "short").unwrap();
    let repair = scene.setup().run();
    repair.succeeds_saying("libtorch_cpu.so in it has 5 bytes instead of 3000000");
}

fn a_folder_that_setup_did_not_make_is_left_alone() {
    let scene = Scene::new();
    fs::create_dir_all(scene.root().join("libtorch/torch")).unwrap();
    fs::write(scene.root().join("libtorch/torch/mine"), "mine").unwrap();
    scene.setup().run().fails_saying("was not made by `cargo xtask setup`");
    assert_eq!(scene.read("libtorch/torch/mine"), "mine");
}

fn no_python() {
    let scene = Scene::new();
    scene.setup().path("").run().fails_saying("python3 is missing");
    scene.installs_nothing();
}

fn no_pip() {
    let scene = Scene::new();
    // -S: without the folder in which pip is installed.
    scene.fake_python("exec \"$REAL_PYTHON\" -S \"$@\"");
    scene.setup().run().fails_saying("has no pip");
    scene.installs_nothing();
}

fn a_python_that_does_not_run() {
    let scene = Scene::new();
    scene.fake_python("echo 'no version is selected' >&2; exit 127");
    scene.setup().run().fails_saying("no version is selected");
    scene.installs_nothing();
}

fn no_network() {
    let scene = Scene::new();
    // A port on which nobody listens.
    let setup = scene.setup().without_wheels().env("PIP_INDEX_URL", "http://127.0.0.1:9/simple");
    let outcome = setup.env("PIP_RETRIES", "0").run(); // by default pip tries for some seconds
    outcome.fails_saying("torch==2.13.0: pip cannot reach the package index");
    scene.installs_nothing();
}

fn a_package_that_the_index_does_not_have() {
    let scene = Scene::new();
    scene.setup().without_wheels().env("PIP_NO_INDEX", "1").run().fails_saying("does not have it");
    scene.installs_nothing();
}

fn a_wheel_with_another_checksum() {
    let scene = Scene::new();
    let pins = scene.root().join("xtask/libtorch.json");
    let text = fs::read_to_string(&pins).unwrap();
    let at = text.find("\"sha256\": \"").unwrap() + "\"sha256\": \"".len();
    let other = format!("{}{}{}", &text[..at], "0".repeat(64), &text[at + 64..]);
    fs::write(&pins, other).unwrap();
    scene.setup().run().fails_saying("torch==2.13.0: the wheel that pip got has another sha256");
    scene.installs_nothing();
}

fn too_little_disk_is_seen_before_anything_is_fetched() {
    let scene = Scene::new();
    let pins = scene.root().join("xtask/libtorch.json");
    let text = fs::read_to_string(&pins).unwrap();
    let huge = text.replacen("\"installed_bytes\": ", "\"installed_bytes\": 99999999999", 1);
    fs::write(&pins, huge).unwrap();
    let outcome = scene.setup().run();
    outcome.fails_saying("of free disk, and");
    assert!(!outcome.text.contains("to download"), "{}", outcome.text);
    scene.installs_nothing();
}

fn a_disk_that_fills_while_unpacking() {
    let scene = Scene::new();
    // 2 MB: the wheels fit, the 3 MB library in one of them does not. The pins must not say so.
    let pins = scene.root().join("xtask/libtorch.json");
    let text = fs::read_to_string(&pins).unwrap();
    let at = text.find("\"installed_bytes\": ").unwrap() + "\"installed_bytes\": ".len();
    let digits = text[at..].find(',').unwrap();
    fs::write(&pins, format!("{}1000{}", &text[..at], &text[at + digits..])).unwrap();
    let outcome = scene.setup().on_small_disk(2_000_000);
    outcome.fails_saying("torch==2.13.0: the disk is full");
}

fn killed_while_pip_downloads() {
    killed(Block::Download);
}

fn killed_while_unpacking() {
    killed(Block::Unpack);
}

fn killed(block: Block) {
    let scene = Scene::new();
    let mut running = scene.setup().block_in(block).start();
    running.wait_until_blocked();
    running.kill();
    assert!(!scene.root().join("libtorch").exists());
    assert!(!scene.root().join(".cargo/libtorch.toml").exists());
    assert_eq!(scene.leftovers().len(), 1);
    // The child that outlived it holds the lock until it ends.
    running.unblock();
    scene.setup().run().succeeds_saying("ready");
    assert_eq!(scene.leftovers(), Vec::<String>::new());
}

fn two_at_once_fetch_once() {
    let scene = Scene::new();
    let mut first = scene.setup().block_in(Block::Download).start();
    first.wait_until_blocked();
    let mut second = scene.setup().start();
    second.wait_for_line("waiting for another");
    first.unblock();
    first.finish().succeeds_saying("fetching");
    let second = second.finish();
    second.succeeds_saying("ready");
    assert!(!second.text.contains("fetching"), "{}", second.text);
    assert_eq!(scene.leftovers(), Vec::<String>::new());
}

fn libtorch_of_the_user_wins() {
    let scene = Scene::new();
    let theirs = scene.users_libtorch("2.13.0+cpu");
    let outcome = scene.setup().env("LIBTORCH", &theirs).run();
    outcome.succeeds_saying("libtorch 2.13.0, nothing is fetched");
    scene.installs_nothing();
    let config = scene.read(".cargo/libtorch.toml");
    assert!(config.contains(&format!("-rpath,{}/lib\"", theirs.display())), "{config}");
    assert!(!config.contains("[env]"), "{config}");

    // Gone from the environment again, it leaves no trace.
    scene.setup().run().succeeds_saying("fetching");
    assert!(!scene.read(".cargo/libtorch.toml").contains(theirs.to_str().unwrap()));

    // Beside the fetched one it says what the file cannot say.
    let before = scene.read(".cargo/libtorch.toml");
    let beside = scene.setup().env("LIBTORCH", &theirs).run();
    beside.succeeds_saying("doc tests that plain cargo runs load that one");
    assert_eq!(scene.read(".cargo/libtorch.toml"), before);
}

fn an_older_libtorch_of_the_user_passes_tchs_version_check() {
    let scene = Scene::new();
    let theirs = scene.users_libtorch("2.11.0");
    let outcome = scene.setup().env("LIBTORCH", theirs).run();
    outcome.succeeds_saying("cargo update -p tch");
    assert!(scene.read(".cargo/libtorch.toml").contains("LIBTORCH_BYPASS_VERSION_CHECK = \"1\""));
}

fn what_is_no_libtorch_is_refused() {
    let scene = Scene::new();
    let with = |value: &str| scene.setup().env("LIBTORCH", value).run();
    with("").fails_saying("LIBTORCH is set to nothing");
    with("lib/torch").fails_saying("is a relative path");
    with("/nowhere/at/all").fails_saying("names no folder");
    with(scene.root().to_str().unwrap()).fails_saying("has no lib/libtorch_cpu.so");
    let old = scene.users_libtorch("2.9.1");
    with(old.to_str().unwrap()).fails_saying("is libtorch 2.9.1, and Brigade is built with 2.11");
    fs::remove_file(old.join("build-version")).unwrap();
    with(old.to_str().unwrap()).fails_saying("has no readable version");
    scene.installs_nothing();
}

fn pytorch_of_the_user_wins() {
    let scene = Scene::new();
    let packages = scene.users_pytorch("2.13.0+cu130");
    let use_it = || scene.setup().env("LIBTORCH_USE_PYTORCH", "1");
    use_it()
        .env("PYTHONPATH", &packages)
        .run()
        .succeeds_saying("LIBTORCH_USE_PYTORCH: libtorch 2.13.0");
    scene.fake_python("exec \"$REAL_PYTHON\" -S \"$@\"");
    use_it().run().fails_saying("has no package torch");
    scene.installs_nothing();
}
