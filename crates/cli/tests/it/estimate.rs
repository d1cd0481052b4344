//! `brigade estimate`: the answers for models, numbers and files, and for files that are none.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

fn ask(arguments: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_brigade"))
        .arg("estimate")
        .args(arguments)
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn answer(arguments: &[&str]) -> Value {
    let (code, stdout, stderr) = ask(&[arguments, &["--json"]].concat());
    assert_eq!(code, 0, "{stderr}");
    serde_json::from_str(&stdout).unwrap()
}

/// A safetensors file whose tensors take no space on the disk: only the header is read.
pub(crate) fn write_header(path: &Path, tensors: &[(&str, &[u64])]) {
    let mut header = json!({"__metadata__": {"format": "pt"}});
    let mut end = 0;
    for (name, shape) in tensors {
        let begin = end;
        end += 4 * shape
            .iter()
            .fold(1, |product: u64, size| product.saturating_mul(*size) % (1 << 40));
        header[*name] = json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, end]});
    }
    let text = header.to_string();
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    fs::write(path, &bytes).unwrap();
    fs::OpenOptions::new()
        .write(true)
        .open(path)
        .unwrap()
        .set_len(bytes.len() as u64 + end)
        .unwrap();
}

pub(crate) const GPT: [(&str, &[u64]); 8] = [
    ("wte.weight", &[50_257, 768]),
    ("h.0.ln_1.weight", &[768]),
    ("h.0.attn.c_attn.weight", &[768, 2304]),
    ("h.0.mlp.c_fc.weight", &[768, 3072]),
    ("h.1.ln_1.weight", &[768]),
    ("h.1.attn.c_attn.weight", &[768, 2304]),
    ("h.1.mlp.c_fc.weight", &[768, 3072]),
    ("ln_f.weight", &[768]),
];

#[test]
fn a_known_model_as_a_table() {
    let (code, stdout, _) = ask(&["resnet18", "--image-size", "32", "--batch-size", "128"]);
    assert_eq!(code, 0);
    assert!(
        stdout.starts_with("resnet18: 11.7 M parameters, the largest tensor 2.4 M\n"),
        "{stdout}"
    );
    let row = stdout.lines().find(|line| line.starts_with("fp32")).unwrap();
    let cells: Vec<&str> = row.split_whitespace().collect();
    // 4 bytes a weight and a gradient, 8 of states; 2 483 712 / 49 values kept twice for 128 images.
    let expected =
        ["fp32", "44.6", "MiB", "44.6", "MiB", "89.2", "MiB", "49.5", "MiB", "228", "MiB"];
    assert_eq!(cells, expected);
    assert!(stdout.contains("8                   1024"), "{stdout}");
}

#[test]
fn a_number_of_parameters() {
    let bytes = &answer(&["7B", "--optimizer", "momentum"])["bytes_per_rank"];
    assert_eq!(bytes["fp32"]["weights"], 28_000_000_000_u64);
    assert_eq!(bytes["fp32"]["optimizer"], 28_000_000_000_u64);
    assert_eq!(bytes["int4, inference"]["total"], 3_500_000_000_u64);
}

#[test]
fn a_file_a_folder_and_an_index() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    write_header(&file, &GPT);
    let whole = answer(&[file.to_str().unwrap()]);
    let parameters = 50_257 * 768 + 3 * 768 + 2 * (768 * 2304 + 768 * 3072);
    assert_eq!(whole["parameters"], parameters);
    assert_eq!(whole["largest"], 50_257 * 768);
    // Two blocks, 12 heads of 64, and logits.
    let kept = 1024 * 2 * (17 * 768 * 4 + 5 * 12 * 1024 * 2) + 8 * 50_257 * 1024_u64;
    assert_eq!(whole["bytes_per_rank"]["fp32"]["activations"], kept);

    let mut by_folder = answer(&[folder.path().to_str().unwrap()]);
    by_folder["model"] = whole["model"].clone();
    assert_eq!(by_folder, whole);

    let shards = tempfile::tempdir().unwrap();
    write_header(&shards.path().join("a.safetensors"), &GPT[..3]);
    write_header(&shards.path().join("b.safetensors"), &GPT[3..]);
    let map: serde_json::Map<_, _> = GPT
        .iter()
        .enumerate()
        .map(|(i, (name, _))| {
            ((*name).to_owned(), json!(["a.safetensors", "b.safetensors"][usize::from(i >= 3)]))
        })
        .collect();
    let index = shards.path().join("model.safetensors.index.json");
    fs::write(&index, json!({"weight_map": map}).to_string()).unwrap();
    let mut by_index = answer(&[index.to_str().unwrap()]);
    by_index["model"] = whole["model"].clone();
    assert_eq!(by_index, whole);
}

