#!/usr/bin/env python3
"""Draws the house from the #include lines of the tree, and prints the arrows that go up.

    docs/pictures/house.py            # writes house.svg beside this file
    docs/pictures/house.py --check    # exits with 1 if the picture is old or an arrow goes up without a reason; folders of
                                      # more than 12 sources are a hint

Needs Python alone. An arrow means: a file of this room includes one of that room.
"""
import collections
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURE = Path(__file__).with_name("house.svg")

# Folders from the roof to the cellar; one that is not named belongs to the folder around it.
ORDER = [
    "integrations/ggml", "src/python", "src/cli", "src/diagnose", "src/diagnose/evidence", "src/diagnose/sampling", "src/diagnose/replay",
    "src/diagnose/catalogue", "src/judge", "src/io", "src/io/call", "src/io/file", "include/softdelta", "src/api",
    "src/distributed", "src/cache", "src/engines/reference", "src/engines/stages", "src/engines/cuda", "src/engines/cuda/attention",
    "src/engines/cuda/delta_rule", "src/engines/cuda/layer", "src/engines/cuda/tile", "src/engines/cuda/device", "src/engines/cpu",
    "src/engines/cpu/attention",
    "src/engines/cpu/delta_rule", "src/engines/cpu/layer", "src/engines/cpu/machine", "src/engines/cpu/kernels",
    "src/engines/cpu/kernels/delta_rule", "src/engines/cpu/kernels/delta_rule/step",
    "src/engines/cpu/kernels/delta_rule/backward", "src/engines/cpu/kernels/delta_rule/forward",
    "src/engines/cpu/kernels/delta_rule/chunk", "src/engines/cpu/kernels/attention", "src/engines/cpu/kernels/layer",
    "src/engines/cpu/kernels/gemm",
    "src/engines/cpu/kernels/simd", "src/engines", "src/core",
]

# Sources of a folder, a header and the source of its name as one: more are worth a look.
MANY_PAIRS = 12

# Arrows that go up, each with its reason: a file or a folder, and what it includes.
REASONS = {
    ("src/api", "include/softdelta"): "api defines the functions that the interface declares",
}


def includes():
    """(file, included file) of the tree, as paths from the root."""
    for top in ("include", "integrations", "src"):
        for file in sorted((ROOT / top).rglob("*")):
            if file.suffix not in (".h", ".hpp", ".cpp", ".cu"):
                continue
            for header in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', file.read_text(), re.MULTILINE):
                for base in (file.parent, ROOT / "src", ROOT / "include", ROOT / "integrations/ggml"):
                    if (base / header).is_file():
                        yield str(file.relative_to(ROOT)), str((base / header).resolve().relative_to(ROOT))
                        break


def folder_of(path, folders):
    """The longest of these folders that holds the path."""
    return max((f for f in folders if path.startswith(f + "/")), key=len, default=None)


def arrows_up(pairs):
    """Lines about includes against the order. A folder may include the headers of the folder around it."""
    for file, header in pairs:
        source, target = folder_of(file, ORDER), folder_of(header, ORDER)
        if source is None or target is None:
            yield f"{file} -> {header}: its folder has no place in the order", None
        elif ORDER.index(target) < ORDER.index(source) and not source.startswith(target + "/"):
            reason = next((why for (a, b), why in REASONS.items()
                           if (file == a or file.startswith(a + "/")) and (header == b or header.startswith(b + "/"))),
                          None)
            yield f"{file} -> {header}: {reason or 'no reason is known'}", reason


def file_cycles(pairs):
    """Headers that include themselves by a detour."""
    graph = collections.defaultdict(set)
    for file, header in pairs:
        graph[file].add(header)
    state = {}

    def visit(node, path):
        if state.get(node) == "done":
            return
        if state.get(node) == "open":
            yield " -> ".join(path[path.index(node):] + [node])
            return
        state[node] = "open"
        for following in sorted(graph[node]):
            yield from visit(following, path + [node])
        state[node] = "done"

    for node in sorted(graph):
        yield from visit(node, [])


