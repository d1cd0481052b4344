//! State dictionaries of TorchScript archives, written by `torch.jit.save`.
//!
//! The pickle of such an archive is a tree of modules with their attributes. The code next to it lists which of these
//! are parameters and buffers. Two lines of each class are read:
//!
//! ```text
//! class Linear(Module):
//!   __parameters__ = ["weight", "bias", ]
//!   __buffers__ = []
//! ```

use std::collections::{HashMap, HashSet};

use super::archive::Archive;
use super::pickle::{Dialect, Node, Pickle, Value as Raw};
use super::{FREE_BYTES, MAX_DEPTH, Quantizer, StoredTensor, TreeBuilder};
use crate::fault::Fault;
use crate::value::Value;

/// The module of an archive, with its pickle not yet interpreted.
#[derive(Debug)]
pub(super) struct Script {
    pickle: Vec<u8>,
    /// Pickle of a tuple of the tensors that the code refers to.
    constants: Vec<u8>,
    /// Classes by module and name: `__torch__.torch.nn.modules.linear.Linear`.
    classes: HashMap<String, Class>,
}

/// A class of modules. The names are in the order of `state_dict()`.
#[derive(Debug, Default)]
struct Class {
    parameters: Vec<String>,
    /// Names of buffers. `None` in archives before PyTorch 1.5, which do not distinguish buffers from other tensors.
    buffers: Option<Vec<String>>,
}

impl Script {
    /// Reads the pickles and the code of an archive that has a `constants.pkl`.
    pub(super) fn read(archive: &Archive, folder: &str) -> Result<Self, Fault> {
        let code = format!("{folder}/code/");
        let files = archive.names().filter_map(|name| {
            let module = name.strip_prefix(&code)?.strip_suffix(".py")?;
            Some((name.to_owned(), module.replace('/', ".")))
        });
        let mut files: Vec<_> = files.collect();
        files.sort();
        let mut classes = HashMap::new();
        // Limit of unpacked code, far more than programs have.
        let mut left = MAX_UNPACKED.saturating_mul(archive.length()).saturating_add(FREE_BYTES);
        for (name, module) in files {
            let text = archive.unpack(&name, left)?;
            left -= text.len() as u64;
            read_classes(&module, &String::from_utf8_lossy(&text), &mut classes);
        }
        Ok(Self {
            pickle: archive.read(&format!("{folder}/data.pkl"))?,
            constants: archive.read(&format!("{folder}/constants.pkl"))?,
            classes,
        })
    }

    /// Returns the parameters and buffers of all modules under the names of `state_dict()`. A frozen module has none:
    /// returns the constants of its code under the names in the code, such as `CONSTANTS.c0`.
    pub(super) fn state_dict(&self) -> Result<Value<StoredTensor>, Fault> {
        let pickle = Pickle::read(&self.pickle, Dialect::Torch)?;
        let mut walk = Walk {
            classes: &self.classes,
            builder: TreeBuilder::new(&pickle, self.pickle.len()),
            tensors: Vec::new(),
        };
        if let Raw::Node(root) = pickle.root() {
            walk.module(root, "", 0)?;
        }
        if walk.tensors.is_empty() {
            return self.constants();
        }
        Ok(Value::Dict(walk.tensors))
    }

    fn constants(&self) -> Result<Value<StoredTensor>, Fault> {
        let pickle = Pickle::read(&self.constants, Dialect::Torch)?;
        let tree = TreeBuilder::new(&pickle, self.constants.len()).plant(pickle.root(), 0)?;
        let Value::Tuple(items) = tree else {
            return Err(Fault::damaged("its constants are not a tuple"));
        };
        let tensors = items.into_iter().enumerate().filter_map(|(place, item)| match item {
            Value::Tensor(mut tensor) => {
                among_constants(&mut tensor);
                Some((format!("CONSTANTS.c{place}"), Value::Tensor(tensor)))
            }
            _ => None,
        });
        Ok(Value::dict(tensors))
    }
}

