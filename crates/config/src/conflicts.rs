//! Resolution of settings that exclude each other.

use brigade_launch::{NodeRange, NprocSpec};

use crate::error::ConfigError;
use crate::layer::Layer;
use crate::source::Source;

/// Resolves settings that exclude each other.
///
/// If a file names two hosts and the user passes `--nproc 2 --hosts a,b`, the flag wins: of two exclusive settings, the
/// one from the lower layer is reset to its default, and a note is added. Two from the same layer are a contradiction.
///
/// # Errors
/// [`ConfigError::Contradiction`] names both settings and the reason why they exclude each other.
///
/// ```
/// use brigade_config::{Layer, Source, conflicts};
///
/// let mut file = Layer::default();
/// let line = Source::File { path: "a.toml".into(), line: 4 };
/// file.set("nnodes", "2", line)?;
/// let mut flags = Layer::default();
/// flags.set("hosts", "a,b", Source::Flag("hosts".into()))?;
/// let resolved = conflicts::resolve(flags.over(file))?;
/// assert_eq!(resolved.settings.text("nnodes").as_deref(), Some("1"));
/// assert_eq!(resolved.notes[0].to_string(), "a.toml:4: nnodes 2 is overridden by flag --hosts");
/// # Ok::<(), brigade_config::ConfigError>(())
/// ```
pub fn resolve(layer: Layer) -> Result<Layer, ConfigError> {
    let mut layer = layer;
    for conflict in CONFLICTS {
        for one in conflict.some {
            for other in conflict.others {
                resolve_two(&mut layer, one, other, conflict.reason)?;
            }
        }
    }
    for list in ["hosts", "hostfile"] {
        resolve_nodes(&mut layer, list);
        resolve_address(&mut layer, list);
    }
    if layer.settings.cpu == Some(true) {
        let reason = "on the CPU there are no GPUs to choose";
        resolve_two(&mut layer, "cpu", "devices", reason)?;
        if layer.settings.nproc == Some(NprocSpec::Gpu) {
            resolve_two(&mut layer, "cpu", "nproc", "on the CPU there are no GPUs to count")?;
        }
    }
    Ok(layer)
}

/// Resolves `nnodes` with a list of hosts. In the same layer as the list it is the number of hosts that the job needs
/// to continue. From a lower layer it belongs to another job and is reset; and `nnodes` of 1 from a higher layer resets
/// the list.
fn resolve_nodes(layer: &mut Layer, list: &str) {
    let given = |name: &str| layer.source(name).filter(|it| **it != Source::Default).cloned();
    let (Some(of_list), Some(of_nodes)) = (given(list), given("nnodes")) else { return };
    let nodes = layer.settings.nnodes.unwrap_or_default();
    if of_nodes.layer() < of_list.layer() {
        layer.reset("nnodes");
        layer.note(of_nodes, format!("nnodes {nodes} is overridden by {of_list}"));
    } else if of_nodes.layer() > of_list.layer() && nodes == NodeRange::default() {
        let text = layer.settings.text(list).unwrap_or_default();
        layer.reset(list);
        layer.note(of_list, format!("{list} {text} is overridden by {of_nodes}"));
    }
}

/// Resolves `master-addr` with a list of hosts. In the same layer as the list it is another name of the first host.
/// From a lower layer it belongs to another job and is reset.
fn resolve_address(layer: &mut Layer, list: &str) {
    let given = |name: &str| layer.source(name).filter(|it| **it != Source::Default).cloned();
    let (Some(of_list), Some(of_address)) = (given(list), given("master-addr")) else { return };
    if of_address.layer() < of_list.layer() {
        let text = layer.settings.text("master-addr").unwrap_or_default();
        layer.reset("master-addr");
        layer.note(of_address, format!("master-addr {text} is overridden by {of_list}"));
    }
}

fn resolve_two(layer: &mut Layer, one: &str, other: &str, reason: &str) -> Result<(), ConfigError> {
    let given = |name: &str| layer.source(name).filter(|it| **it != Source::Default).cloned();
    let (Some(first), Some(second)) = (given(one), given(other)) else { return Ok(()) };
    let text = |name: &str| layer.settings.text(name).unwrap_or_default();
    let (winner, loser, beaten) = match first.layer().cmp(&second.layer()) {
        std::cmp::Ordering::Greater => (first, other, second),
        std::cmp::Ordering::Less => (second, one, first),
        std::cmp::Ordering::Equal => {
            return Err(ConfigError::Contradiction(format!(
                "{one} {} ({first}) and {other} {} ({second}) exclude each other: {reason}",
                text(one),
                text(other),
            )));
        }
    };
    let note = format!("{loser} {} is overridden by {winner}", text(loser));
    layer.reset(loser);
    layer.note(beaten, note);
    Ok(())
}

