"""What scripts/arm --model prints: cycles of the kernels' loops by llvm-mca beside the limit of the core's units, and
instructions of whole calls, counted in qemu, beside those of ggml.

    model.py loops ASSEMBLY_OF_neon ASSEMBLY_OF_neon_bf16
    model.py calls FOLDER      with CORE-WHO-CALL.count and .maps
"""

import pathlib
import re
import subprocess
import sys

# Units that multiply vectors. LLVM's model of apple-m1 is that of Cyclone, which has three.
CORES = {"neoverse-n1": 2, "neoverse-v1": 4, "neoverse-v2": 4, "apple-m1": 3}
WITHOUT_BF16 = {"neoverse-n1"}

# Name, level, function, what the work needs: multiplications, or all instructions on vectors.
MULTIPLICATIONS = r"fmla|fmul|bfmmla"
LOOPS = [
    ("product, f32, 12 × 8", 0, r"_ZN.*11microkernelI", MULTIPLICATIONS),
    ("product, bf16, 12 × 8", 1, r"_ZN.*17block_microkernelI", MULTIPLICATIONS),
    ("exp of 4 numbers", 0, r"_ZN.*12exponentials", r"\tv\d"),
    ("decode, 4 rows × 4 keys of f16", 0, r"_ZN.*7dots_ofI", r"fmla|fcvtl"),
    ("step, state of f32", 0, r"_ZN.*12step_columns", MULTIPLICATIONS),
]


def loops_of(lines):
    """Every innermost loop of a function."""
    labels = {}
    for at, line in enumerate(lines):
        if label := re.match(r"(\.L\d+):", line):
            labels[label[1]] = at
        elif jump := re.match(r"\tb\S*\t(?:\w+, )?(\.L\d+)", line):
            begin = labels.get(jump[1])
            if begin is not None and not any(begin < other for other in labels.values()):
                yield [x for x in lines[begin + 1 : at + 1] if re.match(r"\t[a-z]|[a-z]", x)]


def loop_of(assembly, function, needed):
    """The innermost loop of the function that does most of the work."""
    begin = next(i for i, line in enumerate(assembly) if re.match(function + r".*:$", line))
    end = next(i for i in range(begin, len(assembly)) if assembly[i].startswith("\t.size"))
    return max(loops_of(assembly[begin:end]), key=lambda loop: sum(bool(re.search(needed, x)) for x in loop))


def cycles_of(loop, core):
    times = 200
    out = subprocess.run(
        ["llvm-mca-19", "-mtriple=aarch64", "-mattr=+bf16", f"-mcpu={core}", f"-iterations={times}"],
        input="\n".join(loop),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return int(re.search(r"Total Cycles: +(\d+)", out)[1]) / times


def print_loops(assemblies):
    assemblies = [pathlib.Path(x).read_text().split("\n") for x in assemblies]
    print("| loop | instructions | " + " | ".join(f"{core}: cycles, of the limit" for core in CORES) + " |")
    print("|---" * (2 + len(CORES)) + "|")
    for name, level, function, needed in LOOPS:
        loop = loop_of(assemblies[level], function, needed)
        work = sum(bool(re.search(needed, x)) for x in loop)
        cells = []
        for core, units in CORES.items():
            if level == 1 and core in WITHOUT_BF16:
                cells.append("—")
                continue
            cycles = cycles_of(loop, core)
            cells.append(f"{cycles:.1f}, {work / units / cycles:.2f}")
        print(f"| {name} | {work} of {len(loop)} | " + " | ".join(cells) + " |")


def instructions(folder, name, libraries):
    """Of the call alone: what ran in these libraries, by where the process had mapped them."""
    ranges = []
    for line in (folder / f"{name}.maps").read_text().split("\n"):
        if (found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ..x. .* (\S+)$", line)) and re.search(libraries, found[3]):
            ranges.append((int(found[1], 16), int(found[2], 16)))
    total = 0
    for line in (folder / f"{name}.count").read_text().split("\n")[:-1]:
        address, length, times = line.split()
        if any(begin <= int(address, 16) < end for begin, end in ranges):
            total += int(length) * int(times)
    return total


def print_calls(folder):
    print("| call | level, core | instructions, 10⁶ | ggml's | ratio |")
    print("|---|---|---|---|---|")
    for call in ("attention", "delta"):
        for core, level in (("n1", "neon, neoverse-n1"), ("v2", "neon_bf16, neoverse-v2")):
            ours = instructions(folder, f"{core}-softdelta-{call}", r"libsoftdelta")
            theirs = instructions(folder, f"{core}-ggml-{call}", r"libggml")
            print(f"| {call} | {level} | {ours / 1e6:.1f} | {theirs / 1e6:.1f} | {ours / theirs:.3f} |")


if sys.argv[1] == "loops":
    print_loops(sys.argv[2:])
else:
    print_calls(pathlib.Path(sys.argv[2]))