#[test]
fn a_file_of_torch_save_has_its_state_dictionary_estimated() {
    let fixtures =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../checkpoint/tests/fixtures/weights");
    let fixture = |name: &str| fixtures.join(name).to_str().unwrap().to_owned();
    for name in ["nested_state_dict.pth", "lightning_legacy.ckpt"] {
        assert_eq!(answer(&[&fixture(name)])["parameters"], 18 + 2 + 2 + 2 + 6 + 2 + 6 + 18 + 1);
    }
    let (_, stdout, _) = ask(&[&fixture("nested_state_dict.pth")]);
    assert!(stdout.contains("read the state dictionary under `model.state_dict`\n"), "{stdout}");
    let (code, _, stderr) = ask(&[&fixture("several.pth")]);
    assert!(code == 1 && stderr.contains("choose one (`--key`"), "{stderr}");
    assert_eq!(answer(&[&fixture("several.pth"), "--key", "model_ema"])["parameters"], 6);
}

#[test]
fn what_pytorch_has_saved() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../checkpoint/tests/fixtures");
    let parameters = |name: &str| {
        let path = fixtures.join(name);
        answer(&[path.to_str().unwrap()])["parameters"].clone()
    };
    assert_eq!(parameters("formats/bin"), 6 + 2 + 1, "shards of .bin");
    assert_eq!(parameters("formats/script.jit"), 1 + 2 + 1 + 4 + 4, "TorchScript");
    assert_eq!(parameters("formats/exported.pt2"), 2 * (4 + 2) + 2, "torch.export");
    assert_eq!(
        parameters("formats/dtypes.pth"),
        26 * 6 + 12,
        "every dtype; two values in a byte of F4"
    );
    let (_, stdout, _) = ask(&[fixtures.join("formats/quantized.pth").to_str().unwrap()]);
    assert!(stdout.contains("4 tensors: 15 qint32, 15 qint8, 15 quint4x2, 15 quint8"), "{stdout}");
}

#[test]
fn a_model_of_the_hub_is_found_in_the_cache() {
    let cache = tempfile::tempdir().unwrap();
    let repository = cache.path().join("models--google-bert--bert-base-uncased");
    let snapshot = repository.join("snapshots/0123abcd");
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir(repository.join("refs")).unwrap();
    fs::write(repository.join("refs/main"), "0123abcd").unwrap();
    write_header(&snapshot.join("model.safetensors"), &GPT);
    let config = json!({"hidden_size": 768, "num_hidden_layers": 2, "num_attention_heads": 12, "vocab_size": 50_257});
    fs::write(snapshot.join("config.json"), config.to_string()).unwrap();
    let ask = |name: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_brigade"));
        command.args(["estimate", name]).env("HF_HUB_CACHE", cache.path()).output().unwrap()
    };
    let output = ask("google-bert/bert-base-uncased");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success()
            && text.starts_with("google-bert/bert-base-uncased: 46.9 M parameters"),
        "{text}"
    );
    assert!(text.contains("weights in ") && text.contains("snapshots/0123abcd"), "{text}");
    assert!(text.contains("1 x 1024 tokens"), "{text}");
    let output = ask("google-bert/bert-large-uncased");
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stderr).unwrap();
    let cache = cache.path().display().to_string();
    assert!(
        text.contains("`hf download google-bert/bert-large-uncased`") && text.contains(&cache),
        "{text}"
    );
}

#[test]
fn the_shape_in_config_json_is_believed() {
    let folder = tempfile::tempdir().unwrap();
    write_header(&folder.path().join("model.safetensors"), &[("x.weight", &[1000, 1000])]);
    let config = json!({"n_embd": 100, "n_layer": 3, "n_head": 5, "vocab_size": 0});
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let answer = answer(&[folder.path().to_str().unwrap(), "--seq-len", "10"]);
    let kept = 10 * 3 * (17 * 100 * 2 + 5 * 5 * 10);
    assert_eq!(answer["bytes_per_rank"]["bf16 throughout"]["activations"], kept);
}

