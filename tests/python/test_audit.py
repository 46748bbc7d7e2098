"""audit on right kernels and a few cheats; audit_table.py runs them all."""
import json
from pathlib import Path
from xml.etree import ElementTree

import audit_cheats
import pytest

import softdelta

FILE = Path(audit_cheats.__file__)
SMALL = ("slow", "correlated", "packed", "mixed", "steep", "rising", "length 64", "length 4097", "stateless")  # left out


def named(group, name):
    kernels = audit_cheats.RIGHT if group == "right" else audit_cheats.CHEATS
    return f"{FILE}:{group}_{list(kernels).index(name)}"


def run(group, name, op="gated_delta_rule", **options):
    options = {"budget_s": 600, "seed": 5, "without": SMALL, "output": False, "isolate": False, **options}
    kernel = (audit_cheats.RIGHT if group == "right" else audit_cheats.CHEATS)[name]
    return softdelta.audit(named(group, name) if options["isolate"] else kernel, op=op, **options)


def test_a_right_kernel_is_right(tmp_path):
    found = run("right", "chunks of 64", "kda", without=("length 4097",), isolate=True)
    assert found.right and found.status == 0, str(found)
    right, total = found.score
    assert right == total > 150 and not found.faults and not found.gaps
    assert found.left_out == ["length 4097: by the caller"] and "--seed 5" in found.repeat
    assert len(str(found).splitlines()) < 30 and json.loads(json.dumps(found.to_dict()))["verdict"] == "right"
    assert not ElementTree.fromstring(found.junit()).findall("testcase/failure")


@pytest.mark.parametrize("name, sentence", [
    ("inputs mutated and zeros returned", "v was changed"),
    ("one lost element", "o is wrong in"),
    ("f32 stored as bf16", "final_state is f32 and holds only numbers of bf16"),
    ("state given as bf16", "final_state is bf16, expected f32"),
    ("NaN leaks to the next row", "NaN stays in its row"),
    ("noise", "the bits of"),
    ("o is the memory of v", "o is memory of v"),
    ("computes with softdelta", "import softdelta"),
    ("wrong for one token", "most in length 1"),
])
def test_a_cheat_is_caught(name, sentence):
    found = run("cheat", name, isolate=name == "computes with softdelta")
    assert found.verdict == "wrong" and found.status == 1 and any(sentence in f for f in found.faults), str(found)


def test_missing_gradients_are_no_verdict():
    found = run("cheat", "gradients left out", dtypes="f32")
    assert found.verdict == "incomplete" and found.status == 3 and any("dq is missing" in g for g in found.gaps)
    assert run("cheat", "gradients left out", dtypes="f32", require="forward").right


def test_the_smallest_failing_input_is_saved(tmp_path):
    path = tmp_path / "case"
    found = run("cheat", "heads in turn", dtypes="f32", output=path)
    assert found.case == str(path) and not softdelta.verify(path).right
    assert "value_head_modulo" in " ".join(found.diagnosis), str(found)


def test_the_program(tmp_path):
    tail = ["--op", "kda", "--dtypes", "f32", "--without", ",".join(SMALL), "--budget", "600"]
    assert softdelta.audit.main([named("right", "steps"), *tail, "--junit", str(tmp_path / "j")]) == 0
    assert ElementTree.parse(tmp_path / "j").getroot().get("failures") == "0"
    assert softdelta.audit.main(["no_such_module:f", *tail]) == 2


def test_what_cannot_be_audited_is_refused():
    with pytest.raises(ValueError, match="another process cannot import"):
        softdelta.audit(lambda q: q, op="kda")
    with pytest.raises(ValueError, match="op is 'softmax'"):
        softdelta.audit(print, op="softmax")
    with pytest.raises(ValueError, match="dtypes holds 'f64'"):
        softdelta.audit(print, op="kda", dtypes="f64")
    assert softdelta.audit(lambda q, k, v, g, beta, **_: q.no_such_thing, op="kda", isolate=False, seed=1,
                           output=False).verdict == "wrong"


def test_a_dead_process_is_a_fault(tmp_path):
    (tmp_path / "dead.py").write_text("import os\ndef kernel(**inputs):\n    os.abort()\n")
    found = softdelta.audit(f"{tmp_path / 'dead.py'}:kernel", op="kda", seed=1, output=False, dtypes="f32",
                            without=[*SMALL, "views", "exact", "length 65", "length 63"])
    assert found.verdict == "wrong" and "its process ended with signal 6" in str(found)
