//! An interpreter of pickles in protocols 2 to 5.
//!
//! It calls nothing. `collections.OrderedDict`, the functions that rebuild tensors and parameters, and the storage
//! types are represented by constants. A call of any other name gives an object of which only the name is known
//! ([`Node::Foreign`]). Items that are put into one, as into a subclass of `dict` or `list`, are kept. Containers are
//! stored in one arena and refer to each other by index, so that no nesting, sharing or cycle makes the reader recurse
//! or copy. The number of instructions bounds the memory.
//!
//! Instructions: <https://github.com/python/cpython/blob/main/Lib/pickletools.py>.

use std::collections::HashMap;
use std::fmt;

use super::archive::Fields;
use super::{MAX_DIMENSIONS, Quantizer, shown};
use crate::dtype::{Dtype, TorchType};
use crate::fault::Fault;

/// Contents of a pickle.
#[derive(Debug)]
pub(super) struct Pickle<'a> {
    root: Value<'a>,
    nodes: Vec<Node<'a>>,
    states: HashMap<usize, Value<'a>>,
    arguments: HashMap<usize, Value<'a>>,
    /// Length in bytes, up to the end of the last instruction.
    length: usize,
}

/// A value. Containers are indices into the arena.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Value<'a> {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Str(&'a str),
    Bytes(&'a [u8]),
    Global(Global<'a>),
    Node(usize),
}

/// A container, or a stand-in for an object of PyTorch.
#[derive(Debug)]
pub(super) enum Node<'a> {
    List(Vec<Value<'a>>),
    Tuple(Vec<Value<'a>>),
    Dict(Vec<(Value<'a>, Value<'a>)>),
    /// A dictionary made from the list of pairs at this index, as Python 2 wrote an `OrderedDict`.
    Pairs(usize),
    Storage(Storage<'a>),
    Tensor(TensorSpec<'a>),
    /// A Python object of which only module and name are known.
    Foreign(&'a str, &'a str),
}

/// A storage of one or several tensors, in an entry of the archive.
#[derive(Debug, Clone, Copy)]
pub(super) struct Storage<'a> {
    pub(super) key: &'a str,
    /// `None` for an untyped storage: the tensors have the type, and `numel` counts bytes.
    pub(super) dtype: Option<Dtype>,
    pub(super) numel: i64,
    /// First element and number of elements, if this is a part of the storage with that key. Written by PyTorch until
    /// 0.3.
    pub(super) view: Option<(i64, i64)>,
}

/// A view of a storage. Offset and strides count elements.
#[derive(Debug, Clone)]
pub(super) struct TensorSpec<'a> {
    pub(super) storage: Storage<'a>,
    pub(super) dtype: Dtype,
    pub(super) offset: i64,
    pub(super) size: Vec<i64>,
    pub(super) stride: Vec<i64>,
    /// Quantizer, in which scales and zero points are indices of tensors in the arena.
    pub(super) quantizer: Option<Quantizer<usize>>,
}

/// Names of classes and functions with a known meaning.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Global<'a> {
    OrderedDict,
    RebuildTensor,
    /// `_rebuild_tensor` of PyTorch before 0.4, with fewer arguments.
    RebuildTensorV1,
    /// `_rebuild_tensor_v3`, for types without a storage class, with the type after the other arguments.
    RebuildUntyped,
    RebuildQuantized,
    RebuildParameter,
    RebuildParameterWithState,
    /// A function that calls another of these, for a tensor with attributes or of a subclass.
    RebuildFromType,
    Storage(Dtype),
    UntypedStorage,
    Dtype(Dtype),
    PerTensor,
    PerChannel,
    /// Any other name.
    Foreign(&'a str, &'a str),
}

/// Names with a fixed meaning, with their modules.
const GLOBALS: [(&str, &str, Global<'static>); 11] = [
    ("collections", "OrderedDict", Global::OrderedDict),
    ("torch._utils", "_rebuild_tensor_v2", Global::RebuildTensor),
    ("torch._utils", "_rebuild_tensor", Global::RebuildTensorV1),
    ("torch._utils", "_rebuild_tensor_v3", Global::RebuildUntyped),
    ("torch._utils", "_rebuild_qtensor", Global::RebuildQuantized),
    ("torch", "per_tensor_affine", Global::PerTensor),
    ("torch", "per_channel_affine", Global::PerChannel),
    ("torch.storage", "UntypedStorage", Global::UntypedStorage),
    ("torch._utils", "_rebuild_parameter", Global::RebuildParameter),
    ("torch._utils", "_rebuild_parameter_with_state", Global::RebuildParameterWithState),
    ("torch._tensor", "_rebuild_from_type_v2", Global::RebuildFromType),
];

impl<'a> Global<'a> {
    fn of(module: &'a str, name: &'a str) -> Self {
        if let Some((.., global)) = GLOBALS.iter().find(|(m, n, _)| (*m, *n) == (module, name)) {
            return *global;
        }
        if module != "torch" {
            return Self::Foreign(module, name);
        }
        let storage = Dtype::from_storage(name).map(Self::Storage);
        let dtype = || Dtype::from_untyped(name).map(Self::Dtype);
        storage.or_else(dtype).unwrap_or(Self::Foreign(module, name))
    }

    /// Returns module and name.
    fn names(self) -> (&'a str, &'a str) {
        match self {
            Self::Foreign(module, name) => (module, name),
            Self::Storage(dtype) | Self::Dtype(dtype) => match dtype.torch() {
                Some(TorchType::Storage(name, _) | TorchType::Untyped(name)) => ("torch", name),
                None => ("torch", dtype.name()),
            },
            known => {
                let row = GLOBALS.iter().find(|(.., global)| *global == known);
                row.map_or(("", ""), |(module, name, _)| (module, name))
            }
        }
    }
}

impl fmt::Display for Global<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (module, name) = self.names();
        write!(f, "{module}.{name}")
    }
}

