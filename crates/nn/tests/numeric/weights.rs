//! Weights files: those of PyTorch and of Python's safetensors in, ours out and in.

use std::path::{Path, PathBuf};

use brigade_checkpoint::Error as FileError;
use brigade_nn::{
    BatchNorm2d, Conv2d, Conv2dOptions, Embedding, Flatten, Linear, Model, ModelError, Sequential,
    StateDict, weights,
};
use brigade_test_device::numeric_device;
use brigade_torch::Error;
use tch::{Device, Kind, Tensor};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn refusal(name: &str) -> Error {
    weights::load(fixture(name)).unwrap_err()
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::<f64>::try_from(tensor.flatten(0, -1).to_kind(Kind::Double)).unwrap()
}

fn counted(first: i32, count: i32) -> Vec<f64> {
    (first..first + count).map(f64::from).collect()
}

/// The module behind `small.pth`.
fn small(p: &brigade_nn::ParamPath<'_>) {
    Conv2d::new(p / "block" / 0, 1, 2, [3, 3], Conv2dOptions::default());
    BatchNorm2d::new(p / "block" / 1, 2);
    Linear::new(p / "head", 4, 3);
    Embedding::new(p / "table", 5, 2);
}

#[test]
fn one_dictionary_of_a_checkpoint_can_be_picked() {
    let path = fixture("checkpoint.pth");
    let mut model = Model::builder().device(numeric_device()).build(small).unwrap();
    for state in [weights::load(&path), weights::load_entry(&path, "model")] {
        let report = model.load_state_dict(&state.unwrap()).unwrap();
        assert_eq!((report.loaded, report.key.as_str()), (10, "model"));
    }
    let report = model.load_weights(&path).unwrap();
    assert_eq!(report.to_string(), "10 tensors fit; the weights are those under `model`");
    assert_eq!(model.load_entry(&path, "model").unwrap(), report);

    for (entry, expected) in [
        ("ema", "has no dictionary under `ema`; its state dictionaries are `model`"),
        ("epoch", "has no dictionary under `epoch`; its state"),
        ("optimizer", "a state dictionary (tensors by name) is not in it"),
    ] {
        let error = weights::load_entry(&path, entry).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

fn check_kinds(state: &StateDict) {
    for (name, kind) in [
        ("f64", Kind::Double),
        ("f32", Kind::Float),
        ("f16", Kind::Half),
        ("bf16", Kind::BFloat16),
        ("i64", Kind::Int64),
        ("i32", Kind::Int),
        ("i16", Kind::Int16),
        ("i8", Kind::Int8),
        ("u8", Kind::Uint8),
    ] {
        let tensor = state.get(name).unwrap();
        assert_eq!((tensor.kind(), tensor.size()), (kind, vec![2, 3]), "{name}");
        assert_eq!(values(tensor), counted(1, 6), "{name}");
    }
    let flags = state.get("bool").unwrap();
    assert_eq!((flags.kind(), values(flags)), (Kind::Bool, vec![1.0, 0.0, 1.0]));
    let base = state.get("base").unwrap();
    assert_eq!((base.size(), values(base)), (vec![3, 4], counted(0, 12)));
    let scalar = state.get("scalar").unwrap();
    assert_eq!((scalar.size(), scalar.double_value(&[])), (vec![], 2.5));
    assert_eq!(state.get("empty").unwrap().size(), [0, 3]);
}

#[test]
fn every_kind_of_a_pth_file_is_read_with_its_strides() {
    let state = weights::load(fixture("kinds.pth")).unwrap();
    check_kinds(&state);
    let get = |name| state.get(name).unwrap();
    assert_eq!(get("c64").kind(), Kind::ComplexFloat);
    assert_eq!(get("c64").real().double_value(&[0]), 1.0);
    assert_eq!(get("c64").imag().double_value(&[0]), 2.0);
    assert_eq!(get("transposed").size(), [4, 3]);
    assert_eq!(values(&get("transposed").narrow(0, 1, 1)), [1.0, 5.0, 9.0]);
    assert_eq!(values(get("column")), [6.0, 10.0]);
    assert_eq!((get("expanded").size(), values(get("expanded"))), (vec![2, 2], vec![0.0; 4]));
    assert_eq!(values(get("parameter")), [5.0, 6.0]);
    // One storage in the file is one here.
    assert_eq!(get("transposed").data_ptr(), get("base").data_ptr());
}

#[test]
fn other_formats_of_torch_save_are_read() {
    for name in ["legacy.pth", "protocol4.pth"] {
        let state = weights::load(fixture(name)).unwrap();
        assert_eq!(values(state.get("weight").unwrap()), [0.0, 0.0], "{name}");
    }
    // One storage in an old file is one here, too.
    let old = Path::new(env!("CARGO_MANIFEST_DIR")).join("../checkpoint/tests/fixtures/weights");
    let state = weights::load(old.join("kinds_legacy.pth")).unwrap();
    let get = |name| state.get(name).unwrap();
    assert_eq!(get("transposed").data_ptr(), get("base").data_ptr());
    assert_eq!(values(&get("transposed").narrow(0, 1, 1)), [2.0, 6.0, 10.0]);
    assert_eq!(values(get("column")), [7.0, 11.0]);
    let state = weights::load(old.join("python_2.pth")).unwrap();
    assert_eq!(values(state.get("viewed").unwrap()), [4.0, 5.0, 6.0]);
    assert_eq!(state.key(), "state_dict");
}

#[test]
fn every_kind_of_a_safetensors_file_is_read() {
    check_kinds(&weights::load(fixture("kinds.safetensors")).unwrap());
}

#[test]
fn saved_weights_load_with_their_kinds_and_values() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.safetensors");
    let state = weights::load(fixture("kinds.pth")).unwrap();
    weights::save(&state, &path).unwrap();
    let again = weights::load(&path).unwrap();
    assert_eq!(again.len(), state.len());
    check_kinds(&again);
    for (name, tensor) in state.iter() {
        let read = again.get(name).unwrap();
        assert_eq!((read.kind(), read.size()), (tensor.kind(), tensor.size()), "{name}");
        assert!(read.is_contiguous(), "{name}");
        if tensor.kind() != Kind::ComplexFloat {
            assert_eq!(values(read), values(tensor), "{name}");
        }
    }
    let bytes = std::fs::read(&path).unwrap();
    let header = String::from_utf8_lossy(&bytes[8..]);
    assert!(header.starts_with(r#"{"__metadata__":{"format":"pt"},"#), "{header}");
    assert_eq!(u64::from_le_bytes(bytes[..8].try_into().unwrap()) % 8, 0);
}

#[test]
fn a_model_goes_through_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let images = Tensor::randn([2, 1, 8, 8], (Kind::Float, numeric_device()));
    let net = |p: &brigade_nn::ParamPath<'_>| {
        let convolution = Conv2d::new(p / 0, 1, 4, [3, 3], Conv2dOptions::default());
        let head = Linear::new(p / 3, 4 * 36, 2);
        Sequential::new().add(convolution).add(BatchNorm2d::new(p / 1, 4)).add(Flatten).add(head)
    };
    let mut written = Model::builder().device(numeric_device()).build(net).unwrap();
    let _ = written.forward(&images).unwrap();
    written.save_weights(&path).unwrap();
    let mut read = Model::builder().device(numeric_device()).build(net).unwrap();
    assert_eq!(read.load_weights(&path).unwrap().loaded, 9);
    written.eval();
    read.eval();
    assert_eq!(read.forward(&images).unwrap(), written.forward(&images).unwrap());
}

#[test]
fn saving_replaces_whole_files_and_leaves_nothing_else() {
    use std::os::unix::fs::PermissionsExt;

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.safetensors");
    let mut state = StateDict::new();
    state.insert("a", Tensor::from_slice(&[1f32])).unwrap();
    weights::save(&state, &path).unwrap();
    state.insert("b", Tensor::from_slice(&[2f32])).unwrap();
    weights::save(&state, &path).unwrap();
    assert_eq!(weights::load(&path).unwrap().len(), 2);

    // A save that fails leaves the old file.
    let complex = Tensor::zeros([1], (Kind::ComplexDouble, Device::Cpu));
    state.insert("c", complex).unwrap();
    let error = weights::save(&state, &path).unwrap_err();
    assert!(
        error.to_string().ends_with("safetensors cannot hold `c` of C128; write a .pth file"),
        "{error}"
    );
    assert_eq!(weights::load(&path).unwrap().len(), 2);

    let files: Vec<_> =
        std::fs::read_dir(&folder).unwrap().map(|f| f.unwrap().file_name()).collect();
    assert_eq!(files, ["w.safetensors"]);
    // Like any file that is created, not private as temporary files are.
    let plain = std::fs::File::create(folder.path().join("plain")).unwrap();
    let mode = |file: std::fs::Metadata| file.permissions().mode();
    assert_eq!(mode(std::fs::metadata(&path).unwrap()), mode(plain.metadata().unwrap()));

    let nowhere = folder.path().join("no/such/folder/w.safetensors");
    let error = weights::save(&StateDict::new(), &nowhere).unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(FileError::Io { doing: "write", .. })), "{error}");
}

