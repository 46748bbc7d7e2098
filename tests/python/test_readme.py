"""The README's examples in Python run as they are printed. tests/abi/consume compares the one in C++."""
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

README = Path(__file__).resolve().parents[2] / "README.md"


def examples():
    return re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)


def test_a_model_generates(capsys):
    import softdelta.transformers

    try:
        exec(examples()[0], {})
    finally:
        softdelta.transformers.disable()
    out = capsys.readouterr().out
    assert "kimi_linear" in out
    assert len(re.findall(r"\d+", out.partition("tensor(")[2])) == 16


def test_the_kernel_in_question_is_wrong_and_the_mistake_is_named():
    with pytest.raises(AssertionError, match="one mistake explains it, scores_without_scale"):
        exec(examples()[1], {})


def test_there_are_no_other_examples():
    assert len(examples()) == 2