/// Kind of pickle to read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Dialect {
    /// Pickles of `torch.save`.
    Torch,
    /// Pickles of a list of strings, possibly inside fastcore's `L`. Any other name is an error.
    Strings,
}

impl<'a> Pickle<'a> {
    /// Executes the instructions up to the first STOP.
    ///
    /// Fails with [`Fault::Ended`] if there is none: only then would more bytes give another result.
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
            states: HashMap::new(),
            arguments: HashMap::new(),
            dialect,
        };
        for _ in 0..MAX_INSTRUCTIONS {
            if let Some(root) = machine.step()? {
                let length = bytes.len() - machine.code.0.len();
                let Machine { nodes, states, arguments, .. } = machine;
                return Ok(Self { root, nodes, states, arguments, length });
            }
        }
        Err(Fault::unsupported(format_args!("its pickle has over {MAX_INSTRUCTIONS} instructions")))
    }

    pub(super) fn root(&self) -> Value<'a> {
        self.root
    }

    /// Returns the length in bytes, up to the end of the last instruction.
    pub(super) fn length(&self) -> usize {
        self.length
    }

    /// Iterates over the storages, in the order of their first use.
    pub(super) fn storages(&self) -> impl Iterator<Item = &Storage<'a>> {
        self.nodes.iter().filter_map(|node| match node {
            Node::Storage(storage) => Some(storage),
            _ => None,
        })
    }

    /// Returns the entries of a dictionary that is a list of pairs. `None` for another node.
    pub(super) fn pairs(&self, index: usize) -> Option<Vec<(Value<'a>, Value<'a>)>> {
        let Some(Node::List(items)) = self.node(index) else { return None };
        let pair = |item: &Value<'a>| match item {
            Value::Node(index) => match self.node(*index) {
                Some(Node::List(pair) | Node::Tuple(pair)) => match pair[..] {
                    [key, value] => Some((key, value)),
                    _ => None,
                },
                _ => None,
            },
            _ => None,
        };
        items.iter().map(pair).collect()
    }

    /// Returns the attributes set on the object at this index.
    pub(super) fn state(&self, index: usize) -> Option<Value<'a>> {
        self.states.get(&index).copied()
    }

    /// Returns the arguments of the call that would create the object at this index.
    pub(super) fn arguments(&self, index: usize) -> Option<Value<'a>> {
        self.arguments.get(&index).copied()
    }

    /// Returns the container at this index.
    pub(super) fn node(&self, index: usize) -> Option<&Node<'a>> {
        self.nodes.get(index)
    }
}

