"""The program softdelta, also as python -m softdelta: softdelta verify dump.safetensors"""
import os
import signal
import sys

from ._native import program


def main() -> int:
    if sys.argv[1:2] == ["audit"]:  # of Python functions: the program in C++ has no such command
        from . import audit
        return audit.main(sys.argv[2:])
    for name in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; the program ends as others do
        signal.signal(name, signal.SIG_DFL)
    return program([b"softdelta", *map(os.fsencode, sys.argv[1:])])


if __name__ == "__main__":
    sys.exit(main())