def crowded():
    """Lines about folders with more than MANY_PAIRS sources."""
    for folder in sorted({file.parent for top in ("src", "integrations") for file in (ROOT / top).rglob("*.*")}):
        names = {file.stem for file in folder.iterdir() if file.suffix in (".h", ".cpp", ".cu")}
        if len(names) > MANY_PAIRS:
            yield f"{folder.relative_to(ROOT)}: {len(names)} sources"


# ----------------------------------------------------------------------------------------------------------------------
# The picture: a box for each room (x, y, width, words), dashed while it is planned, and arrows as the tree has them.

WIDTH, HEIGHT, BOX = 900, 866, 40
ROOMS = {
    "src/cli": (20, 20, 275, "cli", "the program softdelta"),
    "src/python": (310, 20, 275, "python", "native module and Python package"),
    "integrations/ggml": (640, 20, 240, "integrations/ggml", "a backend for ggml"),
    "src/diagnose": (20, 90, 565, "diagnose", "catalogue of mistakes, replay, evidence, sampling"),
    "src/judge": (20, 160, 565, "judge", "limits of error, verdicts"),
    "src/io": (20, 230, 565, "io", "case files; a file made into a call"),
    "include/softdelta": (20, 300, 860, "include/softdelta", "softdelta.hpp over softdelta.h, the C interface"),
    "src/api": (20, 370, 600, "api", "checks, defaults, the table of engines"),
    "src/cache": (636, 370, 114, "cache", "append"),
    "src/distributed": (766, 370, 114, "distributed", "ranks"),
    "src/engines/reference": (20, 450, 90, "reference", "f64 truth"),
    "src/engines/stages": (120, 450, 90, "stages", "chunks, tiles"),
    "src/engines/cpu": (240, 450, 300, "cpu", "attention, delta_rule, layer: units, threads"),
    "src/engines/cpu/machine": (575, 450, 160, "machine", "levels, memory"),
    "src/engines/cpu/kernels": (280, 520, 455, "kernels", "the table of a level"),
    "src/engines/cpu/kernels/attention": (280, 590, 145, "kernels/attention", "blocked softmax"),
    "src/engines/cpu/kernels/delta_rule": (435, 590, 145, "kernels/delta_rule", "fold, scan, unfold"),
    "src/engines/cpu/kernels/layer": (590, 590, 145, "kernels/layer", "convolution, norm"),
    "src/engines/cpu/kernels/gemm": (280, 660, 455, "kernels/gemm", "packing, microkernel, products"),
    "src/engines/cpu/kernels/simd": (280, 712, 455, "kernels/simd", "vectors; alone names instructions"),
    "src/engines/cuda": (780, 450, 100, "cuda", "attention, delta"),
    "src/engines": (20, 776, 860, "engines", "engine.h: what an engine is"),
    "src/core": (20, 820, 860, "core", "tensors, options, rules and operands as data; every room includes it"),
}
LANES = {("src/engines/cpu", "src/engines"): 260}  # where an arrow goes down beside the boxes below

CSS = """
svg { font-family: sans-serif; font-size: 12px }
rect { fill: #eef3fa; stroke: #4a6fa5 } text { fill: #1f2328 } .small { fill: #57606a; font-size: 11px }
.frame { fill: none; stroke: #8a94a0; stroke-dasharray: 5 4 } .arrow { stroke: #57606a; fill: none }
.up { stroke: #b3541e; fill: none; stroke-dasharray: 3 3 } .head { fill: #57606a; stroke: none }
.paper { fill: #ffffff; stroke: none } .planned { fill: none; stroke: #8a94a0; stroke-dasharray: 5 4 }
@media (prefers-color-scheme: dark) {
  rect { fill: #1c2733; stroke: #6f9bd8 } text { fill: #e6edf3 } .small { fill: #9aa4ae }
  .frame { fill: none; stroke: #6b7580 } .arrow { stroke: #9aa4ae } .up { stroke: #e5915c } .head { fill: #9aa4ae }
  .paper { fill: #0d1117; stroke: none } .planned { fill: none; stroke: #6b7580; stroke-dasharray: 5 4 }
}
"""


