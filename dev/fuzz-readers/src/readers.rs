//! The readers.

mod data;
mod launch;
mod text;
mod weights;

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use rustix::fs::{MemfdFlags, memfd_create};

use crate::Target;

pub(crate) const TARGETS: &[Target] = &[
    Target {
        name: "safetensors",
        reads: "the header of a safetensors file",
        words: &["\"dtype\"", "\"shape\"", "\"data_offsets\"", "\"F32\"", "__metadata__", "{}"],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: weights::safetensors,
    },
    Target {
        name: "zip",
        reads: "the archive of a .pth file",
        words: &[
            "PK\x03\x04",
            "PK\x01\x02",
            "PK\x05\x06",
            "PK\x06\x07",
            "PK\x06\x06",
            "w/data.pkl",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE + PTH_FREE,
        read: weights::pth,
    },
    Target {
        name: "pickle",
        reads: "the pickle of a .pth file, in an archive and in an old file that are sound",
        words: &[
            "ctorch._utils\n_rebuild_tensor_v2\n",
            "ctorch\nFloatStorage\n",
            "ccollections\nOrderedDict\n",
            "X\x01\0\0\x000",
            "X\x07\0\0\0storage",
            "\u{2}",
            "tQ",
            "tR",
            "q\x01",
            "h\x01",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE + PTH_FREE,
        read: weights::pickle,
    },
    Target {
        name: "script",
        reads: "the code of a TorchScript archive that is sound, a NUL and its pickle",
        words: &[
            "class Linear(Module):\n",
            "  __parameters__ = [\"weight\", ]\n",
            "  __buffers__ = [\"mean\", ]\n",
            "c__torch__\nOuter\n",
            "X\x06\0\0\0weight",
            "(u}b",
            "h\x01",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE + PTH_FREE,
        read: weights::script,
    },
    Target {
        name: "exported",
        reads: "the list of weights of an exported program (.pt2)",
        words: &[
            "\"config\"",
            "\"path_name\"",
            "\"weight_0\"",
            "\"tensor_meta\"",
            "\"sizes\"",
            "\"strides\"",
            "{\"as_int\":",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE + PTH_FREE,
        read: weights::exported,
    },
    Target {
        name: "legacy",
        reads: "a .pth file in the format before PyTorch 1.6",
        words: &[
            "ctorch._utils\n_rebuild_tensor\n",
            "ctorch._utils\n_rebuild_tensor_v2\n",
            "ctorch\nLongStorage\n",
            "ccollections\nOrderedDict\n",
            "X\x01\0\0\x000",
            "U\x07storage",
            "NtQ",
            "tQ",
            "]e.",
            "\x01\0\0\0\0\0\0\0",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE + PTH_FREE,
        read: weights::pth,
    },
    Target {
        name: "manifest",
        reads: "the manifest of a checkpoint, also under its right checksum",
        words: &[
            "\"objects\":[",
            "\"files\":{",
            "\"bytes\":",
            "\"crc32\":\"\"",
            "../",
            "\"name\":",
            "\"mesh\":[",
            "\"tensor_files\":[",
            "\"tensors\":{",
            "\"chunks\":[",
            "\"offset\":[",
            "\"shape\":[",
            "{\"shard\":0}",
            "18446744073709551615",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: weights::manifest,
    },
    Target {
        name: "index",
        reads: "the index of several weights files",
        words: &["\"weight_map\":{", "\"metadata\":{", "\"total_size\":", "../", "/etc/passwd"],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: weights::index,
    },
    Target {
        name: "state",
        reads: "the state of an object in a checkpoint, and what it says of a schedule",
        words: &[
            "{\"$dict\":[[",
            "{\"$tuple\":[",
            "{\"$bytes\":\"",
            "{\"$float\":\"",
            "{\"$tensor\":\"",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: weights::state,
    },
    Target {
        name: "trainer_state",
        reads: "trainer_state.json of Hugging Face's Trainer",
        words: &[
            "\"global_step\":",
            "\"epoch\":",
            "NaN",
            "-Infinity",
            "\\\"",
            "{\"log_history\":[",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: weights::trainer_state,
    },
    #[cfg(feature = "libtorch")]
    Target {
        name: "idx",
        reads: "an IDX file, plain or gzip",
        words: &["\0\0\x08\x03", "\0\0\x08\x01", "\u{1f}", "\0\0\0\x01"],
        // What a gzip file may become, and a buffer that grows to twice of it at most.
        bytes_per_byte: 2 * 200,
        free_bytes: FREE + (8 << 20),
        read: data::idx,
    },
    #[cfg(feature = "libtorch")]
    Target {
        name: "archive",
        reads: "a tar, tar.gz or zip archive of `untar_data`, unpacked",
        words: &[
            "ustar\0",
            "ustar  \0",
            "././@LongLink",
            "30 path=",
            "../",
            "/etc/passwd",
            "PK\x03\x04",
            "PK\x01\x02",
            "PK\x05\x06",
            "\u{1f}",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: data::archive_file,
    },
    Target {
        name: "webdataset",
        reads: "a tar archive of images, by its headers",
        words: &["ustar\0", "ustar  \0", "a.jpg", ".cls", "././@LongLink", "30 path=", "size="],
        // A member of a compressed archive is in memory while it is copied.
        bytes_per_byte: TREE + 2 * GZIP,
        // A number of a class makes names of all up to it, of which 100,000 are allowed.
        free_bytes: FREE + (16 << 20),
        read: data::webdataset,
    },
    Target {
        name: "parquet",
        reads: "a Parquet file with encoded images",
        words: &["PAR1", "image", "bytes", "label", "huggingface", "\"names\":[", "ClassLabel"],
        bytes_per_byte: ZSTD,
        free_bytes: FREE + PARQUET_FREE,
        read: data::parquet,
    },
    Target {
        name: "pack",
        reads: "a file of images without encoding, also under its right digest",
        words: &["BRIGPACK\x01\0\0\0", "{\"classes\":[", "\"names\":["],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: data::pack,
    },
    Target {
        name: "tokenizer",
        reads: "a `tokenizer.json` of Hugging Face's, and what it makes of a text",
        words: &[
            "\"type\":\"BPE\"",
            "\"type\":\"WordPiece\"",
            "\"type\":\"Unigram\"",
            "{\"type\":\"ByteLevel\",\"add_prefix_space\":true,\"trim_offsets\":true}",
            "{\"Regex\":\"",
            "\"added_tokens\":[",
            "\"vocab\":{",
            "\"merges\":[",
            "\"single\":[",
            "4294967295",
        ],
        bytes_per_byte: TREE,
        // What a regular expression may take, and the names in a caught panic's backtrace.
        free_bytes: FREE + (192 << 20),
        read: text::tokenizer,
    },
    Target {
        name: "vocabulary",
        reads: "a vocabulary, as JSON and as a pickled list",
        words: &[
            "{\"format\":\"brigade-vocabulary\",\"version\":1,\"unknown\":0,\"filled\":true,\"tokens\":[",
            "]}\n",
            "cfastcore.foundation\nL\n",
            "X\x05\0\0\0items",
            "X\x05\0\0\0xxunk",
            "h\x01",
            "(",
            "e.",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: text::vocabulary,
    },
    Target {
        name: "tokens",
        reads: "a file of texts as tokens, also under its right checksums",
        words: &["BRIGTOKS\x01\0\0\0", "\x02\0\0\0", "\x04\0\0\0"],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: text::tokens,
    },
    Target {
        name: "transforms",
        reads: "a size, a seed and a list of transforms of images",
        words: &["\u{7}", "\u{b}\u{40}\u{30}"],
        bytes_per_byte: 0,
        // Images of a million pixels: one before a step and one after it.
        free_bytes: FREE + 4 * data::TRANSFORMED_BYTES,
        read: data::transforms,
    },
    Target {
        name: "image",
        reads: "an encoded image (JPEG, PNG, WebP, BMP, GIF), whole and in part",
        words: &[
            "Exif\0\0",
            "Adobe",
            "JFIF",
            "PNG\r\n\u{1a}\n",
            "IHDR",
            "PLTE",
            "tRNS",
            "IDAT",
            "IEND",
            "RIFF",
            "WEBPVP8 ",
            "WEBPVP8L",
            "WEBPVP8X",
            "GIF89a",
            "BM",
            "II*\0",
            "MM\0*",
            "II+\0\x08\0",
            "P4\n",
            "P6\n",
        ],
        bytes_per_byte: 4096,
        free_bytes: FREE + (64 << 20),
        read: data::image,
    },
    Target {
        name: "hostfile",
        reads: "a hostfile, or a list of hosts",
        words: &["slots=", "max-slots=", ":4", "[fd00::7]", "@", "#", ","],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: launch::hostfile,
    },
    Target {
        name: "accelerate_yaml",
        reads: "Accelerate's settings in YAML",
        words: &[
            "distributed_type: MULTI_GPU\n",
            "num_machines: ",
            "&a ",
            "*a",
            "<<: ",
            "? ",
            "|\n",
        ],
        bytes_per_byte: YAML,
        free_bytes: FREE,
        read: launch::accelerate_yaml,
    },
    Target {
        name: "accelerate_json",
        reads: "Accelerate's settings in JSON",
        words: &["\"distributed_type\":", "\"num_processes\":", "null", "{}", "[]", "\\u0000"],
        bytes_per_byte: YAML,
        free_bytes: FREE,
        read: launch::accelerate_json,
    },
    Target {
        name: "settings",
        reads: "Brigade's settings in TOML",
        words: &[
            "version = 1\n",
            "[ranks]\n",
            "[env]\n",
            "nproc = ",
            "\"\"\"",
            "[[a]]\n",
            "a.b.c = 1",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: launch::settings,
    },
    Target {
        name: "node_list",
        reads: "Slurm's lists of nodes and tasks",
        words: &["[", "]", "-", ",", "(x", ")", "0000", "131072"],
        // A few characters stand for hosts up to a limit.
        bytes_per_byte: TREE,
        free_bytes: FREE + (128 << 20),
        read: launch::node_list,
    },
    Target {
        name: "kernel_log",
        reads: "the kernel's log, and the faults of GPUs in it (Xids, SXids, amdgpu)",
        words: &[
            "6,1,500000,-;",
            "NVRM: Xid (PCI:0000:3b:00): 79, ",
            "NVRM: GPU 0000:91:00.0: ",
            "nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, ",
            "amdgpu 0000:c1:00.0: amdgpu: ",
            "Fatal, ",
            "154, ",
            "): ",
            "\n",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: launch::kernel_log,
    },
    Target {
        name: "rendezvous",
        reads: "the frames between agents and coordinator",
        words: &["\0\0\0\x10", "Beat", "Join", "Output", "Finished", "Refused"],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: launch::rendezvous,
    },
    Target {
        name: "agent",
        reads: "what the launcher and an agent say over ssh before the job",
        words: &["Hello", "Found", "Look", "Store", "Piece", "Enter", "Job"],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: launch::agent,
    },
    Target {
        name: "error_file",
        reads: "the error file of a rank",
        words: &["\"message\":", "\"extraInfo\":", "\"py_callstack\":", "\"errorCode\":"],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: launch::error_file,
    },
    Target {
        name: "progress",
        reads: "a rank's report of its progress, or a bar of tqdm's",
        words: &[
            "\"label\":",
            "\"rate\":",
            "\"values\":[[",
            "%|",
            "| 1/9 [",
            "it/s, ",
            "s/it",
            "00:01<",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: launch::progress,
    },
    Target {
        name: "run",
        reads: "the lines of a run, as `brigade watch` and `brigade report` read them",
        words: &[
            "{\"_event\":\"start\"",
            "\"_time\":",
            "\"_step\":",
            "\"_config\":{",
            "\"_project\":",
            "{\"columns\":[\"rank\"],\"data\":[[0]]}",
            "\"NaN\"",
            "}\n{",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: launch::run,
    },
];

/// For values of one or two bytes each.
const TREE: usize = 512;
/// The YAML parser keeps places, and copies what an anchor names.
const YAML: usize = 2048;
/// Buffers, folders, messages.
const FREE: usize = 4 << 20;
/// Schemas and page buffers of the Parquet reader; ten bytes of Brotli may hold 16 MiB.
const PARQUET_FREE: usize = 80 << 20;
/// What gzip can make of a byte.
const GZIP: usize = 1_040;
/// What zstd can make of a byte, and the same in an image's copy.
const ZSTD: usize = 2 * 43_691;
/// What a tensor that repeats its storage may take, and as much for a piece of it.
const PTH_FREE: usize = 4 << 20;

/// A file in memory with these bytes, at its beginning.
fn file(bytes: &[u8]) -> File {
    let mut file = memfd_create("input", MemfdFlags::CLOEXEC).map(File::from).expect("memory");
    file.write_all(bytes).expect("memory");
    io::Seek::rewind(&mut file).expect("it has a beginning");
    file
}

/// A path under which such a file can be opened once more.
fn path_of(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

fn stays_in(folder: &Path, name: &Path) -> bool {
    folder.join(name).parent() == Some(folder)
}

/// Counts what is written to it.
struct Sink(u64);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
