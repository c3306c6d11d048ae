# %% [markdown]
# A decode step of a hybrid model by context, beside transformers, eager, with its own cache: four layers in the shape
# of Qwen3.5 (three gated delta nets and gated attention; width 1,024, heads of 128 and of 256), and then three gated
# delta nets alone, which keep a state in place of a context. Random weights, fp32, batch 1. Both read the same
# parameters, in one process, in turn; medians and quartiles. The bound is the bytes of the plan over the read bandwidth
# of this run.

# %%
from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import torch
from meshfn import programs
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig

# transformers renames an argument, and takes the old name until 5.40.
warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
CONTEXTS = (128, 1024, 4096)
STATES = (128, 1024, 4096, 32768)
STEPS, ROUNDS = 8, 9


def make(heads: int, layers: list[str]) -> Qwen3_5ForCausalLM:
    config = Qwen3_5TextConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=len(layers),
        layer_types=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=heads,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        max_position_embeddings=65536,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(config).eval()


# %%
class Ours:
    """A program of ours. A step writes over the states that it reads, so a call goes on where the last one ended."""

    def __init__(self, module: Qwen3_5ForCausalLM, max_len: int) -> None:
        self.program = programs.build(programs.load(module), max_len=max_len)

    def read(self, tokens: torch.Tensor) -> None:
        self.state = self.program.prefill(tokens)

    def run(self) -> list[int]:
        found = []
        for _ in range(STEPS):
            self.state = self.program.decode(self.state)
            found.append(int(self.state.token[0]))
        return found

    def bytes(self, context: int) -> float:
        """What a step reads and writes, of the plan."""
        decode, slots = self.program.plan.phases["decode"], self.program.sizes.slots - 1
        return decode.reads + decode.state + decode.context * context / slots + decode.writes


class Theirs:
    """transformers' module, eager, over its own cache."""

    def __init__(self, module: Qwen3_5ForCausalLM) -> None:
        self.module = module

    @torch.no_grad()
    def read(self, tokens: torch.Tensor) -> None:
        self.cache = DynamicCache(config=self.module.config)
        self.token = self._next(tokens)

    def _next(self, tokens: torch.Tensor) -> torch.Tensor:
        out = self.module(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1:].argmax(-1)

    @torch.no_grad()
    def run(self) -> list[int]:
        found = []
        for _ in range(STEPS):
            self.token = self._next(self.token)
            found.append(int(self.token))
        return found


class Memory:
    """Its read bandwidth: a sum of half a gigabyte, far beyond any cache."""

    def __init__(self) -> None:
        self.buffer = torch.ones(1 << 27)

    def bandwidth(self) -> float:
        start = time.perf_counter()
        self.buffer.sum()
        return self.buffer.nbytes / (time.perf_counter() - start)


def timed(engine: Any) -> float:
    """Milliseconds a step."""
    start = time.perf_counter()
    engine.run()
    return (time.perf_counter() - start) / STEPS * 1e3


def spread(found: list[float]) -> str:
    low, middle, high = statistics.quantiles(found, n=4)
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


# %%
def show(title: str, module: Qwen3_5ForCausalLM, contexts: tuple[int, ...]) -> None:
    memory = Memory()
    ours, theirs = Ours(module, max(contexts) + STEPS * (ROUNDS + 2)), Theirs(module)
    decode = ours.program.plan.phases["decode"]
    print(
        f"\n{title}; {torch.get_num_threads()} threads, ms a step: median (quartiles) of {ROUNDS} rounds of {STEPS}\n"
        f"{decode.reads / 2**20:.1f} MiB of weights, {decode.state / 2**20:.2f} MiB of states, "
        f"{decode.writes / 2**20:.2f} MiB written"
    )
    print(f"{'context':>8} {'meshfn':>22} {'transformers':>24} {'ratio':>21} {'of the bound':>13}")
    for context in contexts:
        tokens = torch.randint(0, 4096, (1, context), generator=torch.Generator().manual_seed(context))
        for engine in (ours, theirs):
            engine.read(tokens)
        same = ours.run() == theirs.run()
        times: dict[str, list[float]] = {"ours": [], "theirs": [], "ratio": [], "share": []}
        for _ in range(ROUNDS):
            rate, own, other = memory.bandwidth(), timed(ours), timed(theirs)
            share = ours.bytes(context) / own * 1e3 / rate
            for name, value in zip(times, (own, other, other / own, share), strict=True):
                times[name].append(value)
        text = {name: spread(found) for name, found in times.items()}
        middle, tail = statistics.median(times["share"]), "" if same else "   other tokens"
        print(f"{context:>8} {text['ours']:>22} {text['theirs']:>24} {text['ratio']:>21} {middle:>13.0%}{tail}")


# %%
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--value-heads", type=int, default=16)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--states", type=int, nargs="*", default=STATES, help="contexts of the gated delta nets alone")
    given = parser.parse_args()
    linear = ["linear_attention"] * 3
    show("four layers", make(given.value_heads, [*linear, "full_attention"]), tuple(given.contexts))
    if given.states:
        show("gated delta nets alone", make(given.value_heads, linear), tuple(given.states))
