"""Runs a check on every rank of a gloo group, or on one GPU each; ranks are processes. A check is a function of a module.
If it raises on a rank, the test fails."""
import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_preloaded = ["torch", "softdelta.torch.distributed"]
_context.set_forkserver_preload(_preloaded)


def preload(*modules):
    """Processes that are started after this call have these modules imported. Call it before the first one starts."""
    _preloaded.extend(modules)
    _context.set_forkserver_preload(_preloaded)


def _serve(rank, size, store, check, arguments, backend, timeout, together, bound, results):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size,
                                timeout=timedelta(seconds=timeout), device_id=torch.device("cuda", rank) if bound else None)
        results.put((rank, check(*arguments), None))
        if together:
            dist.barrier()  # nobody leaves while another still takes what it sent
    except BaseException as e:
        results.put((rank, None, f"rank {rank}: {type(e).__name__}: {e}\n{traceback.format_exc()}"))
    results.close()
    results.join_thread()
    os._exit(0)  # without waiting for ranks that are gone


def run(size, check, *arguments, backend="gloo", timeout=60, expect=None, bound=False):
    """Returns what check(*arguments) returns on each of `size` ranks. bound: torch knows the GPU of each from the start."""
    with tempfile.TemporaryDirectory() as folder:
        results = _context.Queue()
        together = expect is None
        ranks = [_context.Process(target=_serve, args=(r, size, f"{folder}/store", check, arguments, backend, timeout, together,
                                                       bound, results)) for r in range(size)]
        for rank in ranks:
            rank.start()
        found = {}
        try:
            for _ in range(size if expect is None else expect):
                rank, value, failure = results.get(timeout=timeout + 60)
                assert failure is None, failure
                found[rank] = value
        finally:
            for rank in ranks:
                rank.join(5)
                rank.kill()
        return [found.get(r) for r in range(size)]
