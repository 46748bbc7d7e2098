#!/usr/bin/env python3
"""Draws how much faster softdelta is than its peers, from what peers.py measured: docs/performance.svg.

    bench/picture.py FILE...      # from --json of peers.py; of the same row the last one counts

scripts/docs draws each table that report.py has written, too.
"""
import html
import json
import math
import os
import re
import sys

DOCUMENT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "docs", "performance.svg")

ROWS = {  # row of peers.py: what the picture calls it
    "delta KDA forward T4096 H32 D128 f32": "KDA forward, f32",
    "delta KDA forward T4096 H32 D128 bf16": "KDA forward, bf16",
    "delta KDA forward + backward T1024 H32 D128 f32": "KDA forward + backward, f32",
    "delta GDN forward T4096 H16/32 D128 f32": "GDN forward, f32",
    "delta GDN forward T4096 H16/32 D128 bf16": "GDN forward, bf16",
    "delta GDN forward + backward T1024 H32 D128 f32": "GDN forward + backward, f32",
    "delta GDN step HV32 D128 hot": "GDN decode step, f32",
    "attention forward f32 full D128": "attention forward, f32",
    "attention forward bf16 causal D128": "attention forward, bf16, causal",
    "attention backward f32 full D128": "attention backward, f32",
    "attention backward with dbias [1,H,S,S] bf16 D64": "attention backward with dbias, bf16",
    "attention window 1024 causal S16384 f32 D64": "attention in a window, f32",
    "attention decode H32/8 K32768 D128 f32": "attention decode over 32768 keys, f32",
    "attention decode H32/8 K32768 D128 bf16": "attention decode over 32768 keys, bf16",
}
LEFT, WIDTH, RIGHT, LINE, TOP = 300, 380, 170, 24, 52


def tables(text):
    """Of each column of ratios in a document: {(line of its heading, title): {name: row}}."""
    found, header = {}, []
    for number, line in enumerate(text.splitlines()):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("##"):
            place, heading, header = number, line.lstrip("# "), []
        elif cells[0] == "work":
            header = cells
        elif header[1:3] == ["1", "2"] and cells[1:] and cells[1][0].isdigit():
            one, most = float(cells[1]), float(cells[-1])
            title = f"Times faster by {header[-1]} threads than by one, {heading.removeprefix('Threads: ').removesuffix(', ms')}"
            found.setdefault((place, title), {})[cells[0]] = {"name": cells[0], "ratio": one / most, "peer": f"{most:g} ms"}
        elif header[1:] and header[1].endswith(": ms"):
            for column in range(1, len(cells) - 1):
                if header[column].endswith(": ms") and (ratio := re.match(r"\**([\d.]+)", cells[column + 1])):
                    title = f"{heading}, {header[column].removesuffix(': ms')}: times faster"
                    found.setdefault((place, title), {})[cells[0]] = {
                        "name": cells[0], "ratio": float(ratio[1]), "peer": cells[column] + " ms"}
    return found


def draw(rows, title, labels=ROWS):
    """rows: {name: row} of one machine; the SVG's text."""
    chosen = [(label, rows[name]) for name, label in labels.items() if name in rows and rows[name]["ratio"]]
    most = max(row["ratio"] for _, row in chosen)
    decades = max(1, math.ceil(math.log10(most) * 2) / 2)
    least = math.log10(min(1, *(row["ratio"] for _, row in chosen)))

    def x(ratio):
        return LEFT + WIDTH * (math.log10(ratio) - least) / (decades - least)

    height = TOP + LINE * len(chosen) + 30
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + RIGHT}" height="{height}" '
             'font-family="sans-serif" font-size="13">',
             '<rect width="100%" height="100%" fill="white"/>',
             f'<text x="12" y="22" font-size="15" font-weight="bold">{html.escape(title)}'
             "</text>"]
    bottom = TOP + LINE * len(chosen)
    ticks = [t for t in (1, 3, 10, 30, 100, 300, 1000) if math.log10(t) <= decades]
    for tick in ticks:
        lines += [f'<line x1="{x(tick):.0f}" y1="{TOP - 8}" x2="{x(tick):.0f}" y2="{bottom}" stroke="#ddd"/>',
                  f'<text x="{x(tick):.0f}" y="{bottom + 16}" text-anchor="middle" fill="#666">{tick}×</text>']
    for i, (label, row) in enumerate(chosen):
        y = TOP + LINE * i
        colour = "#2b6cb0" if re.match("delta|GDN|KDA", row["name"]) else "#2f855a"
        begin, end = sorted((x(1), x(row["ratio"])))
        if row["ratio"] < 1:
            colour = "#c53030"
        lines += [f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{html.escape(label)}</text>',
                  f'<rect x="{begin:.0f}" y="{y}" width="{end - begin:.0f}" height="17" rx="2" fill="{colour}"/>',
                  f'<text x="{end + 6:.0f}" y="{y + 13}"><tspan font-weight="bold">{row["ratio"]:.3g}×</tspan>'
                  f' <tspan fill="#666" font-size="11">{html.escape(row["peer"])}</tspan></text>']
    return "\n".join(lines + ["</svg>"]) + "\n"


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    rows, about = {}, None
    for name in sys.argv[1:]:
        with open(name) as file:
            for row in json.load(file):
                if about is not None and row["environment"]["cpu"] != about["cpu"]:
                    sys.exit(f"{name}: measured on {row['environment']['cpu']}, expected {about['cpu']} as before")
                about = row["environment"]
                rows[row["name"]] = row
    with open(DOCUMENT, "w") as file:
        file.write(draw(rows, f"Times faster than the peer, {about['cpu']}, {about['isa']}, {about['threads']} threads"))


if __name__ == "__main__":
    main()
