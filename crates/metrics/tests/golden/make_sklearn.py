"""Makes sklearn.json beside it, with scikit-learn 1.9.1 and scipy 1.17.1:

    python make_sklearn.py

What metrics give on data where something is missing, tied, constant or alone. Predictions are logits (of classes and
labels) or numbers, in float64; decisions are argmax, or sigmoid >= 0.5. "error": scikit-learn raised one.
"""

import json
import math
import pathlib
import random
import warnings

import numpy as np
import scipy.stats as st
import sklearn.metrics as m

warnings.simplefilter("ignore")
random.seed(7)
CASES = []


def number(value):
    value = float(value)
    return value if math.isfinite(value) else str(value)  # "nan", "inf", "-inf", as Rust reads them


def case(name, kind, predictions, targets, metrics):
    rows = []
    for metric, args, compute in metrics:
        try:
            outcome = {"value": number(compute())}
        except ValueError as error:
            outcome = {"error": str(error).split("\n")[0]}
        rows.append({"metric": metric, "args": args, **outcome})
    CASES.append({"name": name, "kind": kind, "predictions": predictions, "targets": targets, "metrics": rows})


def averages(metric, function, names, y, p, **more):
    return [
        (metric, {"average": it, **more}, lambda it=it: function(y, p, average=it, **more))
        for it in names
    ]


def of_counts(suffix, names, y, p):
    rows = []
    for metric, function in [
        ("F1", m.f1_score),
        ("Precision", m.precision_score),
        ("Recall", m.recall_score),
        ("Jaccard", m.jaccard_score),
    ]:
        rows += averages(metric + suffix, function, names, y, p)
    for beta in [0.0, 0.5, math.inf]:
        rows += [
            ("FBeta" + suffix, {"average": it, "beta": beta if beta < math.inf else "inf"},
             lambda it=it, beta=beta: m.fbeta_score(y, p, beta=beta, average=it))
            for it in names
        ]
    return rows


def softmax(x):
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def classes(name, predictions, targets):
    x, y = np.array(predictions), np.array(targets)
    p, q, c = x.argmax(1), softmax(x), x.shape[1]
    rows = of_counts("", ["macro", "micro", "weighted"], y, p)
    rows += [
        ("Matthews", {}, lambda: m.matthews_corrcoef(y, p)),
        ("BalancedAccuracy", {}, lambda: m.balanced_accuracy_score(y, p)),
        ("BalancedAccuracy", {"adjusted": True}, lambda: m.balanced_accuracy_score(y, p, adjusted=True)),
        ("HammingLoss", {}, lambda: m.hamming_loss(y, p)),
        ("Accuracy", {}, lambda: m.accuracy_score(y, p)),
        ("Brier", {}, lambda: m.brier_score_loss(y, q, labels=range(c))),
    ]
    for weights in [None, "linear", "quadratic"]:
        rows.append(("CohenKappa", {"weights": weights}, lambda w=weights: m.cohen_kappa_score(y, p, weights=w)))
    if c > 2:
        for k in range(1, c + 2):
            rows.append(("TopK", {"k": k}, lambda k=k: m.top_k_accuracy_score(y, x, k=k, labels=range(c))))
        for average, multi in [("macro", "ovr"), ("weighted", "ovr"), ("micro", "ovr"), ("macro", "ovo"), ("weighted", "ovo")]:
            rows.append(("RocAuc", {"average": average, "multi_class": multi},
                         lambda a=average, o=multi: m.roc_auc_score(y, q, average=a, multi_class=o)))
    else:
        for positive in [0, 1]:
            for metric, function in [("F1", m.f1_score), ("Precision", m.precision_score), ("Recall", m.recall_score), ("Jaccard", m.jaccard_score)]:
                rows.append((metric, {"average": "binary", "positive": positive},
                             lambda f=function, o=positive: f(y, p, pos_label=o)))
        rows.append(("RocAucBinary", {}, lambda: m.roc_auc_score(y, q[:, 1])))
        rows.append(("AveragePrecision", {}, lambda: m.average_precision_score(y, q[:, 1])))
    case(name, "classes", predictions, targets, rows)


