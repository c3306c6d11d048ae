# %% [markdown]
# What importing and building cost: `import meshfn` beside `import torch`, and a build of 4 layers beside one of 30,
# with an empty compile cache each and with a warm one.

# %%
from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time

IMPORTS = {
    "import torch": "import torch",
    "import meshfn": "import torch, meshfn.functional, meshfn.programs",
}
BUILD = """
import dataclasses
from meshfn import functional as F, programs
model = programs.load("smollm2-135m", abstract=True)
config = dataclasses.replace(model.config, layers=model.config.layers[:{layers}])
model = programs.Model(name="{layers} layers", config=config, params=F.Decoder.init(config, 0))
print(programs.build(model).build_seconds)
"""


def whole_process(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def build_seconds(layers: int, cache: str) -> float:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    code = BUILD.format(layers=layers)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


# %%
if __name__ == "__main__":
    print(f"load average {os.getloadavg()[0]:.2f}, {os.cpu_count()} cores")
    times: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for i in range(8):
        for name, code in IMPORTS.items():
            seconds = whole_process(code)
            if i:  # the first round warms the disk
                times[name].append(seconds)
    for name, found in times.items():
        print(f"{name:14} {statistics.median(found):.3f} s   ({min(found):.3f} to {max(found):.3f}, {len(found)} runs)")
    ratio = statistics.median(b / a for a, b in zip(*times.values(), strict=True))
    print(f"ratio {ratio:.3f}")

    found_builds: dict[tuple[int, str], float] = {}
    for layers in (4, 30):
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                found_builds[layers, state] = build_seconds(layers, cache)
                print(f"build, {layers:2} layers, {state} cache   {found_builds[layers, state]:.1f} s")
    for state in ("cold", "warm"):
        print(f"30 layers to 4, {state}   {found_builds[30, state] / found_builds[4, state]:.2f}")