/// Of grouped queries the keys that context ranks send are fewer.
#[test]
fn keys_of_grouped_queries_are_those_of_config_json() {
    let folder = tempfile::tempdir().unwrap();
    write_header(&folder.path().join("model.safetensors"), &[("x.weight", &[1000, 1000])]);
    let mut config = json!({"hidden_size": 80, "num_hidden_layers": 3, "num_attention_heads": 8, "vocab_size": 0});
    let mut sent = |keys: Option<u64>| {
        if let Some(keys) = keys {
            config["num_key_value_heads"] = json!(keys);
        }
        fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let folder = folder.path().to_str().unwrap();
        let answer = answer(&[folder, "--nproc", "2", "--context", "2", "--seq-len", "16"]);
        let messages = &answer["ranks"][0]["divided"]["stages"][0]["messages"];
        (messages[0]["operation"].clone(), messages[0]["bytes"].as_u64().unwrap())
    };
    // Keys and values of 8 tokens in 3 layers.
    assert_eq!(sent(None), (json!("all_gather"), 3 * 2 * 8 * 80 * 4));
    assert_eq!(sent(Some(2)), (json!("all_gather"), 3 * 2 * 8 * 20 * 4));
}

#[test]
fn convolutions_need_the_size_of_the_images() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cnn.safetensors");
    let tensors: [(&str, &[u64]); 4] = [
        ("a.weight", &[32, 1, 5, 5]),
        ("b.weight", &[64, 32, 5, 5]),
        ("n.running_mean", &[64]),
        ("n.num_batches_tracked", &[]),
    ];
    write_header(&file, &tensors);
    let file = file.to_str().unwrap();
    let unknown = answer(&[file]);
    assert_eq!(unknown["parameters"], 32 * 25 + 64 * 32 * 25, "buffers are not parameters");
    assert_eq!(unknown["bytes_per_rank"]["fp32"]["activations"], Value::Null);
    let (_, stdout, _) = ask(&[file]);
    assert!(stdout.contains("activations unknown") && stdout.contains("--image-size"), "{stdout}");
    let known = answer(&[file, "--image-size", "28"]);
    assert_eq!(
        known["bytes_per_rank"]["fp32"]["activations"],
        2 * 4 * (32 * 28 * 28 + 64 * 14 * 14)
    );
}

#[test]
fn with_kernels_a_gated_layer_keeps_its_pair() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    let names = ["self_attn.q_proj", "input_layernorm", "mlp.gate_proj", "mlp.up_proj"].map(layer);
    let shapes: [&[u64]; 4] = [&[64, 64], &[64], &[100, 64], &[100, 64]];
    let layers = names.iter().map(String::as_str).zip(shapes);
    let tensors: Vec<_> =
        [("model.embed_tokens.weight", &[1000, 64][..])].into_iter().chain(layers).collect();
    write_header(&file, &tensors);
    // Layers, hidden size, heads, intermediate size, and the vocabulary as a multiple of 64.
    for (model, [layers, hidden, heads, width, vocabulary]) in [
        ("llama-7b", [32, 4096, 32, 11_008, 32_000]),
        (file.to_str().unwrap(), [1, 64, 1, 100, 1024]),
    ] {
        let found = answer(&[model, "--kernels", "--seq-len", "512"]);
        let of_token = 8 * (hidden + 2) + 4 * hidden + 8 * hidden + 4 * heads + 4 * width;
        assert_eq!(
            found["bytes_per_rank"]["bf16, fp16 mixed"]["activations"],
            512 * (layers * of_token + 2 * vocabulary),
            "{model}"
        );
    }
}

