//! Generated texts with the properties of film reviews on the web, and pairs of sentences.

use std::fs;
use std::io;
use std::path::Path;

/// Generated set of film reviews that replaces a real one, such as IMDb's, in tests.
///
/// A review is several sentences about parts of a film (the plot, an actor, the score …), most of which agree with the
/// review's label, with the properties that make web texts hard to split: capitals, `<br />`, contractions, numbers,
/// repeated letters and words, quotation marks, URLs, emoticons, and rare names. A model learns the label from words
/// and negations, but not from any single word.
///
/// The same arguments give the same texts on every machine.
///
/// ```
/// use brigade_testkit::Reviews;
///
/// let folder = tempfile::tempdir()?;
/// Reviews::new(6).write(folder.path())?;
/// assert!(folder.path().join("train/pos/0000.txt").is_file());
/// assert!(folder.path().join("test/neg/0001.txt").is_file());
/// assert!(folder.path().join("unsup/0000.txt").is_file());
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Reviews {
    per_class: usize,
    sentences: usize,
    seed: u64,
}

const PARTS: [&str; 16] = [
    "plot",
    "story",
    "acting",
    "cast",
    "script",
    "score",
    "camera work",
    "ending",
    "dialogue",
    "pacing",
    "first half",
    "lead actress",
    "villain",
    "humour",
    "soundtrack",
    "direction",
];
const GOOD: [&str; 16] = [
    "wonderful",
    "brilliant",
    "moving",
    "clever",
    "charming",
    "superb",
    "gripping",
    "fresh",
    "honest",
    "hilarious",
    "beautiful",
    "great",
    "convincing",
    "subtle",
    "rich",
    "unforgettable",
];
const BAD: [&str; 16] = [
    "dull",
    "awful",
    "predictable",
    "lazy",
    "boring",
    "terrible",
    "clumsy",
    "stale",
    "fake",
    "painful",
    "ugly",
    "bad",
    "wooden",
    "shallow",
    "thin",
    "forgettable",
];
const DEGREES: [&str; 8] =
    ["", "very ", "really ", "quite ", "surprisingly ", "so ", "rather ", "truly "];
const WATCHED: [&str; 8] = [
    "I saw it on a plane",
    "We watched this at home",
    "My friends dragged me into it",
    "I rented it last night",
    "It was on TV again",
    "I've waited for it since 2004",
    "They showed it at 9:30 p.m.",
    "I didn't expect much",
];
const SYLLABLES: [&str; 20] = [
    "ka", "ren", "mo", "li", "tor", "va", "shi", "bel", "dra", "no", "mar", "ti", "gos", "el",
    "pur", "an", "zi", "hol", "wes", "ter",
];

impl Reviews {
    /// Creates a set of `per_class` training reviews per label, a third as many test reviews, and as many without a
    /// label.
    #[must_use]
    pub fn new(per_class: usize) -> Self {
        Self { per_class, sentences: 8, seed: 7 }
    }

    /// Sets the mean number of sentences, of about 12 words each. Defaults to 8.
    #[must_use]
    pub fn sentences(mut self, sentences: usize) -> Self {
        self.sentences = sentences.max(1);
        self
    }

    /// Returns review `index` of a label.
    #[must_use]
    pub fn review(&self, positive: bool, index: usize) -> String {
        let mut draw = Draw::new(self.seed, &[u64::from(positive), index as u64]);
        let count = 1 + draw.below(2 * self.sentences);
        let film = draw.name();
        let mut text = String::new();
        for number in 0..count {
            if number > 0 {
                text.push_str(draw.pick(&[" ", " ", " ", " ", "  ", "<br /><br />"]));
            }
            // The first sentence agrees with the label, so that a short review has it, too.
            let agrees = number == 0 || draw.below(5) > 0;
            let sentence = draw.sentence(&film, positive == agrees);
            text.push_str(&sentence);
        }
        text
    }

