//! Account of the operators that ran on GPUs made of host memory.

use std::collections::BTreeMap;
use std::fmt;

use crate::ffi;

/// Number of calls of an operator, and the bytes that they read and wrote.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OperatorTotals {
    /// Number of calls.
    pub calls: u64,
    /// Number of bytes of device memory that were read and written, from the shapes of arguments and results.
    pub bytes: u64,
}

/// Operators that ran on the GPUs, by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Account(pub BTreeMap<String, OperatorTotals>);

impl Account {
    /// Returns the number of calls.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.0.values().map(|it| it.calls).sum()
    }

    /// Returns the bytes outside of products, convolutions and attention.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.iter().filter(|(name, _)| !is_arithmetic(name)).map(|(_, it)| it.bytes).sum()
    }
}

impl fmt::Display for Account {
    /// Writes a table of the operators, those with the most bytes first.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows: Vec<_> = self.0.iter().collect();
        rows.sort_by_key(|(name, it)| (is_arithmetic(name), std::cmp::Reverse(it.bytes)));
        writeln!(f, "{:>7} {:>15} operator", "calls", "bytes")?;
        for (name, it) in rows {
            let note = if is_arithmetic(name) { " (not in the sum of bytes)" } else { "" };
            writeln!(f, "{:>7} {:>15} {name}{note}", it.calls, it.bytes)?;
        }
        write!(f, "{:>7} {:>15} in all", self.calls(), self.bytes())
    }
}

/// Returns `true` for products, convolutions and attention, whose time is not that of their bytes.
fn is_arithmetic(name: &str) -> bool {
    const NAMES: [&str; 8] = [
        "mm",
        "addmm",
        "addmm_",
        "bmm",
        "baddbmm",
        "convolution",
        "convolution_backward",
        "linear",
    ];
    let name = name.strip_prefix("aten::").unwrap_or(name);
    NAMES.contains(&name) || name.starts_with("_scaled_dot_product")
}

/// Returns the account of all operators and copies that ran on the devices while the function ran, on any thread.
///
/// Views and allocations are not in it, since a GPU does nothing for them. While it runs, attention of
/// [`tch::Tensor::scaled_dot_product_attention`] is one operator in each direction, as on a GPU: flash for 16 bits
/// without a mask, otherwise memory-efficient; both have no gradients of gradients.
///
/// Only one account can be open at a time in a process.
pub fn account(function: impl FnOnce()) -> Account {
    struct Open;
    impl Drop for Open {
        fn drop(&mut self) {
            // SAFETY: takes nothing; the text is freed by the conversion.
            ffi::text(unsafe { ffi::fake_gpu_close_account() });
        }
    }
    // SAFETY: takes nothing.
    unsafe { ffi::fake_gpu_open_account() };
    let open = Open;
    function();
    std::mem::forget(open);
    // SAFETY: takes nothing.
    let text = ffi::text(unsafe { ffi::fake_gpu_close_account() }).unwrap_or_default();
    Account(text.lines().filter_map(row).collect())
}

fn row(line: &str) -> Option<(String, OperatorTotals)> {
    let mut words = line.splitn(3, ' ');
    let calls = words.next()?.parse().ok()?;
    let bytes = words.next()?.parse().ok()?;
    Some((words.next()?.to_owned(), OperatorTotals { calls, bytes }))
}
