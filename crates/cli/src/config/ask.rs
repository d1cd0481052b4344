//! Interactive questionnaire of `brigade config` on the terminal.

use std::fmt;
use std::path::Path;

use brigade_config::questions::{Kind, Question, Questionnaire};
use brigade_config::{Machine, Settings};
use inquire::validator::Validation;
use inquire::{Confirm, InquireError, Select, Text};

/// Asks the questions and returns the settings; `None` after Ctrl-C.
///
/// Esc returns to the previous question.
///
/// # Errors
/// Fails when the terminal does.
pub(super) fn ask(path: &Path, force: bool, machine: Machine) -> anyhow::Result<Option<Settings>> {
    if path.exists() && !force {
        let prompt = format!("{} already exists. Overwrite it?", path.display());
        let confirm = Confirm::new(&prompt)
            .with_default(false)
            .with_help_message("the old one is kept with .bak after its name");
        match confirm.prompt() {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(error) => return ended(error).map(|()| None),
        }
    }
    let mut questionnaire = Questionnaire::new(machine);
    while let Some(question) = questionnaire.next() {
        match put(&questionnaire, question) {
            Ok(Some(answer)) => {
                // The prompt has already validated the answer.
                if let Err(reason) = questionnaire.answer(question, &answer) {
                    anyhow::bail!("{} {answer}: {reason}", questionnaire.prompt(question));
                }
            }
            Ok(None) => {
                questionnaire.back();
            }
            Err(error) => return ended(error).map(|()| None),
        }
    }
    Ok(Some(questionnaire.settings()))
}

/// Asks one question; `None` to return to the previous one.
fn put(questionnaire: &Questionnaire, question: Question) -> Result<Option<String>, InquireError> {
    let prompt = questionnaire.prompt(question);
    match questionnaire.kind(question) {
        Kind::Choice { options, default } => {
            let options: Vec<Choice> =
                options.into_iter().map(|(word, meaning)| Choice { word, meaning }).collect();
            let select = Select::new(prompt, options)
                .with_starting_cursor(default)
                .without_filtering()
                .with_help_message("arrows choose, Enter takes, Esc goes back");
            Ok(select.prompt_skippable()?.map(|it| it.word.to_owned()))
        }
        Kind::YesNo { default } => {
            let confirm = Confirm::new(prompt)
                .with_default(default)
                .with_help_message("y or n, Esc goes back");
            let answer = confirm.prompt_skippable()?;
            Ok(answer.map(|yes| if yes { "yes" } else { "no" }.to_owned()))
        }
        Kind::Text { default, help } => {
            let (judge, fallback) = (questionnaire.clone(), default.clone());
            let validator = move |input: &str| {
                let answer = or_default(input, fallback.as_deref());
                Ok(match judge.check(question, &answer) {
                    Ok(()) => Validation::Valid,
                    Err(reason) => Validation::Invalid(reason.into()),
                })
            };
            let text = Text::new(prompt).with_help_message(help).with_validator(validator);
            let text = match &default {
                Some(default) => text.with_default(default),
                None => text,
            };
            let answer = text.prompt_skippable()?;
            Ok(answer.map(|it| or_default(&it, default.as_deref())))
        }
    }
}

fn or_default(answer: &str, default: Option<&str>) -> String {
    let answer = answer.trim();
    if answer.is_empty() { default.unwrap_or_default() } else { answer }.to_owned()
}

/// Ctrl-C, or Esc at the first question, ends the questionnaire without an error.
fn ended(error: InquireError) -> anyhow::Result<()> {
    match error {
        InquireError::OperationInterrupted | InquireError::OperationCanceled => Ok(()),
        error => Err(anyhow::Error::new(error).context("the terminal does not answer")),
    }
}

/// Row of a list.
struct Choice {
    word: &'static str,
    meaning: &'static str,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.meaning.is_empty() { self.word } else { self.meaning })
    }
}