#[test]
fn parts_without_an_estimate_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("short.safetensors"), [1, 2, 3]).unwrap();
    fs::write(path("foreign.safetensors"), [0xff; 64]).unwrap();
    let mut cut = 100_u64.to_le_bytes().to_vec();
    cut.extend(b"{\"a\":");
    fs::write(path("cut.safetensors"), cut).unwrap();
    let mut garbage = 4_u64.to_le_bytes().to_vec();
    garbage.extend(b"abcd");
    fs::write(path("garbage.safetensors"), garbage).unwrap();
    write_header(Path::new(&path("empty.safetensors")), &[]);
    write_header(Path::new(&path("huge.safetensors")), &[("w", &[u64::MAX, 3])]);
    fs::write(path("model.pth"), "").unwrap();
    let index = json!({"weight_map": {"w": "gone.safetensors"}}).to_string();
    fs::write(path("lost.json"), index).unwrap();
    fs::create_dir(path("bare")).unwrap();
    let table = [
        ("short.safetensors", "it begins with the bytes [01, 02, 03]"),
        ("foreign.safetensors", "is neither a safetensors file"),
        ("cut.safetensors", "it was cut short"),
        ("garbage.safetensors", "is neither a safetensors file"),
        ("empty.safetensors", "has no tensors"),
        ("huge.safetensors", "its header is wrong"),
        ("model.pth", "it is empty; download or copy it again"),
        ("lost.json", "gone.safetensors"),
        ("bare", "the folder holds none of model.safetensors"),
    ];
    for (name, expected) in table {
        let (code, stdout, stderr) = ask(&[&path(name)]);
        assert_eq!(code, 1, "{name}");
        assert!(stdout.is_empty() && stderr.lines().count() == 1, "{name}: {stderr}");
        assert!(stderr.contains(expected), "{name}: {stderr}");
    }
    let (code, _, stderr) = ask(&["resnet19"]);
    assert!(
        code == 2
            && stderr.contains("or a known model (cnn, resnet18")
            && stderr.contains("`hf download resnet19`"),
        "{stderr}"
    );
    let (code, _, stderr) = ask(&["gpt2", "--batch-size", "0"]);
    assert!(code == 2 && stderr.contains("must be at least 1"), "{stderr}");
    let (code, _, stderr) = ask(&["gpt2", "--batch-size", "18446744073709551615"]);
    assert!(code == 1 && stderr.contains("check the sizes"), "{stderr}");
}

/// The part of an answer that is about a strategy, the first of its name.
fn of_strategy<'a>(answer: &'a Value, strategy: &str) -> &'a Value {
    let strategies = answer["ranks"][0]["strategies"].as_array().unwrap();
    let is_it = |it: &&Value| it["strategy"].as_str().unwrap_or("none") == strategy;
    strategies.iter().find(is_it).unwrap()
}

#[test]
fn every_strategy_of_sharding() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    write_header(&file, &GPT);
    let file = file.to_str().unwrap();
    let answer = answer(&[file, "--nproc", "4", "--bandwidth", "1G", "--optimizer", "adamw"]);
    let n = answer["parameters"].as_u64().unwrap();
    let block = 768 * 2304 + 768 * 3072 + 768_u64;
    let root = n - 2 * block;
    // The vocabulary's rows do not divide by 4.
    let padded = n + 3 * 768;
    let bytes = |strategy: &str, kind: &str| {
        of_strategy(&answer, strategy)["bytes_per_rank"][kind].as_u64().unwrap()
    };
    let table = [
        ("none", 4 * n, 4 * n, 8 * n, 0),
        ("zero1", 4 * padded, 4 * n, 2 * padded, 0),
        ("zero2", 4 * padded, padded, 2 * padded, 0),
        ("hybrid=2", 2 * (n + 768), 2 * (n + 768), 4 * (n + 768), 4 * (n + 768)),
        ("zero3", padded, padded, 2 * padded, 4 * padded),
    ];
    for (strategy, parameters, gradients, optimizer, gathered) in table {
        assert_eq!(bytes(strategy, "parameters"), parameters, "{strategy}");
        assert_eq!(bytes(strategy, "gradients"), gradients, "{strategy}");
        assert_eq!(bytes(strategy, "optimizer"), optimizer, "{strategy}");
        assert_eq!(bytes(strategy, "gathered"), gathered, "{strategy}");
    }
    let sent = |strategy: &str| of_strategy(&answer, strategy)["sent_elements"].as_u64().unwrap();
    assert_eq!(sent("none"), 6 * n.div_ceil(4));
    assert_eq!(sent("zero2"), 2 * (padded - padded / 4));
    // The root and the last block are whole when backward begins.
    assert_eq!(sent("zero3"), 3 * (padded - padded / 4) - (root + 3 * 768 + block) / 4 * 3);
    let zero3 = of_strategy(&answer, "zero3");
    let seconds = zero3["sent_bytes"].as_f64().unwrap() / 1_073_741_824.0;
    assert!((zero3["seconds"].as_f64().unwrap() - seconds).abs() < 1e-12);

    let strategies = answer["ranks"][0]["strategies"].as_array().unwrap();
    let offloaded = strategies.last().unwrap();
    assert_eq!(offloaded["offload"], true);
    let on_host = offloaded["bytes_per_rank"]["offloaded"].as_u64().unwrap();
    let saved = bytes("zero3", "total") - offloaded["bytes_per_rank"]["total"].as_u64().unwrap();
    // While the root's gradients are summed, a block's rows are on their way to the host: 4 bytes of a quarter.
    assert_eq!((on_host, saved), (4 * padded, 4 * padded - block));
}

