"""softdelta.torch.distributed on gloo: processes on this machine, each of which holds its part against one process."""
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch.distributed is not here", allow_module_level=True)

import ranks  # noqa: E402
import ranks_agree  # noqa: E402
import ranks_attention  # noqa: E402
import ranks_delta  # noqa: E402
import ranks_faults  # noqa: E402
import ranks_gradients  # noqa: E402
import ranks_memory  # noqa: E402


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_delta_rules_are_those_of_one_process(size):
    ranks.run(size, ranks_delta.check_truth, range(7 if size < 8 else 4), ("relay", "scan", "heads", "auto"))


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relay_and_heads_keep_the_bits(size, dtype):
    ranks.run(size, ranks_delta.check_bits, range(5), dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_attention_is_that_of_one_process(size):
    ranks.run(size, ranks_attention.check_truth, range(10 if size < 8 else 6), ("ring", "heads", "auto"))


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_by_heads_keeps_the_bits(size, dtype):
    ranks.run(size, ranks_attention.check_bits, range(5), dtype)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_ring_keeps_keys_of_its_forward_pass(size, dtype):
    ranks.run(size, ranks_attention.check_kept_keys, dtype)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_short_convolutions_take_rows_of_ranks_before(size):
    ranks.run(size, ranks_attention.check_convolution, range(20))


@pytest.mark.parametrize("method", ["scan", "relay"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_of_ranks_are_judged_right(dtype, method):
    found = ranks.run(4, ranks_faults.judged, range(5), dtype, method)[0]
    assert len(found) == 5
    for verdict, report in found:
        assert verdict == "right", report


@pytest.mark.parametrize("method", ["relay", "scan", "heads"])
def test_gradcheck_of_delta_rules_across_ranks(method):
    ranks.run(2, ranks_gradients.check_delta_rules, method)


@pytest.mark.parametrize("method", ["ring", "heads"])
def test_gradcheck_of_attention_across_ranks(method):
    ranks.run(2, ranks_gradients.check_attention, method)


def test_gradcheck_of_convolutions_across_ranks():
    ranks.run(2, ranks_gradients.check_convolution)


@pytest.mark.parametrize("method", ["relay", "scan"])
def test_memory_does_not_grow_with_the_tokens(method):
    for mebibytes in ranks.run(2, ranks_memory.needed, 600_000, method):
        assert mebibytes <= 64


FAULTS = [
    "ValueError: rank 1 has v (torch.float32, 'cpu', torch.Size([1, 2, 3])), rank 0 has (torch.float32, 'cpu', torch.Size([1, 2, 4]))",
    "ValueError: rank 1: ValueError: beta has shape [1, 2, 2], expected 3 tokens in dimension 1, as q",
    "ValueError: rank 1: ValueError: q is None, expected a tensor [B, T, H, K]",
    "ValueError: rank 1: ValueError: g is missing, expected a tensor: kda has a gate",
    "ValueError: rank 1 has scale 0.5, rank 0 has nan",
    "ValueError: rank 0: ValueError: method is 'fast', expected one of auto, relay, scan, heads",
    "no error",
    "ValueError: cu_seqlens ends with 7, expected 6, the tokens of all ranks",
    "ValueError: rank 1 has k (torch.bfloat16, 'cpu', torch.Size([1, 2, 4])), rank 0 has (torch.float32, 'cpu', torch.Size([1, 2, 4]))",
    "ValueError: rank 1: ValueError: v has 2 rows, expected 3, as k",
    "ValueError: rank 1 has causal 1, rank 0 has 0",
    "ValueError: rank 1: mask has 5 keys, expected 1 or 6, those of all ranks",
    "ValueError: ranks have [3, 3] rows, expected one even number on all of them: order is zigzag",
    "Unsupported: top_w selects among all keys, expected method heads",
    "Unsupported: rank 1: Unsupported: a row has |lse| beyond 1024, where f32 does not tell what each rank adds; expected method heads",
    "ValueError: rank 1 has weight (torch.float32, 'cpu', torch.Size([8, 5])), rank 0 has (torch.float32, 'cpu', torch.Size([8, 4]))",
    "ValueError: rank 1: bias has 6 keys, expected 1, as on rank 0: all ranks have the same row",
    "ValueError: rank 1: ValueError: q lies on meta, expected cpu",
    "ValueError: rank 1: ValueError: beta lies on meta, expected cpu",
    "ValueError: rank 1: ValueError: q lies on meta, expected cpu",
    "TypeError: rank 1: TypeError: q is ndarray, expected a torch.Tensor with memory of its own",
    "MemoryError: rank 1: MemoryError: says the argument",
    "ValueError: rank 1 records no gradients (torch.no_grad, or a tensor of inference mode), expected them: q of rank 0 requires one",
    "ValueError: rank 1 has call attention, rank 0 has delta_rule",
    "ValueError: rank 1: ValueError: cp_context is Context without cu_seqlens, expected what build_cp_context returns",
    "ValueError: cp_context.is_last_rank is True on rank 0, expected False: the last sequence goes on behind it",
    "ValueError: rank 1: ValueError: order is 'odd', expected one of contiguous, zigzag",
    "Unsupported: rank 1: Unsupported: a call that ranks share stands in torch.func or forward mode, expected backward()",
    "no error",
    "no error",
]


def test_what_one_rank_has_wrong_every_rank_says():
    for rank, errors in enumerate(ranks.run(2, ranks_faults.faults)):
        assert len(errors) == len(FAULTS)
        for error, expected in zip(errors, FAULTS):
            assert expected in error, f"on rank {rank}"


@pytest.mark.parametrize("method", ranks_agree.FAMILIES)
def test_ranks_whose_operands_differ_are_right_or_say_the_same(method):
    """A hang fails after the timeout."""
    for drawn in ranks.run(2, ranks_agree.check, range(6 * len(ranks_agree.CHANGES)), method, timeout=20):
        assert all(drawn.values())


@pytest.mark.parametrize("method, wanted", [
    *((method, ({"initial_state"}, set())) for method in ("relay", "scan", "heads")),
    *((method, ({"q"}, set())) for method in ("relay", "scan", "heads", "ring", "attention by heads")),
    *((method, (set(), {"bias"})) for method in ("ring", "attention by heads")),
    ("attention by heads", ({"q", "sink"}, {"sink"})),
    ("convolution", ({"x", "weight"}, {"weight"})),
    ("convolution", ({"weight"}, set())),
])
def test_gradients_that_one_rank_alone_wants(method, wanted):
    for seen in ranks.run(2, ranks_agree.check_gradients, range(20), method, wanted, timeout=20):
        assert seen >= 3


@pytest.mark.parametrize("method", ["relay", "scan"])
def test_sums_over_segments_are_rounded_once(method):
    ranks.run(1, ranks_delta.check_sums, range(10), method)


def test_a_killed_rank_is_an_error_on_every_other():
    found = ranks.run(3, ranks_faults.killed, 2, timeout=8, expect=2)
    for message, seconds in found[:2]:
        assert "of 3 was left by another rank" in message, message
        assert seconds < 12


@pytest.mark.parametrize("size", [1, 2, 4])
def test_functions_of_flash_linear_attention_take_its_context(size):
    ranks.run(size, ranks_delta.check_context, range(8))
