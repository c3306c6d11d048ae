# %% [markdown]
# A decode step of a hybrid model by context, beside transformers, eager, with its own cache: four layers in the shape
# of Qwen3.5 (three gated delta nets and gated attention; width 1,024, heads of 128 and of 256), random weights, batch
# 1. Both read the same parameters, in one process, in turn; medians and quartiles. The bound is the bytes of the plan
# over the read bandwidth of this run. Then three gated delta nets alone, which keep a state in place of a context
# (transformers has no cache for a model without attention).

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


def make(heads: int, layers: list[str], dtype: torch.dtype) -> Qwen3_5ForCausalLM:
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
    return Qwen3_5ForCausalLM(config).eval().to(dtype)


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


def spread(found: list[float], digits: int) -> str:
    low, middle, high = (f"{x:.{digits}f}" for x in statistics.quantiles(found, n=4))
    return f"{middle} ({low} to {high})"


# %%
def show(title: str, module: Qwen3_5ForCausalLM, contexts: tuple[int, ...], beside: bool) -> None:
    memory = Memory()
    engines: dict[str, Any] = {"meshfn": Ours(module, max(contexts) + STEPS * (ROUNDS + 2))}
    if beside:
        engines["transformers"] = Theirs(module)
    ours = engines["meshfn"]
    decode = ours.program.plan.phases["decode"]
    print(
        f"\n{title}, {module.dtype}, {torch.get_num_threads()} threads; ms a step: median (quartiles) of {ROUNDS}\n"
        f"{decode.reads / 2**20:.1f} MiB of weights, {decode.state / 2**20:.2f} MiB of states, "
        f"{decode.writes / 2**20:.2f} MiB written"
    )
    columns = [*engines, *(["ratio"] if beside else []), "of the bound"]
    print(" ".join([f"{'context':>8}", *(f"{name:>22}" for name in columns)]))
    for context in contexts:
        tokens = torch.randint(0, 4096, (1, context), generator=torch.Generator().manual_seed(context))
        for engine in engines.values():
            engine.read(tokens)
        same = len({tuple(engine.run()) for engine in engines.values()}) == 1
        times: dict[str, list[float]] = {name: [] for name in columns}
        for _ in range(ROUNDS):
            rate = memory.bandwidth()
            for name, engine in engines.items():
                times[name].append(timed(engine))
            times["of the bound"].append(ours.bytes(context) / times["meshfn"][-1] * 1e5 / rate)
            if beside:
                times["ratio"].append(times["transformers"][-1] / times["meshfn"][-1])
        cells = [f"{spread(found, 2 if name == 'ratio' else 1):>22}" for name, found in times.items()]
        print(" ".join([f"{context:>8}", *cells]) + ("%" if same else "%   other tokens"))


# %%
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--value-heads", type=int, default=16)
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16"))
    parser.add_argument("--contexts", type=int, nargs="*", default=CONTEXTS)
    parser.add_argument("--states", type=int, nargs="*", default=STATES, help="contexts of the gated delta nets alone")
    given = parser.parse_args()
    linear = ["linear_attention"] * 3
    for dtype in given.dtypes if given.contexts else ():
        module = make(given.value_heads, [*linear, "full_attention"], getattr(torch, dtype))
        show("four layers", module, tuple(given.contexts), True)
    if given.states:
        module = make(given.value_heads, linear, getattr(torch, given.dtypes[0]))
        show("three gated delta nets", module, tuple(given.states), False)