#[test]
fn the_smallest_change_that_fits_is_named() {
    let change = |arguments: &[&str]| {
        let answer = answer(arguments);
        answer["ranks"][0]["change"].as_str().unwrap().to_owned()
    };
    // 16 bytes for each of 7 B parameters, and activations.
    let of_7b = ["7B", "--nproc", "8", "--seq-len", "256", "--fused-attention", "--mixed", "bf16"];
    let with = |memory: &str| change(&[&of_7b[..], &["--memory", memory]].concat());
    assert_eq!(with("200G"), "it fits without sharding");
    assert_eq!(with("80G"), "the smallest change that fits: --sharding zero1");
    assert_eq!(with("40G"), "the smallest change that fits: --sharding zero2");
    assert_eq!(with("20G"), "the smallest change that fits: --sharding zero3");
    let offloaded = "the smallest change that fits: --sharding zero3 (offloaded to the CPU)";
    assert_eq!(with("8G"), format!("{offloaded}, or --sharding zero3 on 32 ranks"));
    assert!(with("1G").starts_with("nothing fits, nor does"), "{}", with("1G"));
    let batch = change(&[&of_7b[..], &["--memory", "24G", "--batch-size", "64"]].concat());
    assert_eq!(batch, format!("{offloaded} with --batch-size 16"));
}

#[test]
fn strategies_as_a_table() {
    let (code, stdout, stderr) =
        ask(&["resnet18", "--nproc", "1,4", "--image-size", "32", "--memory", "110M"]);
    assert_eq!(code, 0, "{stderr}");
    let heads: Vec<_> = stdout.lines().filter(|line| line.contains(" none ")).collect();
    assert!(heads[0].starts_with("1 rank ") && !heads[0].contains("zero1"), "{stdout}");
    assert!(heads[1].contains("none       zero1       zero2    hybrid=2       zero3"), "{stdout}");
    assert!(stdout.lines().all(|line| line.len() <= 100), "{stdout}");
    for (flag, value) in [("--memory", "80G"), ("--bandwidth", "1G"), ("--mixed", "bf16")] {
        let (code, _, stderr) = ask(&["gpt2", flag, value]);
        assert!(code == 2 && stderr.contains("--nproc"), "{stderr}");
    }
    let (code, _, stderr) = ask(&["gpt2", "--nproc", "8", "--memory", "80X"]);
    assert!(code == 2 && stderr.contains("such as 80G"), "{stderr}");
}

#[test]
fn strategies_of_a_model_whose_activations_are_unknown() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cnn.safetensors");
    let tensors: [(&str, &[u64]); 3] = [
        ("layer1.0.weight", &[64, 3, 3, 3]),
        ("layer1.1.weight", &[64, 64, 3, 3]),
        ("layer1.0.running_mean", &[64]),
    ];
    write_header(&file, &tensors);
    let file = file.to_str().unwrap();
    let answer = answer(&[file, "--nproc", "2"]);
    let bytes = &of_strategy(&answer, "zero3")["bytes_per_rank"];
    assert_eq!((&bytes["activations"], &bytes["buffers"]), (&Value::Null, &json!(4 * 64)));
    assert_eq!(bytes["parameters"], 4 * 32 * (27 + 64 * 9), "buffers are not sharded");
    assert_eq!(answer["ranks"][0]["change"], Value::Null);
    let (_, stdout, _) = ask(&[file, "--nproc", "2"]);
    assert!(stdout.contains("activations          unknown     unknown"), "{stdout}");
}