/// Marks the storages of a tensor as constants.
fn among_constants(tensor: &mut StoredTensor) {
    tensor.storage.key.insert_str(0, CONSTANTS);
    if let Some(Quantizer::PerChannel { scales, zero_points, .. }) = tensor.quantizer.as_deref_mut()
    {
        among_constants(scales);
        among_constants(zero_points);
    }
}

struct Walk<'p, 'a> {
    classes: &'p HashMap<String, Class>,
    builder: TreeBuilder<'p, 'a>,
    tensors: Vec<(Value<StoredTensor>, Value<StoredTensor>)>,
}

impl Walk<'_, '_> {
    fn module(&mut self, index: usize, prefix: &str, depth: usize) -> Result<(), Fault> {
        if depth > MAX_DEPTH {
            return Err(Fault::unsupported(format_args!(
                "its modules lie over {MAX_DEPTH} deep, or contain themselves"
            )));
        }
        let pickle = self.builder.pickle;
        let Some(&Node::Foreign(module, name)) = pickle.node(index) else { return Ok(()) };
        self.builder.count(module.len() + name.len())?;
        let Some(class) = self.classes.get(&format!("{module}.{name}")) else { return Ok(()) };
        let state = match pickle.state(index) {
            Some(Raw::Node(state)) => pickle.node(state),
            _ => None,
        };
        let Some(Node::Dict(state)) = state else { return Ok(()) };
        // A module that is used under many names is visited for each of them.
        let named = class.parameters.len() + class.buffers.as_ref().map_or(0, Vec::len);
        self.builder.visit(state.len() + named, depth)?;
        let attributes: HashMap<&str, usize> = state
            .iter()
            .filter_map(|(key, value)| match (key, value) {
                (Raw::Str(key), Raw::Node(value)) => Some((*key, *value)),
                _ => None,
            })
            .collect();
        let is_tensor = |index: usize| matches!(pickle.node(index), Some(Node::Tensor(_)));
        let buffers: Vec<&str> = match &class.buffers {
            Some(buffers) => buffers.iter().map(String::as_str).collect(),
            None => {
                let parameters: HashSet<&str> =
                    class.parameters.iter().map(String::as_str).collect();
                let names = state.iter().filter_map(|(key, _)| match key {
                    Raw::Str(key) => Some(*key),
                    _ => None,
                });
                names.filter(|name| !parameters.contains(name)).collect()
            }
        };
        for name in class.parameters.iter().map(String::as_str).chain(buffers) {
            if let Some(&value) = attributes.get(name).filter(|index| is_tensor(**index)) {
                let key = self.builder.text(&format!("{prefix}{name}"))?;
                let tensor = self.builder.plant(Raw::Node(value), depth)?;
                self.tensors.push((Value::Str(key), tensor));
            }
        }
        for (key, value) in state {
            if let (Raw::Str(key), Raw::Node(value)) = (key, value)
                && matches!(pickle.node(*value), Some(Node::Foreign(..)))
            {
                // A module that is used under many names counts for each of them.
                let prefix = self.builder.text(&format!("{prefix}{key}."))?;
                self.module(*value, &prefix, depth + 1)?;
            }
        }
        Ok(())
    }
}

/// Adds the module classes of a file of code to `classes`.
fn read_classes(module: &str, text: &str, classes: &mut HashMap<String, Class>) {
    let mut current = None;
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("class ") {
            current = rest.strip_suffix("(Module):").map(|name| {
                let class = classes.entry(format!("{module}.{name}")).or_default();
                *class = Class::default();
                class
            });
        } else if let Some(class) = &mut current {
            if let Some(list) = line.strip_prefix("  __parameters__ = ") {
                class.parameters = quoted(list);
            } else if let Some(list) = line.strip_prefix("  __buffers__ = ") {
                class.buffers = Some(quoted(list));
            }
        }
    }
}

/// Returns the strings of a list: names of attributes, which need no escapes.
fn quoted(list: &str) -> Vec<String> {
    list.split('"').skip(1).step_by(2).map(ToOwned::to_owned).collect()
}

