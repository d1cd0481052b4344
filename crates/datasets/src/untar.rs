//! fastai's `untar_data`: archives of datasets, downloaded and unpacked into fastai's folders.

mod folders;

use std::path::PathBuf;

use brigade_torch::Result;

use crate::DatasetError;
use crate::archive::Extraction;
use crate::download::{Download, Fetched, RemoteFile};
use crate::urls::{is_model, published};
use folders::Folders;

/// Downloads the archive at `url` and unpacks it, unless that was done before. Returns the path of the unpacked folder.
///
/// `url` is one of [`Urls`](crate::Urls) or any other address of a `.tgz`, `.tar.gz`, `.tar` or `.zip`. See
/// [`UntarData`] for the folders, the checks and the options. All processes of a host may call it at the same time: one
/// does the work, the others wait. It is needed once per host, or once for all hosts that share a file system:
///
/// ```no_run
/// use brigade_datasets::{Urls, untar_data};
///
/// // With an accelerator: accelerator.processes().main_process_first(|| untar_data(Urls::IMAGEWOOF_320))?
/// let path = untar_data(Urls::IMAGEWOOF_320)?;
/// assert!(path.join("train").is_dir()); // ~/.fastai/data/imagewoof2-320/train
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// Returns the same errors as [`UntarData::extract`], wrapped in the error type of an Accelerator's closures, from
/// which `downcast_ref` returns the [`DatasetError`].
pub fn untar_data(url: impl Into<String>) -> Result<PathBuf> {
    Ok(UntarData::new(url).extract()?)
}

/// Options to download and unpack an archive.
///
/// # Folders
///
/// fastai's folders are used, so that fastai and this crate find what the other has downloaded: below `$FASTAI_HOME` or
/// `~/.fastai`, the archive as `archive/NAME`, its content as `data/STEM`, or `models/STEM` for the models among
/// [`Urls`](crate::Urls). The keys `archive`, `data` and `model` in the section `DEFAULT` of the `config.ini` in that
/// folder set other folders. `STEM` is the archive's name without its ending; if everything in the archive is in one
/// folder, that folder is renamed to it. If a folder of that name exists, it is returned without network access.
///
/// # Checks
///
/// For an address of [`Urls`](crate::Urls), the size of the archive and the MD5 of its first MiB are checked, which is
/// all that fastai's table of checksums covers. The bytes after the first MiB are checked only by the checksums in gzip
/// and zip, which detect damage but not tampering. For an address without a row in the table only the size is known,
/// from the server. [`sha256`](Self::sha256) checks the whole archive. An archive with a wrong checksum is downloaded
/// once more, and so is one from an earlier call that cannot be unpacked.
///
/// An interrupted download is resumed: see [`Download`]. For the permitted content of an archive see [`Extraction`].
///
/// ```
/// use brigade_datasets::{Download, UntarData};
/// # use std::io::{BufRead, BufReader, Write};
/// # let home = tempfile::tempdir()?;
/// # let mut tar = tar::Builder::new(Vec::new());
/// # let mut header = tar::Header::new_gnu();
/// # header.set_size(4);
/// # header.set_mode(0o644);
/// # header.set_cksum();
/// # tar.append_data(&mut header, "pets-1.0/names.txt", &b"Rex\n"[..])?;
/// # let archive = tar.into_inner()?;
/// # let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
/// # let url = format!("http://{}/pets.tar", listener.local_addr()?);
/// # let server = std::thread::spawn(move || {
/// #     let (mut stream, _) = listener.accept().unwrap();
/// #     let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
/// #     while lines.next().is_some_and(|line| !line.unwrap().is_empty()) {}
/// #     write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", archive.len()).unwrap();
/// #     stream.write_all(&archive).unwrap();
/// # });
///
/// // `url` is http://…/pets.tar, an archive with the file pets-1.0/names.txt.
/// let direct = Download { proxy_from_environment: false, ..Download::default() };
/// let pets = UntarData::new(url).base(home.path()).download(direct);
/// let path = pets.extract()?;
/// # server.join().unwrap();
/// assert_eq!(path, home.path().join("data/pets"));
/// assert_eq!(std::fs::read_to_string(path.join("names.txt"))?, "Rex\n");
/// assert_eq!(pets.extract()?, path); // from the disk
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct UntarData {
    url: String,
    base: Option<PathBuf>,
    data_folder: Option<PathBuf>,
    archive_folder: Option<PathBuf>,
    is_model: bool,
    force_download: bool,
    sha256: Option<String>,
    extraction: Extraction,
    download: Download,
}