#[test]
fn objects_in_a_pickle_are_not_made() {
    // They do no harm beside the weights.
    let state = weights::load(fixture("os_system.pth")).unwrap();
    assert_eq!(state.names().collect::<Vec<_>>(), ["weight"]);
    assert!(!Path::new("brigade_was_here").exists());
    let error = refusal("whole_module.pth").to_string();
    assert!(
        error.contains("an object of Python (`__main__.Small`), of which nothing was executed"),
        "{error}"
    );
}

#[test]
fn what_wraps_a_model_goes_where_all_of_the_model_fits() {
    let folder = tempfile::tempdir().unwrap();
    let linear = |p: &brigade_nn::ParamPath<'_>| Linear::new(p, 2, 1);
    let mut model = Model::builder().device(numeric_device()).build(linear).unwrap();
    let mut load = |names: &[(&str, &[i64])]| {
        let mut state = StateDict::new();
        for (name, shape) in names {
            state.insert(*name, Tensor::ones(*shape, (Kind::Float, Device::Cpu))).unwrap();
        }
        let path = folder.path().join("in.pth");
        weights::save_pth(&state, &path).unwrap();
        let report = model.load_state_dict(&state);
        assert_eq!(format!("{report:?}"), format!("{:?}", model.load_weights(&path)));
        report
    };
    let (weight, bias): (&[i64], &[i64]) = (&[1, 2], &[1]);
    for prefix in
        ["module.", "model.", "_orig_mod.", "backbone.", "model.module.", "module.backbone."]
    {
        let names = [format!("{prefix}weight"), format!("{prefix}bias")];
        let own = [(names[0].as_str(), weight), (names[1].as_str(), bias)];
        let report = load(&own).unwrap();
        assert_eq!((report.loaded, report.prefix.as_str()), (2, prefix));
        // A loss or a head beside it is left out, and reported.
        let report = load(&[own[0], own[1], ("loss.weight", &[3])]).unwrap();
        assert_eq!(
            report.remark().unwrap(),
            format!(
                "`{prefix}` was taken off the names; left out, without that prefix: loss.weight"
            )
        );
    }
    // Not in part: a name is missing, has another shape, or is one too many.
    for names in [
        &[("model.weight", weight)][..],
        &[("model.weight", weight), ("model.bias", &[2])],
        &[("model.weight", weight), ("model.bias", bias), ("model.more", bias)],
        &[("weight", weight), ("model.bias", bias)],
        &[("encoder.weight", weight), ("encoder.bias", bias)],
    ] {
        assert!(
            matches!(load(names).unwrap_err().downcast_ref(), Some(ModelError::Mismatch(_))),
            "{names:?}"
        );
    }
    assert_eq!(load(&[("weight", weight), ("bias", bias)]).unwrap().remark(), None);
}

