//! Folders of Hugging Face models: a config and weights.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use brigade_checkpoint::{TensorReader, WeightsReader, check_quantization_method, wrapper_prefix};
use brigade_nn::weights::{self, PartsWriter};
use brigade_nn::{
    LoadReport, Model, ModelBuilder, ModelError, ParamPath, QuantizeReport, ShapeMismatch, Weights,
};
use brigade_sharding::device_map::DeviceMap;
use brigade_torch::{Error, Result, kind_of};
use tch::{Kind, Tensor};

use super::config::{CONFIG, TransformerOptions};
use crate::PretrainedReport;
use crate::classifier::is_below;

/// A transformer whose parameters and options have Hugging Face's names, so that it can be loaded from and saved to
/// folders in the format of transformers' `from_pretrained` and `save_pretrained`.
///
/// ```
/// use brigade_models::{BertForSequenceClassification, BertOptions, Transformer};
/// use brigade_nn::Model;
///
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path().join("bert");
/// let options = BertOptions {
///     vocab_size: 50, hidden_size: 32, num_attention_heads: 4, num_hidden_layers: 1, ..Default::default()
/// };
/// let model = Model::new(|path| BertForSequenceClassification::new(path, &options))?;
/// BertForSequenceClassification::save_pretrained(&model, &folder)?;
/// let model = BertForSequenceClassification::from_pretrained(&folder)?;
/// assert_eq!(model.module().options().hidden_size, 32);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Transformer: Sized {
    /// Architecture options, as in `config.json`.
    type Options: TransformerOptions;

    /// Name of the class in transformers (`architectures` in `config.json`).
    const ARCHITECTURE: &'static str;

    /// Name of the body (`base_model_prefix`): the prefix of the names of the body's parameters in this model. Weights
    /// files of the body alone do not have the prefix.
    const BODY: &'static str;

    /// Name, below the body, of the embedding's weight, which has a row for each token of the vocabulary.
    const EMBEDDING: &'static str;

    /// Registers all layers below the path.
    fn build(path: &ParamPath<'_>, options: &Self::Options) -> Self;

    /// Returns the options that the model was built with.
    fn options(&self) -> &Self::Options;

    /// Returns `true` if a parameter of the body may be missing in the weights or in the model, such as BERT's pooler.
    /// The name has the body's prefix.
    #[must_use]
    fn is_optional(name: &str) -> bool {
        let _ = name;
        false
    }

    /// Maps tensors of weights files to this model's parameters if their names or shapes differ, for example experts
    /// that are one tensor here and several in the file. Defaults to no change.
    ///
    /// # Errors
    /// Returns the errors of [`WeightsReader::stack`].
    fn adapt_weights(weights: &mut WeightsReader) -> Result<()> {
        let _ = weights;
        Ok(())
    }

    /// Returns the tensors of a file, with their names, for a tensor of this model: the inverse of
    /// [`Transformer::adapt_weights`]. Defaults to the tensor under its name.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Tensor`] if libtorch cannot create views.
    fn saved_tensors(name: &str, tensor: &Tensor) -> Result<Vec<(String, Tensor)>> {
        Ok(vec![(name.to_owned(), tensor.shallow_clone())])
    }

    /// Builds the model of a folder's `config.json` with the folder's weights, in float32 on the CPU. It is in training
    /// mode, like all new models.
    ///
    /// It takes the memory of the model and at most 16 MB; see [`weights::read`].
    ///
    /// # Errors
    /// [`super::ConfigError`], [`brigade_nn::ModelError::Build`], and the errors of [`Transformer::load_pretrained`].
    fn from_pretrained(folder: impl AsRef<Path>) -> Result<Model<Self>> {
        Self::from_pretrained_as(folder, Model::builder())
    }

    /// Loads a model like [`Transformer::from_pretrained`], in another kind, on another device, or deferred. The
    /// weights of a deferred model are read when the parameters are allocated; each rank of a sharded model reads only
    /// its rows.
    ///
    /// ```
    /// use brigade_models::{Gpt2LmHead, Gpt2Options, Transformer};
    /// use brigade_nn::Model;
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let folder = folder.path().join("gpt2");
    /// let options = Gpt2Options { vocab_size: 50, n_embd: 32, n_head: 4, n_layer: 1, ..Default::default() };
    /// let model = Model::new(|path| Gpt2LmHead::new(path, &options))?;
    /// Gpt2LmHead::save_pretrained(&model, &folder)?;
    /// let model = Gpt2LmHead::from_pretrained_as(&folder, Model::builder().deferred())?;
    /// assert!(model.is_deferred()); // for `Accelerator::prepare`
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns the same errors as [`Transformer::from_pretrained`].
    fn from_pretrained_as(folder: impl AsRef<Path>, builder: ModelBuilder) -> Result<Model<Self>> {
        let is_deferred = builder.is_deferred();
        let (mut model, _) = deferred::<Self>(folder.as_ref(), builder)?;
        if !is_deferred {
            model.materialize()?;
        }
        Ok(model)
    }

    /// Loads a model like [`Transformer::from_pretrained`], with each tensor at its location in a device map, for
    /// inference with a model that does not fit on one device ([`Model::dispatch`]; transformers' `device_map`).
    /// Weights are quantised to 8 or 4 bits if requested ([`Model::place_as`]). By default weights have the type of
    /// most of the files' tensors, as with transformers' `dtype="auto"`. The model is in evaluation mode.
    ///
    /// ```
    /// use brigade_models::{GenerationOptions, Gpt2LmHead, Gpt2Options, Transformer};
    /// use brigade_nn::{Model, Weights};
    /// use brigade_sharding::device_map::DeviceMap;
    /// use tch::Tensor;
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let folder = folder.path().join("gpt2");
    /// let options = Gpt2Options { vocab_size: 50, n_embd: 32, n_head: 4, n_layer: 2, ..Default::default() };
    /// let whole = Model::new(|path| Gpt2LmHead::new(path, &options))?;
    /// Gpt2LmHead::save_pretrained(&whole, &folder)?;
    /// // The blocks stay on the disk but for the one that computes and the one that comes next.
    /// let map = DeviceMap::by_hand([("transformer.h", "disk"), ("", "cpu")]);
    /// let model = Gpt2LmHead::from_pretrained_on(&folder, &map, &Weights::default())?;
    /// let ids = Tensor::from_slice(&[7i64, 8]).view([1, 2]);
    /// let written = GenerationOptions { max_new_tokens: 5, ..Default::default() }.generate(&model, &ids, None)?;
    /// assert_eq!(written.size(), [1, 7]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`Transformer::from_pretrained`] and of [`Model::place_as`].
    fn from_pretrained_on(
        folder: impl AsRef<Path>,
        map: &DeviceMap,
        weights: &Weights,
    ) -> Result<Model<Self>> {
        Ok(Self::load_pretrained_on(folder, map, weights)?.0)
    }

    /// Loads a model like [`Transformer::from_pretrained_on`], and returns it with the report of
    /// [`Transformer::load_pretrained`]: parameters of the head that keep their initial values because the files lack
    /// them, names that were mapped, and tensors of the files that the model does not have. Initial values need a place
    /// in memory: a map that has such a parameter on the disk is an error.
    ///
    /// ```
    /// use brigade_models::{Gpt2, Gpt2LmHead, Gpt2Options, Transformer, TransformerOptions};
    /// use brigade_nn::{Model, Weights};
    /// use brigade_sharding::device_map::DeviceMap;
    /// use tch::Kind;
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let folder = folder.path().join("gpt2");
    /// # let options = Gpt2Options { vocab_size: 50, n_embd: 32, n_head: 4, n_layer: 2, ..Default::default() };
    /// # Gpt2LmHead::save_pretrained(&Model::new(|path| Gpt2LmHead::new(path, &options))?, &folder)?;
    /// // Keeps room for the cache of 4 texts of at most 64 tokens.
    /// let cache = Gpt2Options::from_folder(&folder)?.inference(4, 64, Kind::BFloat16).expect("it has a cache");
    /// let map = DeviceMap::auto().max_memory([("cpu", "1G")]).reserve(cache.reserve());
    /// let (model, report) = Gpt2LmHead::load_pretrained_on(&folder, &map, &Weights::float(Kind::BFloat16))?;
    /// assert_eq!((report.loaded, report.head.len(), report.unused.len()), (28, 0, 0));
    /// # assert_eq!(model.kind(), Kind::BFloat16);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns the same errors as [`Transformer::from_pretrained_on`].
    fn load_pretrained_on(
        folder: impl AsRef<Path>,
        map: &DeviceMap,
        weights: &Weights,
    ) -> Result<(Model<Self>, PretrainedReport)> {
        let folder = folder.as_ref();
        let kind = match weights.kind() {
            Some(kind) => kind,
            None => saved_kind(&WeightsReader::open(folder)?),
        };
        let (model, report) = deferred::<Self>(folder, Model::builder().kind(kind))?;
        let mut model = model.place_as(map, weights)?;
        model.eval();
        Ok((model, report))
    }

    /// Loads a model like [`Transformer::from_pretrained_as`], with weights quantised to 8 or 4 bits for inference, or
    /// in another floating-point kind. Each weight is read, quantised and freed, so that at most one whole weight is in
    /// memory beside the quantised ones. The model is in evaluation mode if weights are quantised. Also returns a
    /// report, which lists the layers that have no kernel; print it at the start of a program.
    ///
    /// ```
    /// use brigade_models::{LlamaForCausalLm, LlamaOptions, Transformer};
    /// use brigade_nn::{Model, Weights};
    /// use tch::Kind;
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let folder = folder.path().join("llama");
    /// # let options = LlamaOptions {
    /// #     vocab_size: 50, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 1, num_attention_heads: 2,
    /// #     num_key_value_heads: Some(2), ..Default::default()
    /// # };
    /// # let model = Model::new(|path| LlamaForCausalLm::new(path, &options))?;
    /// # LlamaForCausalLm::save_pretrained(&model, &folder)?;
    /// let builder = Model::builder().kind(Kind::BFloat16);
    /// let (model, report) = LlamaForCausalLm::from_pretrained_quantized(&folder, builder, &Weights::int4(32))?;
    /// eprintln!("{report}"); // 7 layers quantised, 5.00 bits a weight
    /// assert_eq!((report.layers.len(), model.is_quantized()), (7, true));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns the same errors as [`Transformer::from_pretrained`], and those of [`Model::quantize`].
    fn from_pretrained_quantized(
        folder: impl AsRef<Path>,
        builder: ModelBuilder,
        weights: &Weights,
    ) -> Result<(Model<Self>, QuantizeReport)> {
        let mut model = Self::from_pretrained_as(folder, builder.deferred())?;
        let report = model.quantize(weights)?;
        Ok((model, report))
    }

    /// Loads weights into a model, from a file, or from a folder with `model.safetensors`, with
    /// `model.safetensors.index.json` and its parts, or with `pytorch_model.bin` or its parts.
    ///
    /// - Names may be without the body's prefix, as in the files of Hugging Face's base models.
    /// - Buffers of older versions (`attn.bias`, `position_ids`, `rotary_emb.inv_freq`) are skipped; `gamma` and
    ///   `beta` are `weight` and `bias`.
    /// - For tied weights one name is enough.
    /// - Parameters of the head that are missing in the weights, or have a different number of labels there, keep their
    ///   initial values. Parameters of other heads in the weights are ignored. The report lists both.
    ///
    /// Everything else must match. Otherwise the model is not changed.
    ///
    /// # Errors
    /// Returns the errors of [`WeightsReader::open`] and of [`weights::read`]; [`brigade_nn::ModelError::Mismatch`]
    /// with the report; an error with both sizes if the sizes of the vocabularies differ.
    fn load_pretrained(
        model: &mut Model<Self>,
        weights: impl AsRef<Path>,
    ) -> Result<PretrainedReport> {
        let mut weights = WeightsReader::open(weights)?;
        Self::adapt_weights(&mut weights)?;
        Fit::of(model, &weights)?.read(model, weights)
    }

    /// Writes `config.json` and `model.safetensors` into a folder, which is created if it does not exist.
    /// `from_pretrained` of transformers, and [`Transformer::from_pretrained`], can read it. Tied weights are written
    /// once.
    ///
    /// # Errors
    /// [`brigade_checkpoint::Error`] if a file cannot be written.
    fn save_pretrained(model: &Model<Self>, folder: impl AsRef<Path>) -> Result<()> {
        Self::save_pretrained_in_parts(model, folder, u64::MAX)
    }

    /// Saves a model like [`Transformer::save_pretrained`], with weights in files of at most `max_bytes` each and an
    /// index (`max_shard_size`). Parts and an index of an earlier save are removed.
    ///
    /// # Errors
    /// Returns the same errors as [`Transformer::save_pretrained`]; [`brigade_torch::ErrorKind::InvalidArgument`] for a
    /// model that is divided over ranks: use `Accelerator::save_model` for its weights, and
    /// [`Transformer::save_config`] for the config.
    fn save_pretrained_in_parts(
        model: &Model<Self>,
        folder: impl AsRef<Path>,
        max_bytes: u64,
    ) -> Result<()> {
        let folder = folder.as_ref();
        model.check_not_quantized("save_pretrained")?;
        model.check_undivided("save_pretrained")?;
        write_weights(model, folder, max_bytes)?;
        Self::save_config(model, folder)
    }

    /// Writes `config.json` and `model.safetensors` of a model with quantised weights into a folder, which is created
    /// if it does not exist. [`Transformer::from_pretrained`] reads it without the original weights, and returns the
    /// same model, bit for bit. Other programs do not support the layout of the weights.
    ///
    /// ```
    /// use brigade_models::{Gpt2LmHead, Gpt2Options, Transformer};
    /// use brigade_nn::{Model, Weights};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let folder = folder.path().join("gpt2");
    /// let options = Gpt2Options { vocab_size: 50, n_embd: 32, n_head: 4, n_layer: 1, ..Default::default() };
    /// let mut model = Model::new(|path| Gpt2LmHead::new(path, &options))?;
    /// model.quantize(&Weights::int8())?;
    /// Gpt2LmHead::save_quantized(&model, &folder)?;
    /// assert!(Gpt2LmHead::from_pretrained(&folder)?.is_quantized());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`Model::save_quantized`]; [`brigade_checkpoint::Error`] if a file cannot be written.
    fn save_quantized(model: &Model<Self>, folder: impl AsRef<Path>) -> Result<()> {
        let folder = folder.as_ref();
        Self::save_config(model, folder)?;
        model.save_quantized(folder.join("model.safetensors"))
    }

    /// Writes only `config.json` into a folder, which is created if it does not exist, for a sharded model, whose
    /// weights are written separately because no rank has all of them.
    ///
    /// # Errors
    /// [`brigade_checkpoint::Error`] if the file cannot be written.
    fn save_config(model: &Model<Self>, folder: impl AsRef<Path>) -> Result<()> {
        let folder = folder.as_ref();
        fs::create_dir_all(folder).map_err(|source| io("make", folder, source))?;
        let mut config = model.module().options().to_config();
        config.insert("architectures".to_owned(), vec![Self::ARCHITECTURE].into());
        if let Some(dtype) = dtype_name(model.kind()) {
            config.insert("dtype".to_owned(), dtype.into());
        }
        let text = serde_json::to_string_pretty(&config).map_err(Error::custom)? + "\n";
        write(&folder.join(CONFIG), &text)
    }
}

