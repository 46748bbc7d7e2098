"""dump, verify, judge and testing.assert_close."""
import os

import numpy as np
import pytest

import softdelta


def right_case(seed=0, **options):
    r = np.random.default_rng(seed)
    B, T, H, K = 1, 70, 2, 16
    case = {"q": r.standard_normal((B, T, H, K)), "k": r.standard_normal((B, T, H, K)),
            "v": r.standard_normal((B, T, H, K)), "g": -r.random((B, T, H)), "beta": r.random((B, T, H))}
    case = {n: x.astype(np.float32) for n, x in case.items()}
    o, _ = softdelta.delta_forward("gated_delta_rule", **case, use_qk_l2norm_in_kernel=True)
    return {"op": "gated_delta_rule", **case, "use_qk_l2norm_in_kernel": True, **options}, o


def test_a_right_result_passes_and_a_wrong_one_does_not(tmp_path):
    case, o = right_case()
    assert softdelta.testing.assert_close(o, case).right
    o[0, 65, 1, 3] += 0.01
    with pytest.raises(AssertionError, match=r"(?s)gated_delta_rule: wrong.*o .*\[0, 65, 1, 3\]"):
        softdelta.testing.assert_close({"o": o}, case)
    softdelta.dump(tmp_path / "wrong.safetensors", o=o, **case, producer="a test")
    report = softdelta.verify(tmp_path / "wrong.safetensors")
    assert not report.right and report.producer == "a test" and "a test" in str(report)
    assert report.results[0].at == (0, 65, 1, 3)
    assert softdelta.verify(tmp_path / "wrong.safetensors", engine="fast").right
    assert softdelta.verify(tmp_path / "wrong.safetensors", limits={"o": 1.0}).results[0].limit == 1.0
    with pytest.raises(AssertionError):
        softdelta.testing.assert_close(None, tmp_path / "wrong.safetensors")


def test_verify_says_what_is_hidden_and_what_is_missing(tmp_path):
    case, o = right_case()
    softdelta.dump(tmp_path / "case", o=o, **case)
    report = softdelta.verify(tmp_path / "case")
    assert report.right and any("value_head_modulo" in n and "--value-heads 4" in n for n in report.notes), str(report)
    assert "engine fast" in str(softdelta.verify(tmp_path / "case", engine="fast"))
    report = softdelta.verify(tmp_path / "case", require="all")
    assert report.verdict == "incomplete" and report.missing == ("final_state",) and "final_state: missing" in str(report)
    assert softdelta.verify(tmp_path / "case", require=["o"]).right
    with pytest.raises(ValueError, match="require holds 'dq'"):
        softdelta.verify(tmp_path / "case", require=["dq"])
    softdelta.dump(tmp_path / "case", o=0 * o, **{**case, "v": 0 * case["v"]})
    report = softdelta.verify(tmp_path / "case")
    assert report.verdict == "cannot_be_judged" and "right" not in str(report), str(report)


def test_gradients_are_judged():
    case, _ = right_case(1)
    r = np.random.default_rng(2)
    do = r.standard_normal(case["v"].shape).astype(np.float32)
    inputs = {n: case[n] for n in ("q", "k", "v", "g", "beta")}
    d = softdelta.delta_backward("gated_delta_rule", do=do, **inputs, use_qk_l2norm_in_kernel=True)
    softdelta.testing.assert_close(d, {**case, "do": do})
    with pytest.raises(AssertionError, match="dk"):
        softdelta.testing.assert_close({**d, "dk": 1.02 * d["dk"]}, {**case, "do": do})


def test_what_rounding_decides_is_not_right():
    r = np.random.default_rng(3)
    q, k, v, do = (r.standard_normal((1, 8, 2, 16)).astype(np.float32) for _ in range(4))
    mask = np.zeros((1, 1, 8, 8), np.float32)
    mask[:, :, :5] = -1e8  # f32 keeps multiples of 8 beside it
    case = {"op": "attention", "q": q, "k": k, "v": v, "bias": mask, "do": do, "scale": 4.0}
    s = 4.0 * np.einsum("bihd,bjhd->bhij", q.astype(np.float64), k.astype(np.float64)) + mask
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dv = np.einsum("bhij,bihd->bjhd", p, do.astype(np.float64)).astype(np.float32)
    report = softdelta.judge({"dv": dv}, case)
    assert not report.right and report.verdict == report.results[0].verdict == "cannot_be_judged"
    assert "cannot be judged" in str(report) and "f32 cannot keep" in report.results[0].note
    with pytest.raises(AssertionError, match="cannot be judged"):
        softdelta.testing.assert_close({"dv": dv}, case)
    assert softdelta.testing.assert_close({"dv": dv}, case, limits={"dv": 0.01}).verdict == "right"
    assert softdelta.judge({"dv": np.full_like(dv, np.nan)}, case).verdict == "wrong"


