//! The manifest, which describes the contents of a checkpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write};
use std::path::Path;

use brigade_rank_env::text::counted;
use serde::{Deserialize, Serialize};
use serde_json::ser::{Formatter, PrettyFormatter};

use super::file::FileFacts;
use super::sharding::{MeshAxis, Placement, TensorEntry};
use crate::dtype::TensorInfo;
use crate::error::Error;
use crate::file_name::FileName;

/// File name of the manifest in a checkpoint's folder.
pub const MANIFEST: &str = "manifest.json";
/// Format identifier in every manifest.
pub const FORMAT: &str = "brigade-checkpoint";
/// Manifest version that is written. All older versions can be read.
///
/// - 1: each object lists the files of its tensors; the tensors are those in the files' headers, each whole.
/// - 2: the ranks' mesh, and of each tensor its type, global shape, placements and stored chunks.
pub const VERSION: u32 = 2;

/// Contents of a checkpoint, with the checksums of its files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Format identifier, always [`FORMAT`].
    pub format: String,
    /// Version of the manifest, up to [`VERSION`].
    pub version: u32,
    /// Name and version of the program that wrote the checkpoint.
    pub made_by: String,
    /// World size of the run.
    pub world_size: usize,
    /// Device mesh of the ranks. The product of the axis sizes is [`Manifest::world_size`].
    pub mesh: Vec<MeshAxis>,
    /// Number of optimizer steps taken.
    pub step: u64,
    /// Number of samples trained on, summed over all ranks.
    pub samples: u64,
    /// Objects of the run, in the order in which the program prepared them.
    pub objects: Vec<Object>,
    /// Size and checksum of every file except the manifest.
    pub files: BTreeMap<FileName, FileFacts>,
    /// CRC-32 of the manifest itself, over all fields above.
    #[serde(default)]
    pub crc32: String,
}

/// An object of a checkpoint, such as a model or an optimizer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Object {
    /// Kind of the object: `model`, `optimizer`, `scheduler`, `scaler`, `loader`, `custom`, `run` or `rank`.
    pub kind: String,
    /// Name of the object and stem of its files: `model`, `model_1`, `rank_0`.
    pub name: FileName,
    /// File of the state tree. `None` for a model, which consists of tensors only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<FileName>,
    /// Files of the tensors, and their index if there is one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tensor_files: Vec<FileName>,
    /// Tensors by name. Empty in a manifest of version 1 until [`super::Checkpoint::open`] fills them in from the
    /// headers of the files.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tensors: BTreeMap<String, TensorEntry>,
}

/// A manifest of version 1, with the fields in the order of its checksum.
#[derive(Serialize, Deserialize)]
struct Version1 {
    format: String,
    version: u32,
    made_by: String,
    world_size: usize,
    step: u64,
    samples: u64,
    objects: Vec<ObjectVersion1>,
    files: BTreeMap<FileName, FileFacts>,
    #[serde(default)]
    crc32: String,
}

/// An object in a manifest of version 1.
#[derive(Serialize, Deserialize)]
struct ObjectVersion1 {
    kind: String,
    name: FileName,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    state: Option<FileName>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    tensors: Vec<FileName>,
}

/// Fields that identify format and version, read before the others.
#[derive(Deserialize)]
struct Head {
    format: Option<String>,
    version: Option<u32>,
}

impl Manifest {
    /// Creates a manifest without objects, for ranks that all hold the same: a mesh with one axis, `data`.
    #[must_use]
    pub fn new(made_by: impl Into<String>, world_size: usize) -> Self {
        Self {
            format: FORMAT.into(),
            version: VERSION,
            made_by: made_by.into(),
            world_size,
            mesh: data_mesh(world_size),
            step: 0,
            samples: 0,
            objects: Vec::new(),
            files: BTreeMap::new(),
            crc32: String::new(),
        }
    }

    /// Returns the manifest as JSON, with its own checksum. The version is [`VERSION`], even if the manifest was read
    /// from an older one.
    #[must_use]
    pub fn to_json(&self) -> String {
        let mut whole = Self { version: VERSION, ..self.clone() };
        whole.crc32 = whole.own_checksum();
        let mut text = Vec::new();
        let mut out = serde_json::Serializer::with_formatter(&mut text, Lines::default());
        // Cannot fail: strings and numbers are always valid JSON, which is UTF-8.
        let _ = whole.serialize(&mut out);
        let mut text = String::from_utf8(text).unwrap_or_default();
        text.push('\n');
        text
    }

