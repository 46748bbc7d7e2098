"""Packed sequences: where each begins in its row, as transformers' keyword arguments say it."""
import torch


def sequence_bounds(arguments):
    """cu_seqlens [N+1] from the arguments of a layer, or None when rows are single sequences.

    Modeling files pass cu_seqlens, or leave cu_seq_lens_q of the data collator among other arguments; seq_idx
    [1,T] numbers the sequence of every token.
    """
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        if arguments.get(name) is not None:
            return arguments[name]
    seq_idx = arguments.get("seq_idx")
    if seq_idx is None:
        return None
    if seq_idx.shape[0] != 1:
        raise ValueError(f"seq_idx has {seq_idx.shape[0]} rows, expected 1")
    starts = torch.nonzero(seq_idx[0, 1:] != seq_idx[0, :-1]).flatten() + 1
    return torch.cat([starts.new_zeros(1), starts, starts.new_full((1,), seq_idx.shape[1])])
