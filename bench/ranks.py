#!/usr/bin/env python3
"""What a sequence shared by processes of this machine costs, against one process with as many threads: KDA by relay and
heads, causal attention by the ring in zigzag order; forward and backward, bf16. docs/distributed.md has a table.

    bench/ranks.py --ranks 4 --threads 4            # 4 processes of 4 threads, each on its own cores, and 1 of 16
    bench/ranks.py --device cuda --ranks 2          # 2 GPUs, against one

Efficiency is the time of one over the time of all. With heads beside it: what a rank computes, measured with the others
computing too, and what its bytes take at the rate of all_to_all_single, measured in this run. Results are compared.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--threads", type=int, default=4, help="of a rank")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--tokens", type=int, default=65536, help="of KDA; 0: none")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--queries", type=int, default=32768, help="of attention; 0: none")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--methods", default="relay,heads")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # of a child; −1: alone
    parser.add_argument("--store", help=argparse.SUPPRESS)
    return parser.parse_args()


class Bench:
    def __init__(self, args):
        import torch

        self.torch, self.args, self.alone = torch, args, args.rank < 0
        self.size, self.rank = (1, 0) if self.alone else (args.ranks, args.rank)
        self.cuda = args.device == "cuda"
        self.found = {}
        if self.cuda:
            torch.cuda.set_device(self.rank)
        else:
            torch.set_num_threads(args.threads * (args.ranks if self.alone else 1))
        if not self.alone:
            torch.distributed.init_process_group("nccl" if self.cuda else "gloo", init_method=f"file://{args.store}",
                                                 rank=self.rank, world_size=self.size)

    def draw(self, rows, heads, *sizes, seed):
        """[1, this rank's rows, heads, ..] of a whole that repeats every 1024 rows."""
        torch = self.torch
        period = torch.randn(1, 1024, heads, *sizes, generator=torch.Generator().manual_seed(seed))
        period = period.to(torch.bfloat16).to(self.args.device)
        return period.repeat(1, rows // self.size // 1024, *(1 for _ in period.shape[2:]))

    def barrier(self):
        if self.cuda:
            self.torch.cuda.synchronize()
        if not self.alone:
            self.torch.distributed.barrier()

    def time(self, name, call, runs=None):
        """The median time of the slowest rank, after one run to warm up; and the results of the last run."""
        torch, seconds = self.torch, []
        for i in range((runs or self.args.runs) + 1):
            self.barrier()
            begin = time.perf_counter()
            result = call()
            if self.cuda:
                torch.cuda.synchronize()
            taken = torch.tensor([time.perf_counter() - begin], dtype=torch.float64, device=self.args.device)
            if not self.alone:
                torch.distributed.all_reduce(taken, torch.distributed.ReduceOp.MAX)
            if i > 0:
                seconds.append(taken.item())
        self.found[name] = statistics.median(seconds)
        if self.rank == 0:
            print(f"{'alone' if self.alone else 'shared'}: {name} {self.found[name]:.4f} s", file=sys.stderr, flush=True)
        return result

    def digest(self, name, tensors):
        """Norms over all ranks: [‖x‖] of each tensor."""
        torch = self.torch
        squares = torch.stack([t.detach().float().square().sum().double() for t in tensors]).cpu().to(self.args.device)
        if not self.alone:
            torch.distributed.all_reduce(squares)
        self.found["norms of " + name] = squares.sqrt().tolist()

    def kda(self):
        import softdelta.torch as sd

        torch, args = self.torch, self.args
        T, H, D = args.tokens, args.heads, 128
        if T == 0:
            return
        q, k, v, do = (self.draw(T, H, D, seed=s) for s in range(4))
        g = torch.nn.functional.logsigmoid(self.draw(T, H, D, seed=4) + 3)
        beta = self.draw(T, H, seed=5).sigmoid()
        given = [t.requires_grad_() for t in (q, k, v, g, beta)]

        def step(function):
            def run():
                for t in given:
                    t.grad = None
                o = function()
                o.backward(do)
                return o, *(t.grad for t in given)

            return run

        def local(*x):
            return sd.chunk_kda(*x[:3], g=x[3], beta=x[4], use_qk_l2norm_in_kernel=True)[0]

        if self.alone:
            self.digest("kda", self.time("kda", step(lambda: local(*given))))
            with torch.no_grad():
                self.time("kda forward", lambda: local(*given))
            return
        import softdelta.torch.distributed as sdd

        def shared(method):
            return sdd.delta_rule("kda", q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, method=method)[0]

        for method in args.methods.split(","):
            self.digest("kda " + method, self.time("kda " + method, step(lambda: shared(method))))
        with torch.no_grad():
            self.time("kda forward by " + args.methods.split(",")[0], lambda: shared(args.methods.split(",")[0]))
        if "heads" not in args.methods:
            return
        own = [x.detach().view(1, T, -1, *x.shape[3:]).requires_grad_() for x in given]  # all tokens of some heads
        all_do = do.view(own[2].shape)

        def compute():
            for t in own:
                t.grad = None
            local(*own).backward(all_do)

        self.time("compute of heads", compute)
        sent = torch.cat([x.detach().view(-1) for x in (q, k, v, g, beta)])
        received = torch.empty_like(sent)
        self.time("all to all", lambda: torch.distributed.all_to_all_single(received, sent))
        moved = sent.nbytes * 2 + 2 * do.nbytes  # operands and their gradients, o and its own
        self.found["transfers of heads"] = self.found["all to all"] * moved / sent.nbytes
        self.found["GB/s of a rank"] = sent.nbytes / self.size * (self.size - 1) / self.found["all to all"] / 1e9

    def attention(self):
        import softdelta.torch as sd

        torch, args = self.torch, self.args
        if args.queries == 0:
            return
        q, k, v, do = (self.draw(args.queries, 8, 128, seed=s) for s in range(4))
        given = [t.requires_grad_() for t in (q, k, v)]
        if self.alone:
            def attend():
                return sd.scaled_dot_product_attention(*(t.transpose(1, 2) for t in given), is_causal=True).transpose(1, 2)
        else:
            import softdelta.torch.distributed as sdd

            def attend():
                return sdd.attention(*given, causal="top_left", method="ring", order="zigzag")[0]

        def step():
            for t in given:
                t.grad = None
            o = attend()
            o.backward(do)
            return o, *(t.grad for t in given)

        runs = max(1, args.runs // 2)
        self.digest("ring", self.time("ring", step, runs))
        with torch.no_grad():
            self.time("ring forward", attend, runs)

    def run(self):
        self.kda()
        self.attention()
        if self.rank == 0:
            print(json.dumps(self.found), flush=True)
        if not self.alone:
            self.barrier()
        os._exit(0)


def child(args, rank, store, cores):
    environment = dict(os.environ, GLOO_SOCKET_IFNAME="lo",
                       OMP_NUM_THREADS=str(args.threads * (args.ranks if rank < 0 else 1)))
    command = [sys.executable, __file__, *sys.argv[1:], "--rank", str(rank), "--store", store]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE if rank <= 0 else subprocess.DEVNULL,
                            preexec_fn=lambda: os.sched_setaffinity(0, cores))


def main():
    args = arguments()
    for name, rows in (("--tokens", args.tokens), ("--queries", args.queries)):
        if rows % (2048 * args.ranks):
            sys.exit(f"{name} is {rows}, expected a multiple of {2048 * args.ranks}: operands repeat every 1024 rows")
    if args.rank is not None:
        Bench(args).run()
    everything = sorted(os.sched_getaffinity(0))
    cores = [everything[r * args.threads:(r + 1) * args.threads] or everything for r in range(args.ranks)]
    with tempfile.TemporaryDirectory() as folder:
        alone = json.loads(child(args, -1, "", everything).communicate()[0])
        ranks = [child(args, r, folder + "/store", cores[r]) for r in range(args.ranks)]
        shared = json.loads(ranks[0].communicate()[0])
    print(json.dumps({"alone": alone, "shared": shared}))
    methods, rows = args.methods.split(","), []
    if args.tokens:
        rows += [("kda " + m, "kda") for m in methods] + [("kda forward by " + methods[0], "kda forward")]
    rows += [("ring", "ring"), ("ring forward", "ring forward")] if args.queries else []
    for name, of in rows:
        print(f"{name:18} {alone[of]:.3f} s alone, {shared[name]:.3f} s on {args.ranks}: "
              f"{'speed-up' if args.device == 'cuda' else 'efficiency'} {alone[of] / shared[name]:.2f}")
        for a, b in zip(alone.get("norms of " + of, []), shared.get("norms of " + name, [])):
            assert abs(a - b) < 2e-3 * a, f"{name}: norms {a}, {b}"
    if args.tokens and "heads" in args.methods:
        parts = shared["compute of heads"] + shared["transfers of heads"]
        print(f"heads: computes {shared['compute of heads']:.3f} s and moves for {shared['transfers of heads']:.3f} s "
              f"({shared['GB/s of a rank']:.2f} GB/s); takes {shared['kda heads'] / parts:.2f} of both")


if __name__ == "__main__":
    main()