impl UntarData {
    /// Creates options for the archive at `url`. Nothing is downloaded yet.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        let url = url.into();
        Self {
            is_model: is_model(&url),
            url,
            base: None,
            data_folder: None,
            archive_folder: None,
            force_download: false,
            sha256: None,
            extraction: Extraction::new(),
            download: Download::default(),
        }
    }

    /// Sets the base folder, which contains `config.ini`, `archive` and `data`. Defaults to `$FASTAI_HOME` or
    /// `~/.fastai`.
    #[must_use]
    pub fn base(mut self, folder: impl Into<PathBuf>) -> Self {
        self.base = Some(folder.into());
        self
    }

    /// Sets the folder in which the archive is unpacked to a sub-folder. Defaults to fastai's folder of data or, for a
    /// model, of models.
    #[must_use]
    pub fn data_folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.data_folder = Some(folder.into());
        self
    }

    /// Sets the folder to which the archive is downloaded. Defaults to fastai's folder of archives.
    #[must_use]
    pub fn archive_folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.archive_folder = Some(folder.into());
        self
    }

    /// Sets whether the archive is unpacked into the folder of models instead of that of data: fastai's `c_key`.
    /// Defaults to `true` for the models among [`Urls`](crate::Urls).
    #[must_use]
    pub fn model(mut self, is_model: bool) -> Self {
        self.is_model = is_model;
        self
    }

    /// Sets whether to download and unpack the archive again if that was done before. The existing folder is replaced
    /// when the new one is complete. Defaults to `false`.
    #[must_use]
    pub fn force_download(mut self, force: bool) -> Self {
        self.force_download = force;
        self
    }

    /// Sets the expected SHA-256 of the whole archive, in hexadecimal digits. Defaults to none.
    #[must_use]
    pub fn sha256(mut self, digits: impl Into<String>) -> Self {
        self.sha256 = Some(digits.into());
        self
    }

    /// Sets the maximum size of all files of the archive together in bytes: see [`Extraction::max_bytes`].
    #[must_use]
    pub fn max_bytes(mut self, bytes: u64) -> Self {
        self.extraction = self.extraction.max_bytes(bytes);
        self
    }

    /// Sets the maximum number of files in the archive: see [`Extraction::max_files`].
    #[must_use]
    pub fn max_files(mut self, files: u64) -> Self {
        self.extraction = self.extraction.max_files(files);
        self
    }

    /// Sets the download options: mirrors, which have the archive under the same name, number of attempts and time
    /// limits.
    #[must_use]
    pub fn download(mut self, download: impl Into<Download>) -> Self {
        self.download = download.into();
        self
    }

    /// Downloads and unpacks the archive, unless its folder exists, and returns the path of the folder.
    ///
    /// # Errors
    /// Fails if the archive cannot be downloaded (an `https` address needs the feature `https`), has a wrong checksum
    /// twice or cannot be unpacked safely, or if a folder cannot be written. The folder is complete or does not exist.
    pub fn extract(&self) -> Result<PathBuf, DatasetError> {
        let (name, stem) = names(&self.url)?;
        let folders = Folders::find(self.base.as_deref(), |name| std::env::var_os(name))?;
        let around = match (&self.data_folder, self.is_model) {
            (Some(folder), _) => folder,
            (None, true) => &folders.models,
            (None, false) => &folders.data,
        };
        let folder = around.join(stem);
        if !self.force_download && folder.exists() {
            return Ok(folder);
        }
        let archives = self.archive_folder.as_ref().unwrap_or(&folders.archives);
        let row = published(&self.url);
        let file = RemoteFile {
            name,
            bytes: row.map(|row| row.bytes),
            sha256: self.sha256.as_deref(),
            md5_of_start: row.map(|row| row.md5_of_start),
        };
        let extraction = self.extraction.clone().replace(self.force_download);
        let bring = |again| {
            let urls = std::slice::from_ref(&self.url);
            let fetched = self.download.fetch(&file, urls, archives, again)?;
            Ok((fetched, extraction.extract(archives.join(name), &folder)))
        };
        match bring(self.force_download)? {
            (
                Fetched::Before,
                Err(
                    error @ (DatasetError::DamagedArchive { .. }
                    | DatasetError::NotAnArchive { .. }),
                ),
            ) => {
                tracing::warn!("{error}; downloading it again");
                bring(true)?.1?;
            }
            (_, extracted) => extracted?,
        }
        Ok(folder)
    }
}

/// Returns the names of the archive and of its folder, each of which is one component of a path.
fn names(url: &str) -> Result<(&str, &str), DatasetError> {
    let invalid = |reason| DatasetError::InvalidUrl { url: url.to_owned(), reason };
    let end = url.find(['?', '#']).unwrap_or(url.len());
    let place = url.get(..end).and_then(|url| url.split_once("://"));
    let (_, place) = place
        .ok_or_else(|| invalid("it is not an address that begins with https:// or http://"))?;
    let (_, path) = place.split_once('/').unwrap_or_default();
    let name = path.rsplit('/').next().unwrap_or_default();
    let stem = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
    let stem = stem.strip_suffix(".tar").unwrap_or(stem);
    // Hidden names are reserved for this crate's own files, and names of dots alone are other folders.
    let is_sound = |name: &str| !name.is_empty() && !name.starts_with('.') && !name.contains('\0');
    if is_sound(name) && is_sound(stem) {
        Ok((name, stem))
    } else {
        Err(invalid("it does not end with the name of an archive"))
    }
}

#[cfg(test)]
mod tests;
