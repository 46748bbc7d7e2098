"""Calls in forked processes, in daemon threads while the interpreter ends, and numbers of threads."""
import multiprocessing
import os
import subprocess
import sys

import numpy as np
import pytest

import softdelta


def long_call():
    """One that has work for several threads."""
    r = np.random.default_rng(0)
    q, k, v = (r.standard_normal((1, 512, 4, 64)).astype(np.float32) for _ in range(3))
    return softdelta.attention_forward(q, k, v, threads=2)[0]


def f64_call():
    """One that the reference computes."""
    r = np.random.default_rng(1)
    q, k, v = (r.standard_normal((2, 32, 4, 16)) for _ in range(3))
    return softdelta.delta_forward("delta_rule", q, k, v, threads=2)[0]


def send(pipe, call):
    pipe.send_bytes(call().tobytes())


@pytest.mark.parametrize("call", [long_call, f64_call])
def test_a_forked_process_computes_the_same(call):
    want = call().tobytes()
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=send, args=(there, call))
    process.start()
    try:
        assert here.poll(60), "the forked process hangs"
        assert here.recv_bytes() == want
    finally:
        process.kill()
        process.join()


def test_a_data_loader_computes_the_same():
    torch = pytest.importorskip("torch")

    class Calls(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            softdelta.set_num_threads(2)  # torch gives its workers one thread
            return torch.from_numpy(long_call())

    want = torch.from_numpy(long_call())
    loader = torch.utils.data.DataLoader(Calls(), num_workers=2, timeout=60, multiprocessing_context="fork")
    rows = list(loader)
    assert len(rows) == 4 and all(torch.equal(x[0], want) for x in rows)


DAEMON = """
import threading, time
import numpy as np, softdelta
q = np.ones((1, 256, 4, 64), np.float32)
def work():
    while True:
        softdelta.attention_forward(q, q, q, threads={threads})
threading.Thread(target=work, daemon=True).start()
time.sleep(0.02)
"""

# The callback of a diagnosis takes the interpreter's lock in the midst of a call.
DIAGNOSIS = """
import threading, time
import numpy as np, softdelta
r = np.random.default_rng(0)
q, k, v = (r.standard_normal((1, 64, 2, 16)).astype(np.float32) for _ in range(3))
def work():
    while True:
        softdelta.diagnose(dict(op="attention", q=q, k=k, v=v, o=v), progress=lambda *_: None)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
"""


@pytest.mark.parametrize("program", [DAEMON.format(threads=1), DAEMON.format(threads=2), DIAGNOSIS],
                         ids=["one", "two", "diagnosis"])
def test_a_daemon_thread_does_not_disturb_the_end(program):
    for _ in range(20):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and done.stderr == "", (done.returncode, done.stderr)


def test_numbers_of_threads_are_checked_when_given():
    before = softdelta.get_num_threads()
    try:
        for n in (-1, 2**31, 2**40, 1.5, "2", None):
            with pytest.raises(ValueError, match="n is .*, expected 0 .the default. to 2147483647"):
                softdelta.set_num_threads(n)
            assert softdelta.get_num_threads() == before
        for n in (-1, 2**31, 2**40, 1.5):
            with pytest.raises(ValueError, match="threads is .*, expected 0 .the default. to 2147483647"):
                softdelta.attention_forward(*[np.ones((1, 2, 1, 4), np.float32)] * 3, threads=n)
        for n in (0, 1, np.int64(3), 2**31 - 1):
            softdelta.set_num_threads(n)
            long_call()
            softdelta.delta_forward("delta_rule", *[np.ones((1, 2, 1, 4), np.float32)] * 3)
    finally:
        softdelta.set_num_threads(before)


def test_an_import_does_not_look_for_gpus():
    """Looking starts CUDA, and a process that is forked later could not use it."""
    code = ("import softdelta.torch.distributed, softdelta.transformers, numpy as np\n"
            "from softdelta import _options\n"
            "softdelta.attention_forward(*np.ones((3, 1, 4, 2, 8), np.float32))\n"
            "assert _options.engines.cache_info().currsize == 0, 'somebody asked for the engines'\n"
            "assert 'cpu' in _options.engines()")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_level_that_is_no_text_is_one_error():
    code = ("import numpy as np, softdelta\nq = np.ones((1, 2, 1, 4), np.float32)\n"
            "for call in (softdelta.isa_levels, lambda: softdelta.attention_forward(q, q, q)):\n"
            "    try:\n        call()\n    except softdelta.Unsupported as error:\n        print(error)")
    done = subprocess.run([sys.executable, "-c", code], env={**os.environb, b"SOFTDELTA_ISA": b"avx\xff\xfe"},
                          capture_output=True, text=True, timeout=60)
    assert done.stderr == "" and len(done.stdout.splitlines()) == 2
    for line in done.stdout.splitlines():
        assert line.startswith(r"SOFTDELTA_ISA is avx\xff\xfe, no instruction set that is known here; available: ")
