"""The other end of worker.py: a function in a process of its own, or in this one."""
from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from . import worker

MOST_DEATHS = 3  # each costs the start of a process


class Isolated:
    """The function in a process of its own. A call that takes too long ends it; the next call starts another."""

    def __init__(self, name: str, compile: bool):
        self.start = {"function": name, "path": [os.getcwd(), *sys.path], "compile": compile}
        self.process = None
        self.deaths = 0
        self.named = []
        self.parameters = self._begin()

    def _begin(self):
        script = f"import runpy; runpy.run_path({os.fspath(Path(worker.__file__))!r}, run_name='__main__')"
        environment = {"OMP_WAIT_POLICY": "passive", **os.environ}  # threads that wait leave the processors to the judge
        self.process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        env=environment)
        reply = self._exchange(self.start, 120)
        if "parameters" not in reply:
            self.close()
            raise ValueError(f"{self.start['function']} cannot be loaded: {reply.get('raised') or reply['died']}")
        self.named = reply["named"]
        return reply["parameters"]

    def _exchange(self, message, seconds):
        late = threading.Event()
        process = self.process

        def stop():
            late.set()
            process.kill()

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            worker.write(process.stdin, message)
            reply = worker.read(process.stdout)
        except (BrokenPipeError, EOFError, RuntimeError):
            reply = None
        finally:
            timer.cancel()
        if reply is not None:
            return reply
        status = process.wait()
        self.process = None
        self.deaths += 1
        if late.is_set():
            return {"died": f"no answer within {seconds:.0f} s", "late": True}
        return {"died": f"its process ended with {f'signal {-status}' if status < 0 else f'status {status}'}"}

    def call(self, request, seconds):
        if self.process is None and self.deaths >= MOST_DEATHS:
            return {"died": f"not called: its process ended {self.deaths} times", "late": True}
        if self.process is None:
            self._begin()
        reply = self._exchange(request, seconds)
        if reply.get("device_lost"):
            self.close()
            self.deaths += 1
        return reply

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in self.process.stdin, self.process.stdout:
                try:
                    pipe.close()
                except OSError:  # it ended with a message half written
                    pass
            self.process = None


class Here:
    """The function in this process."""

    def __init__(self, function):
        self.function = function
        worker.kept.clear()  # of another function
        self.parameters, self.named = worker.parameters_of(function), worker.named_of(function)

    def call(self, request, seconds):
        return worker.answer_or_say_why(self.function, request)

    def close(self):
        pass


def name_of(function) -> str:
    """ "module:function" of a function that another process can import."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<locals>")
    if module == "__main__":
        module = getattr(sys.modules["__main__"], "__file__", None)
    if module is None or "<" in name:
        raise ValueError(f"fn is {function!r}, which another process cannot import: "
                         "expected a function of a module, or isolate=False")
    return f"{module}:{name}"
