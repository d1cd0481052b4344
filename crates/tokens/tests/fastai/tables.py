"""Writes the tables of the English tokenizer and of fastai's rules, taken from the spaCy and the Python that run it.

    python tests/fastai/tables.py FOLDER

writes FOLDER/english/characters.txt, FOLDER/english/exceptions.txt and FOLDER/rules/entities.txt; FOLDER is the
crate's `src`, or a temporary one to compare with it.
"""

import html.entities
import json
import re
import sys
import unicodedata
from importlib import metadata
from pathlib import Path

import spacy
from spacy import util
from spacy.attrs import ORTH
from spacy.lang import char_classes, punctuation
from spacy.lang.en import punctuation as english

LICENSE = """\
# From spaCy {version}, under the MIT License:
#
{license}
#
# Written by tests/fastai/tables.py.
"""


def header():
    text = next(f for f in metadata.files("spacy") if f.name == "LICENSE").read_text()
    lines = [f"# {line}".rstrip() for line in text.strip().splitlines()]
    return LICENSE.format(version=spacy.__version__, license="\n".join(lines))


def ranges(has):
    """The code points for which `has` holds, as ranges in hexadecimal, surrogates left out."""
    points = [p for p in range(sys.maxunicode + 1) if not 0xD800 <= p <= 0xDFFF and has(chr(p))]
    found = []
    for point in points:
        if found and found[-1][1] == point - 1:
            found[-1][1] = point
        else:
            found.append([point, point])
    return [f"{a:x}" if a == b else f"{a:x}-{b:x}" for a, b in found]


def in_class(content):
    return re.compile(f"[{content}]").fullmatch


def singles(patterns, others):
    """The characters among patterns, which must be single characters but for `others`."""
    texts = [p for p in patterns if p.strip() and p not in others]
    characters = {re.sub(r"\\(.)", r"\1", p) for p in texts}
    assert all(len(c) == 1 for c in characters), [c for c in characters if len(c) != 1]
    return characters.__contains__


def check(tokenizer):
    """That the patterns have the form that the Rust code is written for."""
    assert tokenizer.token_match is None and tokenizer.faster_heuristics
    for patterns, compiled, compile_ in [
        (punctuation.TOKENIZER_PREFIXES, tokenizer.prefix_search, util.compile_prefix_regex),
        (punctuation.TOKENIZER_SUFFIXES, tokenizer.suffix_search, util.compile_suffix_regex),
        (english.TOKENIZER_INFIXES, tokenizer.infix_finditer, util.compile_infix_regex),
    ]:
        assert compiled.__self__.pattern == compile_(patterns).pattern
    a, al, au = char_classes.ALPHA, char_classes.ALPHA_LOWER, char_classes.ALPHA_UPPER
    q, h = char_classes.CONCAT_QUOTES, char_classes.HYPHENS
    assert h == "-|–|—|--|---|——|~"
    assert english.TOKENIZER_INFIXES[3:] == [
        r"(?<=[0-9])[+\-\*^](?=[0-9-])",
        rf"(?<=[{al}{q}])\.(?=[{au}{q}])",
        rf"(?<=[{a}]),(?=[{a}])",
        rf"(?<=[{a}0-9])(?:{h})(?=[{a}])",
        rf"(?<=[{a}0-9])[:<>=/](?=[{a}])",
    ]
    assert english.TOKENIZER_INFIXES[:2] == punctuation.LIST_ELLIPSES == [r"\.\.+", "…"]
    assert english.TOKENIZER_INFIXES[2:3] == punctuation.LIST_ICONS
    prefixes = punctuation.TOKENIZER_PREFIXES
    # The first alternative that matches counts.
    assert prefixes.index("…") < prefixes.index("……")


def classes():
    al, q, icons = char_classes.ALPHA_LOWER, char_classes.CONCAT_QUOTES, char_classes.CONCAT_ICONS
    is_icon = in_class(icons)
    prefixes = singles(
        punctuation.TOKENIZER_PREFIXES,
        [r"\+(?![0-9])", "……", r"\.\.+", r"US\$", r"C\$", r"A\$", *punctuation.LIST_ICONS],
    )
    lookbehinds = punctuation.TOKENIZER_SUFFIXES[-6:]
    before_period = rf"0-9{al}%²\-\+{char_classes.PUNCT}(?:{q})"
    assert lookbehinds == [
        r"(?<=[0-9])\+",
        r"(?<=°[FfCcKk])\.",
        rf"(?<=[0-9])(?:{char_classes.CURRENCY})",
        rf"(?<=[0-9])(?:{char_classes.UNITS})",
        rf"(?<=[{before_period}])\.",
        rf"(?<=[{char_classes.ALPHA_UPPER}][{char_classes.ALPHA_UPPER}])\.",
    ]
    suffixes = singles(
        punctuation.TOKENIZER_SUFFIXES,
        ["……", r"\.\.+", "'s", "'S", "’s", "’S", *lookbehinds, *punctuation.LIST_ICONS],
    )
    return {
        "space": str.isspace,
        "word": re.compile(r"\w").fullmatch,
        "decimal": re.compile(r"\d").fullmatch,
        "assigned": lambda c: unicodedata.category(c) != "Cn",
        "alpha": in_class(char_classes.ALPHA),
        "alpha-lower": in_class(al),
        "alpha-upper": in_class(char_classes.ALPHA_UPPER),
        "quote": in_class(q),
        "icon": is_icon,
        "prefix": lambda c: prefixes(c) or is_icon(c),
        "suffix": lambda c: suffixes(c) or is_icon(c),
        "before-period": in_class(before_period),
    }


def wrapped(words, width=116):
    line = " "
    for word in words:
        if len(line) + 1 + len(word) > width:
            yield line
            line = " "
        line += f" {word}"
    yield line


def characters(folder):
    with open(folder / "english" / "characters.txt", "w", encoding="utf8") as file:
        file.write(header())
        file.write(f"# The classes space, word, decimal and assigned are Python's, Unicode {unicodedata.unidata_version}.\n\n")
        for name, has in classes().items():
            file.write("\n".join([f"{name}:", *wrapped(ranges(has))]) + "\n")
        after_digits = (char_classes.CURRENCY + "|" + char_classes.UNITS).replace("\\", "").split("|")
        assert not any(re.search(r"[0-9\s]", it) for it in after_digits)
        file.write("\n".join(["after-digit:", *wrapped(dict.fromkeys(after_digits))]) + "\n")


def exceptions(folder, tokenizer):
    with open(folder / "english" / "exceptions.txt", "w", encoding="utf8") as file:
        file.write(header())
        file.write("# Each line has the tokens of the text that they make together.\n\n")
        for _, tokens in sorted(tokenizer.rules.items()):
            file.write(json.dumps([it[ORTH] for it in tokens], ensure_ascii=False) + "\n")


def entities(folder):
    with open(folder / "rules" / "entities.txt", "w", encoding="utf8") as file:
        file.write("# HTML 5's named character references, as Python's html.entities has them: the name, and what it stands for\n")
        file.write("# as code points in hexadecimal. Written by tests/fastai/tables.py.\n\n")
        for name, value in sorted(html.entities.html5.items()):
            file.write(f"{name} {' '.join(f'{ord(c):x}' for c in value)}\n")


def main():
    folder = Path(sys.argv[1])
    for name in ["english", "rules"]:
        (folder / name).mkdir(parents=True, exist_ok=True)
    tokenizer = spacy.blank("en").tokenizer
    check(tokenizer)
    characters(folder)
    exceptions(folder, tokenizer)
    entities(folder)


main()
