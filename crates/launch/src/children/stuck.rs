//! Description of where a process hangs, as far as the kernel reports it without a debugger.

use std::fmt::Write;
use std::fs;

/// Returns one line per thread: its name, its state, its system call and what it waits for.
///
/// There is no backtrace: that would take ptrace, which needs unsafe code and is not allowed everywhere.
pub(super) fn describe(pid: i32) -> String {
    let mut text = String::new();
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return "the process is gone\n".to_owned();
    };
    for thread in threads.flatten() {
        let read = |file: &str| {
            let content = fs::read_to_string(thread.path().join(file)).unwrap_or_default();
            content.trim().to_owned()
        };
        let status = read("status");
        let state =
            status.lines().find_map(|line| line.strip_prefix("State:")).map_or("?", str::trim);
        let _ =
            write!(text, "thread {} {:?}: {state}", thread.file_name().display(), read("comm"),);
        if let Some(call) = system_call(&read("syscall")) {
            let _ = write!(text, ", in {call}");
        }
        let wchan = read("wchan");
        if !wchan.is_empty() && wchan != "0" {
            let _ = write!(text, ", waits in {wchan}");
        }
        text.push('\n');
    }
    text
}

/// Parses `/proc/PID/task/TID/syscall`: `running`, or a number and its arguments.
fn system_call(content: &str) -> Option<String> {
    let mut words = content.split_whitespace();
    let number: i64 = words.next()?.parse().ok()?;
    let first = words.next().unwrap_or("?");
    let name = SYSTEM_CALLS.iter().find(|call| call.0 == number).map(|call| call.1);
    Some(match name {
        Some(name) => format!("{name}({first}, …)"),
        None => format!("system call {number}({first}, …)"),
    })
}

/// System calls in which programs hang.
#[cfg(target_arch = "x86_64")]
const SYSTEM_CALLS: [(i64, &str); 19] = [
    (0, "read"),
    (1, "write"),
    (7, "poll"),
    (23, "select"),
    (35, "nanosleep"),
    (42, "connect"),
    (43, "accept"),
    (44, "sendto"),
    (45, "recvfrom"),
    (46, "sendmsg"),
    (47, "recvmsg"),
    (61, "wait4"),
    (202, "futex"),
    (230, "clock_nanosleep"),
    (232, "epoll_wait"),
    (247, "waitid"),
    (270, "pselect6"),
    (271, "ppoll"),
    (281, "epoll_pwait"),
];
#[cfg(not(target_arch = "x86_64"))]
const SYSTEM_CALLS: [(i64, &str); 0] = [];

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn names_the_system_call() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id().cast_signed();
        // The child is a copy of this process until it has loaded `sleep` and sleeps.
        while !describe(pid).contains("sleep\": S (sleeping)") {
            std::thread::yield_now();
        }
        let text = describe(pid);
        child.kill().unwrap();
        child.wait().unwrap();
        #[cfg(target_arch = "x86_64")]
        assert!(text.contains("in clock_nanosleep("), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        assert_eq!(describe(pid), "the process is gone\n");
    }

    #[test]
    fn reads_what_the_kernel_writes() {
        assert_eq!(system_call("running"), None);
        assert_eq!(system_call(""), None);
        assert_eq!(system_call("999 0x7 0x1 0x0"), Some("system call 999(0x7, …)".to_owned()));
    }
}
