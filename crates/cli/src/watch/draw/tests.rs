//! Tests of the screen's content, as text.

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::super::model::tests::{learner, model};
use super::super::view::KeyAction;
use super::*;

fn buffer(model: &Model, view: &View, width: u16, height: u16) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    let status = Status {
        name: "file".to_owned(),
        place: Some((2, 3)),
        silent: Some(Duration::from_secs(95)),
        notice: None,
    };
    terminal.draw(|frame| draw(frame, model, view, &status)).unwrap();
    terminal.backend().buffer().clone()
}

fn lines(buffer: &Buffer) -> Vec<String> {
    let width = usize::from(buffer.area.width);
    let line = |cells: &[ratatui::buffer::Cell]| {
        cells.iter().map(ratatui::buffer::Cell::symbol).collect::<String>().trim_end().to_owned()
    };
    buffer.content.chunks(width.max(1)).map(line).collect()
}

fn screen(model: &Model, view: &View, width: u16, height: u16) -> String {
    lines(&buffer(model, view, width, height)).join("\n")
}

fn press(view: &mut View, model: &Model, keys: &str) {
    for key in keys.chars() {
        let code = if key == '>' { KeyCode::Down } else { KeyCode::Char(key) };
        assert_eq!(
            view.key(KeyEvent::new(code, KeyModifiers::NONE), model),
            KeyAction::Draw,
            "{key}"
        );
    }
}

#[test]
fn the_whole_screen() {
    let ranks = "{\"_step\":12,\"ranks\":{\"columns\":[\"rank\",\"host\",\"step_ms\"],\
                 \"data\":[[0,\"node0\",12.5],[1,\"node1\",13]]}}\n\
                 {\"_step\":12,\"samples_per_second\":800.5,\"step_ms\":12,\"resident_mib\":2048}";
    let model = model(&(learner(3, 4) + ranks));
    let expected = "\
digits  running · silent for 1 min 30 s · epoch 3.0/4 · step 12 · 12 s · run 2 of 3
800.5 samples/s · step 12 ms · resident 2.0 GiB
75 %, 4 s left ────────────────────────────────────────────────────────────────────────────────────
━ loss 0.0833333  ━ train_loss 0.5  ━ valid_loss 0.25 ────────────┌ series ────────────────────────
1.05  │⢄                                                          │ loss                  0.0833333
      │⠈⢆                                                         │ lr                         0.01
      │ ⠈⢢                                                        │ train_loss                  0.5
      │   ⠣⡀                                                      │ valid_loss                 0.25
      │    ⠱⡀                                                     │ time                       65.4
0.542 │     ⠑⠤⡀        ⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒│ samples_per_second        800.5
      │       ⠈⠑⢄⡀                                                │ step_ms                      12
      │          ⠈⠑⠒⠢⠤⢄⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀│ resident_mib               2048
      │                 ⠈⠉⠉⠑⠒⠒⠒⠢⠤⠤⠤⠤⢄⣀⣀⣀⣀⣀                        │
0.0375│                                   ⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠑⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒│
      └───────────────────────────────────────────────────────────│
      1                            6                            12│
 epochs ────────────────────────────────────────── ranks ──────────────────────────────────────────
epoch  train_loss  valid_loss       time          rank  host   step_ms
    2         0.5        0.25  1 min 5 s             0  node0     12.5
    1         0.5        0.25  1 min 5 s             1  node1       13
    0         0.5        0.25  1 min 5 s
q quit  ? help  ↑↓ series  l linear  s smooth 0  x step  z 100 %  space pin  c settings";
    let found = screen(&model, &View::default(), 99, 22);
    assert_eq!(found, expected, "\n{found}");
}

#[test]
fn tables_beside_each_other_are_whole_or_one_is_left_out() {
    let ranks = "{\"_step\":12,\"ranks\":{\"columns\":[\"rank\",\"host\",\"step_ms\"],\
                 \"data\":[[0,\"node0\",12.5],[1,\"node1\",13]]}}";
    let model = model(&(learner(3, 4) + ranks));
    let lines = |width| {
        let found = screen(&model, &View::default(), width, 22);
        let mut lines = found.lines().map(str::to_owned).collect::<Vec<_>>();
        lines.drain(..lines.iter().position(|line| line.starts_with("epoch  ")).unwrap());
        lines
    };
    assert_eq!(
        lines(99)[1],
        "    2         0.5        0.25  1 min 5 s             0  node0     12.5"
    );
    // Less than two halves of the widest table's width.
    assert_eq!(lines(63)[1], "    2         0.5        0.25  1 min 5 s      0  node0     12.5");
    assert_eq!(lines(50)[1], "    2         0.5        0.25  1 min 5 s");
    assert_eq!(lines(30)[1], "    2         0.5        0.25…");
}

