//! Questionnaire of `brigade config`, in the order of `accelerate config`.
//!
//! Pure functions from answers to the next question. Input and output are in the command-line program.

use brigade_launch::NodeRange;

use crate::machine::Machine;
use crate::settings::{Setting, Settings};
use crate::value::{Backend, DynamoBackend, DynamoMode, List, Precision, Value as _};

/// Question of the questionnaire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// Machines on which the job runs: this one, or several.
    Where,
    /// Names of the hosts.
    Hosts,
    /// Number of machines.
    Machines,
    /// Rank of this machine among them.
    Rank,
    /// Address of the main machine.
    Address,
    /// Port of the main machine.
    Port,
    /// Backend of the rendezvous, for machines that join and leave.
    Backend,
    /// Endpoint of the rendezvous.
    Endpoint,
    /// Maximum number of restarts.
    Restarts,
    /// Choice to train on the CPU even if there are GPUs.
    Cpu,
    /// Number of ranks per machine.
    Processes,
    /// GPUs that the ranks use.
    Devices,
    /// Precision of computations.
    Precision,
    /// Choice to use `torch.compile` in Python programs.
    Compile,
    /// Backend of `torch.compile`.
    CompileBackend,
    /// Mode of `torch.compile`.
    CompileMode,
    /// Choice to require a single graph from `torch.compile`.
    CompileGraph,
    /// Choice to compile with dynamic shapes.
    CompileShapes,
    /// Choice to compile repeated blocks once (regional compilation).
    CompileBlocks,
}

/// Type of a question's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One of several words.
    Choice {
        /// Words, each with its meaning.
        options: Vec<(&'static str, &'static str)>,
        /// Index of the default word.
        default: usize,
    },
    /// The word `yes` or `no`.
    YesNo {
        /// Default answer, `true` for yes.
        default: bool,
    },
    /// A text of the user's own.
    Text {
        /// Default text. `None` if an answer is required.
        default: Option<String>,
        /// Description of a valid answer.
        help: &'static str,
    },
}

/// Questionnaire with the answers so far.
///
/// ```
/// use brigade_config::{Machine, questions::{Questionnaire, Question}};
///
/// let mut questionnaire = Questionnaire::new(Machine { gpus: 2, device_word: "GPU", cores: 8 });
/// assert_eq!(questionnaire.next(), Some(Question::Where));
/// questionnaire.answer(Question::Where, "here")?;
/// questionnaire.answer(Question::Cpu, "no")?;
/// assert_eq!(questionnaire.next(), Some(Question::Processes));
/// assert!(questionnaire.answer(Question::Processes, "0").is_err());
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug)]
pub struct Questionnaire {
    machine: Machine,
    answers: Vec<(Question, String)>,
}

impl Questionnaire {
    /// Creates a questionnaire without answers. The defaults are those that suit the machine.
    #[must_use]
    pub fn new(machine: Machine) -> Self {
        Self { machine, answers: Vec::new() }
    }

    /// Returns the next question to ask; `None` when all are answered.
    #[must_use]
    pub fn next(&self) -> Option<Question> {
        ORDER
            .iter()
            .copied()
            .find(|question| self.answer_to(*question).is_none() && self.applies(*question))
    }

    /// Records an answer.
    ///
    /// # Errors
    /// Returns a description of a valid answer. The question then remains open.
    pub fn answer(&mut self, question: Question, text: &str) -> Result<(), String> {
        let text = text.trim();
        self.check(question, text)?;
        self.answers.push((question, text.to_owned()));
        Ok(())
    }

    /// Removes the last answer. Returns `false` if there is none.
    pub fn back(&mut self) -> bool {
        self.answers.pop().is_some()
    }

