"""The house: what stands at the root, who may import whom, what an import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {
    # room -> what it may import of ours
    "functional": set(),
    "sharding": {"functional.tree", "functional.wire"},
    "kernels_cuda": {"functional"},
    "programs": {"functional", "sharding", "kernels_cuda"},
}
AT_ROOT = {
    *ROOMS, "tests", "examples", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "Makefile",
    "__init__.py", "__main__.py", "py.typed", ".ci", ".gitignore",
}  # fmt: skip


def test_the_root_holds_the_rooms_and_nothing_else():
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {f.split("/")[0] for f in files} <= AT_ROOT


def _imports(file: Path) -> set[str]:
    """Modules of ours that a file imports, such as `functional.tree`."""
    here = file.relative_to(ROOT).with_suffix("").parts
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name.removeprefix("meshfn.") for a in node.names if a.name.startswith("meshfn.")}
        elif isinstance(node, ast.ImportFrom):
            base = [*here[: len(here) - node.level], *([node.module] if node.module else [])] if node.level else []
            if not node.level and (node.module or "").split(".")[0] == "meshfn":
                base = (node.module or "").split(".")[1:]
            elif not node.level:
                continue
            path = ".".join(base)
            if path in ROOMS:  # `from ..functional import tree` takes one module of it
                found |= {f"{path}.{a.name}" if (ROOT / path / f"{a.name}.py").exists() else path for a in node.names}
            else:
                found |= {path} if "." in path else {f"{path}.{a.name}".strip(".") for a in node.names}
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_between_rooms(room):
    wrong = []
    for file in sorted((ROOT / room).rglob("*.py")):
        for module in _imports(file):
            other = module.split(".")[0]
            if other in ROOMS and other != room and not {module, other} & ROOMS[room]:
                wrong.append(f"{file.relative_to(ROOT)} imports {module}")
    assert not wrong


def test_only_one_file_touches_each_private_interface():
    owners = {"torch.utils._pytree": "functional/tree.py", "torch._dynamo": "programs/dynamo.py"}
    owners |= {"torch._inductor": "programs/dynamo.py", "torch.utils._python_dispatch": "sharding/meter.py"}
    for private, owner in owners.items():
        users = {
            str(f.relative_to(ROOT))
            for room in ROOMS
            for f in (ROOT / room).rglob("*.py")
            for node in ast.walk(ast.parse(f.read_text()))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in [getattr(node, "module", None) or "", *(a.name for a in node.names)]
            if name.startswith(private)
        }
        assert users == {owner}, private


def test_private_names_stand_in_one_file_each():
    owners = {
        "torch._C._functorch": "sharding/functorch.py",
        "torch._C._dispatch": "programs/dynamo.py",
        "_c10d_functional": "sharding/processes.py",
        "_dynamo_marked_constant": "sharding/constant.py",
        "_cdata": "sharding/meter.py",
    }
    for private, owner in owners.items():
        users = {
            str(f.relative_to(ROOT)) for room in ROOMS for f in (ROOT / room).rglob("*.py") if private in f.read_text()
        }
        assert users == {owner}, private


def test_import_is_light():
    """Importing everything public leaves the heavy packages to their first use."""
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import meshfn.functional, meshfn.programs, meshfn.sharding\n"
        "heavy = {'transformers', 'torch._dynamo', 'torch._inductor', 'torch.distributed.tensor', 'gguf', 'einops'}\n"
        "print(sorted(heavy & (set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_files_have_one_subject():
    rooms = (*ROOMS, "tests", "examples")
    long = {str(f): n for room in rooms for f in (ROOT / room).rglob("*.py") if (n := f.read_text().count("\n")) > 400}
    adapters = {f for f in (ROOT / "programs/families").glob("*.py") if f.name not in ("__init__.py", "parts.py")}
    long |= {str(f): n for f in adapters if (n := f.read_text().count("\n")) > 120}
    assert not long
