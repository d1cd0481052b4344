//! Suggestions for misspelled names.

use crate::settings::TABLE;

/// Returns the name most similar to `word`, if it is similar enough to be suggested.
#[must_use]
pub fn closest<'a>(word: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let likeness = |name| strsim::jaro_winkler(&word.replace('_', "-"), name);
    names
        .into_iter()
        .map(|name| (likeness(name), name))
        .filter(|(likeness, _)| *likeness >= ALIKE)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| name)
}

/// Returns the setting that `word` may mean, by Brigade's name or by that of another launcher.
pub(crate) fn setting(word: &str) -> Option<&'static str> {
    let word = word.replace('_', "-").to_ascii_lowercase();
    let same = TABLE.iter().find(|it| it.also.contains(&word.as_str()));
    same.map(|it| it.name).or_else(|| closest(&word, TABLE.iter().map(|it| it.name)))
}

/// Minimum Jaro-Winkler similarity: `nprc` has 0.93 with `nproc`, `hostlist` 0.90 with `hosts`, `batch` 0.47.
const ALIKE: f64 = 0.8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn similar_names_are_suggested() {
        let table = [
            ("nprc", Some("nproc")),
            ("nproc_per_node", Some("nproc")),
            ("machine_rank", Some("node-rank")),
            ("main_process_ip", Some("master-addr")),
            ("mixed_precison", Some("mixed-precision")),
            ("max_restart", Some("max-restarts")),
            ("learning_rate", None),
            ("batch", None),
        ];
        for (word, expected) in table {
            assert_eq!(setting(word), expected, "{word}");
        }
    }
}
