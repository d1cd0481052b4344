//! Tests of device maps.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

use brigade_checkpoint::Dtype;

use super::{
    DeviceMap, DeviceMapError, FreeMemory, MappedTensor, ModuleTree, Place, Placement, Reserve,
};

mod accelerate;
mod properties;

/// Returns a transformer with a tied head: an embedding of 800 bytes, 4 blocks of 400 with a buffer of 40, a norm of
/// 40.
fn transformer() -> ModuleTree {
    let parameter = |name: String, size| MappedTensor::parameter(name, &[size], Dtype::F32);
    let mut tensors = vec![parameter("model.embed.weight".to_owned(), 200)];
    for block in 0..4 {
        for (name, size) in [("attention.weight", 40), ("mlp.weight", 50)] {
            tensors.push(parameter(format!("model.layers.{block}.{name}"), size));
        }
        let name = format!("model.layers.{block}.attention.mask");
        tensors.push(MappedTensor::buffer(name, &[10], Dtype::F32));
    }
    tensors.push(parameter("model.norm.weight".to_owned(), 10));
    tensors.push(MappedTensor::buffer("model.inv_freq", &[10], Dtype::F32));
    let head = parameter("lm_head.weight".to_owned(), 200);
    tensors.push(head.tied_to("model.embed.weight"));
    ModuleTree::new(tensors, (0..4).map(|block| format!("model.layers.{block}"))).unwrap()
}

fn entries(placement: &Placement) -> Vec<(&str, Place)> {
    placement.entries().iter().map(|(name, place)| (name.as_str(), *place)).collect()
}

fn resolve(map: &DeviceMap) -> Result<Placement, DeviceMapError> {
    map.resolve(&transformer(), &FreeMemory::unknown())
}

fn message(map: &DeviceMap) -> String {
    resolve(map).unwrap_err().to_string()
}

#[test]
fn layers_go_to_devices_in_order_and_the_first_keeps_room_for_the_largest() {
    let map = DeviceMap::sequential().max_memory([("cuda:0", "2100"), ("cpu", "1M")]);
    let placement = resolve(&map).unwrap();
    // The embedding with the head, and one block of 400. 800 bytes are kept for the largest layer at that time.
    let places: Vec<_> = (0..4)
        .map(|block| placement.place_of(&format!("model.layers.{block}.mlp.weight")).unwrap())
        .collect();
    assert_eq!(placement.place_of("lm_head.weight"), Some(Place::Cuda(0)));
    assert_eq!(places, [Place::Cuda(0), Place::Cuda(0), Place::Cpu, Place::Cpu]);
    // `model` was split, and Accelerate would have no entry for its buffer.
    assert_eq!(placement.place_of("model.inv_freq"), Some(Place::Cuda(0)));
    let notes = placement.notes();
    assert_eq!(notes, ["model.inv_freq is on cuda:0, with the first layer of model"]);
    let moved = placement.bytes_moved_from(Place::Cpu);
    assert_eq!(moved, 2 * 400 + 40);
}

#[test]
fn all_in_one_place_is_one_entry() {
    let placement = resolve(&DeviceMap::auto().max_memory([("cpu", "1M")])).unwrap();
    assert_eq!(entries(&placement), [("", Place::Cpu)]);
    assert_eq!(placement.bytes(), [(Place::Cpu, 800 + 1600 + 80), (Place::Disk, 0)]);
}

#[test]
fn a_name_is_not_a_prefix_of_a_longer_one() {
    let tensors = ["a.w", "a.weight"].map(|name| MappedTensor::parameter(name, &[1], Dtype::F32));
    let tree = ModuleTree::new(tensors, [""; 0]).unwrap();
    let map = DeviceMap::by_hand([("a.w", "cpu"), ("a.weight", "disk")]);
    let placement = map.resolve(&tree, &FreeMemory::unknown()).unwrap();
    assert_eq!(placement.place_of("a.weight"), Some(Place::Disk));
    assert_eq!(placement.place_of("a.w"), Some(Place::Cpu));
    assert_eq!(placement.place_of("a.we"), None);
}

