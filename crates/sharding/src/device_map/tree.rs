//! Tree of the modules and tensors of a model.

use std::collections::HashMap;

use brigade_checkpoint::Dtype;

use super::DeviceMapError;

/// A parameter or a buffer of a model, without its values.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MappedTensor {
    /// Name of the tensor in the model.
    pub name: String,
    /// Shape of the tensor.
    pub shape: Vec<u64>,
    /// Data type of the elements.
    pub dtype: Dtype,
    /// Kind of the tensor: parameter or buffer.
    pub kind: TensorKind,
    /// First name of the tied weight, if this is another name of it. The bytes are counted under the first name.
    pub tied_to: Option<String>,
}

/// Kind of a tensor of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TensorKind {
    /// Parameter of the model.
    Parameter,
    /// Buffer of the model.
    Buffer {
        /// `true` if the buffer is stored in the model's files.
        persistent: bool,
    },
}

impl MappedTensor {
    /// Returns a parameter with one name.
    #[must_use]
    pub fn parameter(name: impl Into<String>, shape: &[u64], dtype: Dtype) -> Self {
        let kind = TensorKind::Parameter;
        Self { name: name.into(), shape: shape.to_vec(), dtype, kind, tied_to: None }
    }

    /// Returns a persistent buffer, which is stored in the model's files.
    #[must_use]
    pub fn buffer(name: impl Into<String>, shape: &[u64], dtype: Dtype) -> Self {
        let kind = TensorKind::Buffer { persistent: true };
        Self { kind, ..Self::parameter(name, shape, dtype) }
    }

    /// Marks the tensor as another name of the weight `first`.
    #[must_use]
    pub fn tied_to(self, first: impl Into<String>) -> Self {
        Self { tied_to: Some(first.into()), ..self }
    }

    pub(super) fn is_parameter(&self) -> bool {
        self.kind == TensorKind::Parameter
    }
}

/// Tree of a model's modules. The name of a tensor gives its module, and the children of a module are in the order of
/// their first tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleTree {
    pub(super) tensors: Vec<MappedTensor>,
    /// Modules of the model. The root is the first.
    pub(super) modules: Vec<Module>,
    /// Index of the module of each tensor.
    pub(super) module_of: Vec<usize>,
    /// Indices in `tensors` of the names of each tied weight, the first name first.
    pub(super) ties: Vec<Vec<usize>>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Module {
    /// Name of the module. The root's name is empty.
    pub(super) name: String,
    pub(super) parent: usize,
    pub(super) children: Vec<usize>,
    /// Indices of the module's own parameters, followed by its own buffers.
    pub(super) tensors: Vec<usize>,
    /// `true` if the module is never split.
    pub(super) is_unit: bool,
}

/// A module or a tensor, by its index in the tree's lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Item {
    Module(usize),
    Tensor(usize),
}

/// Index of the root among the modules.
pub(super) const ROOT: usize = 0;

impl ModuleTree {
    /// Creates the tree from the tensors of a model, in order of registration, and the names of units: modules that are
    /// never split, such as the blocks of a transformer.
    ///
    /// # Errors
    /// Fails for names that are empty, occur twice, or name both a tensor and a module, for ties to tensors that do not
    /// exist, for units that do not exist, and if there are no tensors.
    pub fn new<U: Into<String>>(
        tensors: impl IntoIterator<Item = MappedTensor>,
        units: impl IntoIterator<Item = U>,
    ) -> Result<Self, DeviceMapError> {
        let tensors: Vec<_> = tensors.into_iter().collect();
        if tensors.is_empty() {
            return Err(DeviceMapError::Empty);
        }
        let mut modules = vec![Module::default()];
        let mut places = HashMap::from([(String::new(), ROOT)]);
        let mut by_name = HashMap::new();
        let mut module_of = Vec::with_capacity(tensors.len());
        for (place, tensor) in tensors.iter().enumerate() {
            if tensor.name.is_empty() {
                return Err(DeviceMapError::Nameless { shape: tensor.shape.clone() });
            }
            if by_name.insert(tensor.name.as_str(), place).is_some() {
                return Err(DeviceMapError::DuplicateName { name: tensor.name.clone() });
            }
            let mut module = ROOT;
            for (end, _) in tensor.name.match_indices('.') {
                let name = &tensor.name[..end];
                module = places.get(name).copied().unwrap_or_else(|| {
                    let child = modules.len();
                    modules[module].children.push(child);
                    let name = name.to_owned();
                    places.insert(name.clone(), child);
                    modules.push(Module { name, parent: module, ..Module::default() });
                    child
                });
            }
            modules[module].tensors.push(place);
            module_of.push(module);
        }
        if let Some(tensor) = tensors.iter().find(|tensor| places.contains_key(&tensor.name)) {
            return Err(DeviceMapError::TensorIsModule { name: tensor.name.clone() });
        }
        for module in &mut modules {
            module.tensors.sort_by_key(|tensor| !tensors[*tensor].is_parameter());
        }
        for unit in units {
            let name = unit.into();
            let Some(module) = places.get(&name).filter(|module| **module != ROOT) else {
                return Err(DeviceMapError::NoSuchUnit { name });
            };
            modules[*module].is_unit = true;
        }
        let ties = ties(&tensors, &by_name)?;
        Ok(Self { tensors, modules, module_of, ties })
    }

    /// Returns the tensors, in order of registration.
    #[must_use]
    pub fn tensors(&self) -> &[MappedTensor] {
        &self.tensors
    }

