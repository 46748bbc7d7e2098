"""softdelta's kernels in the models of an unmodified transformers (5.20 or later), on CPUs.

    import softdelta.transformers

    print(softdelta.transformers.enable())      # what was replaced
    ...                                         # models built before and after use the kernels
    softdelta.transformers.disable()

    with softdelta.transformers.enable():       # or for a while
        ...

Replaced are the functions that a modeling file calls by name, so models of any age follow at once:

- the gated delta rule, Kimi delta attention, the scan of Mamba-2 and lightning attention, whole sequences and single steps,
  forward and backward;
- the short causal convolution before them, of whole sequences and of single tokens, and the gated norm behind them;
  with Mamba-2 and lightning attention the norms between layers, too;
- "sdpa" in the AttentionInterface; and attn_implementation="softdelta" is there to be asked for, by models that have
  eager attention alone among others.

A call that is outside what the kernels do goes back to the function of transformers, with one warning a reason.

Sequences that outgrow one process are shared by the ranks of a torch.distributed group:

    with softdelta.transformers.enable(group=torch.distributed.group.WORLD):
        loss = model(**softdelta.transformers.shard(input_ids, labels)).loss       # this rank's share
"""
import difflib
import importlib
import importlib.util
from dataclasses import dataclass
from typing import Callable

from . import attention, delta_rules, gated_norm, lightning, masks, short_convolution, state_space

MAMBA2 = ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2")
MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "qwen4_exp", "lara_mini",  # gated delta rule
          "kimi_linear", "glm5_next", "bailing_hybrid",                                     # Kimi delta attention
          *MAMBA2,
          "minimax",                                                                        # lightning attention
          "lfm2", "lfm2_moe", "lfm3", "inkling", "inkling2", "inkling2_loop",               # the short convolution alone
          "falcon_mamba", "jamba", "mamba", "zamba")

# name in a modeling file → maker of its replacement
REPLACEMENTS = {
    "torch_chunk_gated_delta_rule": delta_rules.chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": delta_rules.recurrent_gated_delta_rule,
    "chunk_kimi_delta_attention": delta_rules.chunk_kda,
    "recurrent_kimi_delta_attention": delta_rules.recurrent_kda,
    "mamba2_chunk_scan": state_space.chunk_scan,
    "mamba2_selective_state_update": state_space.state_update,
    "causal_conv1d_fn": short_convolution.causal_conv1d,
    "causal_conv1d_update": short_convolution.causal_conv1d_update,
}

# end of a class's name in a modeling file, and a name that its __init__ uses → maker of the replacement of its forward:
# Mamba's RMSNormGated has the gate first, and groups
CLASSES = {("RMSNormGated", "activation"): gated_norm.forward,
           ("RMSNormGated", "group_size"): gated_norm.gate_first,
           ("LightningAttention", "get_slope_rate"): lightning.forward}
# the same of models whose norms between layers take a sixth of a prefill
NORMED = (*MAMBA2, "minimax")
NORMS = {("RMSNorm", "variance_epsilon"): gated_norm.ungated}

_replaced = {}  # (where, name) → Replacement


class ClassNamespace:
    """What a class holds itself, as a dictionary that can be written to."""

    def __init__(self, of):
        self.of = of

    def get(self, name):
        return vars(self.of).get(name)

    def __setitem__(self, name, value):
        setattr(self.of, name, value)

    def __delitem__(self, name):
        delattr(self.of, name)


@dataclass(frozen=True)
class Replacement:
    """One function of transformers, the one in its place, and the dictionary that names it."""
    where: str
    name: str
    namespace: dict | ClassNamespace
    original: Callable | None  # None: the name is new
    replacement: Callable


class Enabled:
    """What one call of enable() replaced; as a context manager it puts that back on exit."""

    def __init__(self, replaced):
        self.replaced = tuple(replaced)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        _restore(self.replaced)

    def __str__(self):
        lines = {}
        for r in self.replaced:
            lines.setdefault(r.where, []).append(r.name)
        if not lines:
            return "softdelta: nothing to replace that is not replaced already"
        return "\n".join(f"softdelta in {where}: {', '.join(names)}" for where, names in lines.items())


