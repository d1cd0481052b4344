//! fastai's tokenization.

use serde_json::{Value, json};

use crate::rules::Rule;
use crate::{English, Error, Result, SPECIAL_TOKENS, TokenList, Tokenizer};

/// fastai's tokenization: its rules, spaCy's English tokenizer, and the rules for tokens. Equal to fastai 2.8's
/// `TokenizeWithRules(WordTokenizer())`.
///
/// ```
/// use brigade_tokens::{FastaiTokenizer, TokenList, Tokenizer};
///
/// let mut tokens = TokenList::new();
/// FastaiTokenizer::new().tokenize("This movie ROCKS... I can't wait!!!", &mut tokens)?;
/// let expected = [
///     "xxbos", "xxmaj", "this", "movie", "xxup", "rocks", "…", "i", "ca", "n't", "wait", "xxrep", "3", "!",
/// ];
/// assert_eq!(tokens.iter().collect::<Vec<_>>(), expected);
/// # Ok::<(), brigade_tokens::Error>(())
/// ```
#[derive(Debug)]
pub struct FastaiTokenizer {
    rules: Vec<Rule>,
    post_rules: Vec<Rule>,
    special_tokens: Vec<String>,
    english: English,
}

impl Default for FastaiTokenizer {
    fn default() -> Self {
        Self::new()
    }
}

impl FastaiTokenizer {
    /// Creates the tokenizer with fastai's rules and special tokens.
    #[must_use]
    pub fn new() -> Self {
        Self {
            rules: Rule::defaults(),
            post_rules: Rule::post_defaults(),
            special_tokens: SPECIAL_TOKENS.map(str::to_owned).to_vec(),
            // None of these contains a character at which words are split, so none needs a special case.
            english: English::new(),
        }
    }

    /// Sets the rules for texts, in their order.
    #[must_use]
    pub fn rules(mut self, rules: impl IntoIterator<Item = Rule>) -> Self {
        self.rules = rules.into_iter().collect();
        self
    }

    /// Sets the rules for tokens, in their order. Without rules, the tokens are those of fastai's `Tokenizer.encodes`,
    /// which applies none; some tokens then contain a space.
    #[must_use]
    pub fn post_rules(mut self, rules: impl IntoIterator<Item = Rule>) -> Self {
        self.post_rules = rules.into_iter().collect();
        self
    }

    /// Sets the tokens that are never split: fastai's `special_toks`.
    ///
    /// # Errors
    /// Fails if a token is empty.
    pub fn special_tokens<T: Into<String>>(
        mut self,
        tokens: impl IntoIterator<Item = T>,
    ) -> Result<Self> {
        self.special_tokens = tokens.into_iter().map(Into::into).collect();
        self.english =
            English::new().with_special_cases(self.special_tokens.iter().map(|it| [it]))?;
        Ok(self)
    }

    /// Joins the fields of a text, such as its title and its body, with spaces between them, like fastai's
    /// `tokenize_df`. If `mark` is `true`, `xxfld 1` is put before the first field, `xxfld 2` before the second, and so
    /// on.
    ///
    /// fastai marks the fields if there is more than one.
    ///
    /// ```
    /// use brigade_tokens::FastaiTokenizer;
    ///
    /// let text = FastaiTokenizer::join_fields(&["A title", "a text"], true);
    /// assert_eq!(text, "xxfld 1 A title xxfld 2 a text");
    /// assert_eq!(FastaiTokenizer::join_fields(&["A title", "a text"], false), "A title a text");
    /// ```
    #[must_use]
    pub fn join_fields(fields: &[&str], mark: bool) -> String {
        let marked = |(place, field): (usize, &&str)| {
            if mark { format!("xxfld {} {field}", place + 1) } else { (*field).to_owned() }
        };
        fields.iter().enumerate().map(marked).collect::<Vec<_>>().join(" ")
    }

    /// Creates a tokenizer from its [description](Tokenizer::describe).
    ///
    /// # Errors
    /// Fails for the description of another kind of tokenizer, or with rules that are unknown to this version or
    /// user-defined. For user-defined rules use [`from_description_with`](Self::from_description_with).
    pub fn from_description(description: &Value) -> Result<Self> {
        Self::from_description_with(description, &[])
    }

    /// Creates a tokenizer from its [description](Tokenizer::describe), with these user-defined rules, which are found
    /// by name.
    ///
    /// ```
    /// use brigade_tokens::rules::Rule;
    /// use brigade_tokens::{FastaiTokenizer, Tokenizer};
    ///
    /// let rule = Rule::custom("trim", |text| text.trim().to_owned());
    /// let tokenizer = FastaiTokenizer::new().rules([rule.clone(), Rule::FixHtml]);
    /// let again = FastaiTokenizer::from_description_with(&tokenizer.describe(), &[rule])?;
    /// assert_eq!(again.describe(), tokenizer.describe());
    /// # Ok::<(), brigade_tokens::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the same errors as [`from_description`](Self::from_description), and fails if a user-defined rule is
    /// missing.
    pub fn from_description_with(description: &Value, custom: &[Rule]) -> Result<Self> {
        if description.get("kind").and_then(Value::as_str) != Some(KIND) {
            let message = format!(
                "expected the description of a tokenizer of the kind `{KIND}`, found {description}"
            );
            return Err(Error::InvalidArgument(message));
        }
        let list = |name: &str| {
            description.get(name).and_then(Value::as_array).ok_or_else(|| {
                let message =
                    format!("the description of a tokenizer has no list `{name}`: {description}");
                Error::InvalidArgument(message)
            })
        };
        let rules = |name: &str| -> Result<Vec<Rule>> {
            list(name)?.iter().map(|it| Rule::from_description(it, custom)).collect()
        };
        let tokens = list("special_tokens")?.iter().map(|token| {
            token.as_str().ok_or_else(|| {
                Error::InvalidArgument(format!("the special token {token} is not a text"))
            })
        });
        let tokens = tokens.collect::<Result<Vec<_>>>()?;
        Self::new().rules(rules("rules")?).post_rules(rules("post_rules")?).special_tokens(tokens)
    }
}

const KIND: &str = "fastai";

impl Tokenizer for FastaiTokenizer {
    fn tokenize(&self, text: &str, tokens: &mut TokenList) -> Result<()> {
        let mut owned: Option<String> = None;
        for rule in &self.rules {
            if let std::borrow::Cow::Owned(changed) = rule.apply(owned.as_deref().unwrap_or(text)) {
                owned = Some(changed);
            }
        }
        let text = owned.as_deref().unwrap_or(text);
        for token in self.english.split(text)? {
            match &self.post_rules[..] {
                [] => tokens.push(token.of(text)),
                [rule] => tokens.push(&rule.apply(token.of(text))),
                rules => {
                    let token = token.of(text).to_owned();
                    tokens.push(
                        &rules.iter().fold(token, |token, rule| rule.apply(&token).into_owned()),
                    );
                }
            }
        }
        Ok(())
    }

    fn describe(&self) -> Value {
        let describe = |rules: &[Rule]| rules.iter().map(Rule::describe).collect::<Vec<_>>();
        json!({
            "kind": KIND,
            "rules": describe(&self.rules),
            "post_rules": describe(&self.post_rules),
            "special_tokens": self.special_tokens,
            "english": self.english.describe()["spacy"],
        })
    }
}