/// A step of a model that ranks divide: the formulas of the documentation, with the numbers of a small transformer.
#[test]
fn layers_sequences_and_stages_that_ranks_divide() {
    let divided = ["--nproc", "8", "--tensor", "2", "--pipeline", "2", "--context", "2"];
    let of = |more: &[&str]| answer(&[&["llama-7b"], &divided[..], more].concat());
    let whole = answer(&["llama-7b", "--nproc", "1", "--fused-attention", "--seq-len", "4096"]);
    let found = of(&["--fused-attention", "--seq-len", "4096"]);
    let none = |answer: &Value, kind: &str| {
        of_strategy(answer, "none")["bytes_per_rank"][kind].as_u64().unwrap()
    };
    // Two stages, whose matrices two ranks divide, and of which each has the embedding or the head.
    let quarter = none(&whole, "parameters") / 4;
    assert!(none(&found, "parameters").abs_diff(quarter) < quarter / 100);
    // Half of the layers and of the tokens, two micro-batches at a time; of 17 numbers tensor ranks divide 12.
    assert_eq!(none(&found, "activations"), none(&whole, "activations") / 4 * 2 / 17 * 11);
    let division = &found["ranks"][0]["divided"];
    assert_eq!(division["mesh"], "pp 2 x cp 2 x tp 2");
    assert_eq!(
        (&division["micro_batches"], &division["stages"][0]["held"]),
        (&json!(8), &json!(2))
    );
    let sent = |answer: &Value, axis: &str, phase: &str| -> Vec<(u64, u64)> {
        let messages = answer["ranks"][0]["divided"]["stages"][0]["messages"].as_array().unwrap();
        let of_axis = messages.iter().filter(|row| row["axis"] == axis && row["phase"] == phase);
        of_axis
            .map(|row| (row["messages"].as_u64().unwrap(), row["bytes"].as_u64().unwrap()))
            .collect()
    };
    // The embedding, and two sums in each of 16 layers, for 8 micro-batches.
    let hidden = 2048 * 4096 * 4;
    assert_eq!(sent(&found, "tp", "forward"), [(8 * 33, 8 * 33 * hidden)]);
    assert_eq!(sent(&found, "pp", "forward"), [(8, 8 * hidden)]);
    assert_eq!(sent(&found, "pp", "backward"), []);
    // Keys and values of half of the heads.
    assert_eq!(sent(&found, "cp", "forward"), [(8 * 16, 8 * 16 * hidden)]);
    let regions = of(&["--fused-attention", "--seq-len", "4096", "--sequence-parallel"]);
    // Of 17 numbers tensor ranks divide 15, and keep two whole.
    assert_eq!(none(&regions, "activations"), none(&whole, "activations") / 4 * 2 / 34 * 19);
    let bytes = |answer: &Value, axis: &str| -> u64 {
        ["forward", "backward"]
            .iter()
            .flat_map(|phase| sent(answer, axis, phase))
            .map(|(_, bytes)| bytes)
            .sum()
    };
    assert!(bytes(&regions, "tp") >= bytes(&found, "tp"));

    let (code, stdout, stderr) = ask(&[&["llama-7b"], &divided[..]].concat());
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains("mesh pp 2 x cp 2 x tp 2, a rank of stage"), "{stdout}");
    assert!(stdout.contains("sent along tp") && stdout.contains("8 micro-batches"), "{stdout}");
    let refusals: [(&[&str], &str); 4] = [
        (&["gpt2", "--nproc", "6", "--tensor", "4"], "tp 4"),
        (&["resnet18", "--nproc", "4", "--tensor", "2"], "can be estimated only for transformers"),
        (&["gpt2", "--nproc", "2", "--pipeline", "2", "--micro-batches", "1"], "micro-batch"),
        (&["gpt2", "--tensor", "2"], "--nproc"),
    ];
    for (arguments, expected) in refusals {
        let (code, _, stderr) = ask(arguments);
        assert!(code != 0 && stderr.contains(expected), "{arguments:?}: {stderr}");
    }
}

