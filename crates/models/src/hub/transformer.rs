//! Download of all files of a transformer from the Hugging Face hub.

use std::path::PathBuf;

use brigade_checkpoint::shards::Index;

use super::{Hub, HubError};

/// Files of a tokenizer, which some models lack.
const TOKENIZER: [&str; 3] = ["tokenizer.json", "tokenizer_config.json", "vocab.txt"];

impl Hub {
    /// Returns the cache folder with a transformer's `config.json`, its weights in one or more files, and its
    /// tokenizer's files if there are any, for [`Transformer::from_pretrained`](crate::Transformer::from_pretrained).
    /// Downloads those that are not in the cache. All files are of one commit.
    ///
    /// ```no_run
    /// use brigade_models::{Gpt2LmHead, Hub, Transformer};
    ///
    /// let folder = Hub::from_env()?.transformer("openai-community/gpt2")?;
    /// let model = Gpt2LmHead::from_pretrained(folder)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns the same errors as [`Hub::file`], and fails if the index of the weights cannot be read.
    pub fn transformer(&self, repository: &str) -> Result<PathBuf, HubError> {
        let config = self.file(repository, "config.json")?;
        let folder = config.parent().map(PathBuf::from).unwrap_or_default();
        let commit = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let hub = self.clone().revision(commit);
        match hub.weights(repository) {
            Err(HubError::NoFile { .. }) => hub.parts(repository)?,
            found => drop(found?),
        }
        for file in TOKENIZER {
            match hub.file(repository, file) {
                // Without a connection it is unknown if the model has it.
                Ok(_) | Err(HubError::NoFile { .. } | HubError::Offline { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(folder)
    }

    fn parts(&self, repository: &str) -> Result<(), HubError> {
        let index = match self.file(repository, "model.safetensors.index.json") {
            Err(HubError::NoFile { .. }) => {
                self.file(repository, "pytorch_model.bin.index.json")?
            }
            found => found?,
        };
        let parts = Index::read(&index).map_err(|error| HubError::Download {
            url: index.display().to_string(),
            reason: error.to_string(),
        })?;
        for part in parts.files() {
            self.file(repository, part)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    /// Starts a hub without any files. Returns the requests that it received.
    fn empty_hub(requests: usize) -> (String, thread::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = thread::spawn(move || {
            let answer = |_| {
                let (mut stream, _) = listener.accept().unwrap();
                let lines = BufReader::new(stream.try_clone().unwrap()).lines();
                let head: Vec<String> =
                    lines.map(|line| line.unwrap()).take_while(|line| !line.is_empty()).collect();
                stream
                    .write_all(
                        b"HTTP/1.1 404 Not Found\r\nX-Error-Code: EntryNotFound\r\n\
                          Content-Length: 0\r\nConnection: close\r\n\r\n",
                    )
                    .unwrap();
                let path = head[0].split(' ').nth(1).unwrap();
                path.rsplit('/').next().unwrap().to_owned()
            };
            (0..requests).map(answer).collect()
        });
        (url, server)
    }

    #[test]
    fn a_model_in_parts_is_complete() {
        let cache = tempfile::tempdir().unwrap();
        let folder = cache.path().join(format!("models--example--pie/snapshots/{COMMIT}"));
        fs::create_dir_all(&folder).unwrap();
        let index = r#"{"weight_map": {"a": "model-00001-of-00002.safetensors",
                        "b": "model-00002-of-00002.safetensors"}}"#;
        for (name, text) in [
            ("config.json", "{}"),
            ("model.safetensors.index.json", index),
            ("model-00001-of-00002.safetensors", ""),
            ("tokenizer.json", "{}"),
        ] {
            fs::write(folder.join(name), text).unwrap();
        }
        let hub =
            |url: &str| Hub::from_env().unwrap().endpoint(url).cache(cache.path()).revision(COMMIT);
        // The second part is requested, too.
        let (url, server) = empty_hub(3);
        let error = hub(&url).transformer("example/pie").unwrap_err().to_string();
        assert!(error.contains("no file model-00002-of-00002.safetensors"), "{error}");
        let asked = server.join().unwrap();
        assert_eq!(
            asked,
            ["model.safetensors", "pytorch_model.bin", "model-00002-of-00002.safetensors"]
        );
        fs::write(folder.join("model-00002-of-00002.safetensors"), "").unwrap();
        let (url, server) = empty_hub(4);
        assert_eq!(hub(&url).transformer("example/pie").unwrap(), folder);
        assert_eq!(server.join().unwrap()[2..], ["tokenizer_config.json", "vocab.txt"]);
    }
}
