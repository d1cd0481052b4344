//! Notebook of `--template notebook`, generated from the template's program: the same function in a cell.

use serde_json::{Value, json};

/// Returns the notebook in Jupyter's format. `brigade` is the dependency as in `Cargo.toml`, `program` the source of
/// the template.
pub(super) fn of_program(name: &str, brigade: &str, program: &str) -> String {
    let title = format!(
        "# {name}\n\nTraining on two processes, from a cell. The kernel is \"Rust (Brigade)\"; README.md says how to \
         install it."
    );
    let dependency = format!(
        "// Compiles Brigade: minutes the first time, seconds in the next kernel.\n:dep brigade = {brigade}"
    );
    let cells = [
        markdown(&title),
        code(&dependency),
        code("use brigade::notebook::prelude::*;\nuse brigade::prelude::*;"),
        markdown("Some of the data: the last expression of a cell is shown."),
        code(
            "fn some(count: usize) -> Result<Tensor> {\n    \
                 let mut batches = DataLoader::new(Digits::test()?).batch_size(count).into_iter();\n    \
                 Ok(batches.next().expect(\"there are images\")?.into_data().0)\n}\n\n\
             images(&some(16).unwrap())",
        ),
        markdown(
            "The function that each rank calls. It runs in other processes and has none of the notebook's variables: \
             what it needs is its argument, what it returns comes back. `src/main.rs` is a program with the same.",
        ),
        code(&train(program)),
        code("let losses = notebook_launcher(train, (5e-3, 4), 2).unwrap();"),
        code("curve(\"Loss\", &losses)"),
        markdown("Change the function, run its cell, and launch again: only the cell is compiled."),
    ];
    let cells: Vec<Value> = cells
        .into_iter()
        .enumerate()
        .map(|(number, mut cell)| {
            cell["id"] = json!(format!("cell-{number}"));
            cell
        })
        .collect();
    let notebook = json!({
        "cells": cells,
        "metadata": {
            "kernelspec": {
                "display_name": "Rust (Brigade)", "language": "rust", "name": "brigade",
            },
            // As the kernel reports it. Without it, nbconvert has neither the file extension nor the highlighting.
            "language_info": {
                "codemirror_mode": "rust", "file_extension": ".rs", "mimetype": "text/rust", "name": "Rust",
                "pygments_lexer": "rust", "version": "",
            },
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    });
    format!("{notebook:#}\n")
}

/// Returns the function of the program, from its documentation to its end.
fn train(program: &str) -> String {
    let lines = program.lines().skip_while(|line| !line.starts_with("///"));
    let body = lines.take_while(|line| *line != "#[cfg(test)]").collect::<Vec<_>>().join("\n");
    body.trim_end().to_owned()
}

fn markdown(text: &str) -> Value {
    json!({ "cell_type": "markdown", "metadata": {}, "source": text })
}

fn code(text: &str) -> Value {
    json!({
        "cell_type": "code", "execution_count": null, "metadata": {}, "outputs": [], "source": text,
    })
}
