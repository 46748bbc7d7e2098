#!/usr/bin/env python3
"""Writes the tables of docs/performance.md from what peers.py measured; the text around them stays.

    bench/report.py FILE...      # from --json of peers.py; of the same row on the same machine the last one counts

A table has one kind of peer and columns for each machine. Of a machine the run with the most threads counts; the table over
threads has the rows of picture.py from all of its runs.
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
    """Rows whose peer begins with prefix: time, ratio and fraction of the limit on each machine."""
    lines = []
    for name in names_of(runs, lambda row: row["peer"].startswith(prefix)):
        rows = [rows.get(name) for rows in runs.values()]
        peer = next(row["peer"] for row in rows if row)
        label = name.split(":")[0].removeprefix("delta ")
        if prefix == "torch SDPA":
            label = label.removeprefix("attention ")
        cells = [label + (f" ({peer.partition(', ')[2]})" if ", " in peer else "")]
        for row in rows:
            cells += [number(row["ours_ms"]), against(row["ratio"], row["floor_ratio"]),
                      against(row["ceiling_fraction"], row["floor_ceiling"])] if row else ["", "", ""]
        lines.append(cells)
    return table(["work"] + sum(([f"{short(machine)}: ms", "ratio", "of limit"] for machine in runs), []), lines)


def beside_ours(runs):
    """Rows of one cost that hold are one row."""
    lines, costs = [], collections.defaultdict(list)
    for name in names_of(runs, lambda row: row["peer"].startswith("ours")):
        rows = [rows.get(name) for rows in runs.values()]
        peer = next(row["peer"] for row in rows if row).removeprefix("ours").strip(", ")
        if name.endswith(": cost") and all(row and row["holds"] for row in rows):
            costs[peer].append([row["ratio"] for row in rows])
        else:
            lines.append([name.removeprefix("delta "), peer] +
                         [against(row["ratio"], row["floor_ratio"]) if row else "" for row in rows])
    for peer, ratios in costs.items():
        lines.append([f"cost in {len(ratios)} more rows", peer] +
                     [f"{min(column):.2f} to {max(column):.2f}" for column in zip(*ratios)])
    return table(["work", "against ours"] + [f"{short(machine)}: ratio" for machine in runs], lines)


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
    after = rest.partition(END)[2]
    most = {}
    for cpu, isa, threads in machines:
        most[cpu, isa] = max(threads, most.get((cpu, isa), 0))
    runs = {(cpu, isa, threads): machines[cpu, isa, threads] for (cpu, isa), threads in most.items()}
    lines = sum((about(machine, rows) for machine, rows in runs.items()), [])
    for prefix, title in TABLES:
        lines += ["", f"### {title}", ""] + beside(runs, prefix)
    lines += ["", "### Beside our own", ""] + beside_ours(runs) + scaling(machines)
    with open(DOCUMENT, "w") as file:
        file.write(f"{before}{BEGIN}\n" + "\n".join(lines).strip() + f"\n{END}{after}")


if __name__ == "__main__":
    main()
