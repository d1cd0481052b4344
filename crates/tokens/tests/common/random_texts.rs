//! Random texts with what is hard to split, and anything else that Unicode has.

use std::ops::RangeInclusive;

use fastrand::Rng;

/// Makes random texts of up to some hundred characters.
pub(crate) struct RandomTexts {
    random: Rng,
    special_cases: Vec<String>,
    names: Vec<&'static str>,
    after_digit: Vec<&'static str>,
    known: Vec<RangeInclusive<u32>>,
}

impl RandomTexts {
    pub(crate) fn new(random: Rng) -> Self {
        let lines = include_str!("../../src/english/exceptions.txt")
            .lines()
            .filter(|line| line.starts_with('['));
        let pieces = lines.map(|line| serde_json::from_str::<Vec<String>>(line).unwrap());
        let entities =
            include_str!("../../src/rules/entities.txt").lines().filter(|it| !it.starts_with('#'));
        let characters = include_str!("../../src/english/characters.txt");
        let (_, after_digit) = characters.split_once("after-digit:").unwrap();
        let (_, known) = characters.split_once("assigned:").unwrap();
        let known = known.split_whitespace().take_while(|it| !it.ends_with(':'));
        let number = |it: &str| u32::from_str_radix(it, 16).unwrap();
        let range = |text: &str| {
            let (first, last) = text.split_once('-').unwrap_or((text, text));
            number(first)..=number(last)
        };
        Self {
            random,
            known: known.map(range).collect(),
            special_cases: pieces.map(|it| it.concat()).collect(),
            names: entities.filter_map(|line| Some(line.split_once(' ')?.0)).collect(),
            after_digit: after_digit.split_whitespace().collect(),
        }
    }

    /// The next text.
    pub(crate) fn text(&mut self) -> String {
        let mut text = String::new();
        for _ in 0..self.random.usize(..12) {
            let before = text.len();
            self.push_piece(&mut text);
            // Some pieces are repeated, and some are split.
            if self.random.u8(..10) == 0 {
                let piece = text[before..].to_owned();
                let between = self.choose(&[
                    "",
                    " ",
                    " ",
                    "  ",
                    "\n",
                    ",",
                    "\u{a0}",
                    "\u{3000} ",
                    "\u{a0}\u{2003}",
                ]);
                for _ in 0..self.random.usize(1..4) {
                    text.push_str(between);
                    text.push_str(&piece);
                }
            }
            if self.random.u8(..12) == 0 {
                text.pop();
            }
            let joint = self.random.u8(..10);
            match joint {
                0..4 => {}
                4..7 => text.push(' '),
                7 => text.push_str(
                    self.choose(&["  ", "\n", " \n ", "\t", "\u{a0}", "\x1c", "\u{3000}", "\r\n"]),
                ),
                _ => text.push_str(self.choose(&[
                    ".", ",", "-", "--", "/", "'", "’", "...", "…", ":", "(", ")", "\"", "@",
                ])),
            }
        }
        text
    }

    /// Whether the tables have a meaning for all characters of a text.
    #[allow(dead_code)]
    pub(crate) fn is_known(&self, text: &str) -> bool {
        text.chars().all(|it| self.known.iter().any(|range| range.contains(&(it as u32))))
    }

