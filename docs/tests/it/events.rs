//! The tables of `events.md`, made of the types that the launcher writes.
//!
//! After an intended change, `UPDATE_GOLDEN=1 cargo nextest run -p brigade-docs events::` rewrites them.

use std::fmt::Write;
use std::fs;

use crate::book::{docs, root};

const BEGIN: &str =
    "<!-- Written by `UPDATE_GOLDEN=1 cargo nextest run -p brigade-docs events::`. -->\n";
const END: &str = "<!-- End of what is written. -->\n";

/// A variant of an enum or a field of a struct.
#[derive(Debug, Default)]
struct Member {
    /// Name in JSON.
    name: String,
    /// Type of a field; `None` for a variant.
    kind: Option<String>,
    doc: String,
    is_optional: bool,
    fields: Vec<Self>,
}

/// Returns the lines between `pub enum NAME {` or `pub struct NAME {` and its end.
fn body<'s>(source: &'s str, name: &str) -> impl Iterator<Item = &'s str> {
    let begins = |line: &&str| {
        [format!("pub enum {name} {{"), format!("pub struct {name} {{")]
            .contains(&(*line).to_owned())
    };
    let mut lines = source.lines();
    assert!(lines.by_ref().find(begins).is_some(), "there is no {name}");
    lines.take_while(|line| *line != "}")
}

/// Reads the members of a type, by the indentation of rustfmt.
fn members(source: &str, name: &str) -> Vec<Member> {
    let mut members: Vec<Member> = Vec::new();
    let mut next = Member::default();
    for line in body(source, name) {
        let text = line.trim();
        let depth = (line.len() - line.trim_start().len()) / 4;
        if let Some(doc) = text.strip_prefix("///") {
            next.doc.push_str(doc);
        } else if text.starts_with("#[") {
            next.is_optional |= text.contains("skip_serializing_if");
        } else if let Some((field, kind)) = text.trim_start_matches("pub ").split_once(": ") {
            next.name = field.to_owned();
            next.kind = Some(json_type(kind.trim_end_matches(',')));
            let field = std::mem::take(&mut next);
            match members.last_mut() {
                Some(variant) if depth == 2 => variant.fields.push(field),
                _ => members.push(field),
            }
        } else if text.starts_with(|letter: char| letter.is_ascii_uppercase()) {
            let end = text.find(|letter: char| !letter.is_ascii_alphanumeric());
            next.name = snake_case(&text[..end.unwrap_or(text.len())]);
            members.push(std::mem::take(&mut next));
        }
    }
    // Variants for what later releases write.
    members.retain(|member| member.name != "unknown");
    members
}

fn snake_case(name: &str) -> String {
    let mut snake = String::new();
    for letter in name.chars() {
        if letter.is_ascii_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.push(letter.to_ascii_lowercase());
    }
    snake
}

/// Returns the name of the type in JSON.
fn json_type(rust: &str) -> String {
    let inside = |outer: &str| rust.strip_prefix(outer).and_then(|rest| rest.strip_suffix('>'));
    if let Some(inner) = inside("Option<") {
        return json_type(inner);
    }
    if let Some(inner) = inside("Vec<") {
        return format!("list of {}s", json_type(inner));
    }
    let known = match rust {
        "String" | "CauseKind" => "text",
        "usize" | "u8" | "u32" | "i32" => "number",
        "bool" => "true or false",
        "HostPart" | "DeviceFault" => "object",
        other => panic!("a field of an event is a {other}: give it a name here"),
    };
    known.to_owned()
}

fn rows(table: &mut String, event: &str, fields: &[Member]) {
    for field in fields {
        let Member { name, kind, doc, is_optional, .. } = field;
        let kind = kind.as_deref().unwrap_or_default();
        let optional = match is_optional {
            true if kind.starts_with("list") => ", unless empty",
            true => ", if there is one",
            false => "",
        };
        // A field without a value is left out.
        let doc = doc.trim().replace('|', "\\|").replace("`None`", "Absent");
        writeln!(table, "{event}| `{name}` | {kind}{optional} | {doc} |").unwrap();
    }
}

fn tables() -> String {
    let read = |path: &str| fs::read_to_string(root().join(path)).unwrap();
    let events = read("crates/rendezvous/src/formation/job_event.rs");
    let faults = read("crates/hardware/src/fault.rs");
    let mut text = String::from("\n| Event | Field | Type | Meaning |\n|---|---|---|---|\n");
    for event in members(&events, "JobEvent") {
        writeln!(text, "| **`{}`** | | | {} |", event.name, event.doc.trim()).unwrap();
        if event.name == "cause" {
            rows(&mut text, "| ", &members(&events, "JobCause"));
        } else {
            rows(&mut text, "| ", &event.fields);
        }
    }
    text.push_str("\n`cause` is one of these:\n\n| Cause | Meaning |\n|---|---|\n");
    for cause in members(&events, "CauseKind") {
        writeln!(text, "| `{}` | {} |", cause.name, cause.doc.trim()).unwrap();
    }
    for (list, members) in [
        ("hosts", members(&events, "HostPart")),
        ("device_faults", members(&faults, "DeviceFault")),
    ] {
        write!(text, "\nEach object in `{list}`:\n\n| Field | Type | Meaning |\n|---|---|---|\n")
            .unwrap();
        rows(&mut text, "", &members);
    }
    text.push('\n');
    text
}

#[test]
fn the_tables_of_events_are_those_of_the_types() {
    let path = docs().join("events.md");
    let page = fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(BEGIN).expect("events.md has the mark of its tables");
    let (found, after) = rest.split_once(END).expect("events.md has the mark behind its tables");
    let expected = tables();
    assert!(expected.lines().count() > 50, "{expected}");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&path, format!("{before}{BEGIN}{expected}{END}{after}")).unwrap();
        return;
    }
    assert!(
        found == expected,
        "docs/events.md is not that of the types: run `UPDATE_GOLDEN=1 cargo nextest run -p brigade-docs events::`"
    );
}
