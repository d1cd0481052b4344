//! What holds for the tokens of any text.

use brigade_tokens::rules::Rule;
use brigade_tokens::{English, FastaiTokenizer, TokenList, Tokenizer};
use serde_json::json;

use crate::random_texts::RandomTexts;

fn tokens(tokenizer: &dyn Tokenizer, text: &str) -> TokenList {
    let mut tokens = TokenList::new();
    tokenizer.tokenize(text, &mut tokens).unwrap();
    tokens
}

/// The tokens are the text, but for single spaces between them.
fn assert_covered(text: &str, tokens: &TokenList) {
    let mut rest = text;
    for token in tokens.iter() {
        assert!(!token.is_empty(), "{text:?}");
        let after =
            rest.strip_prefix(token).or_else(|| rest.strip_prefix(' ')?.strip_prefix(token));
        rest = after.unwrap_or_else(|| panic!("{token:?} does not begin {rest:?}"));
    }
    assert!(rest.is_empty() || rest == " ", "{rest:?} of {text:?}");
}

#[test]
fn tokens_cover_the_text() {
    let mut random = RandomTexts::new(brigade_test_needs::random());
    let english = English::new();
    for _ in 0..3_000 {
        let text = random.text();
        assert_covered(&text, &tokens(&english, &text));
    }
}

#[test]
fn a_tokenizer_is_made_again_from_its_description() {
    let mut random = RandomTexts::new(brigade_test_needs::random());
    let tokenizer = FastaiTokenizer::new()
        .rules([Rule::FixHtml, Rule::Lowercase { add_bos: false, add_eos: true }])
        .post_rules([Rule::ReplaceSpace, Rule::ReplaceRep])
        .special_tokens(["<unk>", "a-b", "no no"])
        .unwrap();
    let description = tokenizer.describe();
    assert_ne!(description, FastaiTokenizer::new().describe());
    let again = FastaiTokenizer::from_description(&description).unwrap();
    assert_eq!(again.describe(), description);
    assert_eq!(tokens(&again, "see <unk> no no a-b").iter().nth(2), Some("no▁no"));
    for _ in 0..300 {
        let text = random.text();
        assert_eq!(tokens(&again, &text), tokens(&tokenizer, &text), "{text:?}");
    }
    // Equal special tokens have equal descriptions, regardless of how they were set.
    let defaults = FastaiTokenizer::new().special_tokens(brigade_tokens::SPECIAL_TOKENS).unwrap();
    assert_eq!(defaults.describe(), FastaiTokenizer::new().describe());
}

#[test]
fn descriptions_of_others_are_refused() {
    let refused =
        |description| FastaiTokenizer::from_description(&description).unwrap_err().to_string();
    let error = refused(English::new().describe());
    assert!(
        error.starts_with("expected the description of a tokenizer of the kind `fastai`, found {"),
        "{error}"
    );
    let mut description =
        FastaiTokenizer::new().rules([Rule::custom("mine", str::to_owned)]).describe();
    let error = refused(description.clone());
    assert_eq!(
        error,
        "the tokenizer was made with the function `mine` as a rule: pass a Rule::custom of that name"
    );
    description["rules"] = json!(["replace_rep", "replace_everything"]);
    let error = refused(description.clone());
    assert_eq!(error, "\"replace_everything\" describes no rule for texts that this version has");
    description["rules"] = json!(null);
    assert!(refused(description).starts_with("the description of a tokenizer has no list `rules`"));
    let error = FastaiTokenizer::new().special_tokens(["a", ""]).unwrap_err().to_string();
    assert_eq!(
        error,
        "the special case [\"\"] has an empty token: give tokens of a character or more"
    );
}

#[test]
fn long_texts_take_linear_time() {
    const MILLION: usize = 1_000_000;
    let english = English::new();
    let fastai = FastaiTokenizer::new();
    let sentence = "The film isn't bad, is it? ";
    let text = sentence.repeat(MILLION / 9);
    let found = tokens(&fastai, &text);
    assert!(found.len() > MILLION, "{}", found.len());
    assert_covered(&text, &tokens(&english, &text));
    // These would take hours if a step examined the whole word again.
    assert_covered(&"a".repeat(MILLION), &tokens(&english, &"a".repeat(MILLION)));
    let units = [
        "a", "(", ".", "…", "-", "'", "'s", "a.", "a-", "1.", "1km", "@", "a@", "a.b@", "://",
        "a,", ":)", ":)) ", "&", "&#", "&a", "a ", "a a b ", "A", "Σ", "Σ'", "😀", "\u{301}", " ",
        "\u{a0}", "\n", "/", "#", "xxrep ", ">:", "°C.", "é.",
    ];
    for unit in units {
        let text = unit.repeat(MILLION / 4 / unit.len());
        assert_covered(&text, &tokens(&english, &text));
        let found = tokens(&fastai, &text);
        assert_eq!(found.get(0), Some("xxbos"), "{unit:?}");
    }
}

#[test]
fn fields_are_marked() {
    let text = FastaiTokenizer::join_fields(&["Good", "so GOOD"], true);
    let found = tokens(&FastaiTokenizer::new(), &text);
    let expected = ["xxbos", "xxfld", "1", "xxmaj", "good", "xxfld", "2", "so", "xxup", "good"];
    assert_eq!(found.iter().collect::<Vec<_>>(), expected);
    assert_eq!(FastaiTokenizer::join_fields(&["one"], false), "one");
    assert_eq!(FastaiTokenizer::join_fields(&[], true), "");
}
