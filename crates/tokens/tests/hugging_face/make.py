"""Makes the tokenizers of this folder and what Python's `tokenizers` says of some texts, with 0.23.3.

python3 make.py FOLDER writes the files; python3 make.py --encode FOLDER reads texts as a JSON list from stdin, and
writes what each tokenizer makes of them.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers.implementations import ByteLevelBPETokenizer

CORPUS = [
    "The film was a quiet surprise, and the people in it were wonderful.",
    "I didn't like this movie; it wasn't funny, it wasn't sad, it was boring.",
    "What a great, great story! Its heroes don't talk much, they walk.",
    "Das war ein schöner Film über Äpfel und Straßen.",
    "Un été à la plage, c'était très drôle.",
    "In 1994 they paid $3.50 for 12 tickets, and $1,200.00 for the rest.",
    "映画は面白かった。とても良い物語です。",
    "The walker walked, walking from the walkway to the talkers who talked.",
    "unhappy unhappily happiness happier happiest unkind kindness kindest",
] * 3

TEXTS = [
    "",
    " ",
    "The film wasn't boring.",
    "  two  spaces\tand a tab\nand lines\n\n",
    "Straße, ÉTÉ, naïve \U0001f600 emoji \u200b zero",
    "映画 unkindness talkwalker",
    "[CLS] <s> <|endoftext|> [MASK] special </s>",
    "$1,994.50 x" * 3,
    "e\u0301 combining, ﬁ ligature, Ⅷ",
    "\u00a0nbsp\u3000wide",
]
PAIRS = [
    ["Is the film good?", "The film was a quiet surprise."],
    ["", "only the second"],
    ["a b c d e f g h i j k l m n o p", "short"],
]
CUTS = [
    [8, "longest_first", "right"],
    [8, "longest_first", "left"],
    [9, "only_first", "right"],
    [9, "only_second", "right"],
    [10, "only_second", "left"],
]


def byte_level():
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        CORPUS, vocab_size=400, min_frequency=2, special_tokens=["<|endoftext|>"], show_progress=False
    )
    return tokenizer._tokenizer


def byte_fallback():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False, limit_alphabet=40)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    # Only these three are special: the bytes are the model's.
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = described["added_tokens"][:3]
    return Tokenizer.from_str(json.dumps(described))


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" {2,}", " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=260, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return tokenizer


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "word_piece": word_piece,
    "unigram": unigram,
}


def described(tokenizer, encoding, texts):
    """What the Rust type has, offsets in bytes."""

    def in_bytes(offsets, sequence):
        if sequence is None:
            return list(offsets)
        text = texts[sequence]
        return [len(text[:place].encode()) for place in offsets]

    sequences = encoding.sequence_ids
    return {
        "ids": encoding.ids,
        "type_ids": encoding.type_ids,
        "attention_mask": encoding.attention_mask,
        "special_tokens_mask": encoding.special_tokens_mask,
        "offsets": [in_bytes(o, s) for o, s in zip(encoding.offsets, sequences)],
        "word_ids": encoding.word_ids,
        "sequence_ids": sequences,
        "tokens": encoding.tokens,
    }


def encoded(tokenizer, texts, add=True):
    try:
        return described(tokenizer, tokenizer.encode(*texts, add_special_tokens=add), texts)
    except Exception:
        return None


def cases(tokenizer):
    found = []
    for text in TEXTS:
        whole = encoded(tokenizer, [text])
        found.append(
            {
                "texts": [text],
                "encoding": whole,
                "plain_ids": encoded(tokenizer, [text], False)["ids"],
                "decoded": tokenizer.decode(whole["ids"]),
                "decoded_with_special": tokenizer.decode(whole["ids"], skip_special_tokens=False),
            }
        )
    for pair in PAIRS:
        found.append({"texts": pair, "encoding": encoded(tokenizer, pair)})
    for length, strategy, direction in CUTS:
        tokenizer.enable_truncation(length, strategy=strategy, direction=direction)
        for texts in PAIRS + [[TEXTS[3]]]:
            cut = encoded(tokenizer, texts)
            found.append({"texts": texts, "cut": [length, strategy, direction], "encoding": cut})
        tokenizer.no_truncation()
    return found


def main():
    if sys.argv[1] == "--encode":
        folder, texts = Path(sys.argv[2]), json.load(sys.stdin)
        result = {}
        for path in sorted(folder.glob("*.json")):
            tokenizer = Tokenizer.from_file(str(path))
            result[path.stem] = [[encoded(tokenizer, [t]), tokenizer.decode(tokenizer.encode(t).ids)] for t in texts]
        json.dump(result, sys.stdout)
        return
    folder = Path(sys.argv[1])
    expected = {}
    for name, make in KINDS.items():
        tokenizer = make()
        path = folder / f"{name}.json"
        path.write_text(json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":")) + "\n")
        tokenizer = Tokenizer.from_file(str(path))
        expected[name] = {"vocab_size": tokenizer.get_vocab_size(), "cases": cases(tokenizer)}
    (folder / "expected").mkdir(exist_ok=True)
    lines = [json.dumps({"corpus": CORPUS}, ensure_ascii=False)]
    for name, facts in expected.items():
        lines.append(json.dumps({"name": name, **facts}, ensure_ascii=False, separators=(",", ":")))
    (folder / "expected" / "encodings.jsonl").write_text("\n".join(lines) + "\n")


main()
