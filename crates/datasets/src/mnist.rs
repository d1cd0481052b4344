//! MNIST and FashionMNIST, from a folder or from their mirrors, and any folder of files with MNIST's names.

use std::path::{Path, PathBuf};

use brigade_torch::Result;

use crate::download::{Download, RemoteFile};
use crate::{DatasetError, LabelledImages};

/// A folder of IDX files with MNIST's names: `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`,
/// `t10k-images-idx3-ubyte` and `t10k-labels-idx1-ubyte`, each plain or with `.gz`.
#[derive(Clone, Debug)]
pub struct IdxFolder(PathBuf);

impl IdxFolder {
    /// Sets the folder. The files may also be in its sub-folder `raw`. Nothing is read yet.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self(folder.into())
    }

    /// Reads the train part.
    ///
    /// # Errors
    /// Fails if a file is missing or invalid; see [`LabelledImages::open`].
    pub fn train(&self) -> Result<LabelledImages> {
        self.open("train")
    }

    /// Reads the test part.
    ///
    /// # Errors
    /// Fails if a file is missing or invalid; see [`LabelledImages::open`].
    pub fn test(&self) -> Result<LabelledImages> {
        self.open("t10k")
    }

    fn open(&self, part: &str) -> Result<LabelledImages> {
        let folders = [self.0.clone(), self.0.join("raw")];
        let advice = "name the folder that holds the IDX files";
        let (images, labels) = find_pair(&folders, part, advice)?;
        LabelledImages::open(images, labels)
    }
}