#[test]
fn by_hand_the_longest_name_decides_and_names_go_before_patterns() {
    let map = DeviceMap::by_hand([
        ("", "cpu"),
        ("model.layers.*", "disk"),
        ("model.layers.1", "cuda:1"),
        ("model.layers.?.mlp", "gpu"),
    ]);
    let placement = resolve(&map).unwrap();
    let table = [
        ("model.embed.weight", Place::Cpu),
        ("model.layers.0.attention.weight", Place::Disk),
        ("model.layers.1.attention.mask", Place::Cuda(1)),
        ("model.layers.1.mlp.weight", Place::Cuda(0)),
    ];
    for (name, place) in table {
        assert_eq!(placement.place_of(name), Some(place), "{name}");
    }
}

#[test]
fn maps_by_hand_that_do_not_suit_the_model_are_refused() {
    let table = [
        (
            vec![("model.layer", "cpu"), ("", "cpu")],
            "the device map names `model.layer`, which the model does not have; near it are model.layers, \
             model.layers.0, model.layers.1",
        ),
        (
            vec![("model.layers", "cpu"), ("lm_head", "cpu")],
            "the device map has no place for model.embed.weight, model.norm.weight, model.inv_freq: name them, or give \
             all that is left a place with the empty name",
        ),
        (
            vec![("model", "cpu"), ("lm_head", "disk")],
            "model.embed.weight and lm_head.weight are one tied weight, and the device map puts one on cpu and the other \
             on disk: give both the same place",
        ),
        (
            vec![("", "cpu"), ("model.layers.*", "disk"), ("*.layers.0", "cpu")],
            "the patterns `model.layers.*` and `*.layers.0` of the device map give model.layers.0 two places: make one of \
             them narrower",
        ),
        (vec![("", "mps")], "`mps` is not a place for weights: write cuda:N, cpu or disk"),
        (vec![("", "cuda:+1")], "`cuda:+1` is not a place for weights: write cuda:N, cpu or disk"),
    ];
    for (places, expected) in table {
        assert_eq!(message(&DeviceMap::by_hand(places)), expected);
    }
    let map = DeviceMap::by_hand([("", "cpu")]).max_memory([("cpu", "1K")]);
    assert_eq!(
        message(&map),
        "the device map puts 2.4 KiB on cpu, whose limit is 1.0 KiB: move a layer to another place, or raise the limit"
    );
}

#[test]
fn devices_and_limits_that_do_not_exist_are_refused() {
    let free = FreeMemory::new([(Place::Cuda(0), 1 << 20), (Place::Cpu, 1 << 20)]);
    let on = |map: DeviceMap| map.resolve(&transformer(), &free).unwrap_err().to_string();
    let expected = "the device map uses cuda:1, which does not exist: there are cuda:0, cpu, disk";
    assert_eq!(on(DeviceMap::auto().max_memory([("cuda:1", "1G")])), expected);
    assert_eq!(on(DeviceMap::by_hand([("", "1")])), expected);
    let limits = |limits: &[(&str, &str)]| {
        message(&DeviceMap::auto().max_memory(limits.iter().map(|(a, b)| (*a, *b))))
    };
    assert_eq!(
        limits(&[("cpu", "lots")]),
        "the limit `lots` of cpu is not a number of bytes such as 80G, 80GiB or 80GB"
    );
    assert_eq!(
        limits(&[("cpu", "")]),
        "the limit `` of cpu is empty, and free memory is not known here"
    );
    assert_eq!(
        limits(&[("0", "1G"), ("cuda", "1G")]),
        "cuda:0 has two limits: leave one of them out"
    );
    assert_eq!(
        message(&DeviceMap::auto()),
        "the device map has no limits, and free memory is not known here: give a limit for each device"
    );
}

