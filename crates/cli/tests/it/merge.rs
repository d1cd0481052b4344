//! Tests of `brigade checkpoint merge`: rows that ranks have saved become one file of weights.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use brigade_checkpoint::layout::{
    Chunk, FileFacts, Manifest, MeshAxis, Object, Placement, Staging, TensorEntry,
};
use brigade_checkpoint::safetensors::layout;
use brigade_checkpoint::{Dtype, FileName, Region, TensorInfo, WeightsReader};

/// Writes a checkpoint of `ranks` ranks whose models have a weight `[5, 2]` of 0 to 9, sharded by rows.
fn checkpoint(folder: &Path, ranks: u64, models: &[&str]) {
    let staging = Staging::create(folder, "test").unwrap();
    let mut manifest = Manifest::new("brigade 0.1.0", ranks as usize);
    manifest.mesh = vec![MeshAxis { name: "dp_shard".into(), size: ranks as usize }];
    manifest.step = 7;
    for model in models {
        let mut object = Object::new("model", FileName::new(*model).unwrap());
        let mut chunks = Vec::new();
        for rank in 0..ranks {
            let region = Region::whole(&[5, 2]).chunk(0, ranks, rank);
            if region.elements() == 0 {
                continue;
            }
            let Region { offset, shape } = region;
            let file = FileName::new(format!("{model}-rows-{rank}.safetensors")).unwrap();
            let info = TensorInfo { dtype: Dtype::F32, shape: shape.clone() };
            let mut bytes = layout(Path::new("rows"), &[("head.weight", info)]).unwrap().header;
            for value in offset[0] * 2..(offset[0] + shape[0]) * 2 {
                bytes.extend((value as f32).to_le_bytes());
            }
            let path = staging.path().join(&file);
            fs::write(&path, bytes).unwrap();
            manifest.files.insert(file.clone(), FileFacts::of(&path, false).unwrap());
            object.tensor_files.push(file.clone());
            chunks.push(Chunk { file, key: None, offset, shape });
        }
        let placements = vec![Placement::Shard(0)];
        let entry = TensorEntry { dtype: Dtype::F32, shape: vec![5, 2], placements, chunks };
        object.tensors.insert("head.weight".into(), entry);
        manifest.objects.push(object);
    }
    staging.commit(&manifest, false).unwrap();
}

/// Returns the output of the command, and `true` if it succeeds.
fn merge(folder: &Path, arguments: &str) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_brigade"));
    command.args(["checkpoint", "merge"]).args(arguments.split_whitespace());
    let output = command.current_dir(folder).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    (output.status.success(), said)
}

fn refused(folder: &Path, arguments: &str, expected: &str) {
    let (is_well, said) = merge(folder, arguments);
    assert!(!is_well && said.contains(expected), "{arguments}: {said}");
}

#[test]
fn rows_are_joined_in_their_order() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for ranks in [1, 2, 4] {
        checkpoint(&folder.join(format!("of-{ranks}")), ranks, &["model"]);
        let file = format!("of-{ranks}.safetensors");
        let (is_well, said) = merge(folder, &format!("of-{ranks} {file}"));
        assert!(is_well, "{said}");
        assert!(said.contains("a checkpoint of brigade 0.1.0: step 7, "), "{said}");
        assert!(said.contains(&format!("as dp_shard {ranks}, 1 tensor in")), "{said}");
        let weights = WeightsReader::open(folder.join(&file)).unwrap();
        let tensor = weights.get("head.weight").unwrap();
        assert_eq!(tensor.info().shape, [5, 2]);
        let mut bytes = vec![0; 40];
        tensor.read(&Region::whole(&[5, 2]), &mut bytes).unwrap();
        let expected: Vec<u8> = (0..10).flat_map(|value| (value as f32).to_le_bytes()).collect();
        assert_eq!(bytes, expected, "{ranks} ranks");
        // An existing file is not overwritten.
        refused(folder, &format!("of-{ranks} {file}"), "already exists");
    }
    // In files of a limited size, in a folder: two of the ranks' rows have 40 bytes together.
    checkpoint(&folder.join("two"), 2, &["model"]);
    for (size, file) in [("8", "model.safetensors"), ("5GB", "model.safetensors")] {
        let to = format!("parts-{size}");
        let (is_well, said) = merge(folder, &format!("two {to} --max-shard-size {size}"));
        assert!(is_well && said.contains(file), "{said}");
        let weights = WeightsReader::open(folder.join(&to)).unwrap();
        assert_eq!(weights.get("head.weight").unwrap().info().shape, [5, 2]);
    }
    refused(folder, "two none --max-shard-size many", "not a number of bytes");
    // A project's folder stands for its newest checkpoint.
    fs::create_dir_all(folder.join("run/checkpoints")).unwrap();
    checkpoint(&folder.join("run/checkpoints/checkpoint_3"), 2, &["model"]);
    let (is_well, said) = merge(folder, "run run.pth");
    assert!(is_well && folder.join("run.pth").is_file(), "{said}");
}

