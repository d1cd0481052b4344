//! Parsers of weights and checkpoints.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use brigade_checkpoint::convert::{TrainerState, read_weights};
use brigade_checkpoint::layout::{Checkpoint, MANIFEST, Manifest};
use brigade_checkpoint::pth::{
    PthFile, StoredTensor, TensorData, dcp_metadata, write_dcp_metadata,
};
use brigade_checkpoint::safetensors::Header;
use brigade_checkpoint::shards::Index;
use brigade_checkpoint::{DeepSpeedFolder, Region, TensorInfo, Value, WeightsReader, format_of};
use brigade_schedule::{Definition, Described};
use brigade_testkit::archive;

use super::{FREE, TREE, file, path_of};
use crate::Target;

pub(super) const TARGETS: &[Target] = &[
    Target {
        name: "safetensors",
        reads: "the header of a safetensors file",
        words: &["\"dtype\"", "\"shape\"", "\"data_offsets\"", "\"F32\"", "__metadata__", "{}"],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: safetensors,
    },
    Target {
        name: "offload",
        reads: "the index of a folder into which Accelerate has offloaded weights",
        words: &[
            "{\"a\":{\"dtype\":\"float32\",\"shape\":[2,3]}}",
            "\"shape\":[]",
            "\"bfloat16\"",
            "\"float8_e4m3fn\"",
            "\"safetensors_file\":\"part.safetensors\"",
            "\"weight_name\":\"w\"",
            "../",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: offload,
    },
    Target {
        name: "quantized",
        reads: "a line of JSON, the quantization_config of a model, and a safetensors file with quantised weights",
        words: &[
            "{\"quant_method\":\"gptq\",\"bits\":4}\n",
            "{\"quant_method\":\"awq\"}\n",
            "\"checkpoint_format\":\"gptq_v2\"",
            "\"bits\":8",
            "fc.qweight",
            "fc.qzeros",
            "fc.scales",
            "fc.g_idx",
            "fc.weight.absmax",
            "fc.weight.packed",
            "int4:32",
            "\\\"blocksize\\\": 64",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE + QUANTIZED_FREE,
        read: quantized,
    },
    Target {
        name: "zip",
        reads: "the archive of a .pth file",
        words: &[
            "PK\x03\x04",
            "PK\x01\x02",
            "PK\x05\x06",
            "PK\x06\x07",
            "PK\x06\x06",
            "w/data.pkl",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE + PTH_FREE,
        read: pth,
    },
    Target {
        name: "pickle",
        reads: "the pickle of a .pth file, in an archive and in an old file that are sound",
        words: &[
            "ctorch._utils\n_rebuild_tensor_v2\n",
            "ctorch\nFloatStorage\n",
            "ccollections\nOrderedDict\n",
            "X\x01\0\0\x000",
            "X\x07\0\0\0storage",
            "\u{2}",
            "tQ",
            "tR",
            "q\x01",
            "h\x01",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE + PTH_FREE,
        read: pickle,
    },
    Target {
        name: "deepspeed",
        reads: "the pickle of DeepSpeed's states: `o` and the optimizer's, or `m` and the model's, beside a sound other",
        words: &[
            "param_shapes",
            "shared_params",
            "fp32_flat_groups",
            "partition_count",
            "exp_avg",
            "ctorch\nSize\n",
            "cdeepspeed.runtime.zero.config\nZeroStageEnum\n",
            "X\x01\0\0\x000",
            "tR",
            "q\x01",
            "h\x01",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE + PTH_FREE,
        read: deepspeed,
    },
    Target {
        name: "script",
        reads: "the code of a TorchScript archive that is sound, a NUL and its pickle",
        words: &[
            "class Linear(Module):\n",
            "  __parameters__ = [\"weight\", ]\n",
            "  __buffers__ = [\"mean\", ]\n",
            "c__torch__\nOuter\n",
            "X\x06\0\0\0weight",
            "(u}b",
            "h\x01",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE + PTH_FREE,
        read: script,
    },
    Target {
        name: "exported",
        reads: "the list of weights of an exported program (.pt2)",
        words: &[
            "\"config\"",
            "\"path_name\"",
            "\"weight_0\"",
            "\"tensor_meta\"",
            "\"sizes\"",
            "\"strides\"",
            "{\"as_int\":",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE + PTH_FREE,
        read: exported,
    },
    Target {
        name: "legacy",
        reads: "a .pth file in the format before PyTorch 1.6",
        words: &[
            "ctorch._utils\n_rebuild_tensor\n",
            "ctorch._utils\n_rebuild_tensor_v2\n",
            "ctorch\nLongStorage\n",
            "ccollections\nOrderedDict\n",
            "X\x01\0\0\x000",
            "U\x07storage",
            "NtQ",
            "tQ",
            "]e.",
            "\x01\0\0\0\0\0\0\0",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE + PTH_FREE,
        read: pth,
    },
    Target {
        name: "manifest",
        reads: "the manifest of a checkpoint, also under its right checksum",
        words: &[
            "\"objects\":[",
            "\"files\":{",
            "\"bytes\":",
            "\"crc32\":\"\"",
            "../",
            "\"name\":",
            "\"mesh\":[",
            "\"tensor_files\":[",
            "\"tensors\":{",
            "\"chunks\":[",
            "\"offset\":[",
            "\"shape\":[",
            "{\"shard\":0}",
            "18446744073709551615",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: manifest,
    },
    Target {
        name: "index",
        reads: "the index of several weights files",
        words: &["\"weight_map\":{", "\"metadata\":{", "\"total_size\":", "../", "/etc/passwd"],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: index,
    },
    Target {
        name: "dcp",
        reads: "the metadata of a folder of torch.distributed.checkpoint, in one whose parts are sound",
        words: &[
            "ctorch.distributed.checkpoint.metadata\nMetadata\n",
            "ctorch.distributed.checkpoint.metadata\nTensorStorageMetadata\n",
            "ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\n",
            "ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n",
            "ctorch\nSize\n",
            "X\x0c\0\0\0__0_0.distcp",
            "X\x07\0\0\0offsets",
            "X\x05\0\0\0sizes",
            ")\u{81}}(",
            "t\u{85}R",
            "ub",
            "j\x01\0\0\0",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE + PTH_FREE,
        read: dcp,
    },
    Target {
        name: "state",
        reads: "the state of an object in a checkpoint, and what it says of a schedule",
        words: &[
            "{\"$dict\":[[",
            "{\"$tuple\":[",
            "{\"$bytes\":\"",
            "{\"$float\":\"",
            "{\"$tensor\":\"",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: state,
    },
    Target {
        name: "trainer_state",
        reads: "trainer_state.json of Hugging Face's Trainer",
        words: &[
            "\"global_step\":",
            "\"epoch\":",
            "NaN",
            "-Infinity",
            "\\\"",
            "{\"log_history\":[",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: trainer_state,
    },
];

/// Memory of a tensor that repeats its storage, and as much for a piece of it.
const PTH_FREE: usize = 4 << 20;

fn offload(input: &[u8]) {
    let folder = tempfile::tempdir().expect("a folder can be made");
    let write = |name: &str, bytes: &[u8]| {
        fs::write(folder.path().join(name), bytes).expect("a file can be written");
    };
    let header = br#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    let part = [&(header.len() as u64).to_le_bytes(), &header[..], &[7; 8]].concat();
    write("a.dat", &[1; 24]);
    write("part.safetensors", &part);
    write("index.json", input);
    let Ok(weights) = WeightsReader::open(folder.path()) else { return };
    for tensor in weights.tensors() {
        // The size of the file is that of the tensor.
        let bytes = tensor.info().bytes().expect("it was compared");
        assert!(bytes <= 24, "{}", tensor.info());
        let _ = tensor.read(&Region::whole(&tensor.info().shape), &mut vec![0; bytes as usize]);
    }
}

/// Values of some rows in float32, which are dequantised at a time.
const QUANTIZED_FREE: usize = 16 << 20;

fn quantized(input: &[u8]) {
    let Some(end) = input.iter().position(|&byte| byte == b'\n') else { return };
    let folder = tempfile::tempdir().expect("a folder can be made");
    let config = [&b"{\"quantization_config\":"[..], &input[..end], b"}"].concat();
    let path = folder.path().join("model.safetensors");
    fs::write(folder.path().join("config.json"), config).expect("a file can be written");
    fs::write(&path, &input[end + 1..]).expect("a file can be written");
    let Ok(weights) = WeightsReader::open(&path) else { return };
    for tensor in weights.tensors().filter(|tensor| tensor.is_quantized()) {
        let shape = &tensor.info().shape;
        // Shapes were checked against the size of the file.
        let values: u64 = shape.iter().product();
        assert!(values <= 2 * input.len() as u64, "{}", tensor.info());
        let whole = Region::whole(shape);
        let mut bytes = vec![0; 4 * values as usize];
        let read = tensor.read(&whole, &mut bytes);
        if let Ok(Some(packed)) = tensor.read_packed() {
            let mut values = vec![0f32; values as usize];
            packed.dequantize(0..packed.rows, &mut values).expect("it was checked");
            assert!(read.is_ok(), "{}", tensor.info());
        }
        let part = whole.narrow(0, shape[0] / 3, shape[0].div_ceil(2)).narrow(1, shape[1] - 1, 1);
        let mut bytes = vec![0; 4 * part.elements() as usize];
        let _ = tensor.read(&part, &mut bytes);
    }
}

fn safetensors(input: &[u8]) {
    let file = file(input);
    let Ok(header) = Header::read(Path::new("a.safetensors"), &file) else { return };
    for entry in &header.tensors {
        assert!(entry.range.end <= input.len() as u64, "{entry:?}");
        assert_eq!(entry.info.bytes(), Some(entry.range.end - entry.range.start), "{entry:?}");
    }
    read_regions(&file);
}

/// Reads some regions of every tensor.
fn read_regions(file: &File) {
    let Ok(weights) = WeightsReader::open(path_of(file)) else { return };
    let _ = weights.verify();
    for tensor in weights.tensors() {
        let info = tensor.info();
        for region in Region::whole(&info.shape).parts(1 << 12).into_iter().take(8) {
            let part = TensorInfo { dtype: info.dtype, shape: region.shape.clone() };
            let mut bytes = vec![0; part.bytes().unwrap_or_default() as usize];
            let read = tensor.read(&region, &mut bytes);
            let may_fail = info.dtype.bits() % 8 > 0 || info.dtype.name().starts_with('q');
            assert!(may_fail || read.is_ok(), "{region} of {info}: {read:?}");
        }
    }
}

fn pth(input: &[u8]) {
    let path = Path::new("a.pth");
    let file = file(input);
    let _ = format_of(path, &file);
    read_regions(&file);
    let Ok(mut file) = PthFile::from_file(path, file) else { return };
    let Ok(value) = file.value() else { return };
    copy_tensors(&mut file, value, input.len());
    for key in [None, Some("model"), Some("a.0")] {
        let _ = file.state_dict(key);
    }
}

/// Copies all tensors: together they are at most a small multiple of the file.
fn copy_tensors(file: &mut PthFile, value: Value<StoredTensor>, length: usize) {
    let mut sink = Sink(0);
    let copied = value.try_map(&mut |_, tensor| {
        let before = sink.0;
        // A storage may turn out to be damaged.
        if file.copy_tensor(&tensor, &mut sink).is_ok() {
            assert_eq!(Some(sink.0 - before), tensor.info().bytes(), "{tensor:?}");
        }
        Ok::<_, std::convert::Infallible>(())
    });
    let Ok(_) = copied;
    assert!(sink.0 <= 16 * length as u64 + (1 << 20), "{} bytes of {length}", sink.0);
}

/// Parses with storages of the sizes in the corpus's module.
fn script(input: &[u8]) {
    let end = input.iter().position(|&byte| byte == 0).unwrap_or(input.len());
    let (code, pickle) = (&input[..end], input.get(end + 1..).unwrap_or_default());
    let bytes = [0; 20];
    pth(&archive(&[
        ("data/0", &bytes[..4]),
        ("data/1", &bytes[..8]),
        ("data/2", &bytes[..4]),
        ("data/3", &bytes),
        ("data/4", &bytes[..16]),
        ("data.pkl", pickle),
        ("constants.pkl", b")."),
        ("code/__torch__.py", code),
    ]));
}

fn exported(input: &[u8]) {
    let bytes = [0; 16];
    pth(&archive(&[
        ("data/weights/weight_0", &bytes),
        ("data/weights/weight_1", &bytes[..8]),
        ("data/weights/weight_2", &bytes[..8]),
        ("data/weights/model_weights_config.json", input),
    ]));
}

/// Parses a pickle in the old format, with two storages after it.
fn legacy_pickle(input: &[u8]) {
    let mut file = LEGACY_HEAD.to_vec();
    file.extend(input);
    file.extend(b"\x80\x02](X\x01\0\0\x000X\x01\0\0\x001e.");
    file.extend(64u64.to_le_bytes());
    file.extend((0..64u8).flat_map(|i| f32::from(i).to_le_bytes()));
    file.extend(0u64.to_le_bytes());
    pth(&file);
}

fn pickle(input: &[u8]) {
    legacy_pickle(input);
    let floats: Vec<u8> = (0..64u8).flat_map(|i| f32::from(i).to_le_bytes()).collect();
    pth(&archive(&[("data.pkl", input), ("data/0", &floats), ("data/1", &[])]));
}

/// Parses the files of one rank, with storages of the sizes in the corpus.
fn deepspeed(input: &[u8]) {
    let (optimizers, model) = match input.split_first() {
        Some((b'o', pickle)) => (vec![Some(pickle)], DEEPSPEED_MODEL),
        // First without files of an optimizer, as of a run without ZeRO.
        Some((b'm', pickle)) => {
            (std::iter::once(None).chain(DEEPSPEED_OPTIMIZERS.map(Some)).collect(), pickle)
        }
        _ => return,
    };
    let floats: Vec<u8> = (0..8u8).flat_map(|i| f32::from(i).to_le_bytes()).collect();
    let saved = |pickle: &[u8], third: usize| {
        archive(&[
            ("data.pkl", pickle),
            ("data/0", &floats),
            ("data/1", &floats),
            ("data/2", &floats[..third]),
            ("data/3", &floats),
        ])
    };
    let folder = tempfile::tempdir().expect("a folder can be made");
    let write = |name: &str, bytes: &[u8]| {
        fs::write(folder.path().join(name), bytes).expect("a file can be written");
    };
    let bytes = saved(model, 32);
    write("mp_rank_00_model_states.pt", &bytes);
    write("zero_pp_rank_0_mp_rank_00_model_states.pt", &bytes);
    for optimizer in optimizers {
        let states = optimizer.map(|pickle| saved(pickle, 4)).unwrap_or_default();
        if optimizer.is_some() {
            write("zero_pp_rank_0_mp_rank_00_optim_states.pt", &states);
        }
        let Ok(run) = DeepSpeedFolder::open(folder.path()) else { continue };
        let _ = (run.to_string(), run.optimizer_state());
        let moments = run.moments().unwrap_or_default();
        let moments = moments.values().flat_map(|slots| slots.values());
        let mut sink = Sink(0);
        for tensor in run.weights().iter().map(|(_, tensor)| tensor).chain(moments) {
            let before = sink.0;
            // A storage may turn out to be damaged.
            if tensor.write_to(&mut sink).is_ok() {
                assert_eq!(Some(sink.0 - before), tensor.info().bytes(), "{:?}", tensor.info());
            }
        }
        let most = 64 * (bytes.len() + states.len()) as u64 + (4 << 20);
        assert!(sink.0 <= most, "{} bytes of at most {most}", sink.0);
    }
}

/// Bytes after the first byte of an input of the corpus.
const DEEPSPEED_MODEL: &[u8] =
    include_bytes!("../../../../fuzz/regressions/deepspeed/good-model").split_at(1).1;
const DEEPSPEED_OPTIMIZERS: [&[u8]; 2] = [
    include_bytes!("../../../../fuzz/regressions/deepspeed/good-stage-2").split_at(1).1,
    include_bytes!("../../../../fuzz/regressions/deepspeed/good-stage-3").split_at(1).1,
];

fn manifest(input: &[u8]) {
    let folder = tempfile::tempdir().expect("a folder can be made");
    fs::write(folder.path().join(MANIFEST), input).expect("a file can be written");
    let _ = Checkpoint::open(folder.path());
    // With its corrected checksum, which no fuzzer guesses.
    let Ok(manifest) = serde_json::from_slice::<Manifest>(input) else { return };
    fs::write(folder.path().join(MANIFEST), manifest.to_json()).expect("a file can be written");
    let Ok(manifest) = Manifest::read(folder.path()) else { return };
    // Chunks that were accepted have as many elements as the whole, and each lies within it.
    for tensor in manifest.objects.iter().flat_map(|object| object.tensors.values()) {
        let whole = tensor.info();
        let mut stored = tensor.chunks.iter().map(|chunk| {
            let shape = chunk.shape.clone();
            TensorInfo { shape, ..whole.clone() }.elements()
        });
        let stored = stored.try_fold(0u64, |sum, elements| sum.checked_add(elements?));
        assert_eq!(stored, whole.elements(), "{tensor:?}");
    }
    let _ = (manifest.bytes(), manifest.of_kind("model").count());
    let names = manifest.files.keys().chain(manifest.objects.iter().map(|object| &object.name));
    for name in names.chain(manifest.objects.iter().flat_map(|object| object.files())) {
        assert!(stays_in(folder.path(), name.as_ref()), "{name:?}");
    }
    let _ = Checkpoint::open(folder.path());
}

fn index(input: &[u8]) {
    let file = file(input);
    let Ok(index) = Index::read(&path_of(&file)) else { return };
    let folder = Path::new("/folder");
    for name in index.files() {
        assert!(stays_in(folder, name.as_ref()), "{name:?}");
    }
}

fn dcp(input: &[u8]) {
    let folder = tempfile::tempdir().expect("a folder can be made");
    let path = folder.path().join(".metadata");
    let Ok(metadata) = dcp_metadata(&path, input) else { return };
    for tensor in metadata.tensors.values() {
        assert!(tensor.chunks.iter().all(|chunk| chunk.is_within(&tensor.shape)), "{tensor:?}");
    }
    // A shorter file allows fewer repetitions.
    let again = write_dcp_metadata(&metadata).ok();
    if let Some(Ok(again)) = again.map(|bytes| dcp_metadata(&path, &bytes)) {
        assert_eq!(again, metadata);
    }
    fs::write(&path, input).expect("a file can be written");
    for (rank, bytes) in PARTS.iter().enumerate() {
        let name = format!("__{rank}_0.distcp");
        fs::write(folder.path().join(name), bytes).expect("a file can be written");
    }
    let Ok(weights) = read_weights(folder.path()) else { return };
    let mut written = 0;
    for (_, tensor) in weights {
        written += tensor.info().bytes().expect("a tensor in files has a size");
        let _ = tensor.write_to(&mut io::sink());
    }
    // No byte of a file belongs to two tensors.
    assert!(written <= PARTS.iter().map(|part| part.len() as u64).sum(), "{written} bytes");
}

/// Files of two ranks.
const PARTS: [&[u8]; 2] = [
    include_bytes!(
        "../../../../crates/checkpoint/tests/fixtures/dcp/fsdp/pytorch_model_fsdp_0/__0_0.distcp"
    ),
    include_bytes!(
        "../../../../crates/checkpoint/tests/fixtures/dcp/fsdp/pytorch_model_fsdp_0/__1_0.distcp"
    ),
];

fn trainer_state(input: &[u8]) {
    let Ok(state) = TrainerState::parse(input) else { return };
    assert!(state.epoch.is_none_or(f64::is_finite), "{state:?}");
}

fn state(input: &[u8]) {
    let Ok(json) = serde_json::from_slice(input) else { return };
    let Ok(value) = Value::from_json(&json) else { return };
    // A parsed value can be written, and parsed again.
    let again = Value::from_json(&value.to_json()).expect("our own form is known");
    // NaN is not equal to itself.
    assert_eq!(format!("{again:?}"), format!("{value:?}"));
    // Definition of a schedule, in which no number may divide by zero.
    if let Some(Definition::All(Described::Known(schedule))) = value.to_plain() {
        for step in [0, 1, 7, u64::MAX] {
            let _ = (schedule.lr(step), schedule.momentum(step), schedule.curve().period(step));
        }
    }
}

/// Magic number, version and no system information.
const LEGACY_HEAD: &[u8] =
    b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}.";

fn stays_in(folder: &Path, name: &Path) -> bool {
    folder.join(name).parent() == Some(folder)
}

/// Writer that counts bytes.
struct Sink(u64);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