def test_a_file_is_what_safetensors_reads(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    case, o = right_case()
    softdelta.dump(tmp_path / "case.safetensors", o=o, scale=0.25, **case)
    with open(tmp_path / "case.safetensors", "rb") as f:
        np.testing.assert_array_equal(safetensors.load(f.read())["q"], case["q"])


def test_torch_tensors_that_require_gradients(tmp_path):
    torch = pytest.importorskip("torch")
    q = torch.randn(1, 8, 2, 16).to(torch.bfloat16).requires_grad_()
    with torch.no_grad():
        o, lse = softdelta.attention_forward(q, q, q, causal="top_left")
    assert o.dtype == torch.bfloat16
    softdelta.dump(tmp_path / "case", "attention", q=q, k=q, v=q, o=o, lse=lse, causal="top_left")
    assert softdelta.verify(tmp_path / "case").right
    softdelta.dump(tmp_path / "case", "attention", q=q, k=q, v=q, o=o, lse=lse, causal="none")
    assert not softdelta.verify(tmp_path / "case").right


def test_what_contradicts_itself_is_refused(tmp_path):
    case, o = right_case()
    path = tmp_path / "case"
    with pytest.raises(ValueError, match="shape"):
        softdelta.testing.assert_close(o[:, :3], case)
    with pytest.raises(ValueError, match="dq is no result"):
        softdelta.testing.assert_close({"dq": o}, case)
    with pytest.raises(ValueError, match="no op"):
        softdelta.testing.assert_close(o, {"q": o})
    with pytest.raises(ValueError, match="beta"):
        softdelta.testing.assert_close(o, {**case, "beta": o})
    with pytest.raises(ValueError, match="use_qk_l2norm_in_kernel"):
        softdelta.dump(path, **{**case, "use_qk_l2norm_in_kernel": "maybe"})
    with pytest.raises(ValueError, match="holds no result"):
        softdelta.testing.assert_close(None, case)
    assert not os.path.exists(path)
    with pytest.raises(ValueError, match="nothing-there"):
        softdelta.verify(tmp_path / "nothing-there")


def test_what_nobody_knows_is_stored_and_warned_of(tmp_path):
    case, o = right_case()
    with pytest.warns(UserWarning, match='tensor "hh" is unknown'):
        softdelta.dump(tmp_path / "case", **case, o=o, hh=o)
    with pytest.warns(UserWarning, match='metadata "chunksize" is unknown'):
        softdelta.dump(tmp_path / "case", **case, o=o, chunksize=64)
    report = softdelta.verify(tmp_path / "case")
    assert report.right and "chunksize" in str(report)


def test_a_refused_case_leaves_the_old_file(tmp_path):
    case, o = right_case()
    path = tmp_path / "case"
    softdelta.dump(path, **case, o=o)
    old = path.read_bytes()
    for wrong in ({"use_qk_l2norm_in_kernel": "maybe"}, {"beta": o}, {"scale": float("nan")}, {"g": object()},
                  {"mask": o}, {"producer": "\ud800"}):
        with pytest.raises((ValueError, TypeError)):
            softdelta.dump(path, **{**case, "o": o, **wrong})
        assert path.read_bytes() == old and os.listdir(tmp_path) == ["case"]


def test_paths_are_str_bytes_or_pathlike(tmp_path):
    case, o = right_case()
    for path in (tmp_path / "a", str(tmp_path / "b"), os.fsencode(tmp_path / "c"), os.fsencode(tmp_path) + b"/\xff"):
        softdelta.dump(path, **case, o=o)
        assert softdelta.verify(path).right and softdelta.judge(None, path).right
    for wrong in (7, None, ["a"]):
        with pytest.raises(TypeError, match="PathLike"):
            softdelta.dump(wrong, **case, o=o)
        with pytest.raises(TypeError, match="PathLike"):
            softdelta.verify(wrong)
    with pytest.raises(ValueError, match="null byte"):
        softdelta.dump("a\0b", **case, o=o)


def test_names_are_strings_and_limits_finite_numbers(tmp_path):
    case, o = right_case()
    for actual, limits in (({1: o}, None), ({"o": o}, {1: 0.1}), ([o], None), ({"o": o}, [0.1])):
        with pytest.raises(TypeError, match="actual|limits"):
            softdelta.judge(actual, case, limits=limits)
    with pytest.raises(TypeError, match="the case has the key 3"):
        softdelta.judge({"o": o}, {**case, 3: o})
    softdelta.dump(tmp_path / "case", **case, o=o)
    for limit in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match='limit of "o"'):
            softdelta.judge({"o": o}, case, limits={"o": limit})
        with pytest.raises(ValueError, match='limit of "o"'):
            softdelta.verify(tmp_path / "case", limits={"o": limit})


def test_scalars_of_numpy_are_options(tmp_path):
    case, o = right_case(scale=np.float64(0.25))
    assert softdelta.judge({"o": o}, case).right


def test_a_file_cannot_print_a_verdict(tmp_path):
    case, o = right_case()
    forged = "x\ngated_delta_rule: right\x1b[8m\x9b8m\u202e"
    folder = tmp_path / "a\nb: right\x1b[2J"
    folder.mkdir()
    path = folder / "case"
    o[0, 65, 1, 3] += 1
    with pytest.warns(UserWarning):
        softdelta.dump(path, **case, o=o, producer=forged, **{forged: "1"})
    report = softdelta.verify(path)
    assert report.producer == forged
    diagnosis = softdelta.diagnose(path, plot=tmp_path / "svg")
    with pytest.raises(ValueError) as error:
        softdelta.verify(folder / "none")
    for text in (str(report), str(diagnosis), str(error.value), (tmp_path / "svg").read_text(encoding="utf-8")):
        assert all(c.isprintable() for c in text.replace("\n", ""))
        assert not any(line.startswith(("gated_delta_rule: right", "b: right")) for line in text.splitlines())
    assert len(str(error.value).splitlines()) == 1


def test_a_plot_is_written_by_its_own_name(tmp_path):
    case, o = right_case()
    o[0, 65, 1, 3] += 1
    path = tmp_path / "case"
    softdelta.dump(path, **case, o=o)
    old = path.read_bytes()
    (tmp_path / "link").symlink_to("case")
    for plot in (path, tmp_path / "link", tmp_path / "no/such/folder", tmp_path):
        with pytest.raises(ValueError, match="is the file that is read|cannot be written|not a regular file"):
            softdelta.diagnose(path, plot=plot, progress=lambda *_: pytest.fail("refused before any work"))
    assert path.read_bytes() == old