def labels(name, predictions, targets):
    x, y = np.array(predictions), np.array(targets)
    q = 1 / (1 + np.exp(-x))
    p = (q >= 0.5).astype(int)
    names = ["macro", "micro", "weighted", "samples"]
    rows = of_counts("Multi", names, y, p)
    rows += averages("RocAucMulti", m.roc_auc_score, names, y, q)
    rows += averages("AveragePrecisionMulti", m.average_precision_score, names, y, q)
    rows.append(("HammingLossMulti", {}, lambda: m.hamming_loss(y, p)))
    case(name, "labels", predictions, targets, rows)


def numbers(name, predictions, targets):
    x, y = np.array(predictions), np.array(targets)
    case(name, "numbers", predictions, targets, [
        ("R2", {}, lambda: m.r2_score(y, x)),
        ("ExplainedVariance", {}, lambda: m.explained_variance_score(y, x)),
        ("Pearson", {}, lambda: st.pearsonr(x, y)[0]),
        ("Spearman", {}, lambda: st.spearmanr(x, y)[0]),
        ("Mse", {}, lambda: m.mean_squared_error(y, x)),
        ("Mae", {}, lambda: m.mean_absolute_error(y, x)),
        ("Rmse", {}, lambda: m.root_mean_squared_error(y, x)),
    ])


def logits(rows, columns, step=None):
    draw = lambda: random.uniform(-2, 2)
    return [[draw() if step is None else round(draw() / step) * step for _ in range(columns)] for _ in range(rows)]


def toward(x, y, by=1.0, never=()):
    for row, target in zip(x, y):
        row[target] += by
        for it in never:
            row[it] = -9.0
    return x


y = [random.randrange(4) for _ in range(40)]
classes("four classes", toward(logits(40, 4), y), y)
z = [it if it != 2 else 1 for it in y]
classes("a class that is predicted and never there", toward(logits(40, 4), z), z)
classes("a class that is neither there nor predicted", toward(logits(40, 4), z, never=(2,)), z)
classes("a class that is never predicted", toward(logits(40, 4), y, never=(0,)), y)
classes("one class there, several predicted", logits(9, 4), [1] * 9)
classes("one class alone", toward(logits(9, 4), [1] * 9, by=9.0), [1] * 9)
classes("always right", toward(logits(12, 4), y[:12], by=9.0), y[:12])
classes("one sample", [[0.5, -1.0, 2.0]], [1])
two = [random.randrange(2) for _ in range(30)]
classes("two classes with ties", [[0.0, row[0] + 0.5 * t] for row, t in zip(logits(30, 1, 0.5), two)], two)
classes("two classes, all scores equal", [[0.25, 0.25]] * 10, two[:10])
classes("two classes, no positive", [[0.0, row[0]] for row in logits(10, 1)], [0] * 10)
classes("two classes, no negative", [[0.0, row[0]] for row in logits(10, 1)], [1] * 10)

t = [[int(random.random() < 0.4) for _ in range(4)] for _ in range(25)]
labels("four labels with ties", logits(25, 4, 0.5), t)
labels("a label that is never there", logits(25, 4), [[*row[:3], 0] for row in t])
labels("a label that is always there", logits(25, 4), [[1, *row[1:]] for row in t])
labels("no label at all", logits(6, 3), [[0, 0, 0]] * 6)

a = [random.gauss(0, 1) for _ in range(50)]
b = [0.7 * it + random.gauss(0, 0.5) for it in a]
numbers("numbers", b, a)
numbers("far from zero", [it + 1e8 for it in b], [it + 1e8 for it in a])
numbers("ties", [round(it) for it in b], [round(2 * it) / 2 for it in a])
numbers("constant targets", b[:5], [3.0] * 5)
numbers("constant and exact", [3.0] * 5, [3.0] * 5)
numbers("two numbers", [1.0, 2.0], [4.0, 3.0])

text = '{\n "source": "scikit-learn 1.9.1, scipy 1.17.1; see make_sklearn.py",\n "cases": [\n'
text += ",\n".join(
    "  {" + ", ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in it.items() if k != "metrics") + ', "metrics": [\n'
    + ",\n".join("   " + json.dumps(row) for row in it["metrics"]) + "\n  ]}"
    for it in CASES
)
pathlib.Path(__file__).with_name("sklearn.json").write_text(text + "\n ]\n}\n")