/// A module of TorchScript and a program of `torch.export` have a state dictionary, too.
#[test]
fn state_dictionaries_of_exported_modules_are_read() {
    let state = weights::load(fixture("torchscript.pt")).unwrap();
    assert_eq!(state.names().collect::<Vec<_>>(), ["weight", "bias"]);
    let mut model = Model::new(|p| Linear::new(p, 1, 1)).unwrap();
    assert_eq!(model.load_weights(fixture("torchscript.pt")).unwrap().loaded, 2);
    assert_eq!(
        values(&model.state_dict().get("weight").unwrap().shallow_clone()),
        values(state.get("weight").unwrap())
    );
    let state = weights::load(format("exported.pt2")).unwrap();
    let tied = state.get("tied.weight").unwrap();
    assert_eq!(tied.size(), [2, 2]);
    assert_eq!(tied.data_ptr(), state.get("linear.weight").unwrap().data_ptr(), "one storage");
}

/// `tests/fixtures/make_formats.py` of the crate checkpoint has made these.
fn format(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../checkpoint/tests/fixtures/formats").join(name)
}

#[test]
fn dtypes_that_a_model_cannot_have_are_named_with_a_remedy() {
    // The same file as in the test of every dtype: the error names the first of its tensors that cannot be loaded.
    for (name, tensors) in [
        ("dtypes.safetensors", &["is F8_E", "is F4", "is U"][..]),
        ("dtypes.pth", &["is bits16"]),
        ("quantized.pth", &["is qint8"]),
    ] {
        let said = weights::load(format(name)).unwrap_err().to_string();
        assert!(tensors.iter().any(|it| said.contains(it)), "{said}");
        assert!(said.contains(&format!("{name}: `")), "the file and the tensor: {said}");
        assert!(
            said.contains(
                "which tensors of a model cannot be; save it in another dtype in PyTorch: `tensor."
            ),
            "{said}"
        );
    }
    // A model that fits in names and shapes; its values are unchanged.
    let mut model = Model::new(|p| {
        [("transposed", [4, 3]), ("part", [2, 2])]
            .map(|(name, shape)| p.parameter(name, &shape, brigade_nn::Init::Zeros))
    })
    .unwrap();
    let said = model.load_weights(format("views.pth")).unwrap_err().to_string();
    assert!(
        said.contains("`transposed` is F8_E4M3") && said.contains("tensor.to(torch.float32)"),
        "{said}"
    );
    assert_eq!(values(&model.state_dict().get("part").unwrap().shallow_clone()), [0.0; 4]);
}

#[test]
fn other_files_of_torch_are_refused_by_name() {
    for (name, expected) in [
        ("list.pth", "holds a list; a state dictionary (tensors by name) is not in it"),
        ("README.md", "is neither a safetensors file nor a .pth file"),
    ] {
        let error = refusal(name).to_string();
        assert!(error.contains(expected), "{name}: {error}");
    }
    let error = weights::load_entry(fixture("kinds.safetensors"), "model").unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(FileError::NoSuchKey { .. })), "{error}");
    let error = weights::load(fixture("absent.pth")).unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(FileError::Io { doing: "read", .. })), "{error}");
}