/// Experts that ranks divide: their part of the parameters, and the messages to them.
#[test]
fn experts_are_spread_over_ranks() {
    let mixtral = ["mixtral-8x7b", "--fused-attention", "--seq-len", "512", "--nproc", "8"];
    let of = |more: &[&str]| answer(&[&mixtral[..], more].concat());
    let bytes = |answer: &Value, strategy: &str, kind: &str| {
        of_strategy(answer, strategy)["bytes_per_rank"][kind].as_u64().unwrap()
    };
    let whole = of(&[]);
    let spread = of(&["--expert", "8"]);
    let experts = 32 * 8 * 3 * 4096 * 14_336u64;
    let others = 46_702_792_704 - experts;
    assert_eq!(bytes(&whole, "none", "parameters"), 4 * (experts + others));
    assert_eq!(bytes(&spread, "none", "parameters"), 4 * (experts / 8 + others));
    // Tokens go through two experts: 15 + 2 x 19 bytes in 16 bits, twice as many in 32.
    let activations = 512 * 4096 * 32 * 2 * (15 + 2 * 19);
    for answer in [&whole, &spread] {
        assert_eq!(bytes(answer, "none", "activations"), activations);
    }
    let sent = |strategy: &str| of_strategy(&spread, strategy)["sent_bytes"].as_u64().unwrap();
    // No other rank has the same experts: only the others' gradients are averaged.
    assert_eq!(sent("none"), 4 * 2 * 7 * others.div_ceil(8));
    // All but the experts is sharded, with padding, and experts over the ranks with the same ones.
    let [four, two] = ["4", "2"].map(|ranks| of(&["--expert", ranks]));
    let states = 8 * (experts / 8 + others / 8);
    for answer in [&spread, &four, &two] {
        let found = bytes(answer, "zero3", "optimizer");
        assert!((states..states + states / 1000).contains(&found), "{found}, not {states}");
    }
    // Forward and backward gather, and backward reduces, over seven other ranks or one with the same experts.
    let sent = |answer: &Value| of_strategy(answer, "zero3")["sent_bytes"].as_u64().unwrap();
    let of_experts = sent(&four) - sent(&spread);
    let expected = 4 * 3 * (experts / 4) / 2;
    let off = of_experts.abs_diff(expected);
    assert!(off <= expected / 32, "{of_experts}, not {expected}");
    assert_eq!(spread["ranks"][0]["divided"]["mesh"], "dp_shard 8, ep 8");
    let messages = spread["ranks"][0]["divided"]["stages"][0]["messages"].as_array().unwrap();
    assert_eq!(messages[1]["axis"], "ep");
    assert_eq!(messages[1]["bytes"], 32 * 2 * (512 * 2 * 7 / 8) * 4096 * 4u64);
    let (_, stdout, _) = ask(&[&mixtral[..], &["--expert", "4", "--tensor", "2"]].concat());
    assert!(stdout.contains("mesh dp_shard 4 x tp 2, ep 4"), "{stdout}");
    assert!(stdout.contains("sent along ep"), "{stdout}");

    let refusals: [(&[&str], &str); 4] = [
        (&["gpt2", "--nproc", "2", "--expert", "2"], "gpt2: no experts to spread over 2 ranks"),
        (&["mixtral-8x7b", "--nproc", "3", "--expert", "3"], "8 experts cannot be spread over 3"),
        (&["mixtral-8x7b", "--nproc", "6", "--expert", "4"], "4"),
        (
            &["mixtral-8x7b", "--nproc", "8", "--expert", "2", "--tensor", "4"],
            "2 expert ranks are not whole groups of 4 tensor ranks",
        ),
    ];
    for (arguments, expected) in refusals {
        let (code, _, stderr) = ask(arguments);
        assert!(code != 0 && stderr.contains(expected), "{arguments:?}: {stderr}");
    }
}

