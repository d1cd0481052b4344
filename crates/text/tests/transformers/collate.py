"""What the collators of transformers make of the cases in a file: reads JSON, and writes JSON."""

import json
import sys

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import trainer_pt_utils
from transformers.data import data_collator as collators

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def tokenizer(side):
    words = SPECIAL + [f"w{number}" for number in range(len(SPECIAL), 100)]
    vocabulary = {word: number for number, word in enumerate(words)}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="[UNK]")),
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        padding_side=side,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def lists(batch):
    return {key: value.tolist() for key, value in batch.items()}


def padded(case):
    kind = {
        "padding": collators.DataCollatorWithPadding,
        "tokens": collators.DataCollatorForTokenClassification,
    }[case["kind"]]
    length = case["max_length"]
    collator = kind(
        tokenizer(case["side"]),
        padding="max_length" if length else True,
        max_length=length,
        pad_to_multiple_of=case["multiple_of"],
    )
    return lists(collator(case["sequences"]))


def with_padding(case):
    """The sequences with their padding, since transformers does not pad the places of tokens."""
    step = case["multiple_of"] or 1
    width = -(-max(len(it["input_ids"]) for it in case["sequences"]) // step) * step
    fill = {"input_ids": 0, "token_type_ids": 0, "special_tokens_mask": 1, "offset_mapping": (0, 0)}

    def pad(values, value):
        missing = [value] * (width - len(values))
        return values + missing if case["side"] == "right" else missing + values

    return [
        {key: pad(values, fill[key]) for key, values in it.items()}
        | {"attention_mask": pad([1] * len(it["input_ids"]), 0)}
        for it in case["sequences"]
    ]


def masked(case):
    options = {"mlm": False}
    if case["kind"] != "causal":
        options = {
            "mlm_probability": case["probability"],
            "mask_replace_prob": 1.0,
            "random_replace_prob": 0.0,
            "whole_word_mask": case["kind"] == "whole_words",
        }
    collator = collators.DataCollatorForLanguageModeling(
        tokenizer(case["side"]), pad_to_multiple_of=case["multiple_of"], **options
    )
    whole = case["kind"] == "whole_words"
    return lists(collator(with_padding(case) if whole else case["sequences"]))


def flat(case):
    collator = collators.DataCollatorWithFlattening(return_seq_idx=True)
    return lists(collator([{"input_ids": ids} for ids in case["texts"]]))


def words(case):
    ids, _ = collators.DataCollatorForLanguageModeling._calc_word_ids_and_prob_mask(
        torch.tensor([case["offsets"]]).numpy(), torch.tensor([case["special"]]).long().numpy()
    )
    return ids[0].tolist()


def grouped(case):
    drawn = torch.tensor(case["permutation"])
    torch.randperm, original = lambda *_, **__: drawn, torch.randperm
    try:
        return trainer_pt_utils.get_length_grouped_indices(case["lengths"], case["batch_size"])
    finally:
        torch.randperm = original


KINDS = {
    "padding": padded,
    "tokens": padded,
    "causal": masked,
    "masked": masked,
    "whole_words": masked,
    "flat": flat,
    "words": words,
    "grouped": grouped,
}

given, made = sys.argv[1:]
with open(given, encoding="utf-8") as file:
    cases = json.load(file)
results = [dict(case, result=KINDS[case["kind"]](case)) for case in cases]
with open(made, "w", encoding="utf-8") as file:
    json.dump(results, file)
