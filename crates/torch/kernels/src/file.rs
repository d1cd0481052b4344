//! The files of kernels, and the variants in which they are compiled.

use sha2::{Digest, Sha256};

/// File of kernels: the text of one concept.
#[derive(Debug, PartialEq, Eq)]
pub struct File {
    /// Name of the file without its extension, such as `norm_relu`; also the name in `BRIGADE_FUSED`.
    pub name: &'static str,
    /// CUDA C++, without what [`Variant::source`] puts in front of it.
    pub text: &'static str,
    /// Types of elements that the kernels accept.
    pub elements: &'static [Element],
}

/// All files of kernels.
pub static FILES: &[File] = &[
    File { name: "activation", text: include_str!("../activation.cu"), elements: &Element::ALL },
    File {
        name: "cross_entropy",
        text: include_str!("../cross_entropy.cu"),
        elements: &Element::ALL,
    },
    File { name: "embedding", text: include_str!("../embedding.cu"), elements: &Element::ALL },
    File {
        name: "norm_residual",
        text: include_str!("../norm_residual.cu"),
        elements: &[Element::Bfloat16, Element::Float16],
    },
    File {
        name: "norm_relu",
        text: include_str!("../norm_relu.cu"),
        elements: &[Element::Bfloat16, Element::Float16],
    },
    File { name: "images", text: include_str!("../images.cu"), elements: &Element::ALL },
    File { name: "optimizer", text: include_str!("../optimizer.cu"), elements: &Element::ALL },
    File { name: "rotary", text: include_str!("../rotary.cu"), elements: &Element::ALL },
];

/// Text in front of each file: types, loads, sums, random numbers.
const COMMON: &str = include_str!("../common.cuh");

/// Smallest compute capability that the kernels support: Ampere's, the first with bfloat16.
pub const MIN_CAPABILITY: u32 = 80;

/// Compute capabilities for which all files are checked.
pub const CAPABILITIES: [u32; 7] = [80, 86, 89, 90, 100, 103, 120];

impl File {
    /// Finds a file by its name.
    #[must_use]
    pub fn find(name: &str) -> Option<&'static Self> {
        FILES.iter().find(|file| file.name == name)
    }

    /// Returns the maximum number of registers of a thread, which the file's head states. `None` if it states none.
    #[must_use]
    pub fn max_registers(&self) -> Option<u32> {
        let (_, rest) = self.text.split_once("// Registers of a thread: at most ")?;
        rest.split_once('.')?.0.parse().ok()
    }

    /// Returns the reason why a GPU cannot run the kernels for a type of elements: its compute capability, or the type.
    /// `None` for a type stands for one that no kernel accepts.
    #[must_use]
    pub fn obstacle(&self, element: Option<Element>, capability: u32) -> Option<String> {
        if capability < MIN_CAPABILITY {
            let [own, needed] = [capability, MIN_CAPABILITY].map(|it| (it / 10, it % 10));
            return Some(format!(
                "compute capability {}.{}, needs {}.{}",
                own.0, own.1, needed.0, needed.1
            ));
        }
        if element.is_none_or(|element| !self.elements.contains(&element)) {
            let names: Vec<&str> = self.elements.iter().map(|element| element.name()).collect();
            return Some(format!("needs {}", names.join(" or ")));
        }
        None
    }
}

/// Type of the elements for which kernels are compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// Bfloat16: 16 bits with the exponent range of float32.
    Bfloat16,
    /// IEEE half precision.
    Float16,
    /// IEEE single precision.
    Float32,
}

impl Element {
    /// All types, in the order of their numbers.
    pub const ALL: [Self; 3] = [Self::Bfloat16, Self::Float16, Self::Float32];

    /// Returns the name as PyTorch has it, such as `bfloat16`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Bfloat16 => "bfloat16",
            Self::Float16 => "float16",
            Self::Float32 => "float32",
        }
    }

    /// Returns the number of the type in the kernels' text (`BRIGADE_ELEMENT`).
    #[must_use]
    pub fn number(self) -> u32 {
        match self {
            Self::Bfloat16 => 0,
            Self::Float16 => 1,
            Self::Float32 => 2,
        }
    }
}

/// A file of kernels as it is compiled: for a type of elements and a compute capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Variant {
    /// File of kernels.
    pub file: &'static File,
    /// Type of the elements.
    pub element: Element,
    /// Compute capability, such as 90.
    pub capability: u32,
}

impl Variant {
    /// Returns the text to compile.
    #[must_use]
    pub fn source(&self) -> String {
        let File { name, text, .. } = self.file;
        format!("#line 1 \"common.cuh\"\n{COMMON}\n#line 1 \"{name}.cu\"\n{text}")
    }

    /// Returns the name of the text in messages of the compiler.
    #[must_use]
    pub fn source_name(&self) -> String {
        format!("{}.cu", self.file.name)
    }

    /// Returns the options of NVRTC.
    #[must_use]
    pub fn options(&self) -> Vec<String> {
        vec![
            format!("--gpu-architecture=sm_{}", self.capability),
            "--std=c++17".to_owned(),
            format!("-DBRIGADE_ELEMENT={}", self.element.number()),
        ]
    }

    /// Returns the key of the compiled code: the SHA-256 of everything that it depends on.
    #[must_use]
    pub fn key(&self, nvrtc: (u32, u32)) -> [u8; 32] {
        let mut hash = Sha256::new();
        let version = format!("{}.{}", nvrtc.0, nvrtc.1);
        let mut parts =
            vec![self.source_name(), self.source(), version, self.capability.to_string()];
        parts.extend(self.options());
        for part in parts {
            // The length keeps parts apart.
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        hash.finalize().into()
    }

    /// Returns the name of the file in the cache.
    #[must_use]
    pub fn file_name(&self, nvrtc: (u32, u32)) -> String {
        let key: String = self.key(nvrtc)[..16].iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{}-{}-sm_{}-{key}.kernels", self.file.name, self.element.name(), self.capability)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_file_states_its_registers_and_has_elements() {
        for file in FILES {
            assert!(file.max_registers().is_some_and(|it| it <= 255), "{}", file.name);
            assert!(!file.elements.is_empty(), "{}", file.name);
            assert_eq!(File::find(file.name), Some(file));
        }
        assert_eq!(File::find("unknown"), None);
        assert_eq!(Element::ALL.map(Element::number), [0, 1, 2]);
    }

    #[test]
    fn everything_that_changes_the_code_changes_the_key() {
        let variant = Variant { file: &FILES[0], element: Element::Bfloat16, capability: 90 };
        let names = [
            variant.file_name((13, 0)),
            variant.file_name((13, 1)),
            Variant { element: Element::Float16, ..variant }.file_name((13, 0)),
            Variant { capability: 100, ..variant }.file_name((13, 0)),
        ];
        for (i, name) in names.iter().enumerate() {
            assert!(!names[..i].contains(name), "{names:?}");
        }
        assert_eq!(variant.file_name((13, 0)), names[0]);
    }

    #[test]
    fn an_obstacle_names_what_is_needed() {
        let file = File::find("norm_relu").unwrap();
        assert_eq!(file.obstacle(Some(Element::Bfloat16), 80), None);
        let old = file.obstacle(Some(Element::Bfloat16), 75);
        assert_eq!(old.as_deref(), Some("compute capability 7.5, needs 8.0"));
        let wide = file.obstacle(Some(Element::Float32), 90);
        assert_eq!(wide.as_deref(), Some("needs bfloat16 or float16"));
        assert_eq!(file.obstacle(None, 90), wide);
    }
}