/// Defines the datasets that have a name.
macro_rules! published_sets {
    ($($(#[$doc:meta])* $name:ident = $set:expr;)*) => { $(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $name;

        impl $name {
            /// Names of the classes, by label.
            pub const CLASSES: [&str; 10] = $set.classes;

            /// Reads the train part: 60,000 images of 28x28 pixels.
            ///
            /// Searches torchvision's sub-folder, `raw` and the folder itself, for files with and without `.gz`. Does
            /// not download: see `download`.
            ///
            /// # Errors
            /// Fails if a file is missing or invalid; see [`LabelledImages::open`].
            pub fn train(folder: impl AsRef<Path>) -> Result<LabelledImages> {
                $set.open(folder.as_ref(), "train")
            }

            /// Reads the test part: 10,000 images of 28x28 pixels, in the same folders as `train`.
            ///
            /// # Errors
            /// Returns the same errors as `train`.
            pub fn test(folder: impl AsRef<Path>) -> Result<LabelledImages> {
                $set.open(folder.as_ref(), "t10k")
            }

            /// Downloads missing files from the mirrors of the dataset, with checksums, into torchvision's sub-folder
            /// of `folder`. If all files exist, nothing is downloaded and no network is needed. Only one rank per host
            /// needs to do this. Mirrors with `https` addresses need the feature `https`.
            ///
            /// # Errors
            /// Fails if a file cannot be downloaded from any mirror or cannot be written, or if the feature is off.
            pub fn download(folder: impl AsRef<Path>) -> Result<()> {
                Self::download_with(folder, &Download::default())
            }

            /// Downloads missing files with other mirrors, time limits or numbers of attempts than those of `download`.
            ///
            /// # Errors
            /// Returns the same errors as `download`.
            pub fn download_with(
                folder: impl AsRef<Path>,
                download: &Download,
            ) -> Result<()> {
                $set.download(folder.as_ref(), download)
            }
        }
    )* };
}

published_sets! {
    /// MNIST: handwritten digits (LeCun, Cortes, Burges), 12 MB to download.
    Mnist = MNIST;
    /// FashionMNIST: images of clothes (Xiao, Rasul, Vollgraf), 31 MB to download.
    FashionMnist = FASHION_MNIST;
}

/// Mirrors, checksums and classes of a published dataset.
struct PublishedSet {
    name: &'static str,
    /// Name of torchvision's sub-folder.
    folder: &'static str,
    mirrors: &'static [&'static str],
    files: [RemoteFile<'static>; 4],
    classes: [&'static str; 10],
}

impl PublishedSet {
    fn folders(&self, folder: &Path) -> [PathBuf; 3] {
        [folder.join(self.folder).join("raw"), folder.join("raw"), folder.to_owned()]
    }

    fn open(&self, folder: &Path, part: &str) -> Result<LabelledImages> {
        let advice = format!("{}::download fetches it", self.name);
        let (images, labels) = find_pair(&self.folders(folder), part, &advice)?;
        LabelledImages::open(images, &labels)?.with_classes(self.classes.len(), labels)
    }

    fn download(&self, folder: &Path, download: &Download) -> Result<()> {
        let folders = self.folders(folder);
        if ["train", "t10k"].iter().all(|part| find_pair(&folders, part, "").is_ok()) {
            return Ok(());
        }
        Ok(download.fetch_all(&self.files, self.mirrors, &folders[0])?)
    }
}

const MNIST: PublishedSet = PublishedSet {
    name: "Mnist",
    folder: "MNIST",
    mirrors: &[
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ],
    files: [
        RemoteFile::new(
            "train-images-idx3-ubyte.gz",
            9_912_422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        RemoteFile::new(
            "train-labels-idx1-ubyte.gz",
            28_881,
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        RemoteFile::new(
            "t10k-images-idx3-ubyte.gz",
            1_648_877,
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        RemoteFile::new(
            "t10k-labels-idx1-ubyte.gz",
            4_542,
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ],
    classes: ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"],
};

const FASHION_MNIST: PublishedSet = PublishedSet {
    name: "FashionMnist",
    folder: "FashionMNIST",
    // Served without TLS: the checksum protects against tampering.
    mirrors: &["http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"],
    files: [
        RemoteFile::new(
            "train-images-idx3-ubyte.gz",
            26_421_880,
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        ),
        RemoteFile::new(
            "train-labels-idx1-ubyte.gz",
            29_515,
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        ),
        RemoteFile::new(
            "t10k-images-idx3-ubyte.gz",
            4_422_102,
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        ),
        RemoteFile::new(
            "t10k-labels-idx1-ubyte.gz",
            5_148,
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ],
    classes: [
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ],
};

/// Returns the paths of the images and labels of a part. Both must be in the same folder: the first that contains the
/// images.
fn find_pair(
    folders: &[PathBuf],
    part: &str,
    advice: &str,
) -> Result<(PathBuf, PathBuf), DatasetError> {
    let images = find(folders, &format!("{part}-images-idx3-ubyte"), advice)?;
    let beside: Vec<PathBuf> = images.parent().map(Path::to_owned).into_iter().collect();
    let labels = find(&beside, &format!("{part}-labels-idx1-ubyte"), advice)?;
    Ok((images, labels))
}

/// Searches for a plain file before a compressed one: torchvision keeps both, and the plain file is read faster.
fn find(folders: &[PathBuf], file: &str, advice: &str) -> Result<PathBuf, DatasetError> {
    folders
        .iter()
        .flat_map(|folder| [folder.join(file), folder.join(format!("{file}.gz"))])
        .find(|path| path.is_file())
        .ok_or_else(|| DatasetError::NotFound {
            file: file.into(),
            looked_in: folders.to_vec(),
            advice: advice.into(),
        })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::Digits;

    /// Writes four small files with MNIST's names; those with `.gz` are the embedded digits.
    fn fill(folder: &Path, gz: bool) {
        fs::create_dir_all(folder).unwrap();
        let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/digits");
        for file in MNIST.files {
            let (plain, dims) = match file.name {
                name if name.contains("images") => (name.trim_end_matches(".gz"), 3),
                name => (name.trim_end_matches(".gz"), 1),
            };
            let source = assets.join(file.name);
            if gz {
                fs::copy(source, folder.join(file.name)).unwrap();
            } else {
                let idx = crate::IdxFile::open(source, dims).unwrap();
                let mut bytes = vec![0, 0, 8, dims as u8];
                for dim in idx.shape {
                    bytes.extend((dim as u32).to_be_bytes());
                }
                bytes.extend(idx.data);
                fs::write(folder.join(plain), bytes).unwrap();
            }
        }
    }

    #[test]
    fn every_layout_of_torchvision_is_found() {
        for gz in [false, true] {
            for layout in ["", "raw", "MNIST/raw"] {
                let root = tempfile::tempdir().unwrap();
                fill(&root.path().join(layout), gz);
                let (train, test) = (Mnist::train(&root).unwrap(), Mnist::test(&root).unwrap());
                assert_eq!((train.len(), test.len()), (1438, 359), "{layout}");
                let digits = Digits::train().unwrap();
                assert_eq!(train.sample(1437).unwrap(), digits.sample(1437).unwrap());
                // All files exist: nothing is requested, so no mirror is needed.
                Mnist::download_with(&root, &Download::from(["http://127.0.0.1:1/"])).unwrap();
                assert_eq!(FashionMnist::train(&root).is_ok(), layout != "MNIST/raw");
            }
        }
    }

    #[test]
    fn a_plain_folder_is_opened_without_a_name() {
        let root = tempfile::tempdir().unwrap();
        fill(root.path(), true);
        let folder = IdxFolder::new(root.path());
        assert_eq!((folder.train().unwrap().len(), folder.test().unwrap().len()), (1438, 359));
        assert_eq!(folder.test().unwrap().classes(), 10);
    }

    #[test]
    fn missing_and_mismatched_files_are_named() {
        let root = tempfile::tempdir().unwrap();
        let error = FashionMnist::train(&root).unwrap_err().to_string();
        let expected = "found neither train-images-idx3-ubyte nor train-images-idx3-ubyte.gz in ";
        assert!(error.starts_with(expected), "{error}");
        assert!(error.contains("FashionMNIST/raw"), "{error}");
        assert!(error.ends_with("FashionMnist::download fetches it"), "{error}");

        fill(root.path(), true);
        let at = |name: &str| root.path().join(name);
        fs::remove_file(at("train-labels-idx1-ubyte.gz")).unwrap();
        let error = Mnist::train(&root).unwrap_err().to_string();
        assert!(error.starts_with("found neither train-labels-idx1-ubyte nor"), "{error}");

        fs::copy(at("t10k-labels-idx1-ubyte.gz"), at("train-labels-idx1-ubyte.gz")).unwrap();
        let error = Mnist::train(&root).unwrap_err().to_string();
        assert!(error.contains("train-images-idx3-ubyte.gz holds 1438 images, but "), "{error}");
        assert!(error.contains("train-labels-idx1-ubyte.gz holds 359 labels"), "{error}");

        let mut labels = vec![0, 0, 8, 1, 0, 0, 0x01, 0x67];
        labels.extend([3; 358]);
        labels.push(10);
        fs::write(at("t10k-labels-idx1-ubyte"), labels).unwrap();
        let error = Mnist::test(&root).unwrap_err().to_string();
        assert!(error.ends_with("label 10 at position 358, expected 0 to 9"), "{error}");
    }
}