    /// Reads the manifest of a checkpoint's folder.
    ///
    /// # Errors
    /// Fails with [`Error::NotACheckpoint`], [`Error::Version`], [`Error::Damaged`] or [`Error::Io`].
    pub fn read(folder: &Path) -> Result<Self, Error> {
        let path = folder.join(MANIFEST);
        let not = |fact: String| Error::NotACheckpoint { path: folder.to_owned(), fact };
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(not(match fs::metadata(folder) {
                    Ok(folder) if folder.is_dir() => foreign(&path),
                    Ok(_) => "it is a file, not a folder".into(),
                    Err(error) => error.to_string(),
                }));
            }
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                return Err(not("it is a file, not a folder".into()));
            }
            Err(error) => return Err(Error::io("read", &path)(error)),
        };
        let damaged = |fact: String| Error::Damaged { path: path.clone(), fact };
        let head: Head = serde_json::from_slice(&text)
            .map_err(|error| damaged(format!("it is not a manifest: {error}")))?;
        if head.format.as_deref() != Some(FORMAT) {
            return Err(not(format!(
                "its {MANIFEST} is of format {:?}, not {FORMAT:?}",
                head.format.unwrap_or_default()
            )));
        }
        match head.version {
            Some(1) => {
                let mut old: Version1 = serde_json::from_slice(&text)
                    .map_err(|error| damaged(format!("it is not a manifest: {error}")))?;
                let recorded = std::mem::take(&mut old.crc32);
                same_checksum(&checksum(&old), &recorded).map_err(damaged)?;
                let manifest = Self { crc32: recorded, ..Self::from(old) };
                manifest.check().map_err(damaged)?;
                return Ok(manifest);
            }
            Some(VERSION) => {}
            None | Some(0) => return Err(damaged("it has no version".into())),
            Some(found) => {
                return Err(Error::Version { path: folder.to_owned(), found, known: VERSION });
            }
        }
        let manifest: Self = serde_json::from_slice(&text)
            .map_err(|error| damaged(format!("it is not a manifest: {error}")))?;
        same_checksum(&manifest.own_checksum(), &manifest.crc32).map_err(damaged)?;
        manifest.check().map_err(damaged)?;
        Ok(manifest)
    }

    /// Iterates over the objects of a kind, in order.
    pub fn of_kind(&self, kind: &str) -> impl Iterator<Item = &Object> {
        self.objects.iter().filter(move |object| object.kind == kind)
    }

    /// Returns the total size of all files in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.files.values().fold(0, |sum, file| sum.saturating_add(file.bytes))
    }

    /// Checks that the entries are consistent.
    fn check(&self) -> Result<(), String> {
        let lost = |name: &&FileName| !self.files.contains_key(*name);
        if let Some(name) = self.objects.iter().flat_map(Object::files).find(lost) {
            return Err(format!("an object is in {name}, which is not among its files"));
        }
        if self.files.contains_key(MANIFEST) {
            return Err("it names itself among its files".into());
        }
        let mut names = BTreeSet::new();
        if let Some(object) = self.objects.iter().find(|object| !names.insert(&object.name)) {
            return Err(format!("it has two objects `{}`", object.name));
        }
        self.check_mesh()?;
        let mut stored = BTreeSet::new();
        for object in &self.objects {
            for (name, tensor) in &object.tensors {
                let about = |fault: String| format!("`{name}` of {}: {fault}", object.name);
                tensor.check().map_err(about)?;
                if !tensor.placements.is_empty() && tensor.placements.len() != self.mesh.len() {
                    return Err(about(format!(
                        "it has {} placements on a mesh of {} axes",
                        tensor.placements.len(),
                        self.mesh.len()
                    )));
                }
                for chunk in &tensor.chunks {
                    if !object.tensor_files.contains(&chunk.file) {
                        return Err(about(format!("{} is not among its files", chunk.file)));
                    }
                    if !stored.insert((&chunk.file, chunk.key(name))) {
                        return Err(about(format!(
                            "`{}` in {} is also another chunk",
                            chunk.key(name),
                            chunk.file
                        )));
                    }
                }
            }
        }
        Ok(())
    }

    fn check_mesh(&self) -> Result<(), String> {
        let mut names = BTreeSet::new();
        if let Some(axis) = self.mesh.iter().find(|axis| !names.insert(&axis.name)) {
            return Err(format!("its mesh has two axes `{}`", axis.name));
        }
        let ranks = self.mesh.iter().try_fold(1usize, |ranks, axis| ranks.checked_mul(axis.size));
        if ranks != Some(self.world_size) {
            let sizes: Vec<usize> = self.mesh.iter().map(|axis| axis.size).collect();
            return Err(format!(
                "its mesh of {sizes:?} is not one of {}",
                counted(self.world_size, "rank")
            ));
        }
        Ok(())
    }

    fn own_checksum(&self) -> String {
        checksum(&Self { crc32: String::new(), ..self.clone() })
    }
}