#[test]
fn where_the_largest_layer_cannot_be_computed_the_smallest_limit_is_told() {
    for rule in [DeviceMap::auto(), DeviceMap::fill()] {
        for place in ["cuda:0", "cpu"] {
            let map = rule.clone().reserve(Reserve { device: 100, unit: 0 });
            let told = format!(
                "{place} is limited to 850 B, and model.embed with its 800 B would have to be moved there to be computed: \
                 give {place} at least 900 B (900 bytes)"
            );
            assert_eq!(message(&map.clone().max_memory([(place, "850")])), told);
            resolve(&map.max_memory([(place, "900")])).unwrap();
        }
    }
}

#[test]
fn limits_that_are_not_given_are_what_is_free() {
    let free = FreeMemory::new([(Place::Cuda(0), 4000), (Place::Cpu, 1 << 20)]);
    let placement = DeviceMap::auto().resolve(&transformer(), &free).unwrap();
    assert_eq!(placement.limit(Place::Cuda(0)), Some(4000));
    let notes = ["limit of cuda:0: 3.9 KiB, which is free", "limit of cpu: 1.0 MiB, which is free"];
    assert_eq!(placement.notes(), notes);
    // Nine tenths: 3600 bytes hold the model of 2480 with 800 of room.
    assert_eq!(entries(&placement), [("", Place::Cuda(0))]);
}

#[test]
fn caches_and_activations_are_reserved() {
    let map = DeviceMap::sequential().max_memory([("cuda:0", "3200"), ("cpu", "1M")]);
    let on_gpu = |map: &DeviceMap| {
        let placement = resolve(map).unwrap();
        placement.layers().iter().filter(|it| it.place.is_gpu() && it.is_unit).count()
    };
    assert_eq!(on_gpu(&map), 4);
    assert_eq!(on_gpu(&map.clone().reserve(Reserve { device: 900, unit: 0 })), 2);
    // The caches of offloaded units are on the GPU that computes them.
    assert_eq!(on_gpu(&map.clone().reserve(Reserve { device: 0, unit: 200 })), 2);
    assert_eq!(on_gpu(&map.clone().reserve(Reserve { device: 500, unit: 400 })), 0);
    let placement = resolve(&map.clone().reserve(Reserve { device: 50, unit: 200 })).unwrap();
    assert_eq!(placement.reserved(Place::Cuda(0)), 50 + 4 * 200);
    assert_eq!(placement.reserved(Place::Cpu), 0);
    let error = message(&map.reserve(Reserve { device: 0, unit: 700 }));
    assert!(error.contains("give cuda:0 at least") && error.contains("(3600 bytes)"), "{error}");
}

#[test]
fn without_a_gpu_the_caches_of_layers_on_the_disk_are_in_the_hosts_memory() {
    let map = DeviceMap::fill().max_memory([("cpu", "3200")]);
    let on_cpu = |reserve: Reserve| {
        let placement = resolve(&map.clone().reserve(reserve)).unwrap();
        let bytes: u64 = placement.bytes()[0].1;
        let largest = placement.layers().iter().filter(|it| it.place == Place::Disk);
        let largest = largest.map(|it| it.bytes).max().unwrap_or(0);
        assert!(bytes + largest + placement.reserved(Place::Cpu) <= 3200);
        placement.layers().iter().filter(|it| it.place == Place::Cpu && it.is_unit).count()
    };
    assert_eq!(on_cpu(Reserve::default()), 4);
    assert!(on_cpu(Reserve { device: 0, unit: 400 }) < 4);
}

