//! Small files that request much memory or disk, or places outside their folder.

use std::fs;
use std::path::Path;

use brigade_checkpoint::convert::{Target, convert, convert_like, read_weights};
use brigade_checkpoint::layout::{
    Checkpoint, FORMAT, FileFacts, MANIFEST, Manifest, VERSION, verify_file,
};
use brigade_checkpoint::pth::PthFile;
use brigade_checkpoint::shards::Index;
use brigade_checkpoint::{Error, Safetensors, Torch};
use brigade_testkit::archive;

fn text(text: &str) -> Vec<u8> {
    [b"X".as_slice(), &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
}

fn tuple(values: &[i64]) -> Vec<u8> {
    let items = values.iter().flat_map(|value| [&[0x8a, 8][..], &value.to_le_bytes()].concat());
    [b"(".as_slice(), &items.collect::<Vec<u8>>(), b"t"].concat()
}

/// Returns the pickle of a tensor over storage `0` of `elements` floats.
fn tensor(elements: i32, size: &[i64], stride: &[i64]) -> Vec<u8> {
    [
        b"ctorch._utils\n_rebuild_tensor_v2\n((".as_slice(),
        &text("storage"),
        b"ctorch\nFloatStorage\n",
        &text("0"),
        &text("cpu"),
        b"J",
        &elements.to_le_bytes(),
        b"tQK\0",
        &tuple(size),
        &tuple(stride),
        b"\x89ccollections\nOrderedDict\n)RtR",
    ]
    .concat()
}

/// Returns a state dictionary of these tensors over one storage of floats.
fn weights(elements: usize, tensors: &[Vec<u8>]) -> Vec<u8> {
    let items = tensors.iter().enumerate();
    let items = items.flat_map(|(i, tensor)| [text(&format!("t{i}")), tensor.clone()].concat());
    let pickle = [b"\x80\x02}(".as_slice(), &items.collect::<Vec<u8>>(), b"u."].concat();
    let storage: Vec<u8> = (0..elements).flat_map(|i| (i as f32).to_le_bytes()).collect();
    archive(&[("data.pkl", &pickle), ("data/0", &storage)])
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Checks that every reader refuses the file and leaves no files behind. Returns the error.
fn refused(file: &[u8]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("in.pth");
    fs::write(&path, file).unwrap();
    let error = PthFile::open(&path).unwrap().value().unwrap_err().to_string();
    for (target, ending) in
        [(Target::Weights(&Safetensors), "safetensors"), (Target::Weights(&Torch), "bin")]
    {
        let to = folder.path().join("out").with_extension(ending);
        let found = convert(&path, &to, target).unwrap_err();
        assert!(matches!(found, Error::Unsupported { .. } | Error::Damaged { .. }), "{found}");
        assert_eq!(names(folder.path()), ["in.pth"]);
    }
    error
}

#[test]
fn a_view_may_not_repeat_its_storage_out_of_proportion() {
    // torch.save(torch.as_strided(torch.rand(1), (100000, 100000), (0, 0))), and similar views.
    let max = i64::from(i32::MAX);
    for (elements, size, stride) in [
        (1, vec![100_000, 100_000], vec![0, 0]),
        (1, vec![max, max], vec![0, 0]),
        (1, vec![i64::MAX], vec![0]),
        (1000, vec![500, 100_000], vec![1, 0]),
        // A window that moves by one element: no stride is 0.
        (3000, vec![1500, 1500], vec![1, 1]),
    ] {
        let file = weights(elements, &[tensor(elements as i32, &size, &stride)]);
        let error = refused(&file);
        assert!(error.contains(&format!("repeats the {elements} elements")), "{error}");
        assert!(error.contains(".contiguous()"), "{error}");
    }
    for (size, stride) in [(vec![max; 3], vec![0; 3]), (vec![i64::MAX, 2], vec![0, 0])] {
        let error = refused(&weights(1, &[tensor(1, &size, &stride)]));
        assert!(error.contains("reach outside its storage of 1 elements"), "{error}");
    }
}

#[test]
fn tensors_may_not_share_a_storage_out_of_proportion() {
    let whole = tensor(100_000, &[100_000], &[1]);
    let error = refused(&weights(100_000, &vec![whole.clone(); 40]));
    assert!(error.contains("share storages"), "{error}");

    // Allowed: as many uses as the layers of a model that shares one storage.
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("in.pth"), folder.path().join("out.safetensors"));
    fs::write(&from, weights(100_000, &vec![whole; 12])).unwrap();
    convert(&from, &to, Target::Weights(&Safetensors)).unwrap();
    assert!(fs::metadata(&to).unwrap().len() > 12 * 400_000);
    assert_eq!(read_weights(&to).unwrap().len(), 12);
}

#[test]
fn a_small_expanded_tensor_is_what_it_says() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("in.pth");
    fs::write(&path, weights(2, &[tensor(2, &[2, 3], &[1, 0])])).unwrap();
    let mut file = PthFile::open(&path).unwrap();
    let value = file.value().unwrap();
    let bytes = file.read_tensor(value.get("t0").unwrap().as_tensor().unwrap()).unwrap();
    let floats: Vec<f32> =
        bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    assert_eq!(floats, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
}

/// Checks a long string, sizes or names that are stored once and recalled with two bytes each.
#[test]
fn repetitions_in_a_pickle_cost_no_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("in.pth");
    let long = "x".repeat(1 << 20);
    let strings =
        [b"\x80\x02]q\0(".as_slice(), &text(&long), b"q\x01", &b"h\x01".repeat(100_000), b"e."];
    let foreign = [
        b"\x80\x02](c".as_slice(),
        long.as_bytes(),
        b"\nname\nq\x01",
        &b"h\x01".repeat(100_000),
        b"e.",
    ];
    for pickle in [strings.concat(), foreign.concat()] {
        fs::write(&path, archive(&[("data.pkl", &pickle)])).unwrap();
        let error = PthFile::open(&path).unwrap().value().unwrap_err().to_string();
        assert!(error.contains("repeats long strings"), "{error}");
    }
    // One tuple of many numbers is the size of many tensors.
    let many = tuple(&vec![1; 100_000]);
    let sizes = [
        b"\x80\x02](".as_slice(),
        &many,
        b"q\x01",
        b"((",
        &text("storage"),
        b"ctorch\nFloatStorage\n",
        &text("0"),
        &text("cpu"),
        b"K\x01tQq\x02t",
        &b"ctorch._utils\n_rebuild_tensor_v2\n(h\x02K\0h\x01h\x01\x89ccollections\nOrderedDict\n)RtR"
            .repeat(10_000),
        b"e.",
    ];
    fs::write(&path, archive(&[("data.pkl", &sizes.concat()), ("data/0", &[0; 4])])).unwrap();
    let error = PthFile::open(&path).unwrap().value().unwrap_err().to_string();
    assert!(error.contains("100000 dimensions"), "{error}");
}

