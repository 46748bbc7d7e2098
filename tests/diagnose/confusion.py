#!/usr/bin/env python3
"""The table of docs/diagnose.md: which drawn changes are named, by kind of change.

    diagnose_points_test --gtest_filter='*AreNamed' | confusion.py
"""
import re
import sys
from collections import Counter, defaultdict

KINDS = {
    "a factor": "missing doubled halved negated times over",
    "rows": "row rows last tail first every two",
    "head, sequence": "head",
    "decay, gates": "no decay base without with not summed",
    "products, states": "transposed of in without",
    "operands": "one sigmoid swapped always",
}
EXACT = {"decay twice": "decay, gates", "without its diagonal": "products, states", "not masked": "products, states",
         "over ln 2 in the exponent": "decay, gates", "not rescaled": "sums", "last only": "sums", "first only": "sums",
         "not summed": "sums", "summed by 16 rows": "sums", "summed once more": "operands", "first head": "head, sequence",
         "first sequence": "head, sequence", "first keys lost": "products, states", "last keys lost": "products, states",
         "of the chunk before": "products, states", "in turn": "head, sequence", "NaN": "operands"}
VERDICTS = ("first", "tied", "in three", "not named", "wrong name", "hidden")


def kind_of(change):
    return EXACT.get(change) or next(k for k, words in KINDS.items() if change.split()[0] in words.split())


def main():
    changes = sorted({*EXACT, "missing", "doubled", "halved", "negated", "times scale", "over scale", "times ln 2", "over ln 2",
                      "times group", "over group", "times beta", "over beta", "row before", "row after", "two rows before",
                      "tail lost", "first row lost", "last row lost", "rows 48 to 63 lost", "every row of 16 lost",
                      "head before", "head after", "in bf16", "transposed", "no decay", "base 2", "without its own gate",
                      "with the next gate", "one", "sigmoid", "swapped with k", "always"}, key=len, reverse=True)
    counts = defaultdict(Counter)
    for point, verdict in re.findall(r"^\d+, (.*): (noise|" + "|".join(VERDICTS) + ")$", sys.stdin.read(), re.MULTILINE):
        verdict = "not named" if verdict == "noise" else verdict
        change = next(c for c in changes if point.endswith(" " + c))
        for row in kind_of(change), "all":
            counts[row][verdict] += 1
    print("| kind of change | drawn | named first, or tied | in the first three | does not show | a wrong name |\n|---|---|---|---|---|---|")
    for kind in sorted(counts, key=lambda k: (k == "all", k)):
        c = counts[kind]
        first = c["first"] + c["tied"]
        print(f"| {kind} | {c.total()} | {first} | {first + c['in three']} | {c['hidden']} | {c['wrong name']} |")


if __name__ == "__main__":
    main()
