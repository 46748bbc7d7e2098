#!/usr/bin/env python3
"""Draws how src/engines/cpu/kernels/gemm packs the right operand of a product, and what the microkernel does with it:
packed_operand.svg beside this file. Needs Python alone. Drawn for level x86-64-v2: W = 4
lanes, NR = 2 W columns, MR = 6 rows.
"""
from pathlib import Path

W, NR, MR, ROWS, DEPTH, COLUMNS, CELL = 4, 8, 6, 9, 5, 20, 20
COLOURS = ("one", "two", "tail")  # of the micropanels; the last is one vector wide
CSS = """
svg { font-family: sans-serif; font-size: 12px } text { fill: #1f2328 } .small { fill: #57606a; font-size: 11px }
.paper { fill: #ffffff } .cell { stroke: #8a94a0; stroke-width: 0.6 } .plain { fill: #f3f4f6 }
.one { fill: #cfe2f8 } .two { fill: #d5efd9 } .tail { fill: #f9e3c8 } .hot { stroke: #b3541e; stroke-width: 2; fill: none }
.arrow { stroke: #57606a; fill: none } .head { fill: #57606a } .number { font-size: 9px; fill: #57606a }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small, .number { fill: #9aa4ae } .paper { fill: #0d1117 } .plain { fill: #21262d }
  .one { fill: #1d3a5c } .two { fill: #1f4429 } .tail { fill: #573a17 } .hot { stroke: #e5915c }
  .arrow { stroke: #9aa4ae } .head { fill: #9aa4ae } .cell { stroke: #57606a }
}
"""


def panel_of(column):
    return COLOURS[column // NR]


def cell(x, y, colour, number=None):
    text = "" if number is None else (f'<text class="number" x="{x + CELL / 2:g}" y="{y + 13}" '
                                      f'text-anchor="middle">{number}</text>')
    return f'<rect class="cell {colour}" x="{x:g}" y="{y:g}" width="{CELL}" height="{CELL}"/>{text}'


def label(x, y, words, kind="small", anchor="start"):
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>'


def hot(x, y, columns, rows):
    return f'<rect class="hot" x="{x:g}" y="{y:g}" width="{columns * CELL}" height="{rows * CELL}"/>'


def packed_place(k, n):
    """Where element (k, n) of B lies in the packed operand."""
    panel = n // NR * NR
    width = min(NR, COLUMNS - panel)
    return panel * DEPTH + k * width + n - panel


def draw():
    out = []
    # The product: C above nothing, B on top, A to the left, as they are multiplied.
    bx, by = 170, 50
    ax, ay = 50, by + DEPTH * CELL + 30
    out.append(label(bx, by - 14, "B [depth, columns], strided rows of f32, bf16 or f16", "title"))
    for k in range(DEPTH):
        for n in range(COLUMNS):
            out.append(cell(bx + n * CELL, by + k * CELL, panel_of(n), packed_place(k, n)))
        out.append(label(bx - 8, by + k * CELL + 14, f"k = {k}", anchor="end"))
    out.append(label(ax, ay - 14, "A [rows, depth]", "title"))
    for m in range(ROWS):
        for k in range(DEPTH):
            out.append(cell(ax + k * CELL, ay + m * CELL, "plain"))
        for n in range(COLUMNS):
            out.append(cell(bx + n * CELL, ay + m * CELL, "plain"))
    out.append(label(bx + COLUMNS * CELL, ay - 14, "C [rows, columns], f32 sums", "title", "end"))
    k = 2
    out += [hot(bx + NR * CELL, by + k * CELL, NR, 1), hot(ax + k * CELL, ay, 1, MR), hot(bx + NR * CELL, ay, NR, MR)]
    side = bx + COLUMNS * CELL + 24
    out += [label(side, ay + 14, "the microkernel, for every k:"),
            label(side, ay + 32, "load NR = 2 W elements of the micropanel,"),
            label(side, ay + 48, "broadcast each of MR elements of A,"),
            label(side, ay + 64, "add MR × NR products to sums in registers"),
            label(side, ay + 96, "MR × NR: 6 × 8 (x86-64-v2, drawn here),"),
            label(side, ay + 112, "6 × 16 (avx2),"),
            label(side, ay + 128, "12 × 32 (avx512 and above)"),
            label(side, by + 14, "a micropanel: NR columns of B; the last"),
            label(side, by + 30, "one may be W columns wide"),
            label(side, by + 54, "numbers: place in the packed operand")]

    # Packed: the same elements in the order of memory.
    py = ay + ROWS * CELL + 52
    out.append(label(50, py - 14, "PackedB: micropanel after micropanel, each [depth][NR]; the microkernel reads it from "
                                  "left to right", "title"))
    x, small = 50, 7
    for panel in range(0, COLUMNS, NR):
        width = min(NR, COLUMNS - panel)
        for row in range(DEPTH):
            out.append(f'<rect class="cell {panel_of(panel)}" x="{x}" y="{py}" width="{width * small}" height="{CELL}"/>'
                       f'<text class="number" x="{x + width * small / 2:g}" y="{py + 13}" text-anchor="middle">'
                       f"k={row}</text>")
            if panel == NR and row == k:
                out.append(f'<rect class="hot" x="{x}" y="{py}" width="{width * small}" height="{CELL}"/>')
            x += width * small
    width_all = max(x + 20, side + 250)

    # Pairs of bf16.
    qy = py + CELL + 48
    out.append(label(50, qy - 14, "Pairs of bf16: a word of 32 bits holds rows 2k (lower half) and 2k + 1 of a column; "
                                  "a missing row is 0", "title"))
    for n in range(NR):
        for half in range(2):
            x = 50 + n * 88
            out.append(f'<rect class="cell one" x="{x + half * 40}" y="{qy}" width="40" height="{CELL}"/>'
                       f'<text class="number" x="{x + half * 40 + 20}" y="{qy + 13}" text-anchor="middle">'
                       f"[{half}][{n}]</text>")
    height = qy + CELL + 34
    out.append(label(50, qy + CELL + 18, "one instruction: sum[n] += a[2k] · b[2k][n] + a[2k + 1] · b[2k + 1][n]"))
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width_all}" height="{height}" '
            f'viewBox="0 0 {width_all} {height}">', f"<style>{CSS}</style>",
            f'<rect class="paper" width="{width_all}" height="{height}"/>']
    return "\n".join(head + out + ["</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("packed_operand.svg").write_text(draw())
