"""Runs llama.cpp's programs with softdelta and without, compares what they say, and times them. scripts/llama calls it.

    llama.py BUILD MODELS [tests | times | operations] ...
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import models

KINDS = ("qwen3next", "kimi-linear", "llama")
# Of each: the operations that softdelta must be seen to compute.
OPERATIONS = {
    "qwen3next": ("GATED_DELTA_NET", "FLASH_ATTN_EXT", "SSM_CONV", "CONCAT"),
    "kimi-linear": ("GATED_DELTA_NET", "FLASH_ATTN_EXT", "SSM_CONV"),
    "llama": ("FLASH_ATTN_EXT",),
}
failures = []


def check(right, what):
    print(f"  {'right' if right else 'WRONG'}: {what}", flush=True)
    if not right:
        failures.append(what)
    return right


def text(tokens, seed):
    """What the test tokenizer reads as so many tokens: five bytes each."""
    words = []
    for _ in range(tokens):
        seed = (seed * 1103515245 + 12345) % (1 << 31)
        words.append(f"{seed:010d}"[:5])
    return "".join(words)


class Llama:
    def __init__(self, build, threads, prefix):
        self.prefix = prefix  # of what is timed
        self.timing = False
        self.bin = build / "bin"
        self.library = build / "backend" / "libggml-cpu-softdelta.so"
        self.threads = threads

    def environment(self, softdelta, **more):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("GGML_", "SOFTDELTA_"))}
        if not self.timing:
            env.setdefault("OMP_WAIT_POLICY", "passive")  # many short parallel regions, and perhaps a busy machine
        if softdelta:
            env["GGML_BACKEND_PATH"] = str(self.library if softdelta is True else softdelta)
            env["SOFTDELTA_GGML_LOG"] = "counts"
        return {**env, **more}

    def run(self, program, *options, softdelta=False, **environment):
        prefix = self.prefix if program == "llama-bench" else []
        command = [*prefix, self.bin / program, *options, "-t", self.threads]
        done = subprocess.run([str(x) for x in command], env=self.environment(softdelta, **environment),
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0:
            print(done.stderr[-2000:], file=sys.stderr)
            raise RuntimeError(f"{program} ended with {done.returncode}")
        return done

    def complete(self, model, prompt, *options, softdelta=False, **environment):
        return self.run("llama-completion", "-m", model, "-f", prompt, "-n", 64, "--temp", 0, "-c", 4096, "-no-cnv",
                        "--no-display-prompt", "--ignore-eos", "--no-warmup", "-ctk", "f32", "-ctv", "f32", *options,
                        softdelta=softdelta, **environment)


def counts(stderr):
    """What the library logs: operation → calls taken, calls, seconds."""
    rows = {}
    for name, taken, calls, seconds in re.findall(r"softdelta: (\S+): (\d+) of (\d+) calls, (\S+) s$", stderr, re.M):
        before = rows.get(name, (0, 0, 0.0))
        rows[name] = (before[0] + int(taken), before[1] + int(calls), before[2] + float(seconds))
    return rows


def greedy(llama, folder):
    print("== greedy text: 64 tokens after each of 3 prompts, f32 weights and caches, -fa auto")
    prompts = []
    for i, tokens in enumerate((7, 150, 1100)):
        prompts.append(folder / f"prompt-{i}.txt")
        prompts[-1].write_text(text(tokens, i + 1))
    for kind in KINDS:
        same, seen = 0, {}
        for prompt in prompts:
            without = llama.complete(folder / f"{kind}.gguf", prompt)
            with_it = llama.complete(folder / f"{kind}.gguf", prompt, softdelta=True)
            same += without.stdout == with_it.stdout and len(with_it.stdout.strip()) >= 64
            for name, (taken, calls, _) in counts(with_it.stderr).items():
                seen[name] = tuple(a + b for a, b in zip(seen.get(name, (0, 0)), (taken, calls)))
        check(same == len(prompts), f"{kind}: the same text for {same} of {len(prompts)} prompts")
        for name in OPERATIONS[kind]:
            taken, calls = seen.get(name, (0, 0))
            check(taken > 0, f"{kind}: softdelta computed {taken} of {calls} {name}")


def perplexity(llama, folder):
    print("== perplexity: f16 and q8_0 caches, 1e-3 relative")
    file = folder / "perplexity.txt"
    file.write_text(text(4096, 77))
    for kind in KINDS:
        for cache in ("f16", "q8_0"):
            found = []
            for softdelta in (False, True):
                done = llama.run("llama-perplexity", "-m", folder / f"{kind}.gguf", "-f", file, "-c", 1024, "-b", 512, "-ctk",
                                 cache, "-ctv", cache, softdelta=softdelta)
                estimate = re.search(r"Final estimate: PPL = (\S+)", done.stdout + done.stderr)
                if estimate is None:
                    raise RuntimeError("llama-perplexity names no estimate")
                found.append(float(estimate[1]))
                taken = counts(done.stderr).get("FLASH_ATTN_EXT", (0, 0))
            error = abs(found[1] - found[0]) / found[0]
            check(error <= 1e-3 and taken[0] > 0,
                  f"{kind}, {cache}: {found[0]:.4f} and {found[1]:.4f}, {error:.1e}; {taken[0]} of {taken[1]} FLASH_ATTN_EXT")


class Server:
    """llama-server with four slots, for the length of a with statement."""

    def __init__(self, llama, model, slots, softdelta):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self.log = open(slots / f"server-{bool(softdelta)}.log", "w")
        self.process = subprocess.Popen(
            [str(x) for x in (llama.bin / "llama-server", "-m", model, "--host", "127.0.0.1", "--port", port, "-np", 4, "-c",
                              8192, "-t", llama.threads, "--slot-save-path", slots, "-ctk", "f32", "-ctv", "f32", "--no-warmup")],
            env=llama.environment(softdelta), stdout=self.log, stderr=subprocess.STDOUT)

    def __enter__(self):
        for _ in range(600):
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                with urllib.request.urlopen(self.address + "/health") as answer:
                    if answer.status == 200:
                        return self
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise RuntimeError(f"llama-server does not start: {self.log.name}")

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(60)
        self.log.close()

    def post(self, path, **body):
        request = urllib.request.Request(self.address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    def complete(self, prompt, slot=-1, tokens=48):
        return self.post("/completion", prompt=prompt, n_predict=tokens, temperature=0, cache_prompt=True, id_slot=slot,
                         ignore_eos=True)


def talk(server):
    """Everything that is compared; the same questions to each server."""
    prompts = [text(n, 100 + n) for n in (40, 90, 300, 700)]
    said = {}
    with ThreadPoolExecutor(4) as pool:
        said["four at once"] = [x["content"] for x in pool.map(server.complete, prompts)]
        longer = [a + text(20, 5) for a in prompts]
        answers = list(pool.map(server.complete, longer))
        said["the prompts, longer"] = [x["content"] for x in answers]
    cached = sum(x.get("timings", {}).get("cache_n", 0) for x in answers)
    first = server.complete(prompts[3], slot=0)
    server.post("/slots/0?action=save", filename="state.bin")
    direct = server.complete(prompts[3] + first["content"] + text(9, 3), slot=0)
    server.post("/slots/0?action=erase")
    server.post("/slots/0?action=restore", filename="state.bin")
    restored = server.complete(prompts[3] + first["content"] + text(9, 3), slot=0)
    said["after a restored state"] = [first["content"], direct["content"], restored["content"]]
    return said, cached, direct["content"] == restored["content"]


def server(llama, folder):
    print("== llama-server: four slots at once, prompt cache, a state saved and restored")
    for kind in KINDS:
        both = []
        for softdelta in (False, True):
            with Server(llama, folder / f"{kind}.gguf", folder, softdelta) as running:
                both.append(talk(running))
        log = counts((folder / "server-True.log").read_text(errors="replace"))
        (without, _, _), (with_it, cached, restored) = both
        for what, answers in without.items():
            check(answers == with_it[what] and all(len(x) >= 48 for x in answers), f"{kind}: {what}: the same answers")
        check(restored, f"{kind}: a restored state goes on as the one that was saved")
        check(cached > 0 or kind != "llama", f"{kind}: {cached} tokens came from the prompt cache")
        check(all(log.get(name, (0,))[0] > 0 for name in OPERATIONS[kind]), f"{kind}: softdelta computed, by its log")


def loading(llama, folder):
    print("== loading: beside ggml's libraries; missing; no library; of another version; variables of nonsense")
    model, prompt = folder / "qwen3next.gguf", folder / "prompt-1.txt"
    wanted = llama.complete(model, prompt).stdout

    def says(done):
        return [line for line in done.stderr.splitlines() if "softdelta" in line.lower() and "calls," not in line]

    dropped = llama.bin / "libggml-cpu-softdelta.so"
    shutil.copy(llama.library, dropped)
    try:
        done = llama.complete(model, prompt, SOFTDELTA_GGML_LOG="counts")
    finally:
        dropped.unlink()
    taken = counts(done.stderr).get("GATED_DELTA_NET", (0, 0))[0]
    check(done.stdout == wanted and taken > 0, f"a file beside ggml's: found, {taken} GATED_DELTA_NET")

    missing = llama.complete(model, prompt, softdelta=folder / "libggml-cpu-softdelta-missing.so")
    check(missing.stdout == wanted and len(says(missing)) == 1, f"a missing file: as before, {len(says(missing))} line")

    text_file = llama.complete(model, prompt, softdelta=prompt)
    refused = [line for line in text_file.stderr.splitlines() if prompt.name in line]
    check(text_file.stdout == wanted and len(refused) == 1, f"a file that is no library: as before, {len(refused)} line")

    for variable in ("SOFTDELTA_GGML_TAKE", "SOFTDELTA_GGML_LOG", "SOFTDELTA_GGML_DEVICE"):
        done = llama.complete(model, prompt, softdelta=True, **{"SOFTDELTA_GGML_LOG": "counts", variable: "foo"})
        named = [line for line in done.stderr.splitlines() if variable in line]
        taken = counts(done.stderr).get("GATED_DELTA_NET", (0, 0))[0]
        check(done.stdout == wanted and len(named) == 1 and (taken > 0 or variable == "SOFTDELTA_GGML_LOG"),
              f"nonsense: the default stays; {'; '.join(named)}")
    done = llama.complete(model, prompt, softdelta=True, SOFTDELTA_ISA="foo")
    check(done.stdout == wanted and not counts(done.stderr) and any("SOFTDELTA_ISA is foo" in line for line in says(done)),
          "an instruction set that there is not: as before, " + "; ".join(says(done)))

    other = folder / "libggml-cpu-softdelta-other.so"
    library = llama.library.read_bytes()
    changed = re.sub(rb"built for ggml \d", b"built for ggml 9", library)
    assert changed != library
    other.write_bytes(changed)
    done = llama.complete(model, prompt, softdelta=other)
    check(done.stdout == wanted and not counts(done.stderr) and any("built for ggml 9" in line for line in says(done)),
          "another version, named: as before, " + "; ".join(says(done)))
    shutil.copy(other, dropped)
    try:
        done = llama.complete(model, prompt, SOFTDELTA_GGML_LOG="counts")
    finally:
        dropped.unlink()
    check(done.stdout == wanted and not counts(done.stderr), "another version beside ggml's: as before, " + "; ".join(says(done)))


def tests(llama, folder, only):
    for kind in KINDS:
        file = folder / f"{kind}.gguf"
        if not file.exists():
            models.make(kind, str(file))
    for test in (greedy, perplexity, server, loading):
        if only and test.__name__ not in only:
            continue
        try:
            test(llama, folder)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            check(False, f"{test.__name__}: {error}")


def bench(llama, model, tokens, softdelta, **environment):
    """Seconds of a prefill of so many tokens, and the log. A long one needs no warming up."""
    done = llama.run("llama-bench", "-m", model, "-p", tokens, "-n", 0, "-r", 1, "-fa", "auto", "-o", "json",
                     *(("--no-warmup",) if tokens > 1024 else ()), softdelta=softdelta, **environment)
    return json.loads(done.stdout)[0]["samples_ns"][0] / 1e9, counts(done.stderr)


def median(numbers):
    return sorted(numbers)[len(numbers) // 2]


def times(llama, folder, lengths, runs):
    """A prefill with and without, alternating; the shares of operations in it, and what Amdahl makes of them. A prefill of more
    than 8192 tokens, which takes minutes, runs once."""
    model = folder / "qwen3next-bench.gguf"
    if not model.exists():
        print("== a model of qwen3next's shape: 12 layers, q8_0")
        models.make("qwen3next", str(model), "q8_0", True)
    print(f"== llama-bench, {llama.threads} threads, {model.stat().st_size / 1e9:.1f} GB of q8_0 weights, -fa auto")
    print("| prefill | without, tokens/s | with | faster | share of GATED_DELTA_NET, FLASH_ATTN_EXT, SSM_CONV, CONCAT | these faster | Amdahl | reached |")
    print("|---|---|---|---|---|---|---|---|")
    for tokens in lengths:
        without, with_it, taken = [], [], []
        for _ in range(runs if tokens <= 8192 else 1):
            without.append(bench(llama, model, tokens, False)[0])
            seconds, log = bench(llama, model, tokens, True)
            with_it.append(seconds)
            taken.append(log)
        # Node by node, all of them by ggml; a run that warms up counts in both logs.
        log = bench(llama, model, tokens, True, SOFTDELTA_GGML_LOG="times", SOFTDELTA_GGML_TAKE="none")[1]
        total = sum(row[2] for row in log.values())
        shares, factors, left = [], [], 1.0
        for name in OPERATIONS["qwen3next"]:
            share, factor = log[name][2] / total, log[name][2] / median([x[name][2] for x in taken])
            shares.append(share)
            factors.append(factor)
            left -= share * (1 - 1 / factor)
        before, after = median(without), median(with_it)
        print(f"| pp{tokens} | {tokens / before:.1f} | {tokens / after:.1f} | {before / after:.2f} | {', '.join(f'{x:.1%}' for x in shares)} | "
              f"{', '.join(f'{x:.1f}' for x in factors)} | {1 / left:.2f} | {before / after * left:.2f} |", flush=True)
        largest = sorted(log.items(), key=lambda item: -item[1][2])[:8]
        print("  without: " + ", ".join(f"{name} {row[2] / total:.1%}" for name, row in largest), flush=True)


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("build", type=pathlib.Path)
    arguments.add_argument("models", type=pathlib.Path)
    arguments.add_argument("what", choices=("tests", "times"))
    arguments.add_argument("only", nargs="*", help="tests by name, or lengths of prefills")
    arguments.add_argument("--threads", type=int, default=os.cpu_count())
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--prefix", default="", help="a command before those that are timed, as in: taskset -c 0,1")
    given = arguments.parse_args()
    given.models.mkdir(parents=True, exist_ok=True)
    llama = Llama(given.build.resolve(), given.threads, given.prefix.split())
    llama.timing = given.what == "times"
    if given.what == "tests":
        tests(llama, given.models.resolve(), given.only)
    else:
        times(llama, given.models.resolve(), [int(x) for x in given.only or (512, 4096)], given.runs)
    if failures:
        sys.exit("failed: " + "; ".join(failures))


if __name__ == "__main__":
    main()
