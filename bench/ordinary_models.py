#!/usr/bin/env python3
"""Ordinary models of an unmodified transformers with softdelta enabled and without: the same tokens, and how fast.

    pip install '.[torch]' transformers
    bench/ordinary_models.py --threads 2 --json ordinary_models.json
    bench/ordinary_models.py --tiny                             # whether it works, in a minute or two

Twelve models with random weights, in f32, in bf16 and in f32 under torch.autocast. Sides take turns: a prefill, a training
step (f32 and autocast) and greedy generation from prompts of several lengths. Where another rounding chooses another
token, the next logits in f32 tell whether the two were as good as equal: nearer than the unmodified model's own rounding.
Models that have eager attention alone run with attn_implementation="softdelta"."""
import argparse
import contextlib
import copy
import json
import statistics
import sys
import time
import warnings

import torch
import transformers

import softdelta.transformers

VOCABULARY = 512
EAGER_ONLY = ("gemma2", "gpt_oss")
TYPES = ("f32", "bf16", "autocast")
SLOWER = 1.05  # what counts as no slower: clocks are not quieter


def configurations(size):
    """name → (model class, configuration). size: hidden, heads, key heads, head size, layers, window."""
    hidden, heads, key_heads, head, layers, window = size
    common = dict(vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
                  num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=head, max_position_embeddings=8192,
                  pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.05)
    turns = dict(layer_types=["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)],
                 sliding_window=window)
    experts = dict(num_experts_per_tok=2)
    t = transformers
    return {
        "gpt2": (t.GPT2LMHeadModel, t.GPT2Config(
            vocab_size=VOCABULARY, n_embd=hidden, n_layer=layers, n_head=heads, n_positions=8192, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, initializer_range=0.05, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0)),
        "llama": (t.LlamaForCausalLM, t.LlamaConfig(**common)),
        "mistral": (t.MistralForCausalLM, t.MistralConfig(**common, sliding_window=window)),
        "qwen2": (t.Qwen2ForCausalLM, t.Qwen2Config(**common)),
        "qwen3": (t.Qwen3ForCausalLM, t.Qwen3Config(**common)),
        "qwen3_moe": (t.Qwen3MoeForCausalLM, t.Qwen3MoeConfig(**common, **experts, num_experts=4,
                                                              moe_intermediate_size=hidden // 2)),
        "gemma2": (t.Gemma2ForCausalLM, t.Gemma2Config(**common, **turns, query_pre_attn_scalar=head,
                                                       attn_logit_softcapping=20.0)),
        "gemma3": (t.Gemma3ForCausalLM, t.Gemma3TextConfig(**common, **turns, query_pre_attn_scalar=head)),
        "phi3": (t.Phi3ForCausalLM, t.Phi3Config(**common)),
        "gpt_oss": (t.GptOssForCausalLM, t.GptOssConfig(**common, **turns, **experts, num_local_experts=4)),
        "t5": (t.T5ForConditionalGeneration, t.T5Config(
            vocab_size=VOCABULARY, d_model=hidden, d_kv=head, d_ff=2 * hidden, num_layers=layers,
            num_decoder_layers=layers, num_heads=heads, dropout_rate=0, pad_token_id=0, eos_token_id=2,
            decoder_start_token_id=0)),
        "olmo2": (t.Olmo2ForCausalLM, t.Olmo2Config(**common)),
    }


SIZES = {False: (512, 8, 2, 64, 4, 512), True: (64, 4, 2, 16, 2, 16)}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side; the median counts")
    parser.add_argument("--prefill", type=int, metavar="TOKENS", help="1024, tiny 40")
    parser.add_argument("--train", type=int, metavar="TOKENS", help="512, tiny 20")
    parser.add_argument("--generate", type=int, metavar="TOKENS", help="32, tiny 12")
    parser.add_argument("--tiny", action="store_true", help="small models and few tokens")
    parser.add_argument("--only", action="append", metavar="MODEL|TYPE", help="rows of this model or type")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    for name, many, few in (("prefill", 1024, 40), ("train", 512, 20), ("generate", 32, 12)):
        if getattr(arguments, name) is None:
            setattr(arguments, name, few if arguments.tiny else many)
    return arguments


def build(name, kind, tiny):
    torch.manual_seed(0)
    model_class, configuration = configurations(SIZES[tiny])[name]
    model = model_class(configuration).eval()
    for what, parameter in model.named_parameters():
        if what.endswith("sinks"):  # left empty by the class
            torch.nn.init.normal_(parameter)
    return model.bfloat16() if kind == "bf16" else model


def draw(rows, tokens):
    return torch.randint(3, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(1))


def prompts(tokens):
    """Four prompts of several lengths, padded on the left; and their mask."""
    ids = draw(4, tokens)
    for row, length in enumerate((tokens, tokens // 2, tokens // 3, 1)):
        ids[row, :tokens - length] = 0
    return ids, (ids != 0).long()


@contextlib.contextmanager
def side(model, name, kind, ours):
    """softdelta enabled or not, and autocast."""
    context = softdelta.transformers.enable() if ours else contextlib.nullcontext()
    with context, torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        if name in EAGER_ONLY:
            model.set_attn_implementation("softdelta" if ours else "eager")
        yield
    if name in EAGER_ONLY:
        model.set_attn_implementation("eager")


def works(model, name, kind, arguments):
    """name → a function of no arguments; generate returns its tokens."""
    long, short = draw(1, arguments.prefill), draw(1, arguments.train)
    parameters = list(model.parameters())
    ids, mask = prompts(max(arguments.generate, 8))

    def prefill():
        with torch.no_grad():
            model(long, use_cache=False, **({"decoder_input_ids": long} if name == "t5" else {}))

    def train():
        loss = model(short, labels=short, use_cache=False).loss
        torch.autograd.grad(loss, parameters, allow_unused=True)

    def generate():
        return model.generate(ids, attention_mask=mask, max_new_tokens=arguments.generate,
                              min_new_tokens=arguments.generate, do_sample=False)

    return {"prefill": prefill, **({} if kind == "bf16" else {"train": train}), "generate": generate}


def seconds(run):
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def compare(model, name, kind, plain, ours, arguments):
    """same, a tie (with how near, in the unmodified model's own rounding), or different."""
    if torch.equal(plain, ours):
        return "same", 0.0
    ids, mask = prompts(max(arguments.generate, 8))
    wide, worst = copy.deepcopy(model).float(), 0.0
    for row in torch.nonzero((plain != ours).any(1)).flatten().tolist():
        at = torch.nonzero(plain[row] != ours[row])[0].item()
        both = [plain[row, at].item(), ours[row, at].item()]
        if name == "t5":
            given = dict(input_ids=ids[row:row + 1], attention_mask=mask[row:row + 1],
                         decoder_input_ids=plain[row:row + 1, :at])
        else:  # without its padding: a row alone
            begin = int((plain[row] != 0).nonzero()[0])
            given = dict(input_ids=plain[row:row + 1, begin:at])
        with torch.no_grad():
            true = wide(**given, use_cache=False).logits[0, -1]
            with side(model, name, kind, False):
                low = model(**given, use_cache=False).logits[0, -1].float()
        gap = (true[both[0]] - true[both[1]]).abs() / (low - true).abs().max().clamp_min(1e-6)
        worst = max(worst, gap.item())
    return "tie" if worst <= 2 else "different", worst


def measure(name, kind, arguments):
    model = build(name, kind, arguments.tiny)
    row = dict(model=name, type=kind)
    tokens = {}
    for work, run in works(model, name, kind, arguments).items():
        times = {False: [], True: []}
        for turn in range(arguments.rounds + 1):
            for ours in (False, True):
                with side(model, name, kind, ours):
                    spent, result = seconds(run)
                if turn:
                    times[ours].append(spent)
                if work == "generate":
                    tokens[ours] = result
        plain, ours = (statistics.median(times[x]) for x in (False, True))
        row[work] = dict(plain_ms=1e3 * plain, softdelta_ms=1e3 * ours, gain=plain / ours)
    row["tokens"], row["nearness"] = compare(model, name, kind, tokens[False], tokens[True], arguments)
    row["holds"] = row["tokens"] != "different" and (
        arguments.tiny or all(row[w]["softdelta_ms"] <= SLOWER * row[w]["plain_ms"] for w in row if isinstance(row[w], dict)))
    return row


def show(row):
    cells = [f"{row[w]['plain_ms']:.1f} → {row[w]['softdelta_ms']:.1f} ms, {row[w]['gain']:.2f} ×" if w in row else "–"
             for w in ("prefill", "train", "generate")]
    tokens = row["tokens"] if row["tokens"] == "same" else f"{row['tokens']} ({row['nearness']:.2f})"
    print(f"| {row['model']} | {row['type']} | {' | '.join(cells)} | {tokens} | {'' if row['holds'] else 'FAILS'} |", flush=True)


def main():
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    about = dict(torch=torch.__version__, transformers=transformers.__version__, threads=arguments.threads,
                 tiny=arguments.tiny)
    rows = []
    print("| model | type | prefill | training step | generation | tokens | |\n|---|---|---|---|---|---|---|")
    for name in configurations(SIZES[arguments.tiny]):
        for kind in TYPES:
            if arguments.only and not {name, kind} & set(arguments.only):
                continue
            rows.append(measure(name, kind, arguments) | {"environment": about})
            show(rows[-1])
            if arguments.json:
                with open(arguments.json, "w") as file:
                    json.dump(rows, file, indent=1)
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