    /// Writes the texts as in IMDb's archive: `train/pos`, `train/neg`, `test/pos`, `test/neg` and `unsup`, one file
    /// each.
    ///
    /// # Errors
    /// Fails when a folder or a file cannot be written.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        let tested = self.per_class.div_ceil(3);
        let sets = [("train", 0, self.per_class), ("test", 1, tested)];
        for (set, stream, count) in sets {
            for (class, positive) in [("pos", true), ("neg", false)] {
                let folder = folder.join(set).join(class);
                fs::create_dir_all(&folder)?;
                for index in 0..count {
                    let text = self.review(positive, stream * 1_000_000 + index);
                    fs::write(folder.join(format!("{index:04}.txt")), text)?;
                }
            }
        }
        let folder = folder.join("unsup");
        fs::create_dir_all(&folder)?;
        for index in 0..self.per_class {
            let text = self.review(index % 2 == 0, 2_000_000 + index);
            fs::write(folder.join(format!("{index:04}.txt")), text)?;
        }
        Ok(())
    }

    /// Returns pair `index` of sentences, with `true` if they are paraphrases, in the manner of the Microsoft Research
    /// Paraphrase Corpus. Otherwise the second sentence denies the first in one of several ways, so that a
    /// small model learns the difference from some hundred pairs.
    #[must_use]
    pub fn pair(&self, index: usize) -> (String, String, bool) {
        let mut draw = Draw::new(self.seed, &[2, index as u64]);
        let (part, film) = (draw.pick(&PARTS), draw.name());
        let (same, words) = (draw.below(2) == 0, if draw.below(2) == 0 { &GOOD } else { &BAD });
        let (one, two) = (draw.pick(words), draw.pick(words));
        let first = format!("The {part} of {film} is {}{one}.", draw.pick(&DEGREES));
        let second = match (same, draw.below(2)) {
            (true, 0) => format!("In {film}, the {part} is {two}."),
            (true, _) => format!("{film} has {}{two} {part}.", draw.pick(&["a ", "some "])),
            (false, 0) => format!("The {part} of {film} isn't {two}."),
            (false, _) => format!("{film} has {}{two} {part}.", draw.pick(&["no ", "hardly any "])),
        };
        (first, second, same)
    }
}

/// Random choices from a stream of integers.
struct Draw(u64);

impl Draw {
    fn new(seed: u64, path: &[u64]) -> Self {
        let mut draw = Self(seed);
        for step in path {
            draw.0 = draw.next() ^ step.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        }
        draw
    }

    /// Returns the next number of splitmix64.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    fn pick(&mut self, from: &[&'static str]) -> &'static str {
        from[self.below(from.len())]
    }

    /// Returns a name of few syllables, few of which are frequent.
    fn name(&mut self) -> String {
        let syllables = 2 + self.below(2);
        // Product of two numbers: small ones are more frequent.
        let mut name: String = (0..syllables)
            .map(|_| {
                SYLLABLES
                    [self.below(SYLLABLES.len()) * self.below(SYLLABLES.len()) / SYLLABLES.len()]
            })
            .collect();
        name[..1].make_ascii_uppercase();
        name
    }

    fn sentence(&mut self, film: &str, positive: bool) -> String {
        let negated = self.below(4) == 0;
        let words = if positive == negated { &BAD } else { &GOOD };
        let (word, other) = (self.pick(words), self.pick(words));
        let degree = self.pick(&DEGREES);
        let part = self.pick(&PARTS);
        let not = if negated { "n't" } else { "" };
        let name = self.name();
        let watched = self.pick(&WATCHED);
        let stars = 1 + self.below(4) + if positive { 5 } else { 0 };
        match self.below(12) {
            0 => format!("The {part} is{not} {degree}{word}."),
            1 => format!("{watched}, and the {part} was{not} {word} or {other}."),
            2 => format!(
                "I do{not} think that \"{film}\" is {degree}{word}; its {part} was{not} {other}."
            ),
            3 => format!("{name}'s {part} is{not} {word}!!!"),
            4 => {
                if negated {
                    format!("NOT {}, just not {word} at all.", word.to_uppercase())
                } else {
                    format!(
                        "{}, just {degree}{word} - {word}, {word}, {word}!",
                        word.to_uppercase()
                    )
                }
            }
            5 => format!("{stars}/10 from me, the {part} (by {name}) was{not} {word}."),
            6 => format!(
                "See http://www.{}.com/{}.html: the {part} is{not} {word}.",
                film.to_lowercase(),
                self.below(90)
            ),
            7 => format!(
                "{watched}. {name} was{not} {word}, {} {name} {other}.",
                if negated { "nor was" } else { "and so was" }
            ),
            8 => {
                if negated {
                    format!("Was it {word}? Nooooo. The {part} wasn't {other} either.")
                } else {
                    format!("Was it {word}? Yesssss. The {part} was {other}, too :)")
                }
            }
            9 => format!(
                "It's{} {word} for ${}, is{not} it?",
                if negated { " not" } else { "" },
                3 + self.below(20)
            ),
            10 => format!("Mr. {name} and the {part} of {film} are{not} {degree}{word}..."),
            _ => format!(
                "The {part} had{not} been {word} since {}, & the {} was{not} {other}.",
                1960 + self.below(60),
                self.pick(&PARTS)
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_the_same_each_time_and_differ() {
        let reviews = Reviews::new(4);
        assert_eq!(reviews.review(true, 3), reviews.review(true, 3));
        assert_ne!(reviews.review(true, 3), reviews.review(true, 4));
        assert_ne!(reviews.review(true, 3), reviews.review(false, 3));
        let pairs: Vec<_> = (0..100).map(|index| reviews.pair(index)).collect();
        let same = pairs.iter().filter(|(.., same)| *same).count();
        assert!((30..70).contains(&same), "{same}");
        assert!(pairs.iter().all(|(first, second, _)| first != second));
    }
}
