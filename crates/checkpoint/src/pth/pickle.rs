//! An interpreter of the few pickle instructions that `torch.save` writes for tensors.
//!
//! It calls nothing. A pickle may name `collections.OrderedDict`, the functions that rebuild
//! tensors and parameters, and the storage types; each stands for a constant here. Any other name
//! ends the reading ([`Fault::Forbidden`]), as does any instruction that `torch.save` has no use
//! for. Containers lie in one arena and refer to each other by index, so that no nesting, sharing
//! or cycle can make the reader recurse or copy; the number of instructions bounds the memory.
//!
//! Instructions: <https://github.com/python/cpython/blob/main/Lib/pickletools.py>.

use std::collections::HashMap;
use std::fmt;

use super::MAX_DIMENSIONS;
use super::archive::Fields;
use crate::dtype::Dtype;
use crate::fault::Fault;

/// What a pickle holds.
#[derive(Debug)]
pub(super) struct Pickle<'a> {
    root: Value<'a>,
    nodes: Vec<Node<'a>>,
}

/// A value; containers are indices into the arena.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Value<'a> {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Str(&'a str),
    Global(Global<'a>),
    Node(usize),
}

/// A container, or what stands for an object of PyTorch.
#[derive(Debug)]
pub(super) enum Node<'a> {
    List(Vec<Value<'a>>),
    Tuple(Vec<Value<'a>>),
    Dict(Vec<(Value<'a>, Value<'a>)>),
    Storage(Storage<'a>),
    Tensor(TensorSpec<'a>),
    /// An object of Python that only its name is known of.
    Foreign(&'a str, &'a str),
}

/// The bytes of one or several tensors, in an entry of the archive.
#[derive(Debug, Clone, Copy)]
pub(super) struct Storage<'a> {
    pub(super) key: &'a str,
    pub(super) dtype: Dtype,
    pub(super) numel: i64,
}

/// A view of a storage; offset and strides count elements.
#[derive(Debug, Clone)]
pub(super) struct TensorSpec<'a> {
    pub(super) storage: Storage<'a>,
    pub(super) offset: i64,
    pub(super) size: Vec<i64>,
    pub(super) stride: Vec<i64>,
}

/// The names that are known.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Global<'a> {
    OrderedDict,
    RebuildTensor,
    RebuildParameter,
    Storage(Dtype),
    /// Any other, where they are passed over.
    Foreign(&'a str, &'a str),
}

impl fmt::Display for Global<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OrderedDict => f.write_str("collections.OrderedDict"),
            Self::RebuildTensor => f.write_str("torch._utils._rebuild_tensor_v2"),
            Self::RebuildParameter => f.write_str("torch._utils._rebuild_parameter"),
            Self::Storage(dtype) => write!(f, "torch.{}", dtype.storage()),
            Self::Foreign(module, name) => write!(f, "{module}.{name}"),
        }
    }
}

/// Which pickles are read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Dialect {
    /// Those of `torch.save`, with the names that tensors need.
    Tensors,
    /// Those of `torch.save`. Other names than those known stand for themselves, and what Python would make with them
    /// is an object of which nothing but the name is known.
    Foreign,
    /// Those of a list of strings, in protocols 2 to 5, and of fastcore's `L` around it.
    Strings,
}

impl<'a> Pickle<'a> {
    /// Runs the instructions.
    pub(super) fn read(bytes: &'a [u8], dialect: Dialect) -> Result<Self, Fault> {
        if bytes.len() > MAX_BYTES {
            return Err(Fault::unsupported(format_args!(
                "its pickle has {} bytes, more than the {MAX_BYTES} that tensors can need",
                bytes.len()
            )));
        }
        let mut machine = Machine {
            code: Fields(bytes),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
            nodes: Vec::new(),
            dialect,
        };
        for _ in 0..MAX_INSTRUCTIONS {
            if let Some(root) = machine.step()? {
                return Ok(Self { root, nodes: machine.nodes });
            }
        }
        Err(Fault::unsupported(format_args!("its pickle has over {MAX_INSTRUCTIONS} instructions")))
    }

