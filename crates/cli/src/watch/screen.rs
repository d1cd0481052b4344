//! Control of the terminal: switches its mode, draws when something has changed, and restores it at the end.

use std::io::{self, IsTerminal, Stdout};
use std::panic;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::event::{self, Event};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{EnterAlternateScreen, enable_raw_mode};
use ratatui::crossterm::{cursor, terminal};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP};

use super::draw::{Status, draw};
use super::feed::Feed;
use super::model::Model;
use super::text;
use super::view::{KeyAction, View};

/// Shows the run until the user quits. `None` if this terminal cannot be used: it has no keys, or cannot move its
/// cursor.
pub(super) fn show(feed: &mut Feed) -> anyhow::Result<Option<()>> {
    if !io::stdout().is_terminal() || std::env::var_os("TERM").is_none_or(|term| term == "dumb") {
        return Ok(None);
    }
    let signal = Arc::new(AtomicUsize::new(0));
    for number in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
        signal_hook::flag::register_usize(number, Arc::clone(&signal), number as usize)?;
    }
    let Ok(mut screen) = Screen::take() else { return Ok(None) };
    let ended = screen.run(feed, &signal);
    drop(screen);
    match ended {
        // The terminal was closed; exit without an error.
        Err(_) => Ok(Some(())),
        Ok(End::ByUser) => Ok(Some(())),
        Ok(End::BySignal(number)) => {
            // As if it had not been caught, so that a shell gets the signal as the exit status.
            signal_hook::low_level::emulate_default_handler(number)?;
            Ok(Some(()))
        }
    }
}

enum End {
    ByUser,
    BySignal(i32),
}

/// Terminal in raw mode, with its alternate screen. Dropping it restores the terminal.
struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
    events: Receiver<Event>,
    hold: Hold,
}

impl Screen {
    fn take() -> io::Result<Self> {
        let before = panic::take_hook();
        let hold = Hold::default();
        let held = hold.clone();
        panic::set_hook(Box::new(move |about| {
            held.give_back();
            before(about);
        }));
        hold.take()?;
        let screen = Terminal::new(CrosstermBackend::new(io::stdout())).and_then(|terminal| {
            let (send, events) = channel();
            // A thread of its own, which ends with the program: if a terminal is closed, the library that reads it
            // retries without end.
            thread::Builder::new().name("keys".to_owned()).spawn(move || {
                while let Ok(event) = event::read() {
                    if send.send(event).is_err() {
                        return;
                    }
                }
            })?;
            Ok(Self { terminal, events, hold: hold.clone() })
        });
        if screen.is_err() {
            hold.give_back();
        }
        screen
    }

    /// Clears the terminal. `Terminal::clear` would first query the cursor's position, and the answer would go to the
    /// thread that reads keys.
    fn clear(&mut self) -> io::Result<()> {
        let size = self.terminal.size()?;
        self.terminal.resize(size.into())
    }

    fn run(&mut self, feed: &mut Feed, signal: &AtomicUsize) -> io::Result<End> {
        let (mut model, mut view) = (Model::default(), View::default());
        let mut status = Status::default();
        let begin = Instant::now();
        let (mut next_poll, mut next_draw, mut next_list) = (begin, begin, begin);
        let mut is_changed = true;
        loop {
            let number = signal.load(Ordering::Relaxed);
            if number != 0 {
                return Ok(End::BySignal(number as i32));
            }
            if is_closed() {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            if Instant::now() >= next_poll {
                let more = look(feed, &mut model, &mut status, &mut next_list, &mut is_changed);
                next_poll = Instant::now() + if more { Duration::ZERO } else { POLL };
            }
            if is_changed && Instant::now() >= next_draw {
                self.terminal.draw(|frame| draw(frame, &model, &view, &status))?;
                (is_changed, next_draw) = (false, Instant::now() + DRAW);
            }
            let next = if is_changed { next_poll.min(next_draw) } else { next_poll };
            let event = match self.events.recv_timeout(next.duration_since(Instant::now())) {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => return Err(io::ErrorKind::BrokenPipe.into()),
            };
            let ask = match event {
                Event::Key(key) => view.key(key, &model),
                Event::Resize(..) => KeyAction::Draw,
                _ => KeyAction::Nothing,
            };
            match ask {
                KeyAction::Nothing => continue,
                KeyAction::Draw => {}
                KeyAction::Quit => return Ok(End::ByUser),
                KeyAction::Suspend => {
                    self.hold.give_back();
                    signal_hook::low_level::emulate_default_handler(SIGTSTP)?;
                    self.hold.take()?;
                    self.clear()?;
                }
                KeyAction::Clear => self.clear()?,
                KeyAction::NextRun | KeyAction::PreviousRun => {
                    let Feed::File(file) = feed else { continue };
                    if !file.switch(ask == KeyAction::NextRun) {
                        continue;
                    }
                    (model, view.scroll, next_poll) = (Model::default(), 0, Instant::now());
                }
            }
            (is_changed, next_draw) = (true, Instant::now());
        }
    }
}

/// Polls the file. Returns `true` if more may be available at once.
fn look(
    feed: &mut Feed,
    model: &mut Model,
    status: &mut Status,
    next_list: &mut Instant,
    is_changed: &mut bool,
) -> bool {
    let before = text::silence(model, status.silent);
    let found = feed.poll(model);
    status.silent = feed.silent();
    let (notice, more, is_new) = match found {
        Ok(found) => (found.notice, found.more, found.is_new),
        Err(error) => (Some(brigade_rank_env::text::printable(&error.to_string())), false, false),
    };
    let is_renamed = status.name != feed.name();
    if is_renamed || Instant::now() >= *next_list {
        status.name = feed.name();
        *next_list = Instant::now() + LIST;
        let place = match feed {
            Feed::File(file) => {
                let (runs, at) = file.siblings();
                at.map(|at| (at + 1, runs.len()))
            }
            Feed::Input(_) => None,
        };
        *is_changed |= is_renamed || place != status.place;
        status.place = place;
    }
    *is_changed |= is_new || notice != status.notice;
    *is_changed |= before != text::silence(model, status.silent);
    status.notice = notice;
    more
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.hold.give_back();
    }
}

