//! Choices between several ways to compute the same on a GPU, beside the compiled code.

use std::fmt::Write as _;
use std::io;

use sha2::{Digest, Sha256};

use super::{Cache, Entry, read, write};

/// Candidate that was the fastest for an operation of one shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptChoice {
    /// Operation, types, shapes and layouts. One line.
    pub key: String,
    /// Number of candidates that were compared.
    pub candidates: u32,
    /// Number of the fastest one, counted from 0.
    pub chosen: u32,
}

/// Choices that [`Cache::choices`] has read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeptChoices {
    /// Choices, in the order of the file.
    pub choices: Vec<KeptChoice>,
    /// Message for the user: the file was damaged.
    pub remark: Option<String>,
}

impl Cache {
    /// Returns the choices for a GPU with versions of libraries, which `identity` names: those of the last
    /// [`Self::keep_choices`] of any process. Of a damaged file none is returned; the next call of `keep_choices` writes
    /// it again.
    #[must_use]
    pub fn choices(&self, identity: &str) -> KeptChoices {
        let Some(folder) = self.folder() else { return KeptChoices::default() };
        let path = folder.join(file_name(identity));
        let damage = match read(&path, &key(identity)) {
            Entry::Found(text) => match parse(&text) {
                Some(choices) => return KeptChoices { choices, remark: None },
                None => "has lines that are not choices".to_owned(),
            },
            Entry::Missing => return KeptChoices::default(),
            Entry::Damaged(reason) => reason,
        };
        let remark = Some(format!("{} {damage}; it is written again", path.display()));
        KeptChoices { choices: Vec::new(), remark }
    }

    /// Keeps choices for a GPU with versions of libraries, in place of all that were kept for it. Of processes that
    /// write at the same time, the file is that of the last one.
    ///
    /// # Errors
    /// Fails with a message for the user if the file cannot be written, which costs only the time to measure again.
    pub fn keep_choices(&self, identity: &str, choices: &[KeptChoice]) -> io::Result<()> {
        let Some(folder) = self.folder() else { return Ok(()) };
        let mut text = String::new();
        for KeptChoice { key, candidates, chosen } in choices {
            let _ = writeln!(text, "{chosen}\t{candidates}\t{key}");
        }
        let path = folder.join(file_name(identity));
        write(folder, &path, &key(identity), text.as_bytes()).map_err(|error| {
            let message = format!(
                "cannot keep measured choices in {}: {error}; they are measured again at the next start",
                folder.display()
            );
            io::Error::new(error.kind(), message)
        })
    }
}

fn key(identity: &str) -> [u8; 32] {
    Sha256::digest(identity).into()
}

fn file_name(identity: &str) -> String {
    let key: String = key(identity)[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("choices-{key}.choices")
}

fn parse(text: &[u8]) -> Option<Vec<KeptChoice>> {
    let row = |line: &str| {
        let mut words = line.splitn(3, '\t');
        let chosen = words.next()?.parse().ok()?;
        let candidates = words.next()?.parse().ok()?;
        let key = words.next()?.to_owned();
        (chosen < candidates).then_some(KeptChoice { key, candidates, chosen })
    };
    str::from_utf8(text).ok()?.lines().map(row).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::thread;

    use super::*;

    const GPU: &str = "GPU A, cuBLASLt 13.1";

    fn choices(chosen: u32) -> Vec<KeptChoice> {
        let row = |key: &str| KeptChoice { key: key.to_owned(), candidates: 5, chosen };
        vec![row("gelu_bias BFloat16 8x8x8"), row("sums\tof")]
    }

    fn found(cache: &Cache, identity: &str) -> Vec<KeptChoice> {
        let KeptChoices { choices, remark } = cache.choices(identity);
        assert_eq!(remark, None);
        choices
    }

    #[test]
    fn choices_are_those_of_the_last_write_for_the_same_gpu_and_libraries() {
        let root = tempfile::tempdir().unwrap();
        let cache = Cache::at(root.path().join("a/b"));
        assert_eq!(found(&cache, GPU), []);
        cache.keep_choices(GPU, &choices(1)).unwrap();
        assert_eq!(found(&cache, GPU), choices(1));
        assert_eq!(found(&cache, "GPU A, cuBLASLt 13.2"), []);
        cache.keep_choices(GPU, &choices(2)[..1]).unwrap();
        assert_eq!(found(&cache, GPU), choices(2)[..1]);
    }

    #[test]
    fn a_file_that_is_not_intact_is_written_again_with_one_remark() {
        let root = tempfile::tempdir().unwrap();
        let cache = Cache::at(root.path().to_owned());
        cache.keep_choices("another GPU", &choices(3)).unwrap();
        let foreign = fs::read(root.path().join(file_name("another GPU"))).unwrap();
        cache.keep_choices(GPU, &choices(1)).unwrap();
        let path = root.path().join(file_name(GPU));
        let good = fs::read(&path).unwrap();
        let mut flipped = good.clone();
        *flipped.last_mut().unwrap() ^= 1;
        let cut = &good[..good.len() - 1];
        let cases: [&[u8]; 5] = [b"", &good[..40], cut, &flipped, &foreign];
        for (i, damaged) in cases.into_iter().enumerate() {
            fs::write(&path, damaged).unwrap();
            let KeptChoices { choices: none, remark } = cache.choices(GPU);
            assert_eq!(none, [], "case {i}");
            let remark = remark.unwrap();
            assert!(remark.contains("written again") && !remark.contains('\n'), "{remark}");
            cache.keep_choices(GPU, &choices(1)).unwrap();
            assert_eq!(fs::read(&path).unwrap(), good, "case {i}");
            assert_eq!(found(&cache, GPU), choices(1));
        }
        // With a checksum that is right.
        for text in ["1\t2", "2\t2\tkey", "1\tx\tkey", "\u{0}"] {
            write(root.path(), &path, &key(GPU), text.as_bytes()).unwrap();
            assert!(cache.choices(GPU).remark.is_some(), "{text:?}");
        }
    }

    #[test]
    fn of_two_writers_one_has_written_the_whole_file() {
        let root = tempfile::tempdir().unwrap();
        let cache = Cache::at(root.path().to_owned());
        cache.keep_choices(GPU, &choices(1)).unwrap();
        thread::scope(|scope| {
            for chosen in [1, 2] {
                let cache = &cache;
                scope.spawn(move || {
                    for _ in 0..20 {
                        cache.keep_choices(GPU, &choices(chosen)).unwrap();
                    }
                });
            }
            for _ in 0..20 {
                let found = found(&cache, GPU);
                assert!(found == choices(1) || found == choices(2), "{found:?}");
            }
        });
        let files = fs::read_dir(root.path()).unwrap().count();
        assert_eq!(files, 1, "temporary files are left");
    }

    #[test]
    fn a_folder_that_cannot_be_made_costs_only_time() {
        let root = tempfile::tempdir().unwrap();
        // Also fails for root, who may write to any folder.
        let file = root.path().join("file");
        fs::write(&file, "").unwrap();
        let cache = Cache::at(file.join("kernels"));
        let error = cache.keep_choices(GPU, &choices(1)).unwrap_err().to_string();
        assert!(error.contains("cannot keep"), "{error}");
        assert_eq!(cache.choices(GPU).choices, []);
    }
}