/// Checks nested keys: each value of a tree has all keys above it in its place, and each state dictionary in its key.
#[test]
fn long_keys_around_many_values_cost_no_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("in.pth");
    let open = |pickle: &[u8]| {
        fs::write(&path, archive(&[("data.pkl", pickle), ("data/0", &[0; 4])])).unwrap();
        PthFile::open(&path).unwrap()
    };
    let within = |inner: &[u8]| {
        let key = [b"}".as_slice(), &text(&"k".repeat(30_000))].concat();
        [b"\x80\x02".as_slice(), &key.repeat(50), inner, &b"s".repeat(50), b"."].concat()
    };
    let many = |item: &[u8], count: usize| [b"](".as_slice(), &item.repeat(count), b"e"].concat();
    let weight = tensor(1, &[1], &[1]);
    for inner in [many(b"}", 200_000), many(b"]", 200_000), many(&weight, 10_000)] {
        let file = open(&within(&inner));
        for error in [file.value().unwrap_err(), file.state_dict(None).unwrap_err()] {
            assert!(error.to_string().contains("the keys of its dictionaries"), "{error}");
        }
    }
    // Numbers need no place.
    let file = open(&within(&many(b"K\x01", 200_000)));
    file.value().unwrap().try_map(&mut |_, tensor| Ok::<_, Error>(tensor)).unwrap();
    assert!(matches!(file.state_dict(None), Err(Error::NoStateDict { .. })));

    let model = [b"}".as_slice(), &text("w"), &weight, b"s"].concat();
    let items = |count: usize, value: &[u8]| -> Vec<u8> {
        (0..count).flat_map(|i| [text(&format!("a{i}")), value.to_vec()].concat()).collect()
    };
    let two = [b"\x80\x02}(".as_slice(), &items(1500, &model), b"u."].concat();
    let Err(Error::SeveralStateDicts { keys, .. }) = open(&two).state_dict(None) else {
        panic!("it has one")
    };
    assert_eq!(keys.len(), 1000);
    let beside =
        [b"\x80\x02}(".as_slice(), &text("m"), &model, &items(1500, b"K\x01"), b"u."].concat();
    let left_out = open(&beside).state_dict(None).unwrap().left_out;
    assert_eq!(left_out.len(), 1001);
    assert_eq!(left_out[0], "`a0`: the integer 1, which is not among the weights");
    assert!(left_out[1000].starts_with("500 more values"), "{}", left_out[1000]);
    let long = |bytes: usize| {
        let key = text(&"k".repeat(bytes));
        open(&[b"\x80\x02}".as_slice(), &key, &model, b"s."].concat()).state_dict(None)
    };
    assert_eq!(long(900).unwrap().tensors.len(), 1);
    assert!(matches!(long(1100), Err(Error::NoStateDict { .. })));
}