    /// Checks an answer without recording it.
    ///
    /// # Errors
    /// Returns a description of a valid answer.
    pub fn check(&self, question: Question, text: &str) -> Result<(), String> {
        let text = text.trim();
        let expect = |good: bool, expected: &str| {
            if good { Ok(()) } else { Err(format!("expected {expected}")) }
        };
        match (question, self.kind(question)) {
            (_, Kind::Choice { options, .. }) => {
                expect(options.iter().any(|it| it.0 == text), "one of the words")
            }
            (_, Kind::YesNo { .. }) => expect(bool::parse(text).is_some(), "yes or no"),
            (Question::Machines, _) => {
                let several = NodeRange::parse(text).is_some_and(|it| it.max > 1);
                expect(several, "a number of machines from 2, or MIN:MAX")
            }
            (Question::Rank, _) => {
                let last = self.nodes().max - 1;
                let is_one = usize::parse(text).is_some_and(|rank| rank <= last);
                expect(is_one, &format!("a whole number from 0 to {last}"))
            }
            (Question::Port, _) => {
                let is_port = u16::parse(text).is_some_and(|port| port > 0);
                expect(is_port, "a port, from 1 to 65535")
            }
            (Question::Address, _) => {
                let is_name = !text.is_empty() && !text.contains(char::is_whitespace);
                expect(is_name, "a name or an address")
            }
            (Question::Endpoint, _) => {
                let (host, port) = text.rsplit_once(':').unwrap_or((text, "29400"));
                let is_one = !host.is_empty() && !host.contains(char::is_whitespace);
                expect(is_one && u16::parse(port).is_some(), "HOST:PORT")
            }
            (question, _) => match question.setting().and_then(Setting::named) {
                Some(setting) if Settings::default().set(setting.name, text) => Ok(()),
                Some(setting) => Err(setting.fault(text)),
                None => Ok(()),
            },
        }
    }

    /// Returns the text of a question.
    #[must_use]
    pub fn prompt(&self, question: Question) -> &'static str {
        match question {
            Question::Where => "Where will the job run?",
            Question::Hosts => "Which machines?",
            Question::Machines => "How many machines?",
            Question::Rank => "What is the number of this machine?",
            Question::Address => "What is the name or address of machine 0?",
            Question::Port => "On which port of machine 0 do they meet?",
            Question::Backend => "Who brings the machines together?",
            Question::Endpoint => "Where do they meet?",
            Question::Restarts => "How often is the job started again after a failure?",
            Question::Cpu if self.has_tpus() => "Train on the CPU only, even where there are TPUs?",
            Question::Cpu => "Train on the CPU only, even where there are GPUs?",
            Question::Processes if self.is_on_several() => "How many processes on each machine?",
            Question::Processes => "How many processes?",
            Question::Devices if self.has_tpus() => "Which TPUs?",
            Question::Devices => "Which GPUs?",
            Question::Precision => "Which mixed precision?",
            Question::Compile => "Compile models of Python programs with torch.compile?",
            Question::CompileBackend => "Which backend of torch.compile?",
            Question::CompileMode => "How hard should it try?",
            Question::CompileGraph => "Fail where a model is not one graph?",
            Question::CompileShapes => "Trace shapes as variables?",
            Question::CompileBlocks => "Compile repeated blocks once?",
        }
    }

    /// Returns the type of a question's answer, with its default.
    #[must_use]
    pub fn kind(&self, question: Question) -> Kind {
        let text = |default: &str, help| Kind::Text {
            default: Some(default.to_owned()).filter(|it| !it.is_empty()),
            help,
        };
        let words = |words: &[&'static str]| Kind::Choice {
            options: words.iter().map(|it| (*it, "")).collect(),
            default: 0,
        };
        match question {
            Question::Where => Kind::Choice {
                options: vec![
                    (HERE, "this machine"),
                    (HOSTS, "several machines, all started by one command over ssh"),
                    (EACH, "several machines, with one command on each"),
                ],
                default: 0,
            },
            Question::Hosts => {
                text("", "names with their numbers of processes, such as node1:4,node2:4")
            }
            Question::Machines => {
                text("2", "a number, or MIN:MAX where machines may join and leave")
            }
            Question::Rank => text("0", "a different one on each machine, from 0"),
            Question::Address => text("", "a name that all machines can resolve, or an IP address"),
            Question::Port => text("29500", "a free port, the same on every machine"),
            Question::Backend => Kind::Choice {
                options: vec![
                    (Backend::Builtin.word(), "a server built into the launcher"),
                    (Backend::Etcd.word(), "an existing etcd cluster"),
                ],
                default: 0,
            },
            Question::Endpoint => text("", "HOST:PORT, the same on every machine"),
            Question::Restarts => text("3", "0 for never"),
            Question::Cpu => Kind::YesNo { default: self.machine.gpus == 0 },
            Question::Processes => {
                let default = if self.is_on_cpu() { 1 } else { self.machine.gpus.max(1) };
                text(&default.to_string(), "a number, or auto, gpu or cpu to count on each machine")
            }
            Question::Devices => text("all", "all, or numbers such as 0,2"),
            Question::Precision if self.has_tpus() && !self.is_on_cpu() => {
                words(&[Precision::No.word(), Precision::Bf16.word()])
            }
            Question::Precision => {
                words(&[Precision::No.word(), Precision::Fp16.word(), Precision::Bf16.word()])
            }
            Question::Compile
            | Question::CompileGraph
            | Question::CompileShapes
            | Question::CompileBlocks => Kind::YesNo { default: false },
            Question::CompileBackend => {
                let first = DynamoBackend::Inductor.word();
                let mut backends = vec![first];
                let others = DynamoBackend::WORDS.iter().copied();
                let no = DynamoBackend::No.word();
                backends.extend(others.filter(|backend| *backend != first && *backend != no));
                words(&backends)
            }
            Question::CompileMode => words(DynamoMode::WORDS),
        }
    }

    /// Returns the settings that the answers make.
    #[must_use]
    pub fn settings(&self) -> Settings {
        let mut settings = Settings::default();
        for (question, text) in &self.answers {
            let Some(name) = question.setting() else { continue };
            let is_default = match question {
                Question::Devices => text == "all",
                _ => false,
            };
            if !is_default {
                settings.set(name, text);
            }
        }
        settings
    }

    fn applies(&self, question: Question) -> bool {
        let several = self.answer_to(Question::Where) == Some(EACH);
        let elastic = several && self.nodes().min != self.nodes().max;
        let compiles = self.is_yes(Question::Compile);
        match question {
            Question::Where | Question::Cpu | Question::Precision | Question::Compile => true,
            Question::Hosts => self.answer_to(Question::Where) == Some(HOSTS),
            Question::Machines => several,
            Question::Rank | Question::Address | Question::Port => several && !elastic,
            Question::Backend | Question::Endpoint | Question::Restarts => elastic,
            Question::Processes => !self.hosts_say_how_many(),
            Question::Devices => !self.is_on_cpu(),
            Question::CompileBackend
            | Question::CompileMode
            | Question::CompileGraph
            | Question::CompileShapes
            | Question::CompileBlocks => compiles,
        }
    }

    fn answer_to(&self, question: Question) -> Option<&str> {
        self.answers.iter().find(|it| it.0 == question).map(|it| it.1.as_str())
    }

    fn is_yes(&self, question: Question) -> bool {
        self.answer_to(question).and_then(bool::parse) == Some(true)
    }

    fn has_tpus(&self) -> bool {
        self.machine.device_word == "TPU"
    }

    fn is_on_cpu(&self) -> bool {
        self.is_yes(Question::Cpu)
    }

    fn is_on_several(&self) -> bool {
        self.answer_to(Question::Where).is_some_and(|it| it != HERE)
    }

    fn nodes(&self) -> NodeRange {
        self.answer_to(Question::Machines).and_then(NodeRange::parse).unwrap_or_default()
    }

    fn hosts_say_how_many(&self) -> bool {
        let hosts = self.answer_to(Question::Hosts).and_then(List::parse);
        hosts.is_some_and(|hosts| hosts.0.iter().all(|it| it.contains(':')))
    }
}

