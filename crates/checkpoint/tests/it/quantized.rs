//! Files of quantized weights: Brigade's own layout, and files packed by GPTQ, AWQ and bitsandbytes
//! (`fixtures/quantized/make_quantized.py`).

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use brigade_checkpoint::convert::{QuantizeOptions, quantize};
use brigade_checkpoint::safetensors::{Header, layout_with};
use brigade_checkpoint::{
    Dtype, Error, PackedPart, PackedWeight, QuantizedDescription, QuantizedFormat, Region,
    TensorInfo, WeightsReader, check_quantization_method,
};

const FIXTURES: &str = "tests/fixtures/quantized";

fn fixture(name: &str) -> PathBuf {
    Path::new(FIXTURES).join(name)
}

fn values(weights: &WeightsReader, name: &str, region: &Region) -> Vec<f32> {
    let mut bytes = vec![0; 4 * region.elements() as usize];
    weights.get(name).unwrap().read(region, &mut bytes).unwrap();
    bytes.as_chunks().0.iter().map(|&value| f32::from_le_bytes(value)).collect()
}

/// Returns a region of the values of a matrix.
fn part(values: &[f32], columns: usize, region: &Region) -> Vec<f32> {
    let rows = region.offset[0]..region.offset[0] + region.shape[0];
    let first = region.offset[1] as usize;
    let row = |row: u64| &values[row as usize * columns + first..][..region.shape[1] as usize];
    rows.flat_map(|at| row(at).to_vec()).collect()
}

#[test]
fn weights_of_other_packages_are_read_exactly() {
    for (name, shape, packed) in [
        ("gptq4", [32, 64], Some(QuantizedFormat::Int4 { group: 32 })),
        ("gptq4_asymmetric", [32, 64], Some(QuantizedFormat::Int4 { group: 16 })),
        ("gptq4_act_order", [32, 64], Some(QuantizedFormat::Int4 { group: 32 })),
        ("gptq4_v2", [32, 64], Some(QuantizedFormat::Int4 { group: 32 })),
        ("gptq8", [32, 64], Some(QuantizedFormat::Int8)),
        ("gptq8_groups", [32, 64], None),
        ("awq", [32, 64], Some(QuantizedFormat::Int4 { group: 32 })),
        ("nf4", [40, 100], None),
        ("nf4_nested", [40, 100], None),
        ("fp4", [40, 100], None),
        ("int8", [24, 40], None),
    ] {
        let weights = WeightsReader::open(fixture(name)).unwrap();
        let names: Vec<&str> = weights.tensors().map(|tensor| tensor.name()).collect();
        assert_eq!(names, ["fc.weight"], "{name}");
        let tensor = weights.get("fc.weight").unwrap();
        assert_eq!(tensor.info(), &TensorInfo { dtype: Dtype::F32, shape: shape.to_vec() });
        let expected = WeightsReader::open(fixture(name).join("expected.safetensors")).unwrap();
        let whole = Region::whole(&shape);
        let expected = values(&expected, "fc.weight", &whole);
        let found = values(&weights, "fc.weight", &whole);
        let largest = expected.iter().fold(0f32, |most, value| most.max(value.abs()));
        // Nested scales are a product and a sum, which bitsandbytes fuses where the processor supports it.
        let allowed = if name == "nf4_nested" { 1e-6 * largest } else { 0.0 };
        for (place, (value, expected)) in found.iter().zip(&expected).enumerate() {
            assert!((value - expected).abs() <= allowed, "{name} {place}: {value} {expected}");
        }
        let columns = shape[1] as usize;
        for region in [
            whole.narrow(0, 5, 13),
            whole.narrow(1, 7, 22),
            whole.narrow(0, 23, 1),
            whole.narrow(0, 3, 0),
        ] {
            assert_eq!(
                values(&weights, "fc.weight", &region),
                part(&found, columns, &region),
                "{name} {region}"
            );
        }
        let read = tensor.read_packed().unwrap();
        assert_eq!(read.as_ref().map(|packed| packed.format), packed, "{name}");
        if let Some(packed) = read {
            let mut values = vec![0.0; found.len()];
            packed.dequantize(0..packed.rows, &mut values).unwrap();
            assert_eq!(values, expected, "{name}");
            assert_eq!(packed.order.is_some(), name == "gptq4_act_order");
        }
    }
}

