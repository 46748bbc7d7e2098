"""The program that the package brings."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import sysconfig

import pytest

import softdelta

MODULE = [sys.executable, "-m", "softdelta"]
DATA = pathlib.Path(__file__).parents[1] / "data"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(pathlib.Path(softdelta.__file__).parents[1])}


def run(*arguments, program=MODULE, **options):
    return subprocess.run([*program, *map(os.fspath, arguments)], capture_output=True, text=True, env=ENVIRONMENT,
                          **options)


def test_the_script_is_the_module():
    script = pathlib.Path(sysconfig.get_path("scripts")) / "softdelta"
    if not script.exists():
        pytest.skip("softdelta is not installed")
    assert run("--version", program=[script]).stdout == run("--version").stdout == f"softdelta {softdelta.__version__}\n"


def test_every_command_is_there():
    help = run("--help").stdout
    assert "softdelta [OPTIONS]" in help
    for command in ("verify", "diagnose", "make", "run", "bench", "info", "audit"):
        assert command in help
        assert run(command, "--help").returncode == 0


def test_statuses_of_verify(tmp_path):
    right = run("verify", DATA / "gdn_forward_gva.safetensors")
    assert right.returncode == 0 and "right" in right.stdout
    wrong = run("verify", "--json", DATA / "attn_boolmask_rows_dead.safetensors")
    assert wrong.returncode == 1 and json.loads(wrong.stdout)
    missing = run("verify", tmp_path / "missing.safetensors")
    assert missing.returncode == 2 and "missing.safetensors" in missing.stderr
    assert run("verfy").returncode == 2


def test_made_and_run_and_verified(tmp_path):
    case, result = os.fsdecode(b"case \xff.safetensors"), "result.safetensors"  # a name that is not text
    assert run("make", "kda", "-o", case, cwd=tmp_path).returncode == 0
    assert run("run", case, "-o", result, cwd=tmp_path).returncode == 0
    assert run("verify", result, cwd=tmp_path).returncode == 0
    assert run("diagnose", result, cwd=tmp_path).returncode == 0


def test_signals_end_it():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as nobody_reads:
        assert subprocess.run([*MODULE, "info"], stdout=nobody_reads, env=ENVIRONMENT).returncode == -signal.SIGPIPE