#[test]
fn what_cannot_be_merged_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    checkpoint(&folder.join("two"), 2, &["model", "model_1"]);
    refused(folder, "two out.safetensors", "give --model with one of model, model_1");
    refused(
        folder,
        "two out.safetensors --model model_2",
        "has no model model_2: it has model, model_1",
    );
    refused(folder, "two out.zip", "is not that of a weights format");
    refused(folder, "two out", "is not that of a weights format");
    refused(folder, "missing out.safetensors", "missing");
    let (is_well, said) = merge(folder, "two out.safetensors --model model_1");
    assert!(is_well && said.contains("left out model: "), "{said}");

    fs::remove_file(folder.join("two/model-rows-1.safetensors")).unwrap();
    refused(
        folder,
        "two other.safetensors --model model",
        "its model-rows-1.safetensors is missing",
    );
    assert!(!folder.join("other.safetensors").exists());

    let foreign = |name: &str, file: &str| {
        let file = folder.join(name).join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, "").unwrap();
    };
    foreign("dcp", ".metadata");
    refused(folder, "dcp out.pth", "dcp/.metadata");
    foreign("deepspeed", "zero_to_fp32.py");
    refused(folder, "deepspeed out.pth", "no folder of a step");
    foreign("step", "mp_rank_00_model_states.pt");
    refused(folder, "step out.pth", "step/mp_rank_00_model_states.pt is neither");
    checkpoint(&folder.join("none"), 2, &[]);
    refused(
        folder,
        "none out.pth --model model",
        "holds no model: merge a checkpoint of a program",
    );
}

#[test]
fn parts_of_torch_distributed_checkpoint_are_joined() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../checkpoint/tests/fixtures/dcp");
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    // In Accelerate's layout, in a project's newest checkpoint.
    let of_accelerate = folder.join("run/checkpoints/checkpoint_0/pytorch_model_fsdp_0");
    for to in [folder.join("dcp"), of_accelerate] {
        fs::create_dir_all(&to).unwrap();
        for file in [".metadata", "__0_0.distcp", "__1_0.distcp"] {
            fs::copy(fixture.join("torch_2_13").join(file), to.join(file)).unwrap();
        }
    }
    let parts = |size: &str| merge(folder, &format!("dcp parts-{size} --max-shard-size {size}"));
    let (is_well, said) = parts("64");
    assert!(is_well && said.contains("model.safetensors.index.json"), "{said}");
    let weights = WeightsReader::open(folder.join("parts-64")).unwrap();
    assert_eq!(weights.tensors().len(), 4);
    assert!(folder.join("parts-64/model-00002-of-00002.safetensors").exists(), "{said}");
    for (from, arguments) in
        [("dcp", ""), ("dcp", " --model optim"), ("run/checkpoints/checkpoint_0", "")]
    {
        let to = format!("{}{}.safetensors", from.replace('/', "-"), arguments.len());
        let (is_well, said) = merge(folder, &format!("{from} {to}{arguments}"));
        assert!(is_well, "{said}");
        assert!(said.contains("read a checkpoint of torch.distributed.checkpoint: "), "{said}");
        let weights = WeightsReader::open(folder.join(&to)).unwrap();
        let name = if arguments.is_empty() { "0.weight" } else { "state.0.weight.exp_avg" };
        assert_eq!(weights.get(name).unwrap().info().shape, [7, 4]);
    }
    refused(folder, "dcp out.pth --model modle", "optim");
    for from in ["dcp", "run/checkpoints/checkpoint_0"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_brigade"));
        command.args(["checkpoint", "inspect", from]).current_dir(folder).stdin(Stdio::null());
        let output = command.output().unwrap();
        let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        assert!(output.status.success() && said.contains("1.bias"), "{said}");
        assert!(said.contains("read a checkpoint of torch.distributed.checkpoint: "), "{said}");
    }
}

#[test]
fn parameters_of_deepspeeds_ranks_are_joined() {
    let fixture =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../checkpoint/tests/fixtures/deepspeed");
    let from = fixture.join("3-bfloat16");
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let from = from.display();
    let (is_well, said) = merge(folder, &format!("{from} model.safetensors"));
    assert!(is_well, "{said}");
    let line = "read a checkpoint of DeepSpeed: stage 3, 3 ranks, step 2, 10 tensors\n";
    assert!(said.contains(line), "{said}");
    let read = |file: &Path, name: &str| {
        let weights = WeightsReader::open(file).unwrap();
        let tensor = weights.get(name).unwrap();
        let mut bytes = vec![0; tensor.info().bytes().unwrap() as usize];
        tensor.read(&Region::whole(&tensor.info().shape), &mut bytes).unwrap();
        bytes
    };
    let (made, expected) =
        (folder.join("model.safetensors"), fixture.join("3-bfloat16.safetensors"));
    for name in ["embedding.weight", "head.weight", "frozen.weight", "back.bias"] {
        assert_eq!(read(&made, name), read(&expected, name), "{name}");
    }
    let (is_well, said) = merge(folder, &format!("{from} exp_avg.safetensors --model exp_avg"));
    assert!(is_well, "{said}");
    refused(folder, &format!("{from} no.pth --model momentum"), "exp_avg_sq");

    let inspect = |flag: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_brigade"));
        command.args(["checkpoint", "inspect", &from.to_string()]).args(flag.split_whitespace());
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    };
    let said = inspect("");
    assert!(
        said.contains("stage 3, 3 ranks, step 2") && said.contains("back.bias.exp_avg_sq"),
        "{said}"
    );
    assert!(inspect("--short").contains("optimizer\n"));
    assert!(inspect("--json").contains("\"stage\": 3"));
}