/// Writes a weight in Brigade's layout.
fn write(path: &Path, name: &str, packed: &PackedWeight, is_transposed: bool) {
    let mut description = QuantizedDescription::default();
    let parts = description.add_packed(name, packed, is_transposed, None).unwrap();
    write_parts(path, &description, &parts);
}

fn write_parts(path: &Path, description: &QuantizedDescription, parts: &[(String, PackedPart)]) {
    let infos: Vec<_> =
        parts.iter().map(|(name, part)| (name.as_str(), part.info.clone())).collect();
    let layout = layout_with(path, &infos, &HashMap::from([description.to_metadata()])).unwrap();
    let mut bytes = layout.header;
    for place in layout.order {
        bytes.extend(&parts[place].1.bytes);
    }
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_stack_is_read_as_one_tensor_and_by_parts() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let numbers: Vec<f32> = (0..3 * 16 * 64).map(|place| (place as f32 * 0.7).sin()).collect();
    for format in [QuantizedFormat::Int8, QuantizedFormat::Int4 { group: 32 }, QuantizedFormat::Fp8]
    {
        let packed = PackedWeight::quantize(&numbers, 64, format, true).unwrap();
        let mut description = QuantizedDescription::default();
        let mut parts = description.add_packed("experts", &packed, false, Some(3)).unwrap();
        write_parts(&path, &description, &parts);
        let weights = WeightsReader::open(&path).unwrap();
        assert_eq!(weights.tensors().len(), 1);
        let tensor = weights.get("experts").unwrap();
        assert!(tensor.is_quantized() && !tensor.is_transposed());
        assert_eq!(tensor.info().to_string(), "[3, 16, 64] of F32");
        assert_eq!(tensor.read_packed().unwrap().as_ref(), Some(&packed));
        let mut expected = vec![0.0; 3 * 16 * 64];
        packed.dequantize(0..48, &mut expected).unwrap();
        let whole = Region::whole(&[3, 16, 64]);
        assert_eq!(values(&weights, "experts", &whole), expected);
        let region = whole.narrow(0, 1, 2).narrow(1, 4, 5);
        let rows = (1..3).flat_map(|matrix| (4..9).map(move |row| matrix * 16 + row));
        let rows: Vec<f32> =
            rows.flat_map(|row| expected[row * 64..][..64].iter().copied()).collect();
        assert_eq!(values(&weights, "experts", &region), rows);
        // Converted again, the stack stays one.
        let copied = folder.path().join("copied");
        let options =
            QuantizeOptions { format, is_calibrated: false, also: Vec::new(), skip: Vec::new() };
        quantize(&path, &copied, &options).unwrap();
        let copied = WeightsReader::open(&copied).unwrap();
        let copied = copied.get("experts").unwrap().read_packed().unwrap();
        assert_eq!(copied.as_ref(), Some(&packed));
        fs::remove_dir_all(folder.path().join("copied")).unwrap();
        // A matrix is missing, and a number of them that no file has.
        parts.retain(|(name, _)| !name.starts_with("experts.2."));
        write_parts(&path, &description, &parts);
        let error = WeightsReader::open(&path).unwrap_err().to_string();
        assert!(error.contains("`experts.2`"), "{error}");
        let metadata = description
            .to_metadata()
            .1
            .replace(r#""experts":3"#, &format!(r#""experts":{}"#, u64::MAX));
        let infos: Vec<_> =
            parts.iter().map(|(name, part)| (name.as_str(), part.info.clone())).collect();
        let metadata = HashMap::from([(description.to_metadata().0, metadata)]);
        let mut bytes = layout_with(&path, &infos, &metadata).unwrap().header;
        parts.iter().for_each(|(_, part)| bytes.extend(&part.bytes));
        fs::write(&path, bytes).unwrap();
        assert!(WeightsReader::open(&path).is_err());
    }
    let packed = PackedWeight::quantize(&numbers, 64, QuantizedFormat::Int8, true).unwrap();
    for count in [0, 5, u64::MAX] {
        let refused = QuantizedDescription::default().add_packed("w", &packed, false, Some(count));
        assert!(refused.is_err(), "{count}");
    }
}

/// Writes float32 tensors of numbers, and returns these.
fn write_floats(path: &Path, tensors: &[(&str, &[u64])]) -> Vec<Vec<f32>> {
    let infos: Vec<_> = tensors
        .iter()
        .map(|(name, shape)| (*name, TensorInfo { dtype: Dtype::F32, shape: shape.to_vec() }))
        .collect();
    let layout = layout_with(path, &infos, &HashMap::new()).unwrap();
    let numbers: Vec<Vec<f32>> = tensors
        .iter()
        .enumerate()
        .map(|(seed, (_, shape))| {
            let count = shape.iter().product::<u64>();
            (0..count).map(|place| (place as f32 * 0.7 + seed as f32).sin()).collect()
        })
        .collect();
    let mut bytes = layout.header;
    for place in layout.order {
        bytes.extend(numbers[place].iter().flat_map(|number| number.to_le_bytes()));
    }
    fs::write(path, bytes).unwrap();
    numbers
}

#[test]
fn stacked_experts_are_quantised_by_their_rows_and_those_of_another_layout_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let (gate_up, down) = ("h.0.mlp.experts.gate_up_proj", "h.0.mlp.experts.down_proj");
    let options = |skip: &[&str]| QuantizeOptions {
        format: QuantizedFormat::Int8,
        is_calibrated: false,
        also: Vec::new(),
        skip: skip.iter().map(|it| (*it).to_owned()).collect(),
    };
    let numbers = write_floats(&path, &[(gate_up, &[3, 32, 64]), (down, &[3, 64, 16])]);
    let out = folder.path().join("out");
    let report = quantize(&path, &out, &options(&[])).unwrap();
    assert_eq!(report.changed, ["2 weights are stored in int8"]);
    let weights = WeightsReader::open(&out).unwrap();
    for ((name, columns), numbers) in [(gate_up, 64), (down, 16)].into_iter().zip(&numbers) {
        let tensor = weights.get(name).unwrap();
        let expected = PackedWeight::quantize(numbers, columns, QuantizedFormat::Int8, false);
        assert_eq!(tensor.read_packed().unwrap(), Some(expected.unwrap()), "{name}");
    }
    fs::remove_dir_all(&out).unwrap();
    // Chosen by their names.
    let report = quantize(&path, &out, &options(&["*.experts.*"])).unwrap();
    assert_eq!(report.changed, ["0 weights are stored in int8"]);
    let weights = WeightsReader::open(&out).unwrap();
    let whole = Region::whole(&[3, 64, 16]);
    assert_eq!(values(&weights, down, &whole), numbers[1]);
    fs::remove_dir_all(&out).unwrap();
    // Matrices `[in, out]`, and a stack without the other one.
    for tensors in [
        &[(gate_up, &[3, 64, 32][..]), (down, &[3, 16, 64]), ("fc.weight", &[8, 32])][..],
        &[(gate_up, &[3, 32, 64]), ("h.1.mlp.experts.down_proj", &[3, 64, 16])],
    ] {
        let numbers = write_floats(&path, tensors);
        let report = quantize(&path, &out, &options(&[])).unwrap();
        let [_, note] = &report.changed[..] else { panic!("{:?}", report.changed) };
        assert!(
            note.starts_with("2 stacks of experts keep their types, such as h.0.mlp.experts."),
            "{note}"
        );
        let weights = WeightsReader::open(&out).unwrap();
        for ((name, shape), numbers) in tensors.iter().zip(&numbers).take(2) {
            assert_eq!(values(&weights, name, &Region::whole(shape)), *numbers, "{name}");
        }
        fs::remove_dir_all(&out).unwrap();
    }
}