/// Builds the model of a folder without memory, so that its values come from the files when it gets memory.
fn deferred<M: Transformer>(
    folder: &Path,
    builder: ModelBuilder,
) -> Result<(Model<M>, PretrainedReport)> {
    let options = M::Options::from_folder(folder)?;
    check_quantization_method(folder)?;
    let mut model = builder.deferred().build(|path| M::build(path, &options))?;
    let mut weights = WeightsReader::open(folder)?;
    M::adapt_weights(&mut weights)?;
    let report = Fit::of(&model, &weights)?.read(&mut model, weights)?;
    Ok((model, report))
}

/// Returns the floating-point type of most of the weights' elements.
fn saved_kind(weights: &WeightsReader) -> Kind {
    let mut elements =
        [Kind::Float, Kind::BFloat16, Kind::Half, Kind::Double].map(|kind| (kind, 0));
    for tensor in weights.tensors() {
        let info = tensor.info();
        let kind = kind_of(info.dtype);
        if let Some((_, count)) = elements.iter_mut().find(|(it, _)| Some(*it) == kind) {
            *count += info.shape.iter().product::<u64>();
        }
    }
    // The first one of equal counts.
    let most = elements.iter().rev().max_by_key(|(_, count)| *count);
    most.map_or(Kind::Float, |(kind, _)| *kind)
}