#[test]
fn keys_choose_what_is_drawn() {
    let model = model(&learner(3, 40));
    let mut view = View::default();
    press(&mut view, &model, ">");
    assert!(screen(&model, &view, 99, 30).contains("━ lr 0.01 ─"));
    press(&mut view, &model, " >>>>");
    let both = screen(&model, &view, 99, 30);
    assert!(both.contains("━ lr 0.01 ─") && both.contains("━ loss 0.008"), "{both}");
    assert!(both.contains("•lr"), "{both}");
    // The last chart is the selected one, and remains if only one fits.
    let small = screen(&model, &view, 40, 12);
    assert!(small.contains("━ loss") && !small.contains("━ lr"), "{small}");

    press(&mut view, &model, "lsxx");
    let changed = screen(&model, &view, 99, 30);
    assert!(changed.contains("l log  s smooth 0.6  x epoch"), "{changed}");
    assert!(lines(&buffer(&model, &view, 99, 30)).iter().any(|line| line.contains("3.0│")));
    press(&mut view, &model, "zz");
    assert!(screen(&model, &view, 99, 30).contains("2.7"), "a tenth of the run");
    press(&mut view, &model, "c");
    assert!(screen(&model, &view, 99, 30).contains("  opt.lr = 0.01"));
    press(&mut view, &model, "?");
    assert!(screen(&model, &view, 99, 30).contains("Ctrl-C   quit"));
    let escape = KeyEvent::new(KeyCode::Esc, KeyModifiers::NONE);
    assert_eq!(view.key(escape, &model), KeyAction::Draw, "leaves the page");
    assert_eq!(view.key(escape, &model), KeyAction::Quit);
}

#[test]
fn any_size_and_any_values_can_be_drawn() {
    let wild = "{\"_step\":18446744073709551615,\"_time\":1e300,\"a\":1e308,\"b\":\"NaN\",\"c\":-1}\n\
                {\"_step\":3,\"_time\":-1e300,\"a\":-1e308,\"b\":\"Infinity\",\"c\":0,\"epoch\":-1}\n\
                {\"_step\":3,\"a\":1e-308,\"b\":\"-Infinity\",\"c\":5e-324,\"epoch\":1e300,\"loss\":1}\n\
                {\"t\":{\"columns\":[],\"data\":[]},\"u\":{\"columns\":[\"x\"],\"data\":[]}}";
    let models = [Model::default(), model(wild), model(&learner(4, 7)), model("{\"本本\":3}")];
    for model in &models {
        let mut view = View::default();
        for keys in ["", "l", "s", "x", "x", ">", " ", ">", " ", ">", " ", "z", "t", "c", "?"] {
            press(&mut view, model, keys);
            for (width, height) in
                [(0, 0), (1, 1), (2, 40), (20, 5), (40, 3), (300, 1), (80, 24), (90, 9), (120, 60)]
            {
                let _ = buffer(model, &view, width, height);
            }
        }
    }
}

#[test]
fn a_tiny_terminal_shows_the_curve() {
    let found = screen(&model(&learner(2, 30)), &View::default(), 20, 5);
    assert_eq!(
        found,
        "\
digits  running · si
━ loss 0.0166667  ━
⡆
⢸        ⠠⠤⠤⠤⠤⠤⠤⠤⠤⠤⠤
⠈⠑⠤⠤⠤⠤⢤⣀⣀⠈⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉",
        "\n{found}"
    );
}

#[test]
fn what_cannot_be_drawn_is_told() {
    let text = "{\"_step\":1,\"loss\":1}\n{\"_step\":2,\"loss\":\"NaN\"}\n{\"_step\":3,\"loss\":1}";
    let model = model(text);
    let mut view = View::default();
    let found = screen(&model, &view, 70, 12);
    assert!(found.contains("━ loss 1 (1 value not finite) ─"), "{found}");
    press(&mut view, &model, "x");
    let found = screen(&model, &view, 70, 12);
    assert!(found.contains("no times in this run: press x"), "{found}");
}

#[test]
fn texts_of_a_run_cannot_command_the_terminal() {
    let model = model(
        "{\"_event\":\"start\",\"_project\":\"\\u001b]0;p\",\"_config\":{\"\\u001b[2J\":\"\\r\\n\"}}\n\
         {\"\\u001b[31mloss\":1,\"epoch\":1,\"\\u009b\":\"\\u202e\",\
          \"\\u0008\":{\"columns\":[\"\\u001b\"],\"data\":[[\"\\u0007\"]]}}\n\u{1b}\n",
    );
    let mut view = View::default();
    for keys in ["", "c"] {
        press(&mut view, &model, keys);
        for cell in &buffer(&model, &view, 120, 40).content {
            assert!(!cell.symbol().chars().any(|it| it.is_control() || it == '\u{202e}'));
        }
        let shown = screen(&model, &view, 120, 40);
        assert!(
            shown.contains(if keys.is_empty() { r"\u{1b}[31mloss" } else { r"\u{1b}[2J = \r\n" }),
            "{shown}"
        );
    }
}
