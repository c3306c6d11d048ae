# %% [markdown]
# A decode step of latent attention by context, beside transformers, whose cache holds latents too, but which makes keys
# and values of all of them in every step. A model of two layers in the shape of DeepSeek-V3 (a dense one and one with
# experts; N=128 R=64 V=128 L=512 and a query rank of 1536, 16 heads), random weights, fp32, batch 1. Both read the same
# parameters, in one process, in turn; medians and spread.

# %%
from __future__ import annotations

import argparse
import statistics
import time
import warnings

import torch
from meshfn import functional as F
from meshfn import programs
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

# transformers renames an argument, and takes the old name until 5.40.
warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
CONTEXTS = (128, 512, 1024, 2048, 4096)
STEPS, ROUNDS = 8, 5


def make(heads: int) -> DeepseekV3ForCausalLM:
    config = DeepseekV3Config(
        vocab_size=8192,
        hidden_size=2048,
        intermediate_size=4096,
        moe_intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        n_routed_experts=32,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        max_position_embeddings=8192,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(config).eval()


# %%
class Ours:
    """A program of ours, with a context in its cache."""

    def __init__(self, module: DeepseekV3ForCausalLM, max_len: int) -> None:
        self.program = programs.build(programs.load(module), max_len=max_len)

    def read(self, tokens: torch.Tensor) -> None:
        self.state = self.program.prefill(tokens)

    def steps(self) -> float:
        state, start = self.state, time.perf_counter()
        for _ in range(STEPS):
            state = self.program.decode(state)
        return (time.perf_counter() - start) / STEPS

    def tokens(self) -> list[int]:
        state, found = self.state, []
        for _ in range(STEPS):
            state = self.program.decode(state)
            found.append(int(state.token[0]))
        return found


class Theirs:
    """transformers' module, eager, over a cache that grows."""

    def __init__(self, module: DeepseekV3ForCausalLM) -> None:
        self.module = module

    @torch.no_grad()
    def read(self, tokens: torch.Tensor) -> None:
        self.cache = DynamicCache(config=self.module.config)
        for chunk in tokens.split(512, 1):
            out = self.module(chunk, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.first = out.logits[:, -1:].argmax(-1)

    @torch.no_grad()
    def _run(self) -> list[int]:
        token, found = self.first, []
        for _ in range(STEPS):
            logits = self.module(token, past_key_values=self.cache, use_cache=True).logits
            token = logits[:, -1:].argmax(-1)
            found.append(int(token))
        self.cache.crop(-STEPS)
        return found

    def steps(self) -> float:
        start = time.perf_counter()
        self._run()
        return (time.perf_counter() - start) / STEPS

    def tokens(self) -> list[int]:
        return self._run()


# %%
def show(heads: int, contexts: tuple[int, ...]) -> None:
    module = make(heads)
    ours, theirs = Ours(module, max(contexts) + STEPS + 1), Theirs(module)
    cfg = ours.program.model.config.layers[0].attention
    assert isinstance(cfg, F.MLAConfig)
    slots = ours.program.sizes.slots
    # What the cache is, counted: L + R numbers a token and a layer, whatever the heads.
    assert ours.program.plan.cache == 2 * slots * (cfg.kv_lora_rank + cfg.qk_rope_head_dim) * 4
    print(f"{heads} heads, {torch.get_num_threads()} threads; ms a step, median (least to most) of {ROUNDS} rounds")
    print(f"{'context':>8} {'meshfn':>24} {'transformers':>24} {'ratio':>6}   latents, keys and values: ours, theirs")
    before = None
    for context in contexts:
        tokens = torch.randint(0, 8192, (1, context), generator=torch.Generator().manual_seed(context))
        for engine in (ours, theirs):
            engine.read(tokens)
        same = ours.tokens() == theirs.tokens()
        found: dict[str, list[float]] = {"ours": [], "theirs": []}
        for _ in range(ROUNDS):
            found["ours"].append(ours.steps() * 1e3)
            found["theirs"].append(theirs.steps() * 1e3)
        middle = {name: statistics.median(times) for name, times in found.items()}
        text = {n: f"{middle[n]:.1f} ({min(t):.1f} to {max(t):.1f})" for n, t in found.items()}
        costs = F.mla_costs(cfg, 1, context)
        size = {way: cost.elements * 2 * 4 / 2**20 for way, cost in costs.items()}
        print(
            f"{context:>8} {text['ours']:>24} {text['theirs']:>24} {middle['theirs'] / middle['ours']:>5.1f}x   "
            f"{size['absorbed']:.1f} MiB, {size['expanded']:.1f} MiB" + ("" if same else "   other tokens")
        )
        if before is not None and context == contexts[-1]:
            span = context - contexts[0]
            grown = {n: (middle[n] - before[n]) / span * 1e3 for n in middle}
            print(f"growth: {grown['ours']:.2f} us a token of context, transformers {grown['theirs']:.2f}")
        before = before or middle


# %%
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    given = parser.parse_args()
    show(given.heads, tuple(given.contexts))
