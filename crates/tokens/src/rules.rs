//! fastai's rules for texts before they are split, and for their tokens afterwards.

mod case;
mod decode;
mod html;
mod repeats;

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use serde_json::{Value, json};

pub use self::case::{lowercase, replace_all_caps, replace_maj};
pub use self::decode::decode_special_tokens;
pub use self::html::fix_html;
pub use self::repeats::{replace_rep, replace_wrep};
use crate::{Error, Result};

/// A rule that changes a text or a token: one of fastai's, or a user-defined one.
///
/// ```
/// use brigade_tokens::rules::Rule;
///
/// let text = Rule::defaults().iter().fold("WOW... sooooo <b>good</b> good good!".to_owned(), |text, rule| {
///     rule.apply(&text).into_owned()
/// });
/// assert_eq!(text, "xxbos xxup wow … s xxrep 5 o <b>good< / b> good good!");
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub enum Rule {
    /// Decoding of HTML remnants: [`fix_html`].
    FixHtml,
    /// Marking of repeated characters: [`replace_rep`].
    ReplaceRep,
    /// Marking of repeated words: [`replace_wrep`].
    ReplaceWrep,
    /// Spaces around `/` and `#`: [`spec_add_spaces`].
    SpecAddSpaces,
    /// Removal of repeated spaces: [`rm_useless_spaces`].
    RmUselessSpaces,
    /// Marking of words in capitals: [`replace_all_caps`].
    ReplaceAllCaps,
    /// Marking of capitalised words: [`replace_maj`].
    ReplaceMaj,
    /// Conversion to lower case: [`lowercase`].
    Lowercase {
        /// `true` if the text begins with `xxbos`.
        add_bos: bool,
        /// `true` if the text ends with `xxeos`.
        add_eos: bool,
    },
    /// Replacement of spaces in tokens: [`replace_space`], which is applied to tokens.
    ReplaceSpace,
    /// A user-defined function.
    Custom(CustomRule),
}

/// A user-defined rule. Created by [`Rule::custom`].
#[derive(Clone)]
pub struct CustomRule {
    name: String,
    function: Arc<dyn Fn(&str) -> String + Send + Sync>,
}

impl CustomRule {
    /// Returns the name of the rule in descriptions.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Debug for CustomRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CustomRule").field("name", &self.name).finish_non_exhaustive()
    }
}

impl fmt::Debug for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.describe(), f)
    }
}

impl Rule {
    /// Returns fastai's rules for texts in their order: `defaults.text_proc_rules`.
    #[must_use]
    pub fn defaults() -> Vec<Self> {
        vec![
            Self::FixHtml,
            Self::ReplaceRep,
            Self::ReplaceWrep,
            Self::SpecAddSpaces,
            Self::RmUselessSpaces,
            Self::ReplaceAllCaps,
            Self::ReplaceMaj,
            Self::Lowercase { add_bos: true, add_eos: false },
        ]
    }

    /// Returns fastai's rules for tokens: `defaults.text_postproc_rules`.
    #[must_use]
    pub fn post_defaults() -> Vec<Self> {
        vec![Self::ReplaceSpace]
    }

    /// Creates a rule from a function. A [`TokenCache`](crate::TokenCache) identifies the rule by its name, so change
    /// the name if the function changes.
    ///
    /// ```
    /// use brigade_tokens::rules::Rule;
    ///
    /// let rule = Rule::custom("without digits", |text| text.replace(|it: char| it.is_ascii_digit(), ""));
    /// assert_eq!(rule.apply("1 of 20"), " of ");
    /// ```
    pub fn custom(
        name: impl Into<String>,
        function: impl Fn(&str) -> String + Send + Sync + 'static,
    ) -> Self {
        Self::Custom(CustomRule { name: name.into(), function: Arc::new(function) })
    }

