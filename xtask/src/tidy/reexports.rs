//! Rule about re-exports: each type has one public path, so a crate that the facade exports re-exports nothing of
//! another such crate.

use super::Findings;

const FACADE: &str = "crates/brigade/src/lib.rs";

/// Lists each re-export that gives a type a second path. Preludes and items hidden from the documentation are allowed.
pub(super) fn check(sources: &[(String, String)], findings: &mut Findings) {
    let shown: Vec<&str> = sources
        .iter()
        .filter(|(path, _)| path == FACADE)
        .flat_map(|(_, contents)| contents.lines().filter_map(re_exported))
        .collect();
    for (path, contents) in sources {
        let Some((folder, file)) = path.split_once("/src/") else { continue };
        let Some(own) = folder.strip_prefix("crates/") else { continue };
        let own = format!("brigade_{}", own.replace('-', "_"));
        if path == FACADE || file == "prelude.rs" || !shown.contains(&own.as_str()) {
            continue;
        }
        let mut before = "";
        for (number, line) in contents.lines().enumerate() {
            if let Some(name) = re_exported(line).filter(|name| shown.contains(name))
                && before != "#[doc(hidden)]"
            {
                findings.violations.push(format!(
                    "{path}:{}: `brigade` shows {name} itself: name its types by that path, not by a second one",
                    number + 1
                ));
            }
            before = line;
        }
    }
}

/// Returns the crate that a line outside of inner modules makes public, in whole or in part.
fn re_exported(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("pub use ")?;
    let name = rest.split([':', ' ', ';']).next()?;
    (name == "tch" || name.starts_with("brigade_")).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_path_is_named_and_preludes_may_have_it() {
        let facade = "pub use brigade_nn as nn;\npub use brigade_torch as torch;\npub use tch;\n";
        let second = "pub use tch::Tensor;\npub use brigade_torch::{\n    Bucket,\n};\n";
        let fine = "#[doc(hidden)]\npub use brigade_torch::from_vec;\npub use brigade_hidden::X;\nmod prelude {\n    \
                    pub use tch::Tensor;\n}\n";
        let source = |path: &str, text: &str| (path.to_owned(), text.to_owned());
        let mut findings = Findings::default();
        check(
            &[
                source(FACADE, facade),
                source("crates/nn/src/lib.rs", second),
                source("crates/nn/src/more.rs", fine),
                source("crates/nn/src/prelude.rs", second),
                source("crates/hidden/src/lib.rs", second),
            ],
            &mut findings,
        );
        let places: Vec<_> = findings.violations.iter().map(|it| &it[..22]).collect();
        assert_eq!(places, ["crates/nn/src/lib.rs:1", "crates/nn/src/lib.rs:2"]);
    }
}
