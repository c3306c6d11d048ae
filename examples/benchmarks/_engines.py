"""An engine in a process of its own, for `decode.py`: told what to run by JSON lines, it answers in JSON lines.

python _engines.py ENGINE SOURCE DTYPE BATCH THREADS
ENGINE: a key of `ENGINES`. SOURCE: what `programs.load` takes; for llama.cpp a GGUF file.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

MAX_LEN = 4224


def prompts(batch: int, length: int) -> list[list[int]]:
    draw = random.Random(batch)
    return [[draw.randrange(100, 700) for _ in range(length)] for _ in range(batch)]


class Meshfn:
    """A program. info: seconds of its build; bytes of weights and of cache, of weights and of cache for each token that
    a step reads, of all tensors after loading and building, and by which the process grew while it read the file."""

    def __init__(self, source: str, dtype: str, batch: int) -> None:
        import torch
        from meshfn import programs

        before = _peak()
        model = self.load(source, getattr(torch, dtype))
        read = _peak()
        self.batch, self.program = batch, programs.build(model, batch=batch, max_len=MAX_LEN)
        plan = self.program.plan
        decode = plan.phases["decode"]
        self.info = {
            "build": self.program.build_seconds,
            "weights": plan.weights,
            "cache": plan.cache,
            "reads": decode.reads,
            "slot": decode.context / (plan.sizes.slots - 1),
            "tensors": _tensors(),
            "reading": read - before,
        }

    def load(self, source: str, dtype: Any) -> Any:
        from meshfn import programs

        return programs.load(source, dtype=dtype)

    def prefill(self, tokens: int) -> float:
        given = prompts(self.batch, tokens)
        return float(self.program.generate(given, max_new_tokens=1, eos_token_id=()).timings.prefill)

    def decode(self, context: int, steps: int) -> float:
        given = prompts(self.batch, context)
        timings = self.program.generate(given, max_new_tokens=steps + 1, eos_token_id=()).timings
        return float(timings.decode) / steps


class Host(Meshfn):
    """A program of as many layers with next to nothing to compute: what is left is Python and dispatch."""

    def load(self, source: str, dtype: Any) -> Any:
        from meshfn import programs
        from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

        layers = AutoConfig.from_pretrained(source).num_hidden_layers
        heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}
        sizes = {"hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": layers, "vocab_size": 768}
        return programs.load(LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True)).to(dtype))


class Transformers:
    """`generate`, timed between its steps."""

    def __init__(self, source: str, dtype: str, batch: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch, self.batch, self.info = torch, batch, {}
        self.options: dict[str, Any] = {}
        self.module = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype)).eval()
        self.module.generation_config.eos_token_id = None

    def _generate(self, length: int, new: int) -> list[float]:
        """The time after each new token, the time before the first in front."""
        ids = self.torch.tensor(prompts(self.batch, length))
        times = [time.perf_counter()]

        def clock(ids: Any, scores: Any, **_: Any) -> Any:
            times.append(time.perf_counter())
            return self.torch.zeros(self.batch, dtype=self.torch.bool)

        given = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "stopping_criteria": [clock]}
        self.module.generate(ids, attention_mask=self.torch.ones_like(ids), **given, **self.options)
        return times

    def prefill(self, tokens: int) -> float:
        start, first = self._generate(tokens, 1)
        return first - start

    def decode(self, context: int, steps: int) -> float:
        times = self._generate(context, steps + 1)
        return (times[-1] - times[1]) / steps


class Static(Transformers):
    """With its static cache and its own torch.compile. info: seconds of the compile."""

    def __init__(self, source: str, dtype: str, batch: int) -> None:
        from transformers import CompileConfig

        super().__init__(source, dtype, batch)
        compile_config = CompileConfig(mode="default", fullgraph=True, dynamic=False)
        compile_config._compile_all_devices = True  # its own default is to compile on accelerators alone
        self.options = {"cache_implementation": "static", "compile_config": compile_config}
        self.info = {"build": self._first_step() - self._first_step()}

    def _first_step(self) -> float:
        times = self._generate(16, 65)
        return times[2] - times[1]


class Llama:
    def __init__(self, source: str, dtype: str, batch: int) -> None:
        from llama_cpp import Llama as Model

        given = {"n_ctx": MAX_LEN, "n_threads": THREADS, "n_threads_batch": THREADS, "verbose": False}
        if dtype == "float32":
            given |= {"type_k": 0, "type_v": 0}  # a cache in fp32, where its own default is fp16
        self.model = Model(source, **given)
        self.info: dict[str, float] = {}

    def prefill(self, tokens: int) -> float:
        self.model.reset()
        start = time.perf_counter()
        self.model.eval(prompts(1, tokens)[0])
        return time.perf_counter() - start

    def decode(self, context: int, steps: int) -> float:
        self.prefill(context)
        start = time.perf_counter()
        for _ in range(steps):
            self.model.eval([100])  # which token it is changes nothing that is timed
        return (time.perf_counter() - start) / steps


def _peak() -> int:
    """Bytes of memory this process has had at most, by Linux; `getrusage` counts what it was started from, too."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def _tensors() -> int:
    """Bytes of the storages of all tensors there are."""
    import torch

    gc.collect()
    found = {}
    for each in gc.get_objects():
        # By type, so that the compiler's fake tensors, which have no memory, are left out.
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.device.type == "cpu":
            found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(found.values())


ENGINES = {"meshfn": Meshfn, "host": Host, "transformers": Transformers, "static": Static, "llama.cpp": Llama}

if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    name, source, dtype, batch, threads = sys.argv[1:]
    THREADS = int(threads)  # torch has its number from the environment
    engine = ENGINES[name](source, dtype, int(batch))
    print(json.dumps(engine.info), file=answers, flush=True)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        print(json.dumps(getattr(engine, command)(*arguments)), file=answers, flush=True)
