#!/usr/bin/env python3
"""Where the time of ranks goes, on one machine (bench/ranks.py says how much it is).

    bench/ranks_where.py ring --ranks 4 --threads 4   # causal attention by the ring, gloo: seconds of each rank in the
                                                      # library, in waits, in sums; with nothing sent, with half the bytes
    bench/ranks_where.py relay                        # KDA by the relay on two GPUs: without NCCL's priority, by few of its
                                                      # blocks, groups of heads, without asking the others;
                                                      # --timelines FOLDER: kernels
"""
import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time

from ranks import Bench


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=("ring", "relay"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of a rank of the ring")
    parser.add_argument("--queries", type=int, default=32768, help="of the ring")
    parser.add_argument("--tokens", type=int, default=131072, help="of the relay")
    parser.add_argument("--heads", type=int, default=32, help="of the relay")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--timelines", help="a folder for the kernels of each rank, with their times")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # of a child; −1: alone
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.device = "cuda" if args.work == "relay" else "cpu"
    return args


@contextlib.contextmanager
def replaced(*places):
    """places: (owner, name, value)."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    for place in places:
        setattr(*place)
    try:
        yield
    finally:
        for place in before:
            setattr(*place)


class Done:
    """A transfer that is not made."""

    def wait(self):
        pass


class Where(Bench):
    def say(self, text):
        """Of all ranks, one after the other."""
        for rank in range(self.size):
            if rank == self.rank:
                print(text, flush=True)
            self.barrier()

    # ------------------------------------------------------------------------------------------------------------ ring

    def ring(self):
        torch = self.torch
        import softdelta.torch as sd
        q, k, v, do = (self.draw(self.args.queries, 8, 128, seed=s) for s in range(4))
        given = [t.requires_grad_() for t in (q, k, v)]

        def passes(attend):
            def run():
                for t in given:
                    t.grad = None
                attend().backward(do)

            return run

        if self.alone:
            return self.measure("alone", passes(lambda: sd.scaled_dot_product_attention(
                *(t.transpose(1, 2) for t in given), is_causal=True).transpose(1, 2)), {})
        import softdelta.torch.distributed as sdd
        from softdelta.torch.distributed import _ranks, _ring
        spent = {}

        def timed(owner, name, label):
            function = getattr(owner, name)

            def call(*given, **how):
                begin = time.perf_counter()
                try:
                    return function(*given, **how)
                finally:
                    spent[label] = spent.get(label, 0) + time.perf_counter() - begin

            return owner, name, call

        def nothing(ranks, sends, receives):
            """Keys are those that are here; gradients are what lies in memory."""
            for to, of in zip([t for t, _ in receives], [t for t, _ in sends]):
                if to.dtype == torch.bfloat16:
                    to.copy_(of if of.shape == to.shape else of[:, :to.shape[1]] if of.shape[1] > to.shape[1] else
                             of.repeat(1, 2, 1, 1)[:, :to.shape[1]])
            return []

        exchange = _ranks.Ranks.exchange

        def half(ranks, sends, receives):
            def cut(t):
                return t if t.dtype == torch.bfloat16 else t.view(torch.bfloat16).flatten()[:t.numel()]

            return exchange(ranks, [(cut(t), r) for t, r in sends], [(cut(t), r) for t, r in receives])

        native = type("Native", (), {"__getattr__": lambda self, name: getattr(self.module, name)})()
        native.module = _ring._native
        native.attention_forward = native.module.attention_forward
        native.attention_backward = native.module.attention_backward
        watched = [timed(native, "attention_forward", "forward"), timed(native, "attention_backward", "backward"),
                   timed(_ring._Travel, "_wait", "waits"), timed(_ring._Travel, "_start", "begins to send"),
                   timed(_ring, "_merge", "merges"), timed(_ring._Sum, "added", "sums of blocks"),
                   timed(_ring._Travel, "add_gradients", "sums of ranks, with waits"),
                   timed(_ring._Merged, "results", "results"), timed(_ranks.Ranks, "agree", "agreeing")]
        step = passes(lambda: sdd.attention(*given, causal="top_left", method="ring", order="zigzag")[0])
        with replaced((_ring, "_native", native), *watched):
            self.measure("ring", step, spent)
            with replaced((_ranks.Ranks, "exchange", nothing)):
                self.measure("nothing is sent", step, spent)
            with replaced((_ranks.Ranks, "exchange", half)):
                self.measure("half of the gradients' bytes", step, spent)

    def measure(self, name, step, spent):
        found = []
        for i in range(self.args.runs + 1):
            if i > 0:
                self.barrier()
            spent.clear()
            before, ticks, begin = os.times(), self.ticks(), time.perf_counter()
            step()
            seconds, after = time.perf_counter() - begin, os.times()
            loop = sum(n - ticks.get(t, 0) for t, n in self.ticks().items()) / os.sysconf("SC_CLK_TCK")
            if i > 0:
                found.append((seconds, after.user - before.user, after.system - before.system, loop, dict(spent)))
        seconds, user, system, loop, parts = sorted(found, key=lambda f: f[0])[len(found) // 2]
        parts = ", ".join(f"{n} {t:.3f}" for n, t in sorted(parts.items(), key=lambda x: -x[1]))
        self.say(f"{name}, rank {self.rank}: {seconds:.3f} s (least {min(f[0] for f in found):.3f}), processors {user:.2f} + "
                 f"{system:.2f} s of the system, gloo's thread {loop:.2f}; {parts}")

    @staticmethod
    def ticks():
        """Of threads that gloo has."""
        found = {}
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/stat") as file:
                name, rest = file.read().rsplit(")", 1)
                if "gloo" in name:
                    found[thread] = sum(int(n) for n in rest.split()[11:13])
        return found

    # ----------------------------------------------------------------------------------------------------------- relay

    def relay(self):
        torch, args = self.torch, self.args
        import softdelta.torch as sd
        import softdelta.torch.distributed as sdd
        from softdelta.torch.distributed import _ranks
        dist, Ranks = torch.distributed, _ranks.Ranks

        def operands(tokens):
            q, k, v, do = (self.draw(tokens, args.heads, 128, seed=s) for s in range(4))
            g = torch.nn.functional.logsigmoid(self.draw(tokens, args.heads, 128, seed=4) + 3)
            return [t.requires_grad_() for t in (q, k, v, g, self.draw(tokens, args.heads, seed=5).sigmoid())], do

        def passes(function, given, do):
            def run():
                for t in given:
                    t.grad = None
                q, k, v, g, beta = given
                function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True).backward(do)

            return run

        if self.alone:
            step = passes(lambda *x, **how: sd.chunk_kda(*x, **how)[0], *operands(args.tokens))
            self.time("one GPU", step)
            return self.timeline("one GPU", step)

        one_block = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        one_block.config.min_ctas, one_block.config.max_ctas = 1, 1
        few = dist.new_group(pg_options=one_block)
        known, agree = {}, Ranks.agree

        def agreed(ranks, called, given, check):
            tensors, numbers, common = check()
            key = called + repr(sorted(common.items()))
            if key not in known:
                known[key] = agree(ranks, called, given, lambda: (tensors, numbers, common))
            return known[key]

        ordinary = (Ranks, "give_priority", lambda ranks: None)
        before = (Ranks, "agree", agreed)
        silent = [(Ranks, "send", lambda ranks, t, to: Done()),
                  (Ranks, "receive", lambda ranks, t, source: (t.zero_(), Done())[1])]
        given, do = operands(args.tokens)
        for name, of, groups, places in (
            ("as it is", None, None, []), ("without NCCL's priority", None, None, [ordinary]),
            ("one block of NCCL's", few, None, []), ("agreed before", None, None, [before]),
            ("2 groups of heads", None, 2, []), ("4 groups of heads", None, 4, []),
            ("nothing is sent, agreed before", None, None, [before, *silent]), ("as it is, again", None, None, [])):

            def call(*x, **how):
                return sdd.delta_rule("kda", *x, method="relay", group=of, head_groups=groups, **how)[0]

            with replaced(*places):
                step = passes(call, given, do)
                self.time(name, step)
                self.timeline(name, step)

    def timeline(self, name, step):
        """Kernels of one pass that take 25 µs or more, and all of NCCL's: begin and duration in ms after the ranks began,
        stream, name, blocks, threads."""
        if not self.args.timelines:
            return
        torch = self.torch
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
            self.barrier()
            begin = time.time_ns()
            step()
            queued = time.time_ns()
            torch.cuda.synchronize()
        os.makedirs(self.args.timelines, exist_ok=True)
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profile.export_chrome_trace(file.name)
            with open(file.name) as text:
                trace = json.load(text)
        with open(f"{self.args.timelines}/{max(self.rank, 0)}", "a") as out:
            print(f"== {name}: queued in {(queued - begin) / 1e6:.2f} ms", file=out)
            for e in sorted((e for e in trace["traceEvents"] if e.get("cat") == "kernel"), key=lambda e: e["ts"]):
                at = (trace.get("baseTimeNanoseconds", 0) + e["ts"] * 1e3 - begin) / 1e6
                if at > 0 and (e["dur"] > 25 or "nccl" in e["name"]):
                    what = e["name"].replace("softdelta::cuda::", "").replace("(anonymous namespace)::", "")
                    print(f"{at:8.3f} +{e['dur'] / 1e3:7.3f}  {e['args'].get('stream')}  {what.split('(')[0][:60]}  "
                          f"{e['args'].get('grid')} {e['args'].get('block')}", file=out)

    def run(self):
        {"ring": self.ring, "relay": self.relay}[self.args.work]()
        if not self.alone:
            self.barrier()
        os._exit(0)


def child(args, rank, store, cores):
    threads = str(args.threads * (args.ranks if rank < 0 else 1))
    command = [sys.executable, __file__, *sys.argv[1:], "--rank", str(rank), "--store", store]
    return subprocess.Popen(command, env=dict(os.environ, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS=threads),
                            preexec_fn=lambda: os.sched_setaffinity(0, cores))


def main():
    args = arguments()
    if args.rank is not None:
        Where(args).run()
    everything = sorted(os.sched_getaffinity(0))
    cores = [everything] * args.ranks
    if args.work == "ring":
        cores = [everything[r * args.threads:(r + 1) * args.threads] or everything for r in range(args.ranks)]
    with tempfile.TemporaryDirectory() as folder:
        child(args, -1, "", everything).wait()
        for process in [child(args, r, folder + "/store", cores[r]) for r in range(args.ranks)]:
            process.wait()


if __name__ == "__main__":
    main()