/// `true` while the terminal is in raw mode, with its alternate screen. Shared with the panic hook: restored twice, a
/// terminal would move its cursor to its old position, above a panic's message.
#[derive(Debug, Clone, Default)]
struct Hold(Arc<AtomicBool>);

impl Hold {
    fn take(&self) -> io::Result<()> {
        self.0.store(true, Ordering::Relaxed);
        let taken = enable_raw_mode()
            .and_then(|()| execute!(io::stdout(), EnterAlternateScreen, cursor::Hide));
        if taken.is_err() {
            self.give_back();
        }
        taken
    }

    /// Errors are ignored: the terminal was closed.
    fn give_back(&self) {
        if self.0.swap(false, Ordering::Relaxed) {
            let _ = terminal::disable_raw_mode();
            let _ = execute!(io::stdout(), terminal::LeaveAlternateScreen, cursor::Show);
        }
    }
}

/// Returns `true` if the terminal was closed. Not every one that closes sends a signal: a program that was started by
/// `nohup`, or in a session of its own, receives none.
fn is_closed() -> bool {
    let stdout = io::stdout();
    let mut terminal = [PollFd::new(&stdout, PollFlags::empty())];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut terminal, Some(&at_once)).is_ok()
        && terminal[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}

/// Interval between polls of the file.
const POLL: Duration = Duration::from_millis(250);
/// Interval between listings of the folder.
const LIST: Duration = Duration::from_secs(5);
/// Minimum interval between two redraws that no key has requested.
const DRAW: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use std::io::Read;

    use portable_pty::{CommandBuilder, PtySize, native_pty_system};

    use super::*;

    /// Child process of the test below: this executable again.
    #[test]
    #[ignore = "is what the test below starts"]
    fn child() {
        let mut screen = Screen::take().unwrap();
        screen.terminal.draw(|frame| frame.render_widget("drawn", frame.area())).unwrap();
        panic!("on purpose");
    }

    #[test]
    fn a_panic_gives_the_terminal_back() {
        let size = PtySize { rows: 24, cols: 100, pixel_width: 0, pixel_height: 0 };
        let pair = native_pty_system().openpty(size).unwrap();
        let mut command = CommandBuilder::new(std::env::current_exe().unwrap());
        command.args(["--exact", "watch::screen::tests::child", "--ignored", "--nocapture"]);
        command.env("TERM", "xterm");
        command.env("RUST_BACKTRACE", "0");
        let modes = || format!("{:?}", pair.master.get_termios().unwrap());
        let before = modes();
        let mut child = pair.slave.spawn_command(command).unwrap();
        let mut shown = vt100::Parser::new(24, 100, 0);
        let (mut output, mut was_alternate) = (pair.master.try_clone_reader().unwrap(), false);
        drop(pair.slave);
        let mut bytes = [0; 4096];
        // At the end of the program the terminal returns an error.
        while let Ok(count @ 1..) = output.read(&mut bytes) {
            for byte in &bytes[..count] {
                shown.process(&[*byte]);
                was_alternate |= shown.screen().alternate_screen();
            }
        }
        assert!(!child.wait().unwrap().success());
        assert_eq!(modes(), before);
        let screen = shown.screen();
        assert!(was_alternate && !screen.alternate_screen() && !screen.hide_cursor());
        assert!(screen.contents().contains("on purpose"), "{}", screen.contents());
        assert!(!screen.contents().contains("drawn"), "{}", screen.contents());
    }
}