fn manifest(objects: &str, files: &str) -> String {
    format!(
        r#"{{"format":"{FORMAT}","version":{VERSION},"made_by":"a test","world_size":1,
            "mesh":[{{"name":"data","size":1}}],"step":0,
            "samples":0,"objects":{objects},"files":{files},"crc32":""}}"#
    )
}

/// Writes a checkpoint's folder with this manifest and its correct checksum, taken from the error about a wrong one.
fn checkpoint(folder: &Path, manifest: &str) -> Result<Checkpoint, Error> {
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join(MANIFEST), manifest).unwrap();
    let Err(error) = Manifest::read(folder) else { panic!("it has no checksum") };
    let message = error.to_string();
    let Some((_, rest)) = message.split_once("its checksum is ") else { return Err(error) };
    let right = manifest.replace(r#""crc32":"""#, &format!(r#""crc32":"{}""#, &rest[..8]));
    fs::write(folder.join(MANIFEST), right).unwrap();
    Checkpoint::open(folder)
}

#[test]
fn names_in_a_manifest_stay_in_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    let inside = folder.path().join("a/b/checkpoint");
    let object = |name: &str, state: &str, tensors: &str| {
        format!(
            r#"[{{"kind":"custom","name":{name:?},"state":{state:?},"tensor_files":[{tensors:?}]}}]"#
        )
    };
    let facts = r#"{"bytes":2,"crc32":"79fcdd47"}"#;
    let files = |names: &[&str]| {
        let entries: Vec<String> = names.iter().map(|name| format!("{name:?}:{facts}")).collect();
        format!("{{{}}}", entries.join(","))
    };
    fs::create_dir_all(&inside).unwrap();
    for name in ["s.json", "t.json"] {
        fs::write(inside.join(name), "{}").unwrap();
    }
    let good = manifest(&object("custom", "s.json", "t.json"), &files(&["s.json", "t.json"]));
    checkpoint(&inside, &good).unwrap();
    for bad in ["../../x", "/etc/passwd", "a/b", ".", "..", "", "a/", "nul\0"] {
        for manifest in [
            manifest(&object(bad, "s.json", "t.json"), &files(&["s.json", "t.json"])),
            manifest(&object("custom", bad, "t.json"), &files(&[bad, "t.json"])),
            manifest(&object("custom", "s.json", bad), &files(&["s.json", bad])),
            manifest(&object("custom", "s.json", "t.json"), &files(&["s.json", "t.json", bad])),
        ] {
            let manifest = manifest.replace("\\0", "\\u0000");
            let error = checkpoint(&inside, &manifest).unwrap_err();
            assert!(matches!(error, Error::Damaged { .. }), "{bad:?}: {error}");
            assert!(error.to_string().contains("not a file name"), "{bad:?}: {error}");
        }
    }
    // The manifest must not be one of its files, and two objects must not share files.
    let error = checkpoint(&inside, &manifest("[]", &files(&[MANIFEST]))).unwrap_err();
    assert!(error.to_string().contains("names itself"), "{error}");
    let one = r#"{"kind":"custom","name":"custom"}"#;
    let error = checkpoint(&inside, &manifest(&format!("[{one},{one}]"), "{}")).unwrap_err();
    assert!(error.to_string().contains("two objects `custom`"), "{error}");
}