    /// Returns the names of the layers: units, modules without submodules that are outside of units, and own tensors of
    /// the modules above these. Each tensor is in one layer.
    pub fn layers(&self) -> impl Iterator<Item = &str> {
        self.layer_items().into_iter().map(|item| self.name(item))
    }

    pub(super) fn layer_items(&self) -> Vec<Item> {
        let mut layers = Vec::new();
        let mut left = vec![Item::Module(ROOT)];
        while let Some(item) = left.pop() {
            if self.can_split(item) || item == Item::Module(ROOT) {
                let parts = self.parts(item);
                left.extend(parts.into_iter().chain(self.own_buffers(item)).rev());
            } else {
                layers.push(item);
            }
        }
        layers
    }

    pub(super) fn name(&self, item: Item) -> &str {
        match item {
            Item::Module(module) => &self.modules[module].name,
            Item::Tensor(tensor) => &self.tensors[tensor].name,
        }
    }

    /// Returns `true` for a module that has modules and is not a unit.
    pub(super) fn can_split(&self, item: Item) -> bool {
        match item {
            Item::Module(module) => {
                let module = &self.modules[module];
                !module.is_unit && !module.children.is_empty()
            }
            Item::Tensor(_) => false,
        }
    }

    /// Returns the own parameters and modules of a module, by which Accelerate's rules replace it.
    pub(super) fn parts(&self, item: Item) -> Vec<Item> {
        let Item::Module(module) = item else { return Vec::new() };
        let module = &self.modules[module];
        let own = module.tensors.iter().filter(|tensor| self.tensors[**tensor].is_parameter());
        own.map(|tensor| Item::Tensor(*tensor)).chain(self.modules_of(item)).collect()
    }

    pub(super) fn modules_of(&self, item: Item) -> impl DoubleEndedIterator<Item = Item> {
        let children = match item {
            Item::Module(module) => self.modules[module].children.as_slice(),
            Item::Tensor(_) => &[],
        };
        children.iter().map(|child| Item::Module(*child))
    }

    pub(super) fn own_buffers(&self, item: Item) -> Vec<Item> {
        let Item::Module(module) = item else { return Vec::new() };
        let own = self.modules[module].tensors.iter();
        let buffers = own.filter(|tensor| !self.tensors[**tensor].is_parameter());
        buffers.map(|tensor| Item::Tensor(*tensor)).collect()
    }

    /// Returns `true` if a tensor is in a module, or is the item itself.
    pub(super) fn contains(&self, item: Item, tensor: usize) -> bool {
        match item {
            Item::Tensor(own) => own == tensor,
            Item::Module(module) => self.around(tensor).any(|outer| outer == module),
        }
    }

    /// Returns the modules that have a tensor, from the innermost to the root.
    pub(super) fn around(&self, tensor: usize) -> impl Iterator<Item = usize> {
        self.upwards(Some(self.module_of[tensor]))
    }

    /// Returns the modules around an item, from the innermost to the root.
    pub(super) fn outside(&self, item: Item) -> impl Iterator<Item = usize> {
        self.upwards(match item {
            Item::Tensor(tensor) => Some(self.module_of[tensor]),
            Item::Module(ROOT) => None,
            Item::Module(module) => Some(self.modules[module].parent),
        })
    }

    fn upwards(&self, mut next: Option<usize>) -> impl Iterator<Item = usize> {
        std::iter::from_fn(move || {
            let module = next?;
            next = (module != ROOT).then(|| self.modules[module].parent);
            Some(module)
        })
    }

    /// Returns the tensors in a module, in order of registration.
    pub(super) fn tensors_in(&self, module: usize) -> impl Iterator<Item = usize> {
        (0..self.tensors.len()).filter(move |tensor| self.contains(Item::Module(module), *tensor))
    }

    /// Returns the tensors of an item, in the order of modules.
    pub(super) fn tensors_of(&self, item: Item) -> Vec<usize> {
        let mut tensors = Vec::new();
        let mut left = vec![item];
        while let Some(item) = left.pop() {
            match item {
                Item::Tensor(tensor) => tensors.push(tensor),
                Item::Module(module) => {
                    left.extend(self.modules_of(item).rev());
                    tensors.extend(&self.modules[module].tensors);
                }
            }
        }
        tensors
    }

    pub(super) fn is_unit(&self, item: Item) -> bool {
        matches!(item, Item::Module(module) if self.modules[module].is_unit)
    }

    /// Returns `true` if a tensor is in a unit.
    pub(super) fn is_in_unit(&self, tensor: usize) -> bool {
        self.around(tensor).any(|module| self.modules[module].is_unit)
    }
}

fn ties(
    tensors: &[MappedTensor],
    by_name: &HashMap<&str, usize>,
) -> Result<Vec<Vec<usize>>, DeviceMapError> {
    let mut ties: Vec<Vec<usize>> = Vec::new();
    for (place, tensor) in tensors.iter().enumerate() {
        let Some(tied_to) = &tensor.tied_to else { continue };
        let first = by_name.get(tied_to.as_str()).copied();
        let Some(first) = first.filter(|first| tensors[*first].tied_to.is_none()) else {
            let (name, tied_to) = (tensor.name.clone(), tied_to.clone());
            return Err(DeviceMapError::Tie { name, tied_to });
        };
        match ties.iter_mut().find(|tie| tie[0] == first) {
            Some(tie) => tie.push(place),
            None => ties.push(vec![first, place]),
        }
    }
    ties.sort_by_key(|tie| tie[0]);
    Ok(ties)
}
