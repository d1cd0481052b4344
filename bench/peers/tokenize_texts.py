"""fastai's tokenization of a folder's texts with its rules and spaCy's English tokenizer: seconds as JSON.

The texts are in memory; a first pass over a few of them has loaded what is loaded lazily.
"""

import json
import sys
import time
from pathlib import Path

from fastai.text.core import WordTokenizer, defaults, parallel_tokenize

folder, workers = Path(sys.argv[1]), int(sys.argv[2])
texts = [file.read_text() for file in sorted(folder.rglob("*.txt"))]


def tokenize(texts):
    return list(parallel_tokenize(texts, WordTokenizer(), defaults.text_proc_rules, n_workers=workers))


tokenize(texts[:20])
start = time.perf_counter()
tokens = tokenize(texts)
seconds = time.perf_counter() - start
assert len(tokens) == len(texts)
print(json.dumps([[seconds]]))