/// Returns `true` for buffers that older versions of transformers saved and that are computed here.
fn is_computed(name: &str) -> bool {
    const ENDINGS: [&str; 5] = [
        ".attn.bias",
        ".attn.masked_bias",
        ".rotary_emb.inv_freq",
        "embeddings.position_ids",
        "embeddings.token_type_ids",
    ];
    ENDINGS.iter().any(|ending| name.ends_with(ending))
}

/// Returns a name with the body's prefix, with or without a prefix in the input, and without names that come from
/// TensorFlow.
fn full_name<M: Transformer>(name: &str, has_prefix: bool) -> String {
    const OLD: [(&str, &str); 2] =
        [("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")];
    let renamed =
        OLD.iter().find_map(|(old, new)| Some(format!("{}{new}", name.strip_suffix(old)?)));
    let name = renamed.unwrap_or_else(|| name.to_owned());
    if has_prefix { name } else { format!("{}.{name}", M::BODY) }
}

/// Assignment of tensors of open weights to those of a model.
struct Fit {
    /// Names in the weights, and the model's tensors.
    tensors: Vec<(String, Tensor)>,
    report: PretrainedReport,
}

impl Fit {
    fn of<'w, M: Transformer>(model: &Model<M>, weights: &'w WeightsReader) -> Result<Self> {
        let own = model.state_dict();
        let names: Vec<&str> = weights.tensors().map(|tensor| tensor.name()).collect();
        let wrapper = wrapper_prefix(&names, &own.names().collect::<Vec<_>>());
        // All names have the wrapper's prefix.
        let without = |tensor: TensorReader<'w>| &tensor.name()[wrapper.len()..];
        let in_file = weights.tensors().any(|tensor| is_below(M::BODY, without(tensor)));
        let in_own = own.names().any(|name| is_below(M::BODY, name));
        let own_names: HashMap<String, &str> =
            own.names().map(|name| (full_name::<M>(name, in_own), name)).collect();
        let in_head = |full: &str| !is_below(M::BODY, full) || M::is_optional(full);

        let mut report = PretrainedReport::default();
        let mut problems = LoadReport::default();
        let mut fitting: HashMap<String, TensorReader<'w>> = HashMap::new();
        let mut kept = HashSet::new();
        for tensor in weights.tensors() {
            let name = without(tensor);
            if is_computed(name) {
                continue;
            }
            let full = full_name::<M>(name, in_file);
            let found =
                own_names.get(&full).and_then(|&own_name| Some((own_name, own.get(own_name)?)));
            let Some((own_name, values)) = found else {
                if in_head(&full) {
                    report.unused.push(name.to_owned());
                } else {
                    problems.unexpected.push(name.to_owned());
                }
                continue;
            };
            report.renamed += usize::from(own_name != name);
            let in_model = model.whole_size(own_name).unwrap_or_else(|| values.size());
            let in_weights: Vec<i64> =
                tensor.info().shape.iter().map(|size| size.cast_signed()).collect();
            // Tied weights are one parameter under several names.
            kept.extend(model.parameter_name(own_name).map(str::to_owned));
            let name = own_name.to_owned();
            if in_weights == in_model {
                if fitting.insert(name.clone(), tensor).is_some() {
                    return Err(ModelError::DuplicateName { name }.into());
                }
            } else if in_head(&full) {
                report.head.push(name);
            } else if full == format!("{}.{}", M::BODY, M::EMBEDDING) {
                return Err(other_vocabulary(own_name, &in_model, &in_weights));
            } else {
                problems.mismatched.push(ShapeMismatch { name, in_model, in_weights });
            }
        }
        for parameter in model.parameters() {
            if !kept.contains(&parameter.name) {
                if in_head(&full_name::<M>(&parameter.name, in_own)) {
                    report.head.push(parameter.name);
                } else {
                    problems.missing.push(parameter.name);
                }
            }
        }
        report.loaded = fitting.len();
        if !problems.is_complete() {
            problems.loaded = report.loaded;
            return Err(ModelError::Mismatch(Box::new(problems)).into());
        }
        // In the model's order: if tied weights have two values, those of the last name remain.
        let tensors = own.names().filter_map(|name| {
            let from = fitting.remove(name)?.name().to_owned();
            Some((from, model.tensor(name)?))
        });
        Ok(Self { tensors: tensors.collect(), report })
    }

    fn read<M>(self, model: &mut Model<M>, weights: WeightsReader) -> Result<PretrainedReport> {
        model.read_from(weights, self.tensors)?;
        Ok(self.report)
    }
}

