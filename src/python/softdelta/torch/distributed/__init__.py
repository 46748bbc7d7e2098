"""One sequence on many ranks of a torch.distributed process group, with gradients (docs/distributed.md).

Each rank calls the same function with its part of the sequence: rank 0 has the first tokens, the next rank those that
follow; a part may have any length, 0 too. Collectives are those of the group. Every rank must run its backward pass,
for that communicates too: a loss that some rank does not have is 0 times its o there.

Tensors that ranks share (parameters of gates, sink, a bias without rows of its own) get this rank's share of their
gradient. The sum over the ranks is the gradient, as data parallelism takes it.
"""
from ._attention import attention
from ._convolution import short_convolution
from ._delta_rule import delta_rule
from ._shards import shard, unshard

__all__ = ["attention", "delta_rule", "shard", "short_convolution", "unshard"]