#[test]
fn a_foreign_like_writes_nothing_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let like = folder.path().join("x/y/like");
    let objects = r#"[{"kind":"model","name":"../../gift"}]"#;
    fs::create_dir_all(&like).unwrap();
    let _ = checkpoint(&like, &manifest(objects, "{}"));
    let from = folder.path().join("in.pth");
    fs::write(&from, weights(1, &[])).unwrap();
    let to = folder.path().join("x/y/out");
    let error = convert_like(&from, &to, &like, &[]).unwrap_err().to_string();
    assert!(error.contains("not a file name"), "{error}");
    assert_eq!(names(folder.path()), ["in.pth", "x"]);
    assert_eq!(names(&folder.path().join("x")), ["y"]);
    assert_eq!(names(&folder.path().join("x/y")), ["like"]);
}

#[test]
fn names_in_an_index_stay_in_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors.index.json");
    for bad in ["../model.safetensors", "/etc/passwd", "a/b", "..", ""] {
        fs::write(&path, format!(r#"{{"weight_map":{{"w":{bad:?}}}}}"#)).unwrap();
        for error in [Index::read(&path).unwrap_err(), read_weights(folder.path()).unwrap_err()] {
            assert!(matches!(error, Error::Damaged { .. }), "{error}");
            assert!(error.to_string().contains("not a file name"), "{error}");
        }
    }
}

#[test]
fn sizes_in_a_manifest_cost_nothing() {
    let folder = tempfile::tempdir().unwrap();
    // Two files that claim u64::MAX bytes and do not exist.
    let facts = format!(r#"{{"bytes":{},"crc32":"00000000"}}"#, u64::MAX);
    let files = format!(r#"{{"a":{facts},"b":{facts}}}"#);
    let error = checkpoint(folder.path(), &manifest("[]", &files)).unwrap_err();
    assert!(error.to_string().contains("is missing"), "{error}");
    let read = Manifest::read(folder.path()).unwrap();
    assert_eq!(read.bytes(), u64::MAX);

    let small = folder.path().join("small");
    fs::write(&small, "x").unwrap();
    let facts = FileFacts { bytes: u64::MAX, crc32: "00000000".into() };
    let error = verify_file(&small, &facts).unwrap_err();
    assert!(error.to_string().contains("it has 1 bytes"), "{error}");
}

/// Writes a model with one tensor `w`, of which the manifest's entry is given, and a file of two floats.
fn model(folder: &Path, mesh: &str, entry: &str) -> Result<Checkpoint, Error> {
    let file = folder.join("model.safetensors");
    fs::create_dir_all(folder).unwrap();
    let mut bytes = br#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#.to_vec();
    bytes.splice(0..0, (bytes.len() as u64).to_le_bytes());
    bytes.extend([0; 8]);
    fs::write(&file, &bytes).unwrap();
    let facts = serde_json::to_string(&FileFacts::of(&file, false).unwrap()).unwrap();
    let manifest = manifest(
        &format!(
            r#"[{{"kind":"model","name":"model","tensor_files":["model.safetensors"],"tensors":{{"w":{entry}}}}}]"#
        ),
        &format!(r#"{{"model.safetensors":{facts}}}"#),
    );
    checkpoint(folder, &manifest.replace(r#"{"name":"data","size":1}"#, mesh))
}

#[test]
fn a_manifest_that_contradicts_itself_or_its_files_is_refused() {
    const MESH: &str = r#"{"name":"data","size":1}"#;
    let folder = tempfile::tempdir().unwrap();
    let chunk = |key: &str, offset: &str, shape: &str| {
        format!(r#"{{"file":"model.safetensors"{key},"offset":{offset},"shape":{shape}}}"#)
    };
    let entry = |shape: &str, placements: &str, chunks: &[&str]| {
        let chunks = chunks.join(",");
        format!(
            r#"{{"dtype":"F32","shape":{shape},"placements":{placements},"chunks":[{chunks}]}}"#
        )
    };
    let whole = chunk("", "[0]", "[2]");
    let replicated = r#"["replicate"]"#;
    let good = entry("[2]", replicated, &[&whole]);
    let checkpoint = model(folder.path(), MESH, &good).unwrap();
    assert!(checkpoint.verify().is_empty());
    let object = &checkpoint.manifest().objects[0];
    assert_eq!(checkpoint.chunks(object).unwrap()["w"][0].info.shape, [2]);

    // Fails when the checkpoint is opened.
    let other = chunk(r#","key":"v""#, "[1]", "[2]");
    let max = format!("[{}]", u64::MAX);
    let two = format!("{MESH},{MESH}");
    let seven = r#"{"name":"data","size":7}"#;
    let huge = format!(r#"{{"name":"a","size":{0}}},{{"name":"b","size":{0}}}"#, usize::MAX);
    for (mesh, entry, expected) in [
        (MESH, entry("[3]", replicated, &[&whole, &other]), "overlap"),
        (MESH, entry("[3]", replicated, &[&whole]), "leave a gap"),
        (MESH, entry("[2]", replicated, &[&whole, &other]), "out of range"),
        (MESH, entry("[2]", replicated, &[&chunk("", &max, "[2]")]), "out of range"),
        (MESH, entry(&max, replicated, &[&whole]), "64 bits"),
        (MESH, entry("[2]", replicated, &[]), "no chunks"),
        (MESH, entry("[2]", r#"[{"shard":1}]"#, &[&whole]), "dimension 1"),
        (MESH, entry("[2]", r#"["replicate","replicate"]"#, &[&whole]), "2 placements"),
        (
            MESH,
            entry("[2]", replicated, &[&whole.replace("model.", "other.")]),
            "not among its files",
        ),
        (MESH, entry("[4]", replicated, &[&whole, &chunk("", "[2]", "[2]")]), "another chunk"),
        (&two, good.clone(), "two axes"),
        (seven, good.clone(), "not one of 1 rank"),
        (&huge, good.clone(), "not one of 1 rank"),
    ] {
        let error = model(folder.path(), mesh, &entry).unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }), "{expected}: {error}");
        assert!(error.to_string().contains(expected), "{expected}: {error}");
    }

    // Fails when the manifest is compared with the headers, before a tensor is read.
    for (entry, expected) in [
        (entry("[3]", replicated, &[&chunk("", "[0]", "[3]")]), "it was written as [3] of F32"),
        (good.replace("F32", "F16"), "it was written as [2] of F16"),
        (entry("[2]", replicated, &[&chunk(r#","key":"v""#, "[0]", "[2]")]), "it lacks `v`"),
        (
            entry("[4]", replicated, &[&whole, &chunk(r#","key":"v""#, "[2]", "[2]")]),
            "it lacks `v`",
        ),
    ] {
        let checkpoint = model(folder.path(), MESH, &entry).unwrap();
        let error = checkpoint.chunks(&checkpoint.manifest().objects[0]).unwrap_err();
        assert!(error.to_string().contains(expected), "{expected}: {error}");
        assert_eq!(checkpoint.verify()[0].to_string(), error.to_string());
    }
}

#[test]
fn a_sharded_tensor_can_be_told_and_is_not_misread() {
    use brigade_checkpoint::convert::{Target, convert};
    use brigade_checkpoint::layout::{Chunk, MeshAxis, Object, Placement, Staging, TensorEntry};
    use brigade_checkpoint::{Dtype, FileName, TensorInfo};
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("sharded");
    let staging = Staging::create(&target, "test").unwrap();
    let mut object = Object::new("model", FileName::new("model").unwrap());
    let mut manifest = Manifest::new("a later Brigade", 4);
    manifest.mesh = vec![
        MeshAxis { name: "replica".into(), size: 2 },
        MeshAxis { name: "shard".into(), size: 2 },
    ];
    let mut chunks = Vec::new();
    for rank in 0..2u64 {
        let file = FileName::new(format!("shard-{rank}.safetensors")).unwrap();
        let info = TensorInfo { dtype: Dtype::F32, shape: vec![2, 3] };
        let key = format!("w@{},0", rank * 2);
        let laid =
            brigade_checkpoint::safetensors::layout(Path::new("shard"), &[(&key, info)]).unwrap();
        let values = (rank as f32 + 1.0).to_le_bytes().repeat(6);
        fs::write(staging.path().join(&file), [laid.header, values].concat()).unwrap();
        let facts = FileFacts::of(&staging.path().join(&file), false).unwrap();
        manifest.files.insert(file.clone(), facts);
        object.tensor_files.push(file.clone());
        chunks.push(Chunk { file, key: Some(key), offset: vec![rank * 2, 0], shape: vec![2, 3] });
    }
    let placements = vec![Placement::Replicate, Placement::Shard(0)];
    let entry = TensorEntry { dtype: Dtype::F32, shape: vec![4, 3], placements, chunks };
    object.tensors.insert("w".into(), entry);
    manifest.objects.push(object);
    staging.commit(&manifest, false).unwrap();

    let checkpoint = Checkpoint::open(&target).unwrap();
    assert!(checkpoint.verify().is_empty(), "{:?}", checkpoint.verify());
    assert_eq!(checkpoint.manifest().objects, manifest.objects);
    let object = &checkpoint.manifest().objects[0];
    let stored = &checkpoint.stored(object).unwrap()["w"];
    assert_eq!((stored.info.shape.clone(), stored.chunks.len()), (vec![4, 3], 2));
    // Rows are joined in order, regardless of the order of the chunks.
    let to = folder.path().join("out.safetensors");
    convert(&target, &to, Target::Weights(&Safetensors)).unwrap();
    let weights = brigade_checkpoint::WeightsReader::open(&to).unwrap();
    let tensor = weights.get("w").unwrap();
    assert_eq!(tensor.info().shape, [4, 3]);
    let mut bytes = vec![0; 48];
    tensor.read(&brigade_checkpoint::Region::whole(&[4, 3]), &mut bytes).unwrap();
    let expected: Vec<u8> = [1f32, 2.0].iter().flat_map(|it| it.to_le_bytes().repeat(6)).collect();
    assert_eq!(bytes, expected);
}