/// Several stages of each rank: half the layers of a stage, and the activations that the schedule holds.
#[test]
fn a_rank_has_several_stages_of_a_pipeline() {
    let pipeline = ["llama-7b", "--nproc", "2", "--pipeline", "2", "--fused-attention"];
    let of = |more: &[&str]| answer(&[&pipeline[..], more].concat());
    let bytes = |answer: &Value, kind: &str| {
        of_strategy(answer, "none")["bytes_per_rank"][kind].as_u64().unwrap()
    };
    let one = of(&["--schedule", "gpipe"]);
    let interleaved = of(&["--schedule", "interleaved"]);
    let three = of(&["--schedule", "looped-bfs", "--chunks", "4"]);
    let v = of(&["--schedule", "zbv"]);
    // GPipe and looped BFS hold all 8 micro-batches of all layers.
    assert_eq!(bytes(&three, "activations"), bytes(&one, "activations"));
    let stages =
        |answer: &Value| answer["ranks"][0]["divided"]["stages"].as_array().unwrap().clone();
    let held = |answer: &Value| -> Vec<u64> {
        stages(answer).iter().map(|stage| stage["held"].as_u64().unwrap()).collect()
    };
    let ranks = |answer: &Value| -> Vec<u64> {
        stages(answer).iter().map(|stage| stage["rank"].as_u64().unwrap()).collect()
    };
    assert_eq!((ranks(&one), ranks(&interleaved)), (vec![0, 1], vec![0, 1, 0, 1]));
    assert_eq!((ranks(&v), held(&one)), (vec![0, 1, 1, 0], vec![8, 8]));
    // A quarter of the layers for each held activation: at most 2 p + p - 1 of them.
    let of_micro = bytes(&one, "activations") / 8 / 2;
    assert_eq!(bytes(&interleaved, "activations") % of_micro, 0);
    assert!(bytes(&interleaved, "activations") <= 5 * of_micro);
    assert!(bytes(&v, "activations") <= 4 * of_micro);
    // With a V the first rank has the embedding and the head, and the turn sends nothing.
    let sends = |answer: &Value| -> Vec<usize> {
        let of_stage = |stage: &Value| stage["messages"].as_array().unwrap().len();
        stages(answer).iter().map(of_stage).collect()
    };
    assert_eq!((sends(&interleaved), sends(&v)), (vec![1, 2, 2, 1], vec![1, 1, 1, 1]));
    assert!(bytes(&v, "parameters") > bytes(&interleaved, "parameters"));
    let (_, stdout, _) = ask(&[&pipeline[..], &["--schedule", "zbv"]].concat());
    assert!(stdout.contains("a rank of stages 0, 3 of 4, 8 micro-batches"), "{stdout}");
    let (code, _, stderr) = ask(&[&pipeline[..], &["--chunks", "2"]].concat());
    assert!(code != 0 && stderr.contains("1f1b has one stage for each rank, not 2"), "{stderr}");
    let (code, _, stderr) =
        ask(&[&pipeline[..], &["--schedule", "interleaved", "--chunks", "20"]].concat());
    assert!(code != 0 && stderr.contains("32 layers cannot be cut into 40 stages"), "{stderr}");
}

#[test]
fn inference_counts_weights_and_cache_and_bounds_what_is_moved() {
    let folder = tempfile::tempdir().unwrap();
    write_header(&folder.path().join("model.safetensors"), &GPT);
    let config = r#"{"n_embd": 768, "n_layer": 2, "n_head": 12, "vocab_size": 50257}"#;
    fs::write(folder.path().join("config.json"), config).unwrap();
    let path = folder.path().to_str().unwrap();
    let inference = [path, "--inference", "--batch-size", "4", "--seq-len", "512"];
    let matrices = 2 * (768 * 2304 + 768 * 3072);
    let others = 2 * (50_257 * 768 + 5 * 768 - 2 * 768);

    let plain = answer(&inference);
    assert_eq!(plain["cache_per_token"], 2 * 2 * 768 * 2);
    let formats = plain["formats"].as_array().unwrap();
    let weights = |name: &str| {
        let row = formats.iter().find(|row| row["format"] == name);
        row.unwrap()["weights"].as_u64().unwrap()
    };
    assert_eq!(weights("bf16"), 2 * matrices + others);
    assert_eq!(weights("int8"), matrices + 2 * (2 * 768) * 2 + others);
    assert_eq!(weights("int4"), matrices * 17 / 32 + others);
    let cache = 4 * 512 * 2 * 2 * 768 * 2;
    assert_eq!(formats[0]["cache"], cache);
    assert_eq!(formats[0]["total"], weights("bf16") + cache + 4 * 50_257 * 4);

    // A block of 11 MiB stays in memory, and the disk gives a block and a bit for each of the 4 tokens.
    let limits = ["--max-memory", "cuda:0=200M,cpu=0", "--weights", "fp32", "--disk", "1MB"];
    let limited = answer(&[&inference[..], &limits].concat());
    let row = &limited["formats"][0];
    assert_eq!(row["format"], "fp32");
    let moved = row["bytes_moved_per_token"]["disk"].as_u64().unwrap();
    assert_eq!(moved % (4 * (768 * 2304 + 768 * 3072 + 768)), 4 * 768, "{row}");
    let bound = row["tokens_per_second"].as_f64().unwrap();
    assert!((bound - 4.0 * 1e6 / moved as f64).abs() < 1e-9, "{row}");
    assert!(limited["formats"][3]["tokens_per_second"].is_null(), "{limited}");

    let (code, stdout, stderr) = ask(&[&inference[..], &["--max-memory", "cuda:0=50M"]].concat());
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains("does not fit: cuda:0 is limited to 50.0 MiB, and wte"), "{stdout}");
    let (code, _, stderr) = ask(&[path, "--weights", "int4"]);
    assert_eq!(code, 2, "{stderr}");
}