#[test]
fn offloaded_caches_leave_room_on_a_gpu_and_take_it_from_the_hosts_memory() {
    let reserve = Reserve { device: 100, unit: 200 };
    let map = DeviceMap::sequential().max_memory([("cuda:0", "3200"), ("cpu", "1M")]);
    let map = map.reserve(reserve);
    let on_gpu = |placement: &Placement| {
        placement.layers().iter().filter(|it| it.place.is_gpu() && it.is_unit).count() as u64
    };
    let kept = resolve(&map).unwrap();
    assert!(on_gpu(&kept) < 4 && !kept.offloads_caches());
    let offloaded = resolve(&map.clone().offload_caches(true)).unwrap();
    assert!(offloaded.offloads_caches() && on_gpu(&offloaded) >= on_gpu(&kept));
    // Room for the caches of two units that come and go.
    let gpu = on_gpu(&offloaded);
    assert_eq!(offloaded.reserved(Place::Cuda(0)), 100 + 200 * gpu + (200 * (4 - gpu)).min(400));
    assert_eq!(offloaded.reserved(Place::Cpu), 200 * (4 - gpu));
    // Those of weights on the disk are in the host's memory, too, which has less room for weights.
    let map = map.max_memory([("cuda:0", "2100"), ("cpu", "1300")]).offload_caches(true);
    let offloaded = resolve(&map).unwrap();
    let [gpu, host] = [Place::Cuda(0), Place::Cpu].map(|place| {
        offloaded.layers().iter().filter(|it| it.place == place && it.is_unit).count() as u64
    });
    assert!(gpu + host < 4, "{offloaded}");
    assert_eq!(offloaded.reserved(Place::Cpu), 200 * (4 - gpu));
    for (place, bytes) in offloaded.bytes() {
        let limit = offloaded.limit(place).unwrap_or(u64::MAX);
        assert!(bytes + offloaded.reserved(place) <= limit, "{offloaded}");
    }
    // Without a GPU they are where they are computed.
    let map = DeviceMap::fill().max_memory([("cpu", "3200")]).reserve(reserve);
    let [kept, offloaded] = [false, true].map(|is_on| {
        let placement = resolve(&map.clone().offload_caches(is_on)).unwrap();
        (placement.reserved(Place::Cpu), placement.bytes())
    });
    assert_eq!(kept, offloaded);
}

#[test]
fn maps_by_hand_keep_what_is_reserved() {
    let map = DeviceMap::by_hand([("", "cuda:0")]);
    let map = map.reserve(Reserve { device: 20, unit: 100 });
    resolve(&map.clone().max_memory([("cuda:0", "2900")])).unwrap();
    let error = resolve(&map.max_memory([("cuda:0", "2899")])).unwrap_err();
    let is_over = matches!(error, DeviceMapError::OverLimit { bytes: 2900, limit: 2899, .. });
    assert!(is_over, "{error:?}");
}

#[test]
fn fill_uses_a_device_that_the_rules_in_order_leave_empty() {
    // The next block of 400 bytes does not fit on the second GPU, and the rules never return to a device.
    let limits = [("cuda:0", "1230"), ("cuda:1", "100"), ("cpu", "1M")];
    let in_order = resolve(&DeviceMap::sequential().max_memory(limits)).unwrap();
    let filled = resolve(&DeviceMap::fill().max_memory(limits)).unwrap();
    assert_eq!(in_order.bytes()[..2], [(Place::Cuda(0), 840), (Place::Cuda(1), 0)]);
    assert_eq!(filled.bytes()[..2], [(Place::Cuda(0), 800), (Place::Cuda(1), 80)]);
    let note = "cuda:1 is left empty: its next layer needs a limit of 400 B (400 bytes)";
    assert!(in_order.notes().contains(&note.to_owned()), "{:?}", in_order.notes());
}