def room_arrows(pairs):
    """(room, room) as drawn: without core, without the folder around, without what a longer way implies."""
    edges = set()
    for file, header in pairs:
        a, b = folder_of(file, ROOMS), folder_of(header, ROOMS)
        if a != b and b != "src/core" and not a.startswith(b + "/") and ORDER.index(a) < ORDER.index(b):
            edges.add((a, b))
        elif a != b and a.startswith(b + "/") and b == "src/engines" and a.count("/") == 2:
            edges.add((a, b))  # what an engine is

    def reaches(a, b, without):
        return any(x == a and (a, y) != without and (y == b or reaches(y, b, without)) for x, y in edges)

    return sorted(e for e in edges if not reaches(*e, e))


def line(a, b):
    """From the lower edge of a to the upper edge of b; from side to side where they stand beside each other."""
    ax, ay, aw = ROOMS[a][:3]
    bx, by, bw = ROOMS[b][:3]
    if ay == by:
        return (ax + aw, ay + BOX / 2, bx, by + BOX / 2) if ax < bx else (ax, ay + BOX / 2, bx + bw, by + BOX / 2)
    left, right = max(ax, bx), min(ax + aw, bx + bw)
    if (a, b) in LANES:
        return LANES[a, b], ay + BOX, LANES[a, b], by
    if left < right:  # straight down where they overlap
        middle = (left + right) / 2
        return middle, ay + BOX, middle, by
    return ax + aw / 2, ay + BOX, bx + bw / 2, by


def draw(pairs):
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">',
           f"<style>{CSS}</style>",
           '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
           '<path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>',
           f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
           '<rect class="frame" x="226" y="436" width="524" height="326" rx="6"/>',
           '<rect class="frame" x="766" y="424" width="124" height="80" rx="6"/>',
           '<text class="small" x="773" y="441">found at run time</text>']
    for a, b in room_arrows(pairs):
        x1, y1, x2, y2 = line(a, b)
        out.append(f'<line class="arrow" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" marker-end="url(#head)"/>')
    out.append('<line class="up" x1="450" y1="370" x2="450" y2="340" marker-end="url(#head)"/>'
               '<text class="small" x="458" y="359">api defines what the interface declares</text>')
    for folder, (x, y, width, name, words) in ROOMS.items():
        kind = "" if (ROOT / folder).is_dir() else ' class="planned"'
        words = words if not kind else words + ": planned"
        out.append(f'<rect{kind} x="{x}" y="{y}" width="{width}" height="{BOX}" rx="4"/>'
                   f'<text x="{x + width / 2:g}" y="{y + 17}" text-anchor="middle" font-weight="bold">{name}</text>'
                   f'<text class="small" x="{x + width / 2:g}" y="{y + 32}" text-anchor="middle">{words}</text>')
    return "\n".join(out + ["</svg>"]) + "\n"


def main():
    pairs = list(includes())
    up = list(arrows_up(pairs))
    cycles = list(file_cycles(pairs))
    print(f"{len(pairs)} includes between {len({f for pair in pairs for f in pair})} files; {len(up)} go up")
    for text, _ in up:
        print("  " + text)
    for cycle in cycles:
        print("  in a circle: " + cycle)
    for text in crowded():
        print("  many: " + text)
    picture = draw(pairs)
    if sys.argv[1:] == ["--check"]:
        old = not PICTURE.exists() or PICTURE.read_text() != picture
        if old:
            print("docs/pictures/house.svg is not what docs/pictures/house.py draws")
        sys.exit(1 if old or cycles or any(reason is None for _, reason in up) else 0)
    PICTURE.write_text(picture)


if __name__ == "__main__":
    main()
