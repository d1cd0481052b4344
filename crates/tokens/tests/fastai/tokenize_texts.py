"""Writes what fastai and spaCy make of texts: answers.jsonl beside the file with the texts."""

import json
import sys
import unicodedata
from pathlib import Path

import spacy
from fastai.text.core import (
    TokenizeWithRules,
    WordTokenizer,
    defaults,
    lowercase,
    replace_space,
)
from fastai.text.learner import decode_spec_tokens
from spacy.symbols import ORTH


def main():
    path = Path(sys.argv[1])
    task = json.loads(path.read_text(encoding="utf8"))
    english, with_special_cases = spacy.blank("en"), spacy.blank("en")
    for case in task["special_cases"]:
        with_special_cases.tokenizer.add_special_case("".join(case), [{ORTH: it} for it in case])
    rules = [*defaults.text_proc_rules, replace_space, lambda text: lowercase(text, add_bos=False, add_eos=True)]
    fastai = TokenizeWithRules(WordTokenizer())
    with open(path.parent / "answers.jsonl", "w", encoding="utf8") as file:
        file.write(f"{unicodedata.unidata_version}\n")
        for text, tokens in zip(task["texts"], fastai(task["texts"])):
            answer = {
                "rules": [rule(text) for rule in rules],
                "english": [it.text for it in english.tokenizer(text)],
                "with_special_cases": [it.text for it in with_special_cases.tokenizer(text)],
                "tokens": list(tokens),
                "decoded": decode_spec_tokens(tokens),
            }
            file.write(json.dumps(answer) + "\n")


main()
