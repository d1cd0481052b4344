//! Summary of a profile by operation.

use std::collections::BTreeMap;
use std::fmt;

use brigade_torch::ProfiledEvent;

/// Totals over all calls of one operation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OperationSummary {
    /// Name of the operation, such as `aten::conv2d`.
    pub name: String,
    /// `true` if it is a kernel that ran on a GPU.
    pub on_device: bool,
    /// Number of calls of the operation.
    pub calls: usize,
    /// Time in nanoseconds of all calls, without the operations that they called.
    pub self_ns: u64,
    /// Time in nanoseconds of all calls, with the operations that they called.
    pub total_ns: u64,
    /// Bytes that the operation itself allocated and did not free.
    pub self_bytes: i64,
    /// Number of floating-point operations. 0 if it is not known.
    pub flops: u64,
}

/// Name of an allocation in libtorch's events.
const MEMORY: &str = "[memory]";

/// Sums events by name. An event is nested in another one of its thread if that one spans it.
pub(super) fn summarize(events: &[ProfiledEvent]) -> Vec<OperationSummary> {
    let mut order: Vec<&ProfiledEvent> = events.iter().collect();
    // The longer of two events that begin together is the outer one; events of length 0 are inner ones.
    order.sort_by_key(|e| (e.on_device, e.lane, e.start_ns, std::cmp::Reverse(e.duration_ns)));
    let mut sums: BTreeMap<(&str, bool), OperationSummary> = BTreeMap::new();
    let mut open: Vec<&ProfiledEvent> = Vec::new();
    for event in order {
        while let Some(outer) = open.last() {
            let same = (outer.on_device, outer.lane) == (event.on_device, event.lane);
            if same && event.start_ns < outer.start_ns + outer.duration_ns {
                break;
            }
            open.pop();
        }
        let outer = open.last().map(|outer| (outer.name.as_str(), outer.on_device));
        if event.name == MEMORY {
            if let Some(sum) = outer.and_then(|key| sums.get_mut(&key)) {
                sum.self_bytes += event.bytes;
            }
            continue;
        }
        if let Some(sum) = outer.and_then(|key| sums.get_mut(&key)) {
            sum.self_ns = sum.self_ns.saturating_sub(event.duration_ns);
        }
        let sum = sums.entry((&event.name, event.on_device)).or_default();
        sum.calls += 1;
        sum.self_ns += event.duration_ns;
        sum.total_ns += event.duration_ns;
        sum.flops += event.flops;
        open.push(event);
    }
    let mut sums: Vec<OperationSummary> = sums
        .into_iter()
        .map(|((name, on_device), sum)| OperationSummary {
            name: name.to_owned(),
            on_device,
            ..sum
        })
        .collect();
    sums.sort_by_key(|sum| std::cmp::Reverse(sum.self_ns));
    sums
}

/// A table of the operations that take the most time. Its `Display` is text.
#[derive(Debug, Clone)]
pub struct Table {
    rows: Vec<OperationSummary>,
    /// Total time of all rows on CPU and GPU, including rows that are not shown.
    self_ns: [u64; 2],
    memory: bool,
    flops: bool,
}

impl Table {
    pub(super) fn new(mut rows: Vec<OperationSummary>, shown: usize) -> Self {
        let mut self_ns = [0; 2];
        for row in &rows {
            self_ns[usize::from(row.on_device)] += row.self_ns;
        }
        let memory = rows.iter().any(|row| row.self_bytes != 0);
        let flops = rows.iter().any(|row| row.flops != 0);
        rows.truncate(shown);
        Self { rows, self_ns, memory, flops }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |row: &OperationSummary| {
            let text: String = row.name.chars().take(48).collect();
            if row.on_device { format!("{text} (GPU)") } else { text }
        };
        let width = self.rows.iter().map(|row| name(row).chars().count()).max().unwrap_or(0).max(9);
        let (memory, flops) = (self.memory, self.flops);
        write!(
            f,
            "{:width$}  {:>6}  {:>10}  {:>10}  {:>7}",
            "operation", "self", "self", "total", "calls"
        )?;
        write!(f, "{}", if memory { "   memory (MB)" } else { "" })?;
        writeln!(f, "{}", if flops { "     GFLOP" } else { "" })?;
        for row in &self.rows {
            let all = self.self_ns[usize::from(row.on_device)].max(1);
            write!(
                f,
                "{:width$}  {:>5.1}%  {:>7.2} ms  {:>7.2} ms  {:>7}",
                name(row),
                100.0 * row.self_ns as f64 / all as f64,
                row.self_ns as f64 / 1e6,
                row.total_ns as f64 / 1e6,
                row.calls,
            )?;
            if memory {
                write!(f, "  {:>12.2}", row.self_bytes as f64 / 1e6)?;
            }
            if flops {
                write!(f, "  {:>8.3}", row.flops as f64 / 1e9)?;
            }
            writeln!(f)?;
        }
        write!(f, "{:width$}  {:>6}  {:>7.2} ms", "all on CPU", "", self.self_ns[0] as f64 / 1e6)?;
        if self.self_ns[1] > 0 {
            write!(
                f,
                "\n{:width$}  {:>6}  {:>7.2} ms",
                "all on GPU",
                "",
                self.self_ns[1] as f64 / 1e6
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(name: &str, start_ns: u64, duration_ns: u64, lane: u64) -> ProfiledEvent {
        ProfiledEvent {
            name: name.into(),
            start_ns,
            duration_ns,
            lane,
            on_device: false,
            bytes: if name == MEMORY { 100 } else { 0 },
            flops: 0,
            shapes: String::new(),
        }
    }

    #[test]
    fn time_and_memory_belong_to_the_innermost() {
        let events = [
            event("inner", 20, 30, 1),
            event("outer", 0, 100, 1),
            event(MEMORY, 25, 0, 1),
            event("inner", 60, 10, 1),
            event("outer", 100, 50, 1),
            event("other", 10, 1000, 2),
            event(MEMORY, 120, 0, 1),
        ];
        let found = summarize(&events);
        let names: Vec<&str> = found.iter().map(|sum| sum.name.as_str()).collect();
        assert_eq!(names, ["other", "outer", "inner"]);
        assert_eq!((found[1].calls, found[1].self_ns, found[1].total_ns), (2, 110, 150));
        assert_eq!((found[2].calls, found[2].self_ns, found[2].self_bytes), (2, 40, 100));
        assert_eq!(found[1].self_bytes, 100);
        let table = Table::new(found, 2).to_string();
        assert!(table.contains("other") && table.contains("outer") && !table.contains("inner"));
        assert!(table.ends_with("0.00 ms"), "{table}");
    }
}
