#!/usr/bin/env python3
"""Writes the tables of docs/performance.md from what peers.py measured; the text around them stays.

    bench/report.py FILE...      # from --json of peers.py; of the same row on the same machine the last one counts

A table has one kind of peer and columns for each machine. A machine that was not measured keeps its columns. Of a machine the
run with the most threads counts; the table over threads has the rows of picture.py from all of its runs.
"""
import argparse
import collections
import json
import os
import re

from picture import ROWS

DOCUMENT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "docs", "performance.md")
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
TABLES = (("torch SDPA", "Attention beside SDPA"), ("transformers", "Delta rules beside transformers"), ("ggml", "Beside ggml"))


def read(files):
    """Rows by machine, then by name: {(cpu, isa, threads): {name: row}}."""
    machines = collections.defaultdict(dict)
    for name in files:
        with open(name) as file:
            for row in json.load(file):
                about = row["environment"]
                machines[about["cpu"], about["isa"], about["threads"]][row["name"]] = row
    return machines


def number(value, digits=3):
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 1000 else f"{value:.{digits}g}"


def against(value, floor):
    """Bold, with the goal behind it, where it falls short."""
    if value is None:
        return "–" if floor else ""
    return f"{value:.2f}" if floor is None or value >= floor else f"**{value:.2f}** ({floor:.2f})"


def short(machine):
    return re.sub(r"\((R|TM)\)| Processor| CPU", "", machine[0])


def table(header, rows):
    return ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)] + ["| " + " | ".join(r) + " |" for r in rows]


def about(machine, rows):
    first = next(iter(rows.values()))["environment"]
    limits = ", ".join(f"{name} {limit / 1e9:.0f} {'GFLOP/s' if name in ('f32', 'bf16') else 'GB/s'}"
                       for name, limit in first["limits"].items() if limit)
    versions = ", ".join(f"{name} {first[name]}" for name in ("torch", "transformers", "ggml") if first[name])
    lines = [f"- **{short(machine)}**: {machine[1] or 'no fast kernels'}, {machine[2]} threads; {versions}; softdelta by "
             f"{first['compiler']}; {first['system']}. Limits: {limits}."]
    return lines + [f"  - {row['name']}: {row['note']}." for row in rows.values() if row["note"].strip()]


def names_of(runs, wanted):
    """Names of the rows that are wanted, as the first machine orders them."""
    return list(dict.fromkeys(name for rows in runs.values() for name, row in rows.items() if wanted(row)))


def beside(runs, prefix):
    """{work: {column: cell}} of the rows whose peer begins with prefix: time, ratio and fraction of the limit."""
    lines = {}
    for name in names_of(runs, lambda row: row["peer"].startswith(prefix)):
        peer = next(rows[name]["peer"] for rows in runs.values() if name in rows)
        label = name.split(":")[0].removeprefix("delta ")
        if prefix == "torch SDPA":
            label = label.removeprefix("attention ")
        lines[label + (f" ({peer.partition(', ')[2]})" if ", " in peer else "")] = {
            (short(machine), column): cell for machine, rows in runs.items() if (row := rows.get(name))
            for column, cell in (("ms", number(row["ours_ms"])), ("ratio", against(row["ratio"], row["floor_ratio"])),
                                 ("of limit", against(row["ceiling_fraction"], row["floor_ceiling"])))}
    return lines


def beside_ours(runs):
    """The same of the rows beside our own, their ratios alone. Rows of one cost that hold are one row."""
    lines, costs = {}, collections.defaultdict(list)
    for name in names_of(runs, lambda row: row["peer"].startswith("ours")):
        rows = {short(machine): rows[name] for machine, rows in runs.items() if name in rows}
        against_what = next(iter(rows.values()))["peer"].removeprefix("ours").strip(", ")
        if name.endswith(": cost") and all(row["holds"] for row in rows.values()):
            costs[against_what].append({machine: row["ratio"] for machine, row in rows.items()})
        else:
            lines[f"{name.removeprefix('delta ')}, against {against_what}"] = {
                (machine, "ratio"): against(row["ratio"], row["floor_ratio"]) for machine, row in rows.items()}
    for against_what, ratios in costs.items():
        lines[f"cost of the other rows, against {against_what}"] = {
            (machine, "ratio"): f"{min(r[machine] for r in ratios):.2f} to {max(r[machine] for r in ratios):.2f}"
            for machine in ratios[0]}
    return lines


