//! The axes of Accelerate's `parallelism_config`.

use super::given::{Given, Values, closest};
use super::{Settings, SettingsError};
use crate::{Axis, ContextMethod, Mesh};

/// Sizes of a mesh from Accelerate's `parallelism_config`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParallelismConfig {
    sizes: Vec<Size>,
    method: ContextMethod,
    /// Source of the first size.
    origin: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Size {
    axis: Axis,
    ranks: usize,
    given: Given,
}

impl ParallelismConfig {
    /// Reads the arguments that begin with `parallelism_config_`, such as `parallelism_config_dp_shard_size`. Returns
    /// `None` if no size is given, or `use_parallelism_config` is off.
    ///
    /// # Errors
    /// [`SettingsError`] for an unknown key, a size that is not a whole number from 1, and sizes of several axes that
    /// Accelerate does not accept together.
    pub fn read(given: &[Given]) -> Result<Option<Self>, SettingsError> {
        let values = Values::new(given);
        if values.find("use_parallelism_config").is_some()
            && !values.switch("use_parallelism_config")?
        {
            return Ok(None);
        }
        let mut sizes = Vec::new();
        for given in values.with_prefix(PREFIX) {
            let name = &given.name[PREFIX.len()..];
            let Some((_, axis)) = AXES.iter().find(|(known, _)| *known == name) else {
                check_option(given, name)?;
                continue;
            };
            let ranks = given.value.trim().parse().ok().filter(|ranks| *ranks > 0);
            let ranks = ranks.ok_or_else(|| given.wrong("a whole number from 1"))?;
            sizes.retain(|it: &Size| it.axis != *axis);
            sizes.push(Size { axis: *axis, ranks, given: given.clone() });
        }
        let Some(first) = sizes.first() else { return Ok(None) };
        let method = match values.find("parallelism_config_cp_comm_strategy") {
            _ if sizes.iter().any(|it| it.axis == Axis::Sequence && it.ranks > 1) => {
                ContextMethod::Ulysses
            }
            Some(given) if given.value == "alltoall" => ContextMethod::Ring,
            _ => ContextMethod::Gather,
        };
        let config = Self { origin: first.given.origin.clone(), sizes, method };
        config.check()?;
        Ok(Some(config))
    }

    /// Returns the number of ranks along an axis. Defaults to 1.
    #[must_use]
    pub fn size(&self, axis: Axis) -> usize {
        self.find(axis).map_or(1, |it| it.ranks)
    }

    /// Returns the method of context parallelism: that of `cp_comm_strategy`, or [`ContextMethod::Ulysses`] if
    /// `sp_size` is above 1.
    #[must_use]
    pub fn context_method(&self) -> ContextMethod {
        self.method
    }

    /// Returns the mesh of a job with `world_size` ranks. If all sizes are 1, each rank has a copy of the model, as in
    /// Accelerate.
    ///
    /// # Errors
    /// [`SettingsError::Mesh`] for sizes whose product is not `world_size`.
    pub fn mesh(&self, world_size: usize) -> Result<Mesh, SettingsError> {
        let (replicate, shard) = (self.size(Axis::Replicate), self.size(Axis::Shard));
        let (context, sequence) = (self.size(Axis::Context), self.size(Axis::Sequence));
        let tensor = self.size(Axis::Tensor);
        if replicate * shard * context * sequence * tensor == 1 {
            return copies(world_size, &self.origin);
        }
        let builder = Mesh::builder().replicate(replicate).shard(shard).context(context);
        let mesh = builder.sequence(sequence).tensor(tensor).build(world_size);
        mesh.map_err(|source| SettingsError::Mesh { origin: self.origin.clone(), source })
    }