/// Rule: each of `some` excludes each of `others`.
struct Conflict {
    some: &'static [&'static str],
    others: &'static [&'static str],
    reason: &'static str,
}

const CONFLICTS: &[Conflict] = &[
    Conflict {
        some: &["include"],
        others: &["exclude"],
        reason: "one lists the slots to use, the other the slots to leave out",
    },
    Conflict { some: &["hosts"], others: &["hostfile"], reason: "one list of hosts is enough" },
    Conflict {
        some: &["hosts", "hostfile"],
        others: &["node-rank", "rdzv-backend", "rdzv-endpoint"],
        reason: "a list of hosts starts the whole job from here, the other is for one command on \
                 each host",
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lower_layer_gives_way() {
        // In the file, as flags, what is left, the notes
        type Case<'a> = (
            &'a [(&'a str, &'a str)],
            &'a [(&'a str, &'a str)],
            &'a [(&'a str, Option<&'a str>)],
            &'a [&'a str],
        );
        let table: [Case<'_>; 10] = [
            (
                &[("hosts", "a")],
                &[("hostfile", "f")],
                &[("hosts", None), ("hostfile", Some("f"))],
                &["f:1: hosts a is overridden by flag --hostfile"],
            ),
            (
                &[("nnodes", "2"), ("node-rank", "1")],
                &[("hosts", "a,b")],
                &[("nnodes", Some("1")), ("node-rank", None)],
                &[
                    "f:1: node-rank 1 is overridden by flag --hosts",
                    "f:1: nnodes 2 is overridden by flag --hosts",
                ],
            ),
            (
                &[("hosts", "a,b")],
                &[("nnodes", "1")],
                &[("nnodes", Some("1")), ("hosts", None)],
                &["f:1: hosts a,b is overridden by flag --nnodes"],
            ),
            (
                &[("hosts", "a,b")],
                &[("nnodes", "1:2")],
                &[("nnodes", Some("1:2")), ("hosts", Some("a,b"))],
                &[],
            ),
            (
                &[("master-addr", "a")],
                &[("hosts", "b,c")],
                &[("master-addr", None), ("hosts", Some("b,c"))],
                &["f:1: master-addr a is overridden by flag --hosts"],
            ),
            (
                &[("hosts", "a,b")],
                &[("master-addr", "a.internal")],
                &[("master-addr", Some("a.internal")), ("hosts", Some("a,b"))],
                &[],
            ),
            (
                &[("hosts", "a,b")],
                &[("node-rank", "1"), ("nnodes", "2")],
                &[("node-rank", Some("1")), ("hosts", None)],
                &["f:1: hosts a,b is overridden by flag --node-rank"],
            ),
            (
                &[("cpu", "true")],
                &[("devices", "0")],
                &[("cpu", Some("false"))],
                &["f:1: cpu true is overridden by flag --devices"],
            ),
            (
                &[("nproc", "gpu")],
                &[("cpu", "true")],
                &[("nproc", None)],
                &["f:1: nproc gpu is overridden by flag --cpu"],
            ),
            (&[("cpu", "false")], &[("devices", "0")], &[("devices", Some("0"))], &[]),
        ];
        for (file, flags, left, notes) in table {
            let mut lower = Layer::default();
            for (name, text) in file {
                let source = Source::File { path: "f".into(), line: 1 };
                lower.set(name, text, source).unwrap();
            }
            let resolved = resolve(of_flags(flags).over(lower.over(Layer::defaults()))).unwrap();
            for (name, text) in left {
                assert_eq!(resolved.settings.text(name).as_deref(), *text, "{name}");
            }
            let said: Vec<String> = resolved.notes.iter().map(ToString::to_string).collect();
            assert_eq!(said, notes);
        }
    }

    fn of_flags(flags: &[(&str, &str)]) -> Layer {
        let mut layer = Layer::default();
        for (name, text) in flags {
            layer.set(name, text, Source::Flag((*name).to_owned())).unwrap();
        }
        layer
    }

    #[test]
    fn in_one_layer_it_is_a_contradiction() {
        let table: [(&[(&str, &str)], &str); 4] = [
            (
                &[("hosts", "a"), ("hostfile", "f")],
                "hosts a (flag --hosts) and hostfile f (flag --hostfile) exclude each other: one list of hosts is enough",
            ),
            (
                &[("hostfile", "f"), ("rdzv-endpoint", "a:1")],
                "hostfile f (flag --hostfile) and rdzv-endpoint a:1",
            ),
            (&[("cpu", "true"), ("devices", "0")], "cpu true (flag --cpu) and devices 0"),
            (&[("cpu", "true"), ("nproc", "gpu")], "cpu true (flag --cpu) and nproc gpu"),
        ];
        for (flags, expected) in table {
            let error = resolve(of_flags(flags)).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