def kept(document, title):
    """What the document's table says: {work: {(machine, column): cell}}."""
    lines, header = {}, []
    for line in document.partition(f"### {title}\n")[2].strip().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            break
        if not header:
            for name in cells[1:]:
                machine, _, column = name.rpartition(": ")
                header.append((machine or header[-1][0], column))
        elif not set(line) <= set("|-"):
            lines[cells[0]] = dict(zip(header, cells[1:]))
    return lines


def tells(work, cells, lines):
    """Whether a row is shown: one of D64 that reaches its goals is not, beside the same of D128."""
    return "D64" not in work or work.replace("D64", "D128") not in lines or any("**" in cell for cell in cells.values())


def joined(new, old, names):
    """A table of new cells, and of old ones for machines that have no new ones."""
    measured = {machine for cells in new.values() for machine, _ in cells}
    lines = {work: dict(cells) for work, cells in new.items()}
    for work, cells in old.items():
        for (machine, column), cell in cells.items():
            if machine not in measured and cell:
                lines.setdefault(work, {})[machine, column] = cell
    lines = {work: cells for work, cells in lines.items() if tells(work, cells, lines)}
    machines = list(dict.fromkeys(machine for cells in [*old.values(), *lines.values()] for machine, _ in cells))
    columns = [(machine, column) for machine in machines for column in names]
    header = [f"{machine}: {column}" if column == names[0] else column for machine, column in columns]
    return table(["work"] + header, [[work] + [cells.get(at, "") for at in columns] for work, cells in lines.items()])


def scaling(machines):
    """Times over threads, where a machine was measured with more than one number of them."""
    lines = []
    by_cpu = collections.defaultdict(dict)
    for (cpu, isa, threads), rows in machines.items():
        by_cpu[cpu, isa][threads] = rows
    for machine, counts in by_cpu.items():
        threads = sorted(counts)
        names = [name for name in ROWS if all(name in rows for rows in counts.values())]
        if len(threads) > 1 and names:
            lines += ["", f"### Threads: {short(machine)}, ms", ""]
            lines += table(["work"] + [str(n) for n in threads],
                           [[name.removeprefix("delta ")] + [number(counts[n][name]["ours_ms"]) for n in threads] for name in names])
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", help="what bench/peers.py --json wrote")
    machines = read(parser.parse_args().rows)
    with open(DOCUMENT) as file:
        before, _, rest = file.read().partition(BEGIN)
    old, _, after = rest.partition(END)
    most = {}
    for cpu, isa, threads in machines:
        most[cpu, isa] = max(threads, most.get((cpu, isa), 0))
    runs = {(cpu, isa, threads): machines[cpu, isa, threads] for (cpu, isa), threads in most.items()}
    descriptions = {short(machine): about(machine, rows) for machine, rows in runs.items()}
    for found in re.finditer(r"^- \*\*(.*?)\*\*.*\n(?:  - .*\n)*", old, re.MULTILINE):
        descriptions.setdefault(found[1], found[0].splitlines())
    lines = sum((descriptions[machine] for machine in sorted(descriptions)), [])
    for prefix, title in TABLES:
        lines += ["", f"### {title}", ""] + joined(beside(runs, prefix), kept(old, title), ("ms", "ratio", "of limit"))
    lines += ["", "### Beside our own", ""] + joined(beside_ours(runs), kept(old, "Beside our own"), ("ratio",))
    threads = scaling(machines)
    lines += threads or ["", *re.findall(r"^### Threads[^#]*", old, re.MULTILINE)]
    with open(DOCUMENT, "w") as file:
        file.write(f"{before}{BEGIN}\n" + "\n".join(lines).strip() + f"\n{END}{after}")


if __name__ == "__main__":
    main()