    fn choose<'a>(&mut self, among: &[&'a str]) -> &'a str {
        among[self.random.usize(..among.len())]
    }

    fn push_piece(&mut self, text: &mut String) {
        match self.random.u8(..16) {
            0..3 => self.push_word(text),
            3 => {
                let place = self.random.usize(..self.special_cases.len());
                text.push_str(&self.special_cases[place]);
            }
            4 => self.push_number(text),
            5 => self.push_address(text),
            6 => self.push_reference(text),
            7 => text.push_str(self.choose(RULES)),
            8 => {
                let character = self.character();
                let times = self.random.usize(1..7);
                text.extend(std::iter::repeat_n(character, times));
            }
            9..12 => {
                for _ in 0..self.random.usize(1..6) {
                    text.push_str(self.choose(MARKS));
                }
            }
            _ => {
                for _ in 0..self.random.usize(1..5) {
                    text.push(self.character());
                }
            }
        }
    }

    fn push_word(&mut self, text: &mut String) {
        let word = self.choose(WORDS);
        match self.random.u8(..6) {
            0 => text.push_str(&word.to_uppercase()),
            1 => {
                let first = word.chars().next().map_or(0, char::len_utf8);
                text.push_str(&word[..first].to_uppercase());
                text.push_str(&word[first..]);
            }
            _ => text.push_str(word),
        }
    }

    fn push_number(&mut self, text: &mut String) {
        for _ in 0..self.random.usize(1..5) {
            text.push(self.random.digit(10));
        }
        match self.random.u8(..4) {
            0 => {
                let place = self.random.usize(..self.after_digit.len());
                text.push_str(self.after_digit[place]);
            }
            1 => text.push_str(
                self.choose(&["+", ".", "°C.", "°f.", "-", "*", "^", "am", "p.m.", "%", "٣", "५"]),
            ),
            _ => {}
        }
    }

    fn push_address(&mut self, text: &mut String) {
        text.push_str(self.choose(&[
            "",
            "",
            "http://",
            "https://",
            "mailto:",
            "a+b-c.://",
            "://",
            "x://",
            "ftp:/",
        ]));
        text.push_str(self.choose(&["", "", "", "ann@", "ann:secret@", "@", "a@b@"]));
        if self.random.u8(..3) == 0 {
            for place in 0..self.random.usize(3..6) {
                if place > 0 {
                    text.push('.');
                }
                let part = [
                    "1", "10", "127", "169", "254", "192", "168", "172", "16", "2٣", "31", "223",
                    "255", "0", "256", "8",
                ];
                text.push_str(self.choose(&part));
            }
        } else {
            for _ in 0..self.random.usize(1..4) {
                if self.random.u8(..6) == 0 {
                    let length = self.random.usize(60..67);
                    text.extend(std::iter::repeat_n('a', length));
                }
                text.push_str(self.choose(&[
                    "www", "example", "a-b", "a_", "-x", "é", "中", "😀", "A", "", "x\u{a0}",
                ]));
                text.push('.');
            }
            text.push_str(
                self.choose(&["com", "org", "C", "c", "COM", "de", "中国", "co1", "कख", "x", ""]),
            );
        }
        text.push_str(self.choose(&["", "", "", ":80", ":8", ":123456", ":٣٣", ":80x"]));
        text.push_str(self.choose(&[
            "",
            "",
            "",
            "/",
            "/a/b.html?q=1#x",
            "?",
            "#",
            "/a)",
            "/(b)",
            ",",
            ".",
        ]));
    }

    fn push_reference(&mut self, text: &mut String) {
        text.push_str(self.choose(&["&", "&", "&amp;", "&#", "&#x", "amp;", ""]));
        match self.random.u8(..4) {
            0 => {
                let number = self.random.u32(..0x11_0100);
                text.push_str(&format!("{number:x}"));
            }
            1 => {
                let number = self.random.u32(..400);
                text.push_str(&number.to_string());
            }
            _ => {
                let place = self.random.usize(..self.names.len());
                text.push_str(self.names[place]);
            }
        }
        if self.random.bool() {
            text.push(';');
        }
    }

    fn character(&mut self) -> char {
        let range = match self.random.u8(..14) {
            0..4 => ' '..='\x7f',
            4 => '\0'..='\x1f',
            5 => '\x7f'..='\u{24f}',
            6 => '\u{250}'..='\u{6ff}',
            7 => '\u{700}'..='\u{1fff}',
            8 => '\u{2000}'..='\u{2bff}',
            9 => '\u{2c00}'..='\u{4eff}',
            10 => '\u{a000}'..='\u{ffff}',
            11 => '\u{10000}'..='\u{1ffff}',
            12 => '\u{300}'..='\u{3ff}',
            _ => char::MIN..=char::MAX,
        };
        self.random.char(range)
    }
}

const WORDS: &[&str] = &[
    "the",
    "film",
    "good",
    "no",
    "very",
    "don't",
    "it's",
    "can’t",
    "o'clock",
    "ice-cream",
    "and/or",
    "he'll've",
    "e.g.",
    "u.s.",
    "ph.d",
    "a",
    "i",
    "σας",
    "straße",
    "ǆ",
    "ﬁn",
    "été",
    "naïve",
    "слово",
    "слово.",
    "مرحبا",
    "नमस्ते",
    "中文",
    "日本語。",
    "한국",
    "ⅷ",
    "ß",
    "ŉ",
    "i̇",
    "θάλασσας",
    "xxmaj",
    "xxup",
    "xxbos",
    "xxrep",
    "norm",
    "orth",
    "is_alpha",
    "k.o",
    "x-y",
    "well-known",
    "mother-in-law",
    "a.b",
    "foo",
    "bar",
    "gimme",
    "state-of-the-art",
    "10am",
    "5'11",
];
const RULES: &[&str] = &[
    "<br />", "<unk>", "\\n", "\\\"", " @-@ ", " @.@ ", "#39;", "quot;", "nbsp;", "#36;", "#146;",
    "...", "/", "#", "\\", "<br/>", "<b>", "Σ", "ΑΣ", "AΣ.", "İ", "A", "AB", "Ab", "aB", "A1",
    "ABc", " @-", "....", "no no no", "the the",
];
const MARKS: &[&str] = &[
    ".",
    ",",
    "!",
    "?",
    ":",
    ";",
    "'",
    "\"",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    "<",
    ">",
    "-",
    "–",
    "—",
    "~",
    "…",
    "“",
    "”",
    "‘",
    "’",
    "«",
    "»",
    "`",
    "´",
    "/",
    "\\",
    "|",
    "@",
    "#",
    "$",
    "€",
    "£",
    "US$",
    "C$",
    "%",
    "^",
    "&",
    "*",
    "_",
    "+",
    "=",
    "§",
    "°",
    "¬",
    "¿",
    "¡",
    "。",
    "、",
    "「",
    "」",
    "·",
    "।",
    "😀",
    "👍🏽",
    "❤️",
    "👩\u{200d}💻",
    "☃",
    "®",
    "©",
    "\u{301}",
    "\u{200b}",
    "\u{feff}",
    "s",
    "S",
    "D",
    "P",
    "o",
    "3",
    "0",
    "a",
    "T",
    "K",
    "m",
    "²",
];
