//! Compiles the GPU kernels, of which a build only contains the text, for several generations of GPUs. Needs no GPU.

use std::path::Path;
use std::process::ExitCode;
use std::thread;
use std::time::Instant;

use anyhow::Result;
use brigade_dylib_call::Nvrtc;
use brigade_kernels::{CAPABILITIES, FILES, Variant};

/// Compiles all kernels with the NVRTC of a library, and lists those that fail.
pub(crate) fn run(library: &Path) -> Result<ExitCode> {
    Ok(if check(library)? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Returns `true` if each file compiles for all capabilities and types of elements, no kernel has more registers than its
/// file states, and none spills registers to memory.
pub(crate) fn check(library: &Path) -> Result<bool> {
    let nvrtc = Nvrtc::load(library)?;
    let started = Instant::now();
    let variants: Vec<Variant> = FILES
        .iter()
        .flat_map(|file| file.elements.iter().map(move |&element| (file, element)))
        .flat_map(|(file, element)| {
            CAPABILITIES.map(|capability| Variant { file, element, capability })
        })
        .collect();
    let threads = thread::available_parallelism().map_or(1, Into::into);
    let part = variants.len().div_ceil(threads).max(1);
    let findings: Vec<String> = thread::scope(|scope| {
        let parts: Vec<_> = variants
            .chunks(part)
            .map(|part| {
                scope.spawn(|| part.iter().flat_map(|variant| findings(&nvrtc, variant)).collect())
            })
            .collect();
        parts
            .into_iter()
            .flat_map(|part| part.join().unwrap_or_else(|_| vec!["a thread panicked".to_owned()]))
            .collect::<Vec<String>>()
    });
    for finding in &findings {
        eprintln!("kernels: {finding}");
    }
    let (major, minor) = nvrtc.version();
    eprintln!(
        "kernels: {} variants by NVRTC {major}.{minor}, {} s",
        variants.len(),
        started.elapsed().as_secs()
    );
    Ok(findings.is_empty())
}

/// Returns what is wrong with a variant.
fn findings(nvrtc: &Nvrtc, variant: &Variant) -> Vec<String> {
    let Variant { file, element, capability } = variant;
    let place = format!("{}.cu for sm_{capability} and {}", file.name, element.name());
    let options = [variant.options(), vec!["--ptxas-options=-v".to_owned()]].concat();
    let log = match nvrtc.compile_with_log(&variant.source(), &variant.source_name(), &options) {
        Ok((_, log)) => log,
        Err(error) => return vec![format!("{place}: {error}")],
    };
    let mut findings = Vec::new();
    if log.contains("warning") {
        findings.push(format!("{place}: warnings:\n{log}"));
    }
    let kernels = kernels_of(&log);
    if kernels.is_empty() {
        findings.push(format!("{place}: ptxas reports no kernel:\n{log}"));
    }
    let limit = file.max_registers().unwrap_or_default();
    for Kernel { name, registers, spilled } in kernels {
        if registers > limit {
            findings.push(format!(
                "{place}: {name} has {registers} registers, and the file's head states at most {limit}"
            ));
        }
        if spilled > 0 {
            findings.push(format!("{place}: {name} spills {spilled} bytes of registers"));
        }
    }
    findings
}

/// A kernel in ptxas's report.
#[derive(Debug, PartialEq, Eq)]
struct Kernel<'a> {
    name: &'a str,
    registers: u32,
    /// Bytes of registers that are stored to memory.
    spilled: u32,
}

fn kernels_of(log: &str) -> Vec<Kernel<'_>> {
    let mut kernels = Vec::new();
    for line in log.lines() {
        if let Some((_, name)) = line.split_once("Compiling entry function '") {
            let name = name.split('\'').next().unwrap_or_default();
            kernels.push(Kernel { name, registers: 0, spilled: 0 });
        }
        let Some(kernel) = kernels.last_mut() else { continue };
        if let Some(bytes) = number_before(line, " bytes spill stores") {
            kernel.spilled = bytes;
        }
        if let Some(registers) = number_before(line, " registers") {
            kernel.registers = registers;
        }
    }
    kernels
}

/// Returns the number in front of the words.
fn number_before(line: &str, words: &str) -> Option<u32> {
    line.split_once(words)?.0.rsplit(|it: char| !it.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_is_read() {
        let log = "ptxas info    : 124 bytes gmem\n\
            ptxas info    : Compiling entry function 'a' for 'sm_90'\n\
            ptxas info    : Function properties for a\n\
            ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Used 40 registers, used 1 barriers, 128 bytes smem\n\
            ptxas info    : Compiling entry function 'b' for 'sm_90'\n\
            ptxas         .     16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\n\
            ptxas info    : Used 255 registers\n";
        let kernel = |name, registers, spilled| Kernel { name, registers, spilled };
        assert_eq!(kernels_of(log), [kernel("a", 40, 0), kernel("b", 255, 12)]);
        assert_eq!(kernels_of(""), []);
    }
}