#[test]
fn a_large_model_with_layers_of_many_sizes_is_placed_at_once() {
    let layer = |number: u64| {
        let name = format!("layers.{number}.weight");
        MappedTensor::parameter(name, &[1_000_003 + 7919 * (number * number % 977)], Dtype::F32)
    };
    let tree = ModuleTree::new((0..200).map(layer), [""; 0]).unwrap();
    let limits = [("cuda:0", "350M"), ("cuda:1", "50M"), ("cpu", "100M")];
    for rule in [DeviceMap::fill(), DeviceMap::balanced(), DeviceMap::sequential()] {
        let placement = rule.max_memory(limits).resolve(&tree, &FreeMemory::unknown()).unwrap();
        assert_eq!(placement.layers().len(), 200);
        assert!(placement.bytes_moved_from(Place::Disk) > 0);
    }
}

#[test]
fn a_map_is_written_and_read_as_accelerates_json() {
    let limits = [("cuda:0", "2100"), ("cpu", "1M")];
    let placement = resolve(&DeviceMap::sequential().max_memory(limits)).unwrap();
    let json = serde_json::to_string(&placement).unwrap();
    assert!(
        json.contains("\"model.layers.0\":0") && json.contains("\"model.norm\":\"cpu\""),
        "{json}"
    );
    let again = resolve(&DeviceMap::from_json(&json).unwrap()).unwrap();
    for tensor in transformer().tensors() {
        assert_eq!(
            again.place_of(&tensor.name),
            placement.place_of(&tensor.name),
            "{}",
            tensor.name
        );
    }
    let wrong = DeviceMap::from_json("{\"a\": [1]}").unwrap_err().to_string();
    assert_eq!(
        wrong,
        "not a device map in JSON: the place of a is [1]; write an object of names and places such as \
         {\"lm_head\": \"cpu\"}"
    );
}

#[test]
fn equal_layers_are_one_line() {
    let limits = [("cuda:0", "2100"), ("cpu", "1M")];
    let placement = resolve(&DeviceMap::sequential().max_memory(limits)).unwrap();
    let expected = "\
layer                     place        bytes
model.embed               cuda:0       800 B
model.layers.0-1          cuda:0       400 B each, 800 B in all
model.layers.2-3          cpu          400 B each, 800 B in all
model.norm                cpu           40 B
model.inv_freq            cuda:0        40 B
lm_head                   cuda:0         0 B

cuda:0     1.6 KiB of 2.1 KiB
cpu          840 B of 1.0 MiB
disk           0 B
note: model.inv_freq is on cuda:0, with the first layer of model
for each token 840 B from cpu come to cuda:0
";
    assert_eq!(placement.to_string(), expected);
}

#[test]
fn lists_that_are_not_a_model_are_refused() {
    let tensor = |name: &str| MappedTensor::parameter(name, &[1], Dtype::F32);
    let error = |tensors: Vec<MappedTensor>, units: &[&str]| {
        ModuleTree::new(tensors, units.iter().copied()).unwrap_err().to_string()
    };
    assert_eq!(error(vec![], &[]), "there are no tensors to place");
    assert_eq!(error(vec![tensor("")], &[]), "a tensor of shape [1] has no name");
    assert_eq!(error(vec![tensor("a"), tensor("a")], &[]), "two tensors have the name a");
    assert_eq!(
        error(vec![tensor("a.b"), tensor("a")], &[]),
        "a is the name of both a tensor and a module with tensors"
    );
    assert_eq!(
        error(vec![tensor("a"), tensor("b").tied_to("c")], &[]),
        "tensor b is tied to c, which is not an untied tensor of the model"
    );
    assert_eq!(
        error(vec![tensor("a.b")], &["c"]),
        "the model has no module c, which is named as a unit"
    );
    let huge = ModuleTree::new([MappedTensor::parameter("a", &[1 << 62, 4], Dtype::F32)], [""; 0]);
    let map = DeviceMap::by_hand([("", "cpu")]);
    let too_large = map.resolve(&huge.unwrap(), &FreeMemory::unknown()).unwrap_err();
    assert_eq!(too_large.to_string(), "with tensor a the model has more bytes than can be counted");
}
