#!/usr/bin/env python3
"""Writes the tables of docs/performance.md from what peers.py measured; the text around them stays.

    bench/report.py FILE...      # from --json of peers.py; of the same row on the same machine the last one counts
"""
import argparse
import collections
import json
import os

DOCUMENT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "docs", "performance.md")
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


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
    if value is None and floor is None:
        return ""
    return ("–" if value is None else f"{value:.2f}") + (f" (≥ {floor:.2f})" if floor is not None else "")


def table(header, rows):
    return ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)] + ["| " + " | ".join(r) + " |" for r in rows]


def section(machine, rows):
    cpu, isa, threads = machine
    about = next(iter(rows.values()))["environment"]
    limits = {name: limit for name, limit in about["limits"].items() if limit}
    lines = [f"## {cpu}, {isa or 'no fast kernels'}, {threads} {'thread' if threads == 1 else 'threads'}", "",
             f"softdelta {about['softdelta']} ({about['compiler']}), torch {about['torch']}, "
             f"transformers {about['transformers']}, ggml {about['ggml']}, {about['system']}.", "",
             "Limits: " + ", ".join(f"{name} {limit / 1e9:.0f} {'GFLOP/s' if name in ('f32', 'bf16') else 'GB/s'}"
                                    for name, limit in limits.items()) + "."]
    for group, title in (("attention", "Attention"), ("delta", "Delta rules")):
        chosen = [row for name, row in rows.items() if name.startswith(group)]
        if not chosen:
            continue
        lines += ["", f"### {title}", ""]
        lines += table(["work", "ours, ms", "against", "ms", "ratio", "of limit", "holds"],
                       [[row["name"].removeprefix(group + " "), number(row["ours_ms"]),
                         row["peer"] + ", alone" * row.get("alone", False),
                         number(row["peer_ms"]), against(row["ratio"], row["floor_ratio"]),
                         against(row["ceiling_fraction"], row["floor_ceiling"]),
                         {True: "yes", False: "**no**", None: "unknown"}[row["holds"]]] for row in chosen])
        lines += [""] + [f"{row['name']}: {row['note']}." for row in chosen if row["note"].strip()]
    return lines


def scaling(machines):
    """Times over threads, where a machine was measured with more than one number of them."""
    lines = []
    by_cpu = collections.defaultdict(dict)
    for (cpu, isa, threads), rows in machines.items():
        by_cpu[cpu, isa][threads] = rows
    for (cpu, isa), counts in by_cpu.items():
        if len(counts) == 1:
            continue
        threads = sorted(counts)
        names = [name for name in counts[threads[0]] if all(name in rows for rows in counts.values())]
        lines += ["", f"## Threads: {cpu}, {isa}", "", "Milliseconds of ours and, in brackets, of the peer.", ""]
        lines += table(["work", "against"] + [str(n) for n in threads],
                       [[name, counts[threads[0]][name]["peer"]] +
                        [f"{number(counts[n][name]['ours_ms'])} ({number(counts[n][name]['peer_ms'])})"
                         for n in threads] for name in names])
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", help="what bench/peers.py --json wrote")
    machines = read(parser.parse_args().rows)
    with open(DOCUMENT) as file:
        before, _, rest = file.read().partition(BEGIN)
    after = rest.partition(END)[2]
    # of each machine the run with the most threads in full; the others in the table over threads
    most = {}
    for cpu, isa, threads in machines:
        most[cpu, isa] = max(threads, most.get((cpu, isa), 0))
    lines = []
    for (cpu, isa), threads in most.items():
        lines += section((cpu, isa, threads), machines[cpu, isa, threads]) + [""]
    lines += scaling(machines)
    text = "\n".join(lines).strip()
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    with open(DOCUMENT, "w") as file:
        file.write(f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