/// Prefix of the keys of storages that are constants of the code.
pub(super) const CONSTANTS: &str = "constants/";
/// Maximum bytes of code per byte of the archive.
const MAX_UNPACKED: u64 = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_read_from_code() {
        let code = "class A(Module):\n  __parameters__ = [\"weight\", \"0\", ]\n  __buffers__ = []\n  weight : Tensor\n\
                    class B(NamedTuple):\n  __parameters__ = [\"x\", ]\n\
                    class C(Module):\n  __parameters__ = []\n  def forward(self) -> Tensor:\n    return self.x\n";
        let mut classes = HashMap::new();
        read_classes("__torch__.m", code, &mut classes);
        let mut names: Vec<_> = classes.keys().map(String::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["__torch__.m.A", "__torch__.m.C"]);
        assert_eq!(classes["__torch__.m.A"].parameters, ["weight", "0"]);
        assert_eq!(classes["__torch__.m.A"].buffers.as_deref(), Some(&[][..]));
        assert_eq!(classes["__torch__.m.C"].buffers, None);
    }

    fn text(text: &str) -> Vec<u8> {
        [b"X".as_slice(), &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
    }

    fn script(pickle: Vec<u8>, constants: Vec<u8>) -> Script {
        let classes = ["__torch__.m.A", "__torch__.m.B"].map(|name| {
            let class = Class { parameters: vec!["weight".into()], buffers: Some(Vec::new()) };
            (name.to_owned(), class)
        });
        Script { pickle, constants, classes: HashMap::from(classes) }
    }

    #[test]
    fn a_module_used_under_many_names_is_not_looked_through_forever() {
        let entries: Vec<u8> =
            (0..1000).flat_map(|i| [text(&i.to_string()), b"N".to_vec()].concat()).collect();
        let inner = [b"c__torch__.m\nB\n)\x81}(".as_slice(), &entries, b"ubq\x01"].concat();
        let read = |uses: usize| {
            let uses: Vec<u8> = (0..uses)
                .flat_map(|i| [text(&format!("m{i}")), b"h\x01".to_vec()].concat())
                .collect();
            let start = b"\x80\x02c__torch__.m\nA\n)\x81}(".as_slice();
            let pickle = [start, &text("first"), &inner, &uses, b"ub."].concat();
            script(pickle, b"\x80\x02).".to_vec()).state_dict()
        };
        assert!(read(4).is_ok());
        let Err(Fault::Unsupported(fact)) = read(5000) else { panic!("it is read") };
        assert!(fact.contains("more than its size allows"), "{fact}");
    }

    #[test]
    fn scales_of_constants_lie_with_the_constants() {
        let storage = |kind: &str, key: &str| {
            let kind = format!("ctorch\n{kind}\n");
            let parts = [b"(".to_vec(), text("storage"), kind.into_bytes(), text(key), text("cpu")];
            [parts.concat(), b"K\x02tQK\0K\x02\x85K\x01\x85".to_vec()].concat()
        };
        let vector = |kind: &str, key: &str| {
            let storage = storage(kind, key);
            let end = b"\x89ccollections\nOrderedDict\n)RtR".as_slice();
            [b"ctorch._utils\n_rebuild_tensor_v2\n(".as_slice(), &storage, end].concat()
        };
        let constants = [
            b"\x80\x02ctorch._utils\n_rebuild_qtensor\n(".as_slice(),
            &storage("QInt8Storage", "0"),
            b"(ctorch\nper_channel_affine\n",
            &vector("DoubleStorage", "1"),
            &vector("LongStorage", "2"),
            b"K\0t\x89ccollections\nOrderedDict\n)RtR\x85.",
        ];
        let read = script(b"\x80\x02N.".to_vec(), constants.concat()).state_dict().unwrap();
        let tensor = read.get("CONSTANTS.c0").and_then(Value::as_tensor).unwrap();
        assert_eq!(tensor.storage.key, "constants/0");
        let Some(Quantizer::PerChannel { scales, zero_points, axis: 0 }) =
            tensor.quantizer.as_deref()
        else {
            panic!("{:?}", tensor.quantizer)
        };
        assert_eq!([&scales.storage.key, &zero_points.storage.key], ["constants/1", "constants/2"]);
    }
}