impl Question {
    /// Returns the setting that the answer becomes; `None` if it only decides about other questions.
    #[must_use]
    pub fn setting(self) -> Option<&'static str> {
        Some(match self {
            Self::Where | Self::Compile => return None,
            Self::Hosts => "hosts",
            Self::Machines => "nnodes",
            Self::Rank => "node-rank",
            Self::Address => "master-addr",
            Self::Port => "master-port",
            Self::Backend => "rdzv-backend",
            Self::Endpoint => "rdzv-endpoint",
            Self::Restarts => "max-restarts",
            Self::Cpu => "cpu",
            Self::Processes => "nproc",
            Self::Devices => "devices",
            Self::Precision => "mixed-precision",
            Self::CompileBackend => "dynamo-backend",
            Self::CompileMode => "dynamo-mode",
            Self::CompileGraph => "dynamo-use-fullgraph",
            Self::CompileShapes => "dynamo-use-dynamic",
            Self::CompileBlocks => "dynamo-use-regional-compilation",
        })
    }
}

const ORDER: &[Question] = &[
    Question::Where,
    Question::Hosts,
    Question::Machines,
    Question::Rank,
    Question::Address,
    Question::Port,
    Question::Backend,
    Question::Endpoint,
    Question::Restarts,
    Question::Cpu,
    Question::Processes,
    Question::Devices,
    Question::Precision,
    Question::Compile,
    Question::CompileBackend,
    Question::CompileMode,
    Question::CompileGraph,
    Question::CompileShapes,
    Question::CompileBlocks,
];
const HERE: &str = "here";
const HOSTS: &str = "hosts";
const EACH: &str = "each";

#[cfg(test)]
mod tests;