def enable(models=MODELS, attention=True, group=None, method="auto"):
    """Lets transformers' models call softdelta on CPU tensors, models that exist and those to come.

    models: names of model folders in transformers.models, or one of them. Those of MODELS that this transformers lacks are
    passed over.
    attention: whether "sdpa" in the AttentionInterface, which serves every model, is replaced too, and "softdelta"
    offered as an attn_implementation.
    group: a ProcessGroup or a DeviceMesh of one dimension whose ranks share every sequence, a prefill or a training step
    without a cache or padding (docs/distributed.md): every rank calls its model with what shard() gives it.
    method: of softdelta.torch.distributed.delta_rule, with a group.
    Returns an Enabled; its text lists what was replaced. Raises ValueError for a name that is no model, and with a group
    where something is replaced already.
    """
    models = tuple(models) if hasattr(models, "__iter__") and not isinstance(models, str) else (models,)
    for model in models:
        _expect_model(model)
    if group is not None and _replaced:
        raise ValueError("softdelta is enabled already, expected disable() before enable(group=…)")
    done = []
    for model in models:
        namespace = _modeling(model)
        for name, make in (REPLACEMENTS if group is None else _sharded().replacements(group, method)).items():
            if hasattr(namespace, name):
                done += _replace(namespace.__name__, vars(namespace), name, make)
        classes = CLASSES | (NORMS if model in NORMED else {}) | ({} if group is None else _sharded().classes(group))
        for of, make in _classes(namespace, classes):
            done += _replace(f"{namespace.__name__}.{of.__name__}", ClassNamespace(of), "forward", make)
    if attention:
        done += _replace_attention(group)
    return Enabled(done)


def disable():
    """Puts every function of transformers back."""
    _restore(list(_replaced.values()))


def _classes(namespace, classes):
    """Classes of a modeling file whose forward is replaced, each with the maker of its replacement."""
    return [(of, make) for (end, used), make in classes.items() for of in vars(namespace or object).values()
            if isinstance(of, type) and of.__module__ == namespace.__name__ and of.__name__.endswith(end)
            and "forward" in vars(of) and used in of.__init__.__code__.co_names]


def _expect_model(name):
    """Raises ValueError for what is neither in MODELS nor a model of this transformers."""
    if name in MODELS or isinstance(name, str) and name.isidentifier() and _modeling(name):
        return
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    near = difflib.get_close_matches(str(name), {*MODELS, *CONFIG_MAPPING_NAMES}, 1)
    raise ValueError(f"models contains {name!r}, expected names of folders in transformers.models"
                     + (f": {near[0]!r}?" if near else ""))


def _modeling(model):
    """The modeling file of a model, or None where this transformers lacks it."""
    name = f"transformers.models.{model}.modeling_{model}"
    try:
        return importlib.import_module(name) if importlib.util.find_spec(name) else None
    except ModuleNotFoundError:
        return None


def shard(input_ids, labels=None, group=None):
    """What this rank calls its model with, from a batch [B, T] that every rank has: input_ids and position_ids of its
    tokens, the first ones on the first rank; with labels also labels, shift_labels and num_items_in_batch, by which the
    loss is this rank's share. The loss and its gradients are sums over the ranks of the group (None: all processes).
    """
    return _sharded().shard(input_ids, labels, group)


def _sharded():
    from . import sharded  # torch.distributed is not everywhere

    return sharded


def _replace_attention(group):
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    functions, of_masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    sdpa, named = attention.sdpa, attention.named
    if group is not None:
        sdpa = named = _sharded().attention(group)
    return (_replace("AttentionInterface", functions, "sdpa", sdpa)
            + _replace("AttentionInterface", functions, "softdelta", named)
            + _replace("AttentionMaskInterface", of_masks, "softdelta", masks.make))


def _replace(where, namespace, name, make):
    if (where, name) in _replaced:
        return []
    original = namespace.get(name)
    r = _replaced[where, name] = Replacement(where, name, namespace, original, make(original))
    namespace[name] = r.replacement
    return [r]


def _restore(replaced):
    for r in replaced:
        if _replaced.pop((r.where, r.name), None):
            if r.original is None:
                del r.namespace[r.name]
            else:
                r.namespace[r.name] = r.original