impl From<Version1> for Manifest {
    fn from(old: Version1) -> Self {
        let objects = old.objects.into_iter().map(|object| Object {
            kind: object.kind,
            name: object.name,
            state: object.state,
            tensor_files: object.tensors,
            tensors: BTreeMap::new(),
        });
        Self {
            format: old.format,
            version: old.version,
            made_by: old.made_by,
            world_size: old.world_size,
            mesh: data_mesh(old.world_size),
            step: old.step,
            samples: old.samples,
            objects: objects.collect(),
            files: old.files,
            crc32: old.crc32,
        }
    }
}

/// Returns a mesh with one axis for all ranks, that of data parallelism.
fn data_mesh(world_size: usize) -> Vec<MeshAxis> {
    vec![MeshAxis { name: "data".into(), size: world_size }]
}

fn checksum(manifest: &impl Serialize) -> String {
    let text = serde_json::to_vec(manifest).unwrap_or_default();
    format!("{:08x}", crc32fast::hash(&text))
}

fn same_checksum(found: &str, recorded: &str) -> Result<(), String> {
    if found == recorded {
        Ok(())
    } else {
        Err(format!("its checksum is {found}, but the recorded checksum is {recorded}"))
    }
}

/// A JSON formatter with one line per entry, and one per tensor.
#[derive(Default)]
struct Lines {
    pretty: PrettyFormatter<'static>,
    depth: usize,
}

impl Lines {
    fn is_line(&self) -> bool {
        self.depth > TENSOR_DEPTH
    }
}

impl Formatter for Lines {
    fn begin_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.depth += 1;
        if self.is_line() { out.write_all(b"[") } else { self.pretty.begin_array(out) }
    }

    fn end_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        let line = self.is_line();
        self.depth -= 1;
        if line { out.write_all(b"]") } else { self.pretty.end_array(out) }
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        match (self.is_line(), first) {
            (false, _) => self.pretty.begin_array_value(out, first),
            (true, true) => Ok(()),
            (true, false) => out.write_all(b", "),
        }
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        if self.is_line() { Ok(()) } else { self.pretty.end_array_value(out) }
    }

    fn begin_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.depth += 1;
        if self.is_line() { out.write_all(b"{") } else { self.pretty.begin_object(out) }
    }

    fn end_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        let line = self.is_line();
        self.depth -= 1;
        if line { out.write_all(b"}") } else { self.pretty.end_object(out) }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        match (self.is_line(), first) {
            (false, _) => self.pretty.begin_object_key(out, first),
            (true, true) => Ok(()),
            (true, false) => out.write_all(b", "),
        }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.pretty.begin_object_value(out)
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        if self.is_line() { Ok(()) } else { self.pretty.end_object_value(out) }
    }
}

/// Nesting depth of a tensor: manifest, objects, object, tensors. Anything deeper is on one line.
const TENSOR_DEPTH: usize = 4;

impl Object {
    /// Creates an object without state and tensors.
    #[must_use]
    pub fn new(kind: impl Into<String>, name: FileName) -> Self {
        Self {
            kind: kind.into(),
            name,
            state: None,
            tensor_files: Vec::new(),
            tensors: BTreeMap::new(),
        }
    }

    /// Adds a safetensors file and its tensors, each stored whole, with the given placements.
    pub fn add_file<'a>(
        &mut self,
        file: &FileName,
        tensors: impl IntoIterator<Item = (&'a str, TensorInfo)>,
        placements: &[Placement],
    ) {
        self.tensor_files.push(file.clone());
        self.tensors.extend(tensors.into_iter().map(|(name, info)| {
            (name.to_owned(), TensorEntry::whole(info, file.clone(), placements.to_vec()))
        }));
    }

    /// Iterates over the files of the object: its state, then its tensor files.
    pub fn files(&self) -> impl Iterator<Item = &FileName> {
        self.state.iter().chain(&self.tensor_files)
    }
}

/// Returns a guess of what a folder without a manifest is, for a message.
fn foreign(manifest: &Path) -> String {
    let Some(folder) = manifest.parent() else { return "it has no manifest".into() };
    let has = |name: &str| folder.join(name).exists();
    if has("random_states_0.pkl") || has("optimizer.bin") || has("pytorch_model.bin") {
        return format!(
            "it has no {MANIFEST} and looks like one of Accelerate's: bring it in with \
             `brigade checkpoint convert --like`"
        );
    }
    if has("model.safetensors") {
        return format!("it has no {MANIFEST}: only weights, which `load_model` reads");
    }
    format!("it has no {MANIFEST}")
}
