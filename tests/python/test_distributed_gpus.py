"""softdelta.torch.distributed on two GPUs (NCCL), against one. Skipped with fewer."""
import pytest

torch = pytest.importorskip("torch")

from softdelta import _native  # noqa: E402

if "cuda" not in _native.engines() or torch.cuda.device_count() < 2:
    pytest.skip("fewer than two GPUs, or a package without the engine for them", allow_module_level=True)

import ranks  # noqa: E402
import ranks_attention  # noqa: E402
import ranks_delta  # noqa: E402


@pytest.mark.parametrize("method", ["relay", "scan", "heads", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delta_rules_are_those_of_one_gpu(dtype, method):
    ranks.run(2, ranks_delta.check_gpus, range(6), dtype, (method,), backend="nccl")


@pytest.mark.parametrize("bound", [False, True])
def test_transfers_of_ranks_have_priority(bound):
    ranks.run(2, ranks_delta.check_priority, backend="nccl", bound=bound)


@pytest.mark.parametrize("method", ["ring", "heads", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_that_of_one_gpu(dtype, method):
    ranks.run(2, ranks_attention.check_gpus, range(6), dtype, (method,), backend="nccl")