    pub(super) fn root(&self) -> Value<'a> {
        self.root
    }

    /// The container of this index.
    pub(super) fn node(&self, index: usize) -> Option<&Node<'a>> {
        self.nodes.get(index)
    }
}

struct Machine<'a> {
    code: Fields<'a>,
    stack: Vec<Value<'a>>,
    /// Heights of the stack at which a MARK lies.
    marks: Vec<usize>,
    /// A map: an index of 2^32 - 1 costs no more than 0.
    memo: HashMap<u32, Value<'a>>,
    nodes: Vec<Node<'a>>,
    dialect: Dialect,
}

impl<'a> Machine<'a> {
    /// One instruction; the value at STOP.
    fn step(&mut self) -> Result<Option<Value<'a>>, Fault> {
        let [opcode] = self.code.take()?;
        match opcode {
            b'.' => return self.pop().map(Some),
            0x80 => self.protocol()?,
            b'(' => self.marks.push(self.stack.len()),
            b'N' => self.stack.push(Value::None),
            0x88 => self.stack.push(Value::Bool(true)),
            0x89 => self.stack.push(Value::Bool(false)),
            b'K' => {
                let [byte] = self.code.take()?;
                self.stack.push(Value::Int(byte.into()));
            }
            b'M' => {
                let int = self.code.u16()?.into();
                self.stack.push(Value::Int(int));
            }
            b'J' => {
                let int = i32::from_le_bytes(self.code.take()?).into();
                self.stack.push(Value::Int(int));
            }
            0x8a => self.long()?,
            b'G' => {
                let float = f64::from_be_bytes(self.code.take()?);
                self.stack.push(Value::Float(float));
            }
            b'X' => {
                let bytes = self.code.u32()?;
                self.string(bytes.into())?;
            }
            b']' => self.push(Node::List(Vec::new())),
            b'}' => self.push(Node::Dict(Vec::new())),
            b')' => self.push(Node::Tuple(Vec::new())),
            b't' => {
                let items = self.pop_to_mark()?;
                self.push(Node::Tuple(items));
            }
            0x85..=0x87 => {
                let items = self.pop_many(usize::from(opcode - 0x84))?;
                self.push(Node::Tuple(items));
            }
            b'a' => {
                let item = self.pop_many(1)?;
                self.append(item)?;
            }
            b'e' => {
                let items = self.pop_to_mark()?;
                self.append(items)?;
            }
            b's' => {
                let items = self.pop_many(2)?;
                self.set_items(&items)?;
            }
            b'u' => {
                let items = self.pop_to_mark()?;
                self.set_items(&items)?;
            }
            b'q' => {
                let [index] = self.code.take()?;
                self.put(index.into())?;
            }
            b'r' => {
                let index = self.code.u32()?;
                self.put(index)?;
            }
            b'h' => {
                let [index] = self.code.take()?;
                self.recall(index.into())?;
            }
            b'j' => {
                let index = self.code.u32()?;
                self.recall(index)?;
            }
            b'c' => self.global()?,
            b'Q' => self.storage()?,
            b'R' => self.reduce()?,
            0x81 => self.new_object()?,
            b'b' => self.build()?,
            0x8c..=0x8d | 0x93..=0x95 if self.dialect == Dialect::Strings => self.newer(opcode)?,
            other => {
                return Err(Fault::unsupported(format_args!(
                    "its pickle uses instruction 0x{other:02x}, which tensors in the default \
                     protocol do not need; nothing was executed"
                )));
            }
        }
        Ok(None)
    }

    /// Instructions of protocol 4.
    fn newer(&mut self, opcode: u8) -> Result<(), Fault> {
        match opcode {
            0x8c => {
                let [bytes] = self.code.take()?;
                self.string(bytes.into())
            }
            0x8d => {
                let bytes = self.code.u64()?;
                self.string(bytes)
            }
            0x93 => {
                let [Value::Str(module), Value::Str(name)] = *self.pop_many(2)? else {
                    return Err(Fault::damaged("a name of its pickle is not a string"));
                };
                self.name(module, name)
            }
            0x94 => {
                let index = u32::try_from(self.memo.len()).unwrap_or(u32::MAX);
                self.put(index)
            }
            // The length of what follows, which its end tells, too.
            _ => self.code.u64().map(drop),
        }
    }

    fn string(&mut self, bytes: u64) -> Result<(), Fault> {
        let bytes = self.code.slice(usize::try_from(bytes).unwrap_or(usize::MAX))?;
        let text = std::str::from_utf8(bytes)
            .map_err(|_| Fault::damaged("a string of its pickle is not UTF-8"))?;
        self.stack.push(Value::Str(text));
        Ok(())
    }

    fn protocol(&mut self) -> Result<(), Fault> {
        match self.code.take()? {
            [2] => Ok(()),
            [3..=5] if self.dialect == Dialect::Strings => Ok(()),
            [version] => Err(Fault::unsupported(format_args!(
                "it is pickled in protocol {version}; save it with torch.save's default, 2"
            ))),
        }
    }

    fn long(&mut self) -> Result<(), Fault> {
        let [bytes] = self.code.take()?;
        let digits = self.code.slice(bytes.into())?;
        let mut wide = [if digits.last().is_some_and(|top| top & 0x80 != 0) { 0xff } else { 0 }; 8];
        let low = wide.get_mut(..digits.len());
        low.ok_or_else(|| Fault::damaged("an integer of its pickle has more than 64 bits"))?
            .copy_from_slice(digits);
        self.stack.push(Value::Int(i64::from_le_bytes(wide)));
        Ok(())
    }

    fn global(&mut self) -> Result<(), Fault> {
        let (module, name) = (self.line()?, self.line()?);
        self.name(module, name)
    }

    fn name(&mut self, module: &'a str, name: &'a str) -> Result<(), Fault> {
        let global = match (module, name) {
            FASTCORE_LIST if self.dialect == Dialect::Strings => Global::Foreign(module, name),
            _ if self.dialect == Dialect::Strings => {
                return Err(Fault::unsupported(format_args!(
                    "its pickle refers to `{}`, which a list of strings does not need; nothing was executed",
                    shortened(module, name)
                )));
            }
            ("collections", "OrderedDict") => Global::OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2") => Global::RebuildTensor,
            ("torch._utils", "_rebuild_parameter") => Global::RebuildParameter,
            ("torch", storage) if let Some(dtype) = Dtype::from_storage(storage) => {
                Global::Storage(dtype)
            }
            _ if self.dialect == Dialect::Foreign => Global::Foreign(module, name),
            _ => return Err(Fault::Forbidden(shortened(module, name))),
        };
        self.stack.push(Value::Global(global));
        Ok(())
    }

    fn line(&mut self) -> Result<&'a str, Fault> {
        let end = self.code.0.iter().position(|&byte| byte == b'\n');
        let end = end.ok_or_else(|| Fault::damaged("a name of its pickle has no end"))?;
        let line = self.code.slice(end)?;
        let [_newline] = self.code.take()?;
        std::str::from_utf8(line).map_err(|_| Fault::damaged("a name of its pickle is not UTF-8"))
    }

    /// BINPERSID: `('storage', type, key, device, elements)`.
    fn storage(&mut self) -> Result<(), Fault> {
        let id = self.pop()?;
        let storage = match self.tuple(id)? {
            [
                Value::Str("storage"),
                Value::Global(Global::Storage(dtype)),
                Value::Str(key),
                Value::Str(_device),
                Value::Int(numel),
            ] => Storage { key, dtype: *dtype, numel: *numel },
            _ => {
                return Err(Fault::damaged("a reference to a storage is not as PyTorch writes it"));
            }
        };
        self.push(Node::Storage(storage));
        Ok(())
    }

    fn reduce(&mut self) -> Result<(), Fault> {
        let arguments = self.pop()?;
        let callee = self.pop()?;
        if let Some(object) = self.foreign_object(callee) {
            self.push(object);
            return Ok(());
        }
        let Value::Global(function) = callee else {
            return Err(Fault::damaged("its pickle calls something that is not a function"));
        };
        let arguments = self.tuple(arguments)?;
        match (function, arguments) {
            (Global::OrderedDict, []) => self.push(Node::Dict(Vec::new())),
            // storage, offset, size, stride, requires_grad, hooks, and since 2.1 metadata
            (
                Global::RebuildTensor,
                [Value::Node(storage), Value::Int(offset), size, stride, Value::Bool(_), _]
                | [Value::Node(storage), Value::Int(offset), size, stride, Value::Bool(_), _, _],
            ) => {
                let Some(Node::Storage(storage)) = self.nodes.get(*storage) else {
                    return Err(Fault::damaged("a tensor of its pickle has no storage"));
                };
                let tensor = TensorSpec {
                    storage: *storage,
                    offset: *offset,
                    size: self.integers(*size)?,
                    stride: self.integers(*stride)?,
                };
                self.push(Node::Tensor(tensor));
            }
            (Global::RebuildParameter, [tensor @ Value::Node(index), Value::Bool(_), _])
                if matches!(self.nodes.get(*index), Some(Node::Tensor(_))) =>
            {
                let tensor = *tensor;
                self.stack.push(tensor);
            }
            _ => {
                return Err(Fault::damaged(format_args!(
                    "its pickle calls {function:?} with arguments that PyTorch does not write"
                )));
            }
        }
        Ok(())
    }

    fn new_object(&mut self) -> Result<(), Fault> {
        let _arguments = self.pop()?;
        let class = self.pop()?;
        let object = self.foreign_object(class).ok_or_else(|| {
            Fault::unsupported(
                "its pickle uses instruction 0x81, which tensors in the default protocol do not \
                 need; nothing was executed",
            )
        })?;
        self.push(object);
        Ok(())
    }

    /// What calling `callee` stands for, where it is a name that is passed over.
    fn foreign_object(&self, callee: Value<'a>) -> Option<Node<'a>> {
        match callee {
            Value::Global(Global::Foreign(module, name)) => Some(Node::Foreign(module, name)),
            Value::Node(index) => match self.nodes.get(index) {
                Some(&Node::Foreign(module, name)) => Some(Node::Foreign(module, name)),
                _ => None,
            },
            _ => None,
        }
    }

    /// Sets attributes: PyTorch's `_metadata` on an OrderedDict, of which nothing is needed.
    fn build(&mut self) -> Result<(), Fault> {
        let state = self.pop()?;
        let target = *self.top()?;
        let is_dict = |value| match value {
            Value::Node(index) => matches!(self.nodes.get(index), Some(Node::Dict(_))),
            _ => false,
        };
        let foreign = match target {
            Value::Node(index) => matches!(self.nodes.get(index), Some(Node::Foreign(..))),
            _ => false,
        };
        // An `L` is the list that it is around.
        if foreign
            && self.dialect == Dialect::Strings
            && let Value::Node(index) = state
            && let Some(Node::Dict(entries)) = self.nodes.get(index)
            && let Some((_, items)) = entries.iter().find(|(key, _)| *key == Value::Str("items"))
            && let Some(top) = self.stack.last_mut()
        {
            *top = *items;
            return Ok(());
        }
        if foreign || is_dict(target) && is_dict(state) {
            Ok(())
        } else {
            Err(Fault::damaged("its pickle sets the state of something that has none"))
        }
    }

    fn append(&mut self, mut items: Vec<Value<'a>>) -> Result<(), Fault> {
        let target = *self.top()?;
        match self.node(target) {
            Some(Node::List(list)) => {
                list.append(&mut items);
                Ok(())
            }
            _ => Err(Fault::damaged("its pickle appends to something that is not a list")),
        }
    }

    fn set_items(&mut self, items: &[Value<'a>]) -> Result<(), Fault> {
        let target = *self.top()?;
        let (pairs, rest) = items.as_chunks::<2>();
        match self.node(target) {
            Some(Node::Dict(entries)) if rest.is_empty() => {
                entries.extend(pairs.iter().map(|&[key, value]| (key, value)));
                Ok(())
            }
            _ => Err(Fault::damaged("its pickle sets items of something that is not a dictionary")),
        }
    }

    fn put(&mut self, index: u32) -> Result<(), Fault> {
        let top = *self.top()?;
        self.memo.insert(index, top);
        Ok(())
    }

    fn recall(&mut self, index: u32) -> Result<(), Fault> {
        let value = self.memo.get(&index).copied();
        self.stack
            .push(value.ok_or_else(|| Fault::damaged("its pickle recalls what it never kept"))?);
        Ok(())
    }

    fn push(&mut self, node: Node<'a>) {
        self.stack.push(Value::Node(self.nodes.len()));
        self.nodes.push(node);
    }

    fn pop(&mut self) -> Result<Value<'a>, Fault> {
        self.pop_many(1).and_then(|popped| popped.first().copied().ok_or_else(underflow))
    }

    /// The uppermost values, which must lie above the last mark.
    fn pop_many(&mut self, count: usize) -> Result<Vec<Value<'a>>, Fault> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let start = self.stack.len().checked_sub(count).filter(|&start| start >= floor);
        Ok(self.stack.split_off(start.ok_or_else(underflow)?))
    }

    fn pop_to_mark(&mut self) -> Result<Vec<Value<'a>>, Fault> {
        let mark = self.marks.pop().ok_or_else(underflow)?;
        Ok(self.stack.split_off(mark))
    }

    fn top(&self) -> Result<&Value<'a>, Fault> {
        self.stack.last().ok_or_else(underflow)
    }

    fn node(&mut self, value: Value<'a>) -> Option<&mut Node<'a>> {
        match value {
            Value::Node(index) => self.nodes.get_mut(index),
            _ => None,
        }
    }

    fn tuple(&self, value: Value<'a>) -> Result<&[Value<'a>], Fault> {
        if let Value::Node(index) = value
            && let Some(Node::Tuple(items)) = self.nodes.get(index)
        {
            return Ok(items);
        }
        Err(Fault::damaged("its pickle lacks a tuple where one must be"))
    }

    fn integers(&self, value: Value<'a>) -> Result<Vec<i64>, Fault> {
        let integer = |item: &Value<'a>| match item {
            Value::Int(int) => Ok(*int),
            _ => Err(Fault::damaged("a size or stride is not an integer")),
        };
        // Before they are copied: a pickle recalls a long tuple with two bytes.
        let items = self.tuple(value)?;
        if items.len() > MAX_DIMENSIONS {
            return Err(Fault::damaged(format_args!(
                "a tensor of its pickle has {} dimensions, more than {MAX_DIMENSIONS}",
                items.len()
            )));
        }
        items.iter().map(integer).collect()
    }
}

fn underflow() -> Fault {
    Fault::damaged("its pickle takes more values than it has")
}

fn shortened(module: &str, name: &str) -> String {
    let mut global = format!("{module}.{name}");
    if let Some((end, _)) = global.char_indices().nth(MAX_SHOWN) {
        global.truncate(end);
        global.push('…');
    }
    global.escape_debug().to_string()
}

/// fastai's list.
const FASTCORE_LIST: (&str, &str) = ("fastcore.foundation", "L");

/// A tensor takes about 150 bytes and 40 instructions: room for a hundred thousand of them, in
/// some hundred megabytes at worst.
const MAX_BYTES: usize = 64 << 20;
const MAX_INSTRUCTIONS: usize = 4 << 20;
const MAX_SHOWN: usize = 120;
