//! The rules and the tokens of fastai's, equal to what fastai has computed.

use brigade_tokens::rules::{self, Rule};
use brigade_tokens::{English, FastaiTokenizer, TokenList, Tokenizer};
use serde_json::Value;

fn golden() -> Value {
    serde_json::from_str(include_str!("../golden/fastai.json")).unwrap()
}

fn texts(value: &Value) -> Vec<&str> {
    value.as_array().unwrap().iter().map(|it| it.as_str().unwrap()).collect()
}

fn tokens(tokenizer: &dyn Tokenizer, text: &str) -> TokenList {
    let mut tokens = TokenList::new();
    tokenizer.tokenize(text, &mut tokens).unwrap();
    tokens
}

fn assert_tokens(tokenizer: &dyn Tokenizer, text: &str, expected: &Value) {
    let found = tokens(tokenizer, text);
    assert_eq!(found.iter().collect::<Vec<_>>(), texts(expected), "{text:?}");
}

#[test]
fn tokens_are_fastais() {
    let golden = golden();
    let tokenization = &golden["tokenization"];
    let special = texts(&tokenization["special_tokens"]);
    let fastai = FastaiTokenizer::new().special_tokens(special).unwrap();
    let transform = FastaiTokenizer::new().post_rules([]);
    let english = English::new();
    let cases = tokenization["cases"].as_array().unwrap();
    assert!(cases.len() > 300);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        assert_tokens(&fastai, text, &case["tokens"]);
        assert_tokens(&FastaiTokenizer::new(), text, &case["tokens"]);
        assert_tokens(&english, text, &case["spacy"]);
        let without_post_rules = if case["transform"].is_null() { "tokens" } else { "transform" };
        assert_tokens(&transform, text, &case[without_post_rules]);
    }
}

#[test]
fn rules_are_fastais() {
    let golden = golden();
    let golden = &golden["rules"];
    let names = |rules: Vec<Rule>| -> Vec<String> {
        let describe = |rule: &Rule| match rule.describe() {
            Value::String(name) => name,
            settings => settings.as_object().unwrap().keys().next().unwrap().clone(),
        };
        rules.iter().map(describe).collect()
    };
    assert_eq!(names(Rule::defaults()), texts(&golden["order"]));
    assert_eq!(names(Rule::post_defaults()), texts(&golden["post"]));
    let lowercase = |add_bos, add_eos| Rule::Lowercase { add_bos, add_eos };
    for (name, cases) in golden["cases"].as_object().unwrap() {
        let rule = match name.as_str() {
            "lowercase" => lowercase(true, false),
            "lowercase_add_eos" => lowercase(true, true),
            "lowercase_no_bos" => lowercase(false, false),
            name => Rule::from_description(&name.into(), &[]).unwrap(),
        };
        for case in cases.as_array().unwrap() {
            let [text, expected] = texts(case)[..] else { panic!("{case}") };
            assert_eq!(rule.apply(text), expected, "{name}: {text:?}");
        }
    }
    for case in golden["decode_spec_tokens"].as_array().unwrap() {
        let given: TokenList = texts(&case[0]).into_iter().collect();
        let found = rules::decode_special_tokens(&given).unwrap();
        assert_eq!(found.iter().collect::<Vec<_>>(), texts(&case[1]), "{given:?}");
    }
}