    /// Applies the rule to a text. Without a change, the text is returned as it is, without an allocation unless the
    /// rule is user-defined.
    #[must_use]
    pub fn apply<'a>(&self, text: &'a str) -> Cow<'a, str> {
        match self {
            Self::FixHtml => fix_html(text),
            Self::ReplaceRep => replace_rep(text),
            Self::ReplaceWrep => replace_wrep(text),
            Self::SpecAddSpaces => spec_add_spaces(text),
            Self::RmUselessSpaces => rm_useless_spaces(text),
            Self::ReplaceAllCaps => replace_all_caps(text),
            Self::ReplaceMaj => replace_maj(text),
            Self::Lowercase { add_bos, add_eos } => Cow::Owned(lowercase(text, *add_bos, *add_eos)),
            Self::ReplaceSpace => replace_space(text),
            Self::Custom(rule) => Cow::Owned((rule.function)(text)),
        }
    }

    /// Returns the rule's name and settings.
    #[must_use]
    pub fn describe(&self) -> Value {
        match self {
            Self::Lowercase { add_bos, add_eos } => {
                json!({ "lowercase": { "add_bos": add_bos, "add_eos": add_eos } })
            }
            Self::Custom(rule) => json!({ "custom": rule.name }),
            plain => json!(plain.name()),
        }
    }

    /// Returns the name of fastai's function.
    fn name(&self) -> &'static str {
        match self {
            Self::FixHtml => "fix_html",
            Self::ReplaceRep => "replace_rep",
            Self::ReplaceWrep => "replace_wrep",
            Self::SpecAddSpaces => "spec_add_spaces",
            Self::RmUselessSpaces => "rm_useless_spaces",
            Self::ReplaceAllCaps => "replace_all_caps",
            Self::ReplaceMaj => "replace_maj",
            Self::Lowercase { .. } => "lowercase",
            Self::ReplaceSpace => "replace_space",
            Self::Custom(_) => "custom",
        }
    }

    /// Creates a rule from the value that [`describe`](Self::describe) returned. User-defined rules are searched for in
    /// `custom`.
    ///
    /// # Errors
    /// Fails if the value is not the description of a rule, or `custom` lacks the user-defined rule.
    pub fn from_description(description: &Value, custom: &[Self]) -> Result<Self> {
        if let Some(name) = description.get("custom").and_then(Value::as_str) {
            let named = |it: &&Self| matches!(it, Self::Custom(rule) if rule.name == name);
            return custom.iter().find(named).cloned().ok_or_else(|| {
                let message = format!(
                    "the tokenizer was made with the function `{name}` as a rule: pass a Rule::custom of that name"
                );
                Error::InvalidArgument(message)
            });
        }
        if let Some(settings) = description.get("lowercase") {
            let setting = |name: &str| settings.get(name).and_then(Value::as_bool);
            if let (Some(add_bos), Some(add_eos)) = (setting("add_bos"), setting("add_eos")) {
                return Ok(Self::Lowercase { add_bos, add_eos });
            }
        }
        let plain = Self::defaults().into_iter().chain(Self::post_defaults());
        let mut plain = plain.filter(|it| !matches!(it, Self::Lowercase { .. }));
        plain.find(|it| description.as_str() == Some(it.name())).ok_or_else(|| {
            Error::InvalidArgument(format!(
                "{description} describes no rule for texts that this version has"
            ))
        })
    }
}

/// Puts spaces around `/`, `#` and `\`.
///
/// ```
/// use brigade_tokens::rules::spec_add_spaces;
/// assert_eq!(spec_add_spaces("and/or"), "and / or");
/// ```
#[must_use]
pub fn spec_add_spaces(text: &str) -> Cow<'_, str> {
    let mut out = String::new();
    let mut done = 0;
    for at in memchr::memchr3_iter(b'/', b'#', b'\\', text.as_bytes()) {
        out.extend([&text[done..at], " ", &text[at..=at], " "]);
        done = at + 1;
    }
    if done == 0 {
        return Cow::Borrowed(text);
    }
    out.push_str(&text[done..]);
    Cow::Owned(out)
}

/// Replaces repeated spaces by one space.
///
/// ```
/// use brigade_tokens::rules::rm_useless_spaces;
/// assert_eq!(rm_useless_spaces("a   b  \n"), "a b \n");
/// ```
#[must_use]
pub fn rm_useless_spaces(text: &str) -> Cow<'_, str> {
    let mut out = String::new();
    let (mut from, mut done) = (0, 0);
    while let Some(ahead) = text.as_bytes()[from..].windows(2).position(|it| it == b"  ") {
        out.push_str(&text[done..=from + ahead]);
        done = text.len() - text[from + ahead..].trim_start_matches(' ').len();
        from = done;
    }
    if done == 0 {
        return Cow::Borrowed(text);
    }
    out.push_str(&text[done..]);
    Cow::Owned(out)
}

/// Replaces each space by `▁`, so that tokens that contain a space can be joined by spaces and split again.
///
/// ```
/// use brigade_tokens::rules::replace_space;
/// assert_eq!(replace_space("\n "), "\n▁");
/// ```
#[must_use]
pub fn replace_space(token: &str) -> Cow<'_, str> {
    if token.bytes().any(|it| it == b' ') {
        Cow::Owned(token.replace(' ', "▁"))
    } else {
        Cow::Borrowed(token)
    }
}