#[test]
fn the_own_layout_comes_back_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let numbers: Vec<f32> = (0..48 * 64).map(|place| (place as f32 * 0.7).sin()).collect();
    for format in [QuantizedFormat::Int8, QuantizedFormat::Int4 { group: 32 }, QuantizedFormat::Fp8]
    {
        let mut packed = PackedWeight::quantize(&numbers, 64, format, true).unwrap();
        for is_transposed in [false, true] {
            write(&path, "fc.weight", &packed, is_transposed);
            let weights = WeightsReader::open(&path).unwrap();
            let tensor = weights.get("fc.weight").unwrap();
            assert!(tensor.is_quantized());
            assert_eq!(tensor.is_transposed(), is_transposed);
            assert_eq!(tensor.read_packed().unwrap().as_ref(), Some(&packed));
            let mut expected = vec![0.0; 48 * 64];
            packed.dequantize(0..48, &mut expected).unwrap();
            let mut shape = vec![48, 64];
            if is_transposed {
                shape.reverse();
                expected =
                    (0..48 * 64).map(|place| expected[place % 48 * 64 + place / 48]).collect();
            }
            assert_eq!(tensor.info().shape, shape);
            let whole = Region::whole(&shape);
            assert_eq!(values(&weights, "fc.weight", &whole), expected);
            let region = whole.narrow(0, 4, 20).narrow(1, 9, 30);
            let columns = shape[1] as usize;
            assert_eq!(values(&weights, "fc.weight", &region), part(&expected, columns, &region));
            // The second time, float32 scales and an order of columns, as from GPTQ.
            packed.scales[0] *= 1.001;
            packed.order = Some((0..64).rev().collect());
        }
    }
}