    /// Returns the mesh of a job with DeepSpeed, whose own settings decide which ranks share a copy, with the ranks
    /// along `sp`.
    ///
    /// # Errors
    /// [`SettingsError`] for axes that are not combined with DeepSpeed, and sizes that do not divide the ranks.
    pub(super) fn mesh_for_deepspeed(&self, settings: &Settings) -> Result<Mesh, SettingsError> {
        for axis in [Axis::Tensor, Axis::Context] {
            if let Some(size) = self.find(axis).filter(|it| it.ranks > 1) {
                return Err(size.given.unsupported("it is not combined with DeepSpeed: use FSDP"));
            }
        }
        let mesh = self.mesh(settings.mesh.world_size())?;
        let (replicate, shard) =
            (settings.mesh.size(Axis::Replicate), settings.mesh.size(Axis::Shard));
        let parts = self.size(Axis::Sequence);
        let is_same = |axis| mesh.size(axis) == settings.mesh.size(axis);
        if parts > 1 && mesh.size(Axis::Shard) == 1 {
            // Ranks with parts of a sequence share a copy in the same way as ranks with samples of their own.
            let inside = if shard > 1 { shard } else { replicate };
            let (replicate, shard) =
                if shard > 1 { (replicate, inside / parts) } else { (inside / parts, 1) };
            let builder = Mesh::builder().replicate(replicate).shard(shard).sequence(parts);
            let mesh = builder.build(settings.mesh.world_size());
            return mesh
                .map_err(|source| SettingsError::Mesh { origin: self.origin.clone(), source });
        }
        if (is_same(Axis::Replicate) && is_same(Axis::ShardContext)) || mesh.size(Axis::Shard) == 1
        {
            return Ok(if parts > 1 { mesh } else { settings.mesh.clone() });
        }
        Err(SettingsError::Contradiction {
            first: format!("parallelism_config {mesh} ({})", self.origin),
            second: format!("DeepSpeed on {}", settings.mesh),
            remedy: "leave out parallelism_config, or use FSDP for copies of a sharded model",
        })
    }

    /// Returns the mesh of a job in which nothing is sharded.
    pub(super) fn mesh_of_copies(&self, world_size: usize) -> Result<Mesh, SettingsError> {
        let mesh = self.mesh(world_size)?;
        match self.find(Axis::Shard).filter(|it| it.ranks > 1) {
            None => Ok(mesh),
            Some(shard) => {
                Err(shard.given.unsupported("it needs FSDP: set use_fsdp, and fsdp_version to 2"))
            }
        }
    }

    /// Returns the source of the first size.
    pub(super) fn origin(&self) -> &str {
        &self.origin
    }

    fn find(&self, axis: Axis) -> Option<&Size> {
        self.sizes.iter().find(|it| it.axis == axis)
    }

    /// Checks the rules of Accelerate's `ParallelismConfig.__post_init__`.
    fn check(&self) -> Result<(), SettingsError> {
        let above_one = |axis| self.find(axis).filter(|it| it.ranks > 1);
        let described =
            |size: &Size| format!("{} {} ({})", size.given.name, size.ranks, size.given.origin);
        if let (Some(context), Some(sequence)) =
            (above_one(Axis::Context), above_one(Axis::Sequence))
        {
            return Err(SettingsError::Contradiction {
                first: described(context),
                second: described(sequence),
                remedy: "both cut sequences; set one of them to 1",
            });
        }
        if let Some(inner) = above_one(Axis::Tensor).or_else(|| above_one(Axis::Context))
            && let Some(replicate) = above_one(Axis::Replicate)
            && self.size(Axis::Shard) == 1
        {
            return Err(SettingsError::Contradiction {
                first: described(inner),
                second: described(replicate),
                remedy: "copies alone cannot be combined with cut layers or sequences; set \
                         parallelism_config_dp_shard_size above 1",
            });
        }
        Ok(())
    }
}

/// Returns the mesh of a job with a whole model on each rank.
pub(super) fn copies(world_size: usize, origin: &str) -> Result<Mesh, SettingsError> {
    let mesh = Mesh::builder().replicate(world_size).build(world_size);
    mesh.map_err(|source| SettingsError::Mesh { origin: origin.to_owned(), source })
}

/// Checks a key that configures an axis, such as its backend. It has no effect while the axis has one rank.
fn check_option(given: &Given, name: &str) -> Result<(), SettingsError> {
    match name {
        "cp_backend" if given.value != "torch" => Err(given.wrong("torch")),
        "sp_backend" if given.value != "deepspeed" => Err(given.wrong("deepspeed")),
        "cp_comm_strategy" if !["allgather", "alltoall"].contains(&given.value.as_str()) => {
            Err(given.wrong("allgather or alltoall"))
        }
        "cp_backend"
        | "sp_backend"
        | "cp_comm_strategy"
        | "sp_seq_length"
        | "sp_seq_length_is_variable"
        | "sp_attn_implementation" => Ok(()),
        _ => Err(SettingsError::UnknownKey {
            origin: given.origin.clone(),
            key: given.name.clone(),
            hint: closest(name, AXES.iter().map(|it| it.0)),
        }),
    }
}

const PREFIX: &str = "parallelism_config_";
const AXES: [(&str, Axis); 5] = [
    ("dp_replicate_size", Axis::Replicate),
    ("dp_shard_size", Axis::Shard),
    ("tp_size", Axis::Tensor),
    ("cp_size", Axis::Context),
    ("sp_size", Axis::Sequence),
];