fn other_vocabulary(name: &str, in_model: &[i64], in_weights: &[i64]) -> Error {
    let text = match (in_model, in_weights) {
        (&[own, width], &[theirs, their_width]) if width == their_width => {
            let mismatch = ShapeMismatch {
                name: name.to_owned(),
                in_model: in_model.to_vec(),
                in_weights: in_weights.to_vec(),
            };
            let padding = mismatch.padding().map_or_else(String::new, |text| format!(": {text}"));
            format!(
                "the vocabulary does not fit: the model has {own} tokens (vocab_size), the weights have \
                 {theirs} ({name}){padding}; build the model with vocab_size {theirs}"
            )
        }
        _ => format!("{name} is {in_model:?} in the model and {in_weights:?} in the weights"),
    };
    Error::invalid_argument(text)
}

/// Writes weights, with tied ones once.
fn write_weights<M: Transformer>(model: &Model<M>, folder: &Path, max_bytes: u64) -> Result<()> {
    let first: HashSet<String> = first_names(model);
    let own = model.state_dict();
    let saved = own.iter().filter(|(name, _)| first.contains(*name));
    let saved = saved.map(|(name, tensor)| M::saved_tensors(name, tensor));
    let saved: Vec<(String, Tensor)> =
        saved.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
    let infos = saved
        .iter()
        .map(|(name, tensor)| Ok((name.as_str(), weights::info_of(name, tensor, folder)?)))
        .collect::<Result<Vec<_>>>()?;
    let mut writer = PartsWriter::create(folder, &infos, max_bytes)?;
    while let Some(place) = writer.next_place() {
        writer.write(&saved[place].1)?;
    }
    writer.finish()
}

/// Returns the names of parameters and saved buffers. For tied ones, the first name.
fn first_names<M>(model: &Model<M>) -> HashSet<String> {
    let all = model.parameters().into_iter().chain(model.buffers());
    all.map(|tensor| tensor.name).collect()
}

/// Writes a text file atomically.
fn write(path: &Path, text: &str) -> Result<()> {
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    let part = PathBuf::from(part);
    fs::write(&part, text)
        .and_then(|()| fs::rename(&part, path))
        .map_err(|source| io("write", path, source))
}

fn io(doing: &'static str, path: &Path, source: std::io::Error) -> Error {
    brigade_checkpoint::Error::Io { doing, path: path.to_owned(), source }.into()
}

fn dtype_name(kind: Kind) -> Option<&'static str> {
    Some(match kind {
        Kind::Float => "float32",
        Kind::Double => "float64",
        Kind::Half => "float16",
        Kind::BFloat16 => "bfloat16",
        _ => return None,
    })
}