fn refused(folder: &Path) -> String {
    let error = WeightsReader::open(folder).map(drop).unwrap_err();
    assert!(matches!(error, Error::Damaged { .. } | Error::Unsupported { .. }), "{error}");
    error.to_string()
}

#[test]
fn unknown_methods_and_versions_are_errors_that_name_them() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::copy(fixture("gptq4/model.safetensors"), folder.join("model.safetensors")).unwrap();
    assert!(refused(folder).contains("there is no config.json beside the file"));
    for (config, text) in [
        (r#"{"quant_method": "gptq", "bits": 3}"#, "gptq with 3 bits"),
        (
            r#"{"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}"#,
            "`checkpoint_format` `marlin`",
        ),
        (r#"{"quant_method": "awq", "bits": 4, "version": "gemv"}"#, "`version` `gemv` of AWQ"),
        (r#"{"quant_method": "hqq"}"#, "quantised by `hqq`"),
        // The shape is that of 8 bits then.
        (
            r#"{"quant_method": "gptq", "bits": 8}"#,
            "`fc.weight`: its `qzeros` is [2, 4] of I32, expected [2, 8] of I32",
        ),
        (r#"{"quant_method": 1}"#, "its JSON is wrong"),
    ] {
        let text_of_file = format!(r#"{{"quantization_config": {config}}}"#);
        fs::write(folder.join("config.json"), text_of_file).unwrap();
        let error = refused(folder);
        assert!(error.contains(text), "{error}");
    }
    fs::write(folder.join("config.json"), r#"{"quantization_config": {"quant_method": "hqq"}}"#)
        .unwrap();
    let error = check_quantization_method(folder).unwrap_err().to_string();
    assert!(error.contains("`hqq`") && error.contains("config.json"), "{error}");
    check_quantization_method(&fixture("awq")).unwrap();
    check_quantization_method(Path::new("tests")).unwrap();
}

#[test]
fn parts_that_do_not_fit_are_errors_that_name_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let packed =
        PackedWeight::quantize(&[1.0; 64], 32, QuantizedFormat::Int4 { group: 32 }, false).unwrap();
    // Replaces values in the header's text.
    write(&path, "fc.weight", &packed, false);
    let sound = fs::read(&path).unwrap();
    let replaced = |from: &str, to: &str| {
        assert_eq!(from.len(), to.len());
        let at = sound.windows(from.len()).position(|part| part == from.as_bytes()).unwrap();
        let mut bytes = sound.clone();
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        fs::write(&path, bytes).unwrap();
        refused(&path)
    };
    let shape = r#"\"shape\":[2,32]"#;
    let error = replaced(shape, r#"\"shape\":[2,96]"#);
    assert!(
        error.contains("`fc.weight`: its `packed` is [2, 16] of U8, expected [2, 48] of U8"),
        "{error}"
    );
    let error = replaced(shape, r#"\"shape\":[0,32]"#);
    assert!(error.contains("a weight of 0 x 32"), "{error}");
    let error = replaced("int4:32", "int4:64");
    assert!(error.contains("groups of 64 columns do not divide 32 columns"), "{error}");
    let error = replaced("int4:32", "int9:32");
    assert!(error.contains("unknown format `int9:32`"), "{error}");
    let error = replaced(r#"\"version\":1"#, r#"\"version\":7"#);
    assert!(error.contains("version 7 of the layout"), "{error}");
    let error = replaced(r#""fc.weight.zeros""#, r#""fc.weight.other""#);
    assert!(error.contains("its tensor `zeros` is missing"), "{error}");
    let file = fs::File::open(&path).unwrap();
    assert!(Header::read(&path, &file).is_ok());
}
