"""Models of transformers whose sequences ranks share (gloo), against one process."""
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.20")
if not torch.distributed.is_available():
    pytest.skip("torch.distributed is not here", allow_module_level=True)

import ranks  # noqa: E402
import ranks_models  # noqa: E402

ranks.preload("transformers.models.kimi_linear.modeling_kimi_linear", "softdelta.transformers")


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
def test_a_training_step_is_that_of_one_process(name):
    ranks.run(2, ranks_models.check_model, name, ("relay", "scan", "auto"))


def test_attention_by_name():
    assert max(ranks.run(2, ranks_models.off_by_name)) < 1e-5


def test_what_ranks_cannot_share_is_refused():
    for errors in ranks.run(2, ranks_models.refusals, "kimi_linear"):
        for error, expected in zip(errors, ("a cache is used", "attention_mask is given",
                                            "rank 0: ValueError: attention_mask is given", "sequences are packed",
                                            "expected disable()", "no error"), strict=True):
            assert expected in error


def test_a_model_learns_the_same_on_any_number_of_ranks():
    alone, = ranks.run(1, ranks_models.trained, "relay")
    assert alone[-1] < 0.8 * alone[0]
    for size, method, limit in ((4, "relay", 1e-6), (2, "scan", 1e-5)):
        for losses in ranks.run(size, ranks_models.trained, method):
            torch.testing.assert_close(losses, alone, rtol=limit, atol=0)