struct Machine<'a> {
    code: Fields<'a>,
    stack: Vec<Value<'a>>,
    /// Heights of the stack at each MARK.
    marks: Vec<usize>,
    /// Memo, as a map: an index of 2^32 - 1 costs no more than 0.
    memo: HashMap<u32, Value<'a>>,
    nodes: Vec<Node<'a>>,
    /// Attributes of objects that are known only by name, by index.
    states: HashMap<usize, Value<'a>>,
    /// Arguments of calls that are known only by name, by index of the result.
    arguments: HashMap<usize, Value<'a>>,
    dialect: Dialect,
}

impl<'a> Machine<'a> {
    /// Executes one instruction. Returns the value at STOP.
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
            0x8a => {
                let [bytes] = self.code.take()?;
                self.long(bytes.into())?;
            }
            0x8b => {
                let bytes = self.code.u32()?;
                self.long(bytes as usize)?;
            }
            b'G' => {
                let float = f64::from_be_bytes(self.code.take()?);
                self.stack.push(Value::Float(float));
            }
            b'I' => self.decimal()?,
            b'X' => {
                let bytes = self.code.u32()?;
                self.string(bytes.into())?;
            }
            0x8c => {
                let [bytes] = self.code.take()?;
                self.string(bytes.into())?;
            }
            0x8d => {
                let bytes = self.code.u64()?;
                self.string(bytes)?;
            }
            // Python 2 wrote its strings with these two, both text and bytes.
            b'U' => {
                let [bytes] = self.code.take()?;
                self.text_or_bytes(bytes.into())?;
            }
            b'T' => {
                let bytes = self.code.u32()?;
                self.text_or_bytes(bytes as usize)?;
            }
            b'C' => {
                let [bytes] = self.code.take()?;
                self.bytes(bytes.into())?;
            }
            b'B' => {
                let bytes = self.code.u32()?;
                self.bytes(bytes.into())?;
            }
            0x8e | 0x96 => {
                let bytes = self.code.u64()?;
                self.bytes(bytes)?;
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
            0x93 => {
                let [Value::Str(module), Value::Str(name)] = *self.pop_many(2)? else {
                    return Err(Fault::damaged("a name of its pickle is not a string"));
                };
                self.name(module, name)?;
            }
            0x94 => {
                let index = u32::try_from(self.memo.len()).unwrap_or(u32::MAX);
                self.put(index)?;
            }
            // Frame length, which is redundant.
            0x95 => self.code.u64().map(drop)?,
            b'Q' => self.storage()?,
            b'R' => self.reduce()?,
            0x81 => {
                let [class, _arguments] = *self.pop_many(2)? else { return Err(underflow()) };
                self.object(class)?;
            }
            0x92 => {
                let [class, _arguments, _named] = *self.pop_many(3)? else {
                    return Err(underflow());
                };
                self.object(class)?;
            }
            // A class of Python 2, with the arguments.
            b'o' => {
                let class = self.pop_to_mark()?.first().copied().ok_or_else(underflow)?;
                self.object(class)?;
            }
            b'b' => self.build()?,
            0x8f => self.push(Node::Foreign("builtins", "set")),
            0x90 => {
                self.pop_to_mark()?;
                let set = *self.top()?;
                if self.foreign(set).is_none() {
                    return Err(Fault::damaged("its pickle adds to something that is not a set"));
                }
            }
            0x91 => {
                self.pop_to_mark()?;
                self.push(Node::Foreign("builtins", "frozenset"));
            }
            // Pops a mark if nothing is above it.
            b'0' if self.marks.last() == Some(&self.stack.len()) => drop(self.marks.pop()),
            b'0' => self.pop().map(drop)?,
            b'1' => self.pop_to_mark().map(drop)?,
            b'2' => {
                let top = *self.top()?;
                self.stack.push(top);
            }
            other => {
                return Err(Fault::unsupported(format_args!(
                    "its pickle uses instruction 0x{other:02x}, which Python does not write in \
                     protocols 2 to 5; nothing was executed"
                )));
            }
        }
        Ok(None)
    }

    fn string(&mut self, bytes: u64) -> Result<(), Fault> {
        let bytes = self.code.slice(usize::try_from(bytes).unwrap_or(usize::MAX))?;
        let text = std::str::from_utf8(bytes)
            .map_err(|_| Fault::damaged("a string of its pickle is not UTF-8"))?;
        self.stack.push(Value::Str(text));
        Ok(())
    }

    fn bytes(&mut self, bytes: u64) -> Result<(), Fault> {
        let bytes = self.code.slice(usize::try_from(bytes).unwrap_or(usize::MAX))?;
        self.stack.push(Value::Bytes(bytes));
        Ok(())
    }

    fn text_or_bytes(&mut self, bytes: usize) -> Result<(), Fault> {
        let bytes = self.code.slice(bytes)?;
        let text = std::str::from_utf8(bytes).map_or(Value::Bytes(bytes), Value::Str);
        self.stack.push(text);
        Ok(())
    }

    fn protocol(&mut self) -> Result<(), Fault> {
        match self.code.take()? {
            [2..=5] => Ok(()),
            [version] => Err(Fault::unsupported(format_args!(
                "it is pickled in protocol {version}; protocols 2 to 5 are supported, and torch.save's \
                 default is 2"
            ))),
        }
    }

    /// Reads an integer in little-endian bytes.
    fn long(&mut self, bytes: usize) -> Result<(), Fault> {
        let digits = self.code.slice(bytes)?;
        let mut wide = [if digits.last().is_some_and(|top| top & 0x80 != 0) { 0xff } else { 0 }; 8];
        match wide.get_mut(..digits.len()) {
            Some(low) => {
                low.copy_from_slice(digits);
                self.stack.push(Value::Int(i64::from_le_bytes(wide)));
            }
            // NumPy's generators have integers of 128 bits.
            None => self.push(Node::Foreign("builtins", "int")),
        }
        Ok(())
    }

    /// Reads an integer in digits, as Python 2 wrote those of more than 32 bits.
    fn decimal(&mut self) -> Result<(), Fault> {
        let value = match self.line()? {
            "00" => Value::Bool(false),
            "01" => Value::Bool(true),
            digits => Value::Int(digits.parse().map_err(|_| {
                Fault::damaged("an integer of its pickle is not one, or has more than 64 bits")
            })?),
        };
        self.stack.push(value);
        Ok(())
    }

    fn global(&mut self) -> Result<(), Fault> {
        let (module, name) = (self.line()?, self.line()?);
        self.name(module, name)
    }

    fn name(&mut self, module: &'a str, name: &'a str) -> Result<(), Fault> {
        if self.dialect == Dialect::Strings && (module, name) != FASTCORE_LIST {
            return Err(Fault::unsupported(format_args!(
                "its pickle refers to `{}`, which a list of strings does not need; nothing was executed",
                shown(&format!("{module}.{name}"))
            )));
        }
        self.stack.push(Value::Global(Global::of(module, name)));
        Ok(())
    }

    fn line(&mut self) -> Result<&'a str, Fault> {
        let end = self.code.0.iter().position(|&byte| byte == b'\n');
        let end = end.ok_or(Fault::Ended)?;
        let line = self.code.slice(end)?;
        let [_newline] = self.code.take()?;
        std::str::from_utf8(line).map_err(|_| Fault::damaged("a name of its pickle is not UTF-8"))
    }

    /// Executes BINPERSID: `('storage', type, key, device, elements)`, in the old format followed by a view of the
    /// storage or None. The old format also has `('module', class, file, source)`, which gives the class.
    fn storage(&mut self) -> Result<(), Fault> {
        let id = self.pop()?;
        let (dtype, key, numel, view) = match *self.tuple(id)? {
            [Value::Str("module"), class, ..] => {
                self.stack.push(class);
                return Ok(());
            }
            [
                Value::Str("storage"),
                Value::Global(kind @ (Global::Storage(_) | Global::UntypedStorage)),
                Value::Str(key),
                Value::Str(_device),
                Value::Int(numel),
                ref view @ ..,
            ] => {
                let dtype = match kind {
                    Global::Storage(dtype) => Some(dtype),
                    _ => None,
                };
                // Must not copy: two bytes of a pickle can recall a long tuple.
                let view = match *view {
                    [] | [Value::None] => None,
                    [view] => Some(view),
                    _ => return Err(unlike_storage()),
                };
                (dtype, key, numel, view)
            }
            _ => return Err(unlike_storage()),
        };
        let view = match view {
            None => None,
            Some(view) => match *self.tuple(view)? {
                [Value::Str(_key), Value::Int(first), Value::Int(elements)] => {
                    Some((first, elements))
                }
                _ => return Err(unlike_storage()),
            },
        };
        self.push(Node::Storage(Storage { key, dtype, numel, view }));
        Ok(())
    }

    fn reduce(&mut self) -> Result<(), Fault> {
        let arguments = self.pop()?;
        let callee = self.pop()?;
        match callee {
            Value::Global(function) if !matches!(function, Global::Foreign(..)) => {
                self.call(function, arguments, 0)
            }
            callee => {
                self.object(callee)?;
                self.arguments.insert(self.nodes.len() - 1, arguments);
                Ok(())
            }
        }
    }

    fn call(
        &mut self,
        function: Global<'a>,
        arguments: Value<'a>,
        depth: usize,
    ) -> Result<(), Fault> {
        let arguments = self.tuple(arguments)?;
        match (function, arguments) {
            (Global::OrderedDict, []) => self.push(Node::Dict(Vec::new())),
            // Must not copy: two bytes of a pickle can recall a long list.
            (Global::OrderedDict, &[Value::Node(list)])
                if matches!(self.nodes.get(list), Some(Node::List(_))) =>
            {
                self.push(Node::Pairs(list));
            }
            // storage, offset, size, stride, requires_grad, hooks, and since 2.1 metadata
            (
                Global::RebuildTensor | Global::RebuildTensorV1,
                &[Value::Node(storage), Value::Int(offset), size, stride, ..],
            ) => {
                let dtype = self.storage_of(storage)?.dtype.ok_or_else(|| {
                    Fault::damaged("a tensor of its pickle has a storage without a type")
                })?;
                self.rebuild(storage, dtype, offset, [size, stride], None)?;
            }
            // as above, with the type before metadata
            (
                Global::RebuildUntyped,
                &[
                    Value::Node(storage),
                    Value::Int(offset),
                    size,
                    stride,
                    _,
                    _,
                    Value::Global(Global::Dtype(dtype)),
                    ..,
                ],
            ) => self.rebuild(storage, dtype, offset, [size, stride], None)?,
            // as above, with the quantizer before requires_grad
            (
                Global::RebuildQuantized,
                &[Value::Node(storage), Value::Int(offset), size, stride, quantizer, ..],
            ) => {
                let dtype = self.storage_of(storage)?.dtype;
                let dtype = dtype.filter(|dtype| dtype.is_quantized()).ok_or_else(|| {
                    Fault::damaged("a quantized tensor of its pickle has a storage of another type")
                })?;
                let quantizer = self.quantizer(quantizer)?;
                self.rebuild(storage, dtype, offset, [size, stride], quantizer)?;
            }
            (
                Global::RebuildParameter | Global::RebuildParameterWithState,
                &[tensor @ Value::Node(index), ..],
            ) if matches!(self.nodes.get(index), Some(Node::Tensor(_))) => self.stack.push(tensor),
            // function, type, arguments, state
            (Global::RebuildFromType, &[function, _, arguments, _]) => match function {
                Value::Global(function)
                    if depth == 0 && !matches!(function, Global::Foreign(..)) =>
                {
                    self.call(function, arguments, 1)?;
                }
                function => self.object(function)?,
            },
            _ => {
                return Err(Fault::damaged(format_args!(
                    "its pickle calls {function} with arguments that PyTorch does not write"
                )));
            }
        }
        Ok(())
    }

    fn rebuild(
        &mut self,
        storage: usize,
        dtype: Dtype,
        offset: i64,
        [size, stride]: [Value<'a>; 2],
        quantizer: Option<Quantizer<usize>>,
    ) -> Result<(), Fault> {
        let storage = self.storage_of(storage)?;
        let (size, stride) = (self.integers(size)?, self.integers(stride)?);
        self.push(Node::Tensor(TensorSpec { storage, dtype, offset, size, stride, quantizer }));
        Ok(())
    }

    fn storage_of(&self, index: usize) -> Result<Storage<'a>, Fault> {
        match self.nodes.get(index) {
            Some(Node::Storage(storage)) => Ok(*storage),
            _ => Err(Fault::damaged("a tensor of its pickle has no storage")),
        }
    }

    /// Reads `(per_tensor_affine, scale, zero point)` or `(per_channel_affine, scales, zero points, axis)`. `None` if
    /// scales are lists instead of tensors, as PyTorch once wrote them.
    fn quantizer(&self, value: Value<'a>) -> Result<Option<Quantizer<usize>>, Fault> {
        Ok(match *self.tuple(value)? {
            [Value::Global(Global::PerTensor), Value::Float(scale), Value::Int(zero_point)] => {
                Some(Quantizer::PerTensor { scale, zero_point })
            }
            [
                Value::Global(Global::PerChannel),
                Value::Node(scales),
                Value::Node(zero_points),
                Value::Int(axis),
            ] => {
                let is_plain = |index: usize| match self.nodes.get(index) {
                    Some(Node::Tensor(tensor)) => !tensor.dtype.is_quantized(),
                    _ => false,
                };
                let plain = is_plain(scales) && is_plain(zero_points);
                plain.then_some(Quantizer::PerChannel { scales, zero_points, axis })
            }
            _ => {
                return Err(Fault::damaged(
                    "a quantizer of its pickle is not as PyTorch writes it",
                ));
            }
        })
    }

    /// Pushes an object named like `callee`, in place of calling it.
    fn object(&mut self, callee: Value<'a>) -> Result<(), Fault> {
        let (module, name) = match callee {
            Value::Global(global) => global.names(),
            callee => self.foreign(callee).ok_or_else(|| {
                Fault::damaged("its pickle calls something that is not a function")
            })?,
        };
        self.push(Node::Foreign(module, name));
        Ok(())
    }

    /// Returns module and name of an object that is known only by name.
    fn foreign(&self, value: Value<'a>) -> Option<(&'a str, &'a str)> {
        match value {
            Value::Node(index) => match self.nodes.get(index) {
                Some(&Node::Foreign(module, name)) => Some((module, name)),
                _ => None,
            },
            _ => None,
        }
    }

    /// Executes BUILD, which sets attributes, such as PyTorch's `_metadata` on an OrderedDict. They are kept only for
    /// objects known by name.
    fn build(&mut self) -> Result<(), Fault> {
        let state = self.pop()?;
        let target = *self.top()?;
        // An `L` is replaced by the list that it wraps.
        if self.dialect == Dialect::Strings
            && self.foreign(target).is_some()
            && let Value::Node(index) = state
            && let Some(Node::Dict(entries)) = self.nodes.get(index)
            && let Some((_, items)) = entries.iter().find(|(key, _)| *key == Value::Str("items"))
            && let Some(top) = self.stack.last_mut()
        {
            *top = *items;
            return Ok(());
        }
        if self.foreign(target).is_some()
            && let Value::Node(index) = target
        {
            self.states.insert(index, state);
        }
        match self.node(target) {
            Some(Node::Tuple(_) | Node::Storage(_)) | None => {
                Err(Fault::damaged("its pickle sets the state of something that has none"))
            }
            Some(_) => Ok(()),
        }
    }

    fn append(&mut self, mut items: Vec<Value<'a>>) -> Result<(), Fault> {
        let target = *self.top()?;
        match self.node(target) {
            Some(Node::List(list)) => {
                list.append(&mut items);
                Ok(())
            }
            // A subclass of `list`.
            Some(object @ Node::Foreign(..)) => {
                *object = Node::List(items);
                Ok(())
            }
            _ => Err(Fault::damaged("its pickle appends to something that is not a list")),
        }
    }

    fn set_items(&mut self, items: &[Value<'a>]) -> Result<(), Fault> {
        let target = *self.top()?;
        let (pairs, rest) = items.as_chunks::<2>();
        let pairs = pairs.iter().map(|&[key, value]| (key, value));
        match self.node(target) {
            Some(Node::Dict(entries)) if rest.is_empty() => {
                entries.extend(pairs);
                Ok(())
            }
            // A subclass of `dict`.
            Some(object @ Node::Foreign(..)) if rest.is_empty() => {
                *object = Node::Dict(pairs.collect());
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

    /// Pops the topmost `count` values, which must be above the last mark.
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
        // Checked before copying: two bytes of a pickle can recall a long tuple.
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

fn unlike_storage() -> Fault {
    Fault::damaged("a reference to a storage is not as PyTorch writes it")
}

fn underflow() -> Fault {
    Fault::damaged("its pickle takes more values than it has")
}

/// The list class of fastcore, which fastai uses.
const FASTCORE_LIST: (&str, &str) = ("fastcore.foundation", "L");

/// Maximum size of a pickle. A tensor takes about 150 bytes and 40 instructions: enough for a hundred thousand of them,
/// in some hundred megabytes at worst.
pub(super) const MAX_BYTES: usize = 64 << 20;
const MAX_INSTRUCTIONS: usize = 4 << 20;
