#!/usr/bin/env python3
"""Whole models of an unmodified transformers, with softdelta's kernels and without, in one process, taking turns.

    pip install '.[torch]' transformers
    bench/models.py --threads 2 --json models.json

Models have random weights and pinned configurations. In every run the replaced functions are timed where they are
called, backward passes included; what Amdahl's law predicts from them for the whole is compared with what happened.
The parts of the model that are left are timed by hooks, forward only."""
import argparse
import json
import statistics
import sys
import time
import warnings
from collections import defaultdict

import torch
import transformers

import softdelta.transformers

VOCABULARY = 512

CONFIGURATIONS = {
    "qwen3_next": dict(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, hidden_act="silu", max_position_embeddings=32768, initializer_range=0.02,
        rms_norm_eps=1e-6, use_cache=True, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25),
        attention_bias=False, attention_dropout=0.0, head_dim=64, linear_conv_kernel_dim=4, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_num_key_heads=8, linear_num_value_heads=16, decoder_sparse_step=1,
        moe_intermediate_size=128, shared_expert_intermediate_size=128, num_experts_per_tok=2, num_experts=4,
        norm_topk_prob=True, output_router_logits=False, router_aux_loss_coef=0.001, mlp_only_layers=[],
        layer_types=["linear_attention"] * 3 + ["full_attention"], pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "kimi_linear": dict(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1024, moe_intermediate_size=128,
        num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=16, n_shared_experts=1,
        output_router_logits=False, routed_scaling_factor=2.446, kv_lora_rank=128, q_lora_rank=None,
        qk_rope_head_dim=64, v_head_dim=128, qk_nope_head_dim=128, n_group=1, topk_group=1, num_experts_per_tok=2,
        norm_topk_prob=True, hidden_act="silu", max_position_embeddings=1048576, initializer_range=0.02,
        rms_norm_eps=1e-5, use_cache=True, pad_token_id=0, bos_token_id=1, eos_token_id=2, pretraining_tp=1,
        tie_word_embeddings=False, attention_bias=False, attention_dropout=0.0, num_local_experts=4,
        mlp_layer_types=["dense"] + ["sparse"] * 3, layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_head_dim=128, linear_num_heads=16, linear_conv_kernel_dim=4),
    "mamba2": dict(
        vocab_size=VOCABULARY, hidden_size=512, num_heads=16, head_dim=64, state_size=128, n_groups=1,
        num_hidden_layers=4, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "nemotron_h": dict(
        vocab_size=VOCABULARY, hidden_size=512, layers_block_type=["linear_attention", "mlp"] * 3 + ["full_attention", "mlp"],
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, intermediate_size=1024, mamba_num_heads=16,
        mamba_head_dim=64, ssm_state_size=128, n_groups=1, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "granitemoehybrid": dict(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=128, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=512,
        layer_types=["linear_attention"] * 3 + ["full_attention"], mamba_n_heads=16, mamba_d_state=128,
        pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "minimax": dict(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=128, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["linear_attention"] * 3 + ["full_attention"], pad_token_id=0, bos_token_id=1, eos_token_id=2),
}
CLASSES = {"qwen3_next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
           "kimi_linear": (transformers.KimiLinearConfig, transformers.KimiLinearForCausalLM),
           "mamba2": (transformers.Mamba2Config, transformers.Mamba2ForCausalLM),
           "nemotron_h": (transformers.NemotronHConfig, transformers.NemotronHForCausalLM),
           "granitemoehybrid": (transformers.GraniteMoeHybridConfig, transformers.GraniteMoeHybridForCausalLM),
           "minimax": (transformers.MiniMaxConfig, transformers.MiniMaxForCausalLM)}
DELTA_RULE = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "chunk_kimi_delta_attention",
              "recurrent_kimi_delta_attention", "mamba2_chunk_scan", "mamba2_selective_state_update", "lightning attention")

# (model, work) → floors: the delta rule's ratio, the whole model's
FLOORS = {("qwen3_next", "prefill"): (6, 1.6), ("kimi_linear", "prefill"): (80, 10),
          ("qwen3_next", "train"): (None, 1.6), ("kimi_linear", "train"): (None, 10),
          ("qwen3_next", "decode"): (5, 1), ("kimi_linear", "decode"): (5, 1),
          **{(model, work): (None, 2) for model in ("mamba2", "nemotron_h", "granitemoehybrid", "minimax")
             for work in ("prefill", "train")}}
AMDAHL_FLOOR = 0.9

PARTS = (("norm", "RMSNorm"), ("experts", "MoE"), ("experts", "SparseMoeBlock"),
         ("projections", "Linear"), ("forget gate", "ForgetGate"), ("dense MLP", "MLP"))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side; the median counts")
    parser.add_argument("--patience", type=float, default=5, metavar="SECONDS", help="what takes longer is measured once")
    parser.add_argument("--prefill", type=int, default=2048, metavar="TOKENS")
    parser.add_argument("--train", type=int, default=1024, metavar="TOKENS")
    parser.add_argument("--decode", type=int, default=64, metavar="TOKENS")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--only", action="append", metavar="MODEL|WORK", help="rows whose name contains this")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def build(name, dtype=torch.float32):
    configuration, model = CLASSES[name]
    torch.manual_seed(0)
    return model(configuration(**CONFIGURATIONS[name])).to(dtype).eval()


# --- works: a function of no arguments that runs the model once
def prefill(model, tokens):
    ids = draw(tokens)

    def run():
        with torch.no_grad():
            model(ids, use_cache=False)

    return run


def train(model, tokens):
    ids, parameters = draw(tokens), list(model.parameters())

    def run():
        torch.autograd.grad(model(ids, labels=ids, use_cache=False).loss, parameters, allow_unused=True)

    return run


def decode(model, tokens):
    """Tokens one by one after a prompt of 64."""
    ids = draw(64 + tokens)
    with torch.no_grad():
        prompt = model(ids[:, :64], use_cache=True).past_key_values

    def run():
        cache = prompt  # a cache grows with every run; the delta rules' part does not, that of softmax attention little
        with torch.no_grad():
            for t in range(tokens):
                model(ids[:, 64 + t:65 + t], past_key_values=cache, use_cache=True)

    return run


def same_tokens(model, tokens):
    """Whether 16 greedy tokens after a prompt are the same with softdelta and without."""
    def generate():
        return model.generate(draw(tokens), max_new_tokens=16, do_sample=False, eos_token_id=None)

    plain = generate()
    with softdelta.transformers.enable():
        return torch.equal(plain, generate())


def draw(tokens):
    return torch.randint(3, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(1))


# --- time
def seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Begin(torch.autograd.Function):
    """Operands of a timed function; backward, the clock stops when all their gradients are there."""

    @staticmethod
    def forward(ctx, clock, *operands):
        ctx.clock = clock
        return tuple(x[...] for x in operands)  # strides stay

    @staticmethod
    def backward(ctx, *gradients):
        ctx.clock.stop()
        return None, *gradients


class End(torch.autograd.Function):
    """The result of a timed function; backward, the clock starts when its gradient arrives."""

    @staticmethod
    def forward(ctx, clock, result):
        ctx.clock = clock
        return result[...]

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.start()
        return None, gradient


class Clock:
    """Times a function inside the model, forward and backward."""

    def __init__(self, function):
        self.function, self.calls, self.total, self.since = function, 0, 0.0, 0.0

    def start(self):
        self.since = time.perf_counter()

    def stop(self):
        self.total += time.perf_counter() - self.since

    def __call__(self, *args, **kwargs):
        self.calls, self.last = self.calls + 1, (args, kwargs)
        operands = {k: x for k, x in (*enumerate(args), *kwargs.items())
                    if isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled()}
        if operands:
            operands = dict(zip(operands, Begin.apply(self, *operands.values())))
            args = [operands.get(i, x) for i, x in enumerate(args)]
            kwargs = {name: operands.get(name, x) for name, x in kwargs.items()}
        self.start()
        result = self.function(*args, **kwargs)
        self.stop()
        if not operands:
            return result
        return (End.apply(self, result[0]), *result[1:]) if isinstance(result, tuple) else End.apply(self, result)


def label(r):
    """What a replaced function is called here: that of a norm or a layer is the forward of its class."""
    if r.name == "forward":
        return "lightning attention" if r.where.endswith("LightningAttention") else "norm"
    return r.name


def timed(run, functions):
    """Seconds of one run, and {label: (calls, seconds)} of functions: [(replacement, function)]."""
    clocks = [Clock(function) for _, function in functions]
    before = [r.namespace.get(r.name) for r, _ in functions]
    for (r, _), clock in zip(functions, clocks):
        # a class makes a method of a function, not of another object
        r.namespace[r.name] = lambda *args, clock=clock, **kwargs: clock(*args, **kwargs)
    try:
        whole = seconds(run)
    finally:
        for (r, _), function in zip(functions, before):
            r.namespace[r.name] = function
    spent = defaultdict(lambda: (0, 0.0))
    for (r, _), clock in zip(functions, clocks):
        if clock.calls:
            calls, total = spent[label(r)]
            spent[label(r)] = (calls + clock.calls, total + clock.total)
    return whole, dict(spent)


def warm(run, r):
    """Seconds of one call of transformers' function and of ours, over and over on the last operands of a run."""
    clock = r.namespace[r.name] = Clock(r.original)
    run()
    r.namespace[r.name] = r.original
    args, kwargs = clock.last
    with torch.no_grad():
        return [statistics.median(seconds(lambda: f(*args, **kwargs)) for _ in range(500))
                for f in (r.original, r.replacement)]


def alternate(sides, rounds, patience):
    """Runs of sides in turn, after one turn that does not count unless it took too long to be repeated."""
    runs = [[side()] for side in sides]
    again = [[] if taken[0][0] < patience else taken for taken in runs]
    for _ in range(rounds):
        for side, taken, first in zip(sides, again, runs):
            if first[0][0] < patience:
                taken.append(side())
    return again


def median_run(runs):
    """The median of the whole time and of every function's."""
    functions = {name: (calls, statistics.median(functions[name][1] for _, functions in runs))
                 for name, (calls, _) in runs[0][1].items()}
    return statistics.median(whole for whole, _ in runs), functions


def parts(model, run, replaced):
    """Seconds of one run in the parts of a model that are not replaced, by the names of their classes."""
    spent, handles, start = defaultdict(float), [], {}
    for module in model.modules():
        part = next((part for part, suffix in PARTS if type(module).__name__.endswith(suffix)), None)
        if not part or vars(type(module)).get("forward") in replaced or any(module in outer.modules() for outer in start):
            continue  # an outer part counts it
        start[module] = 0.0

        def before(module, *_):
            start[module] = time.perf_counter()

        def after(module, *_, part=part):
            spent[part] += time.perf_counter() - start[module]

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    run()
    for handle in handles:
        handle.remove()
    return dict(spent)


def measure(name, work, tokens, arguments):
    model = build(name, getattr(torch, arguments.dtype))
    run = {"prefill": prefill, "train": train, "decode": decode}[work](model, tokens)

    with softdelta.transformers.enable() as enabled:
        replaced = enabled.replaced
    sides = [lambda f=f: timed(run, f) for f in ([(r, r.original) for r in replaced],
                                                 [(r, r.replacement) for r in replaced])]
    (whole, peer), (whole_ours, ours) = map(median_run, alternate(sides, arguments.rounds, arguments.patience))
    functions = {name: dict(calls=calls, plain_ms=spent * 1e3, softdelta_ms=ours[name][1] * 1e3)
                 for name, (calls, spent) in peer.items()}
    saved = sum(f["plain_ms"] - f["softdelta_ms"] for f in functions.values()) / 1e3
    delta = [f for function, f in functions.items() if function in DELTA_RULE]
    row = dict(model=name, work=work, tokens=tokens, dtype=arguments.dtype, plain_ms=whole * 1e3,
               softdelta_ms=whole_ours * 1e3, gain=whole / whole_ours, predicted=whole / (whole - saved),
               op_ratio=sum(f["plain_ms"] for f in delta) / sum(f["softdelta_ms"] for f in delta),
               functions=functions)
    with softdelta.transformers.enable() as enabled:
        spent = parts(model, run, [r.replacement for r in enabled.replaced])
        row["parts_ms"] = {part: 1e3 * x for part, x in spent.items()}
    if work == "decode":  # a step alone: its state stays in the caches, where the model's weights push it out
        plain, mine = warm(run, next(r for r in replaced if label(r) in DELTA_RULE and label(r) in functions))
        row["step_us"] = dict(plain=plain * 1e6, softdelta=mine * 1e6)
    if work == "prefill":
        row["same_tokens"] = same_tokens(model, tokens)
    row["of_predicted"] = row["gain"] / row["predicted"]
    floor_op, floor_whole = FLOORS[name, work]
    row["holds"] = ((floor_op is None or row["op_ratio"] >= floor_op) and row["gain"] >= floor_whole
                    and row["of_predicted"] >= AMDAHL_FLOOR and row.get("same_tokens", True))
    return row


def show(row):
    floor_op, floor_whole = FLOORS[row["model"], row["work"]]
    print(f"{row['model']} {row['work']} {row['tokens']}: {row['plain_ms']:.0f} → {row['softdelta_ms']:.0f} ms, "
          f"{row['gain']:.2f} × (floor {floor_whole}), {row['of_predicted']:.2f} of Amdahl's {row['predicted']:.2f} × "
          f"(floor {AMDAHL_FLOOR}); delta rule {row['op_ratio']:.1f} × (floor {floor_op or '–'}) "
          f"{'holds' if row['holds'] else 'FAILS'}")
    if "same_tokens" in row:
        print("    greedy tokens after it:", "the same" if row["same_tokens"] else "OTHERS")
    for name, f in row["functions"].items():
        print(f"    {name:36} {f['calls']:4} calls {f['plain_ms']:10.2f} → {f['softdelta_ms']:9.2f} ms, "
              f"{f['plain_ms'] / f['softdelta_ms']:.1f} ×")
    if "step_us" in row:
        plain, ours = row["step_us"].values()
        print(f"    the delta rule's step alone, again and again: {plain:.0f} → {ours:.0f} µs, {plain / ours:.1f} ×")
    print("    left, forward:", ", ".join(f"{part} {spent:.1f} ms" for part, spent in row["parts_ms"].items()), flush=True)


def main():
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    about = dict(torch=torch.__version__, transformers=transformers.__version__, threads=arguments.threads)
    rows = []
    for name, work in FLOORS:
        if arguments.only and not any(part in (name, work, f"{name} {work}") for part in arguments.only):
            continue
        rows.append(measure(name, work, getattr(arguments, work), arguments) | {"environment": about})
        show(rows[-1])
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump(rows, file, indent=1)
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
