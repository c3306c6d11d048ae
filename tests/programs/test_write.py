"""Saving a folder: whatever fails, or is killed, leaves the old one whole."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn.programs import write
from meshfn.programs.checkpoint import Checkpoint
from meshfn.programs.write import is_checkpoint_file, write_folder

from .test_checkpoint import message, put


class Hook:
    """A tokenizer that does something when it is saved."""

    def __init__(self, save_pretrained):
        self.save_pretrained = save_pretrained


def save(folder, value, hook=None, **given):
    put(folder, {"a": torch.full((3,), value)}, tokenizer=hook and Hook(hook), **given)


def value(folder):
    return int(Checkpoint(folder).tensor("a")[0])


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_one_shard_at_a_time(tmp_path):
    """Made tensors of one shard are gone before the next is made."""
    alive, most = set(), 0

    def make(i):
        nonlocal most
        t = torch.full((100,), i)
        alive.add(i)
        most = max(most, len(alive))
        weakref.finalize(t.untyped_storage(), alive.discard, i)
        return t

    put(tmp_path / "out", {f"{i}": (lambda i=i: make(i)) for i in range(12)}, max_shard_size=2400)
    assert most <= 3
    assert not alive


def test_what_is_not_replaced_is_carried_over(tmp_path):
    folder = tmp_path / "model"
    save(folder, 1, max_shard_size=1, generation={"eos_token_id": 3})
    (folder / "README.md").write_text("mine")
    (folder / "logs" / "empty").mkdir(parents=True)
    (folder / "logs" / "1.txt").write_text("one")
    (folder / "logs" / "latest").symlink_to("1.txt")
    (folder / "home").symlink_to("..")
    (folder / "model-00001-of-00002.safetensors").write_text("stale")
    (folder / "logs").chmod(0o750)
    folder.chmod(0o700)
    (tmp_path / ".model.saving-other").mkdir()  # not a name of ours
    link = tmp_path / "link"
    link.symlink_to("model")
    save(link, 2)
    assert link.is_symlink()
    assert value(folder) == 2
    assert_expected_inline(
        "\n".join(tree(folder)),
        """\
README.md
config.json
home
logs
logs/1.txt
logs/empty
logs/latest
model.safetensors""",
    )
    assert (folder / "README.md").read_text() == "mine"
    assert os.readlink(folder / "logs" / "latest") == "1.txt"
    assert stat.S_IMODE((folder / "logs").stat().st_mode) == 0o750
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.saving-other", "link", "model"]


def test_what_fill_writes_wins(tmp_path):
    def fill(new):
        (new / "a").mkdir()
        for name in ("config.json", "a/1", "b"):
            (new / name).write_text("new")

    for name in ("config.json", "a/1", "a/2", "b/1", "c/1", "c/2"):
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / name).write_text("old")
    with pytest.raises(FileExistsError):  # a file where a folder would be carried to
        write_folder(tmp_path / "x", fill, replaces=lambda name: False)
    asked = []
    write_folder(tmp_path / "x", fill, replaces=lambda name: asked.append(name) or name in ("b/1", "c/1"))
    assert sorted(asked) == ["a/1", "a/2", "b/1", "c/1", "c/2", "config.json"]
    found = {name: (tmp_path / "x" / name).read_text() for name in tree(tmp_path / "x") if name not in "ac"}
    assert found == {"config.json": "new", "a/1": "new", "a/2": "old", "b": "new", "c/2": "old"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("step", ["fill", "_sync", "_carry_over", "_exchange", "save_file"])
def test_what_fails_leaves_the_old_folder(tmp_path, monkeypatch, error, step):
    folder = tmp_path / "model"
    save(folder, 1)
    (folder / "README.md").write_text("mine")
    before = tree(tmp_path)

    def fail(*args, **given):
        raise error

    if step == "save_file":
        monkeypatch.setattr("safetensors.torch.save_file", fail)
    elif step != "fill":
        monkeypatch.setattr(write, step, fail)
    with pytest.raises(error):
        save(folder, 2, fail if step == "fill" else None)
    assert tree(tmp_path) == before
    assert value(folder) == 1
    with pytest.raises(error):
        save(tmp_path / "new", 2, fail)
    assert tree(tmp_path) == before


def test_without_an_exchange(tmp_path, monkeypatch):
    """Two renames, where the system cannot exchange; undone where the second fails."""
    monkeypatch.setattr(write, "_exchange", lambda a, b: False)
    folder = tmp_path / "model"
    save(folder, 1)
    (folder / "README.md").write_text("mine")
    save(folder, 2)
    assert value(folder) == 2
    before = tree(tmp_path)
    rename = os.rename
    for failing in (1, 2):
        calls = []

        def fail(a, b, failing=failing, calls=calls):
            calls.append(a)
            if len(calls) == failing:
                raise OSError("no")
            rename(a, b)

        monkeypatch.setattr(os, "rename", fail)
        with pytest.raises(OSError, match="no"):
            save(folder, 3)
        monkeypatch.setattr(os, "rename", rename)
        assert value(folder) == 2
        assert tree(tmp_path) == before


def test_without_links(tmp_path, monkeypatch):
    """Files are copied where the file system has no hard links."""
    folder = tmp_path / "model"
    save(folder, 1)
    (folder / "README.md").write_text("mine")
    (folder / "link").symlink_to("nowhere")
    monkeypatch.setattr(os, "link", lambda *args, **given: os.open("/nowhere", 0))
    save(folder, 2)
    assert (value(folder), (folder / "README.md").read_text()) == (2, "mine")
    assert os.readlink(folder / "link") == "nowhere"


def test_two_saves_at_once(tmp_path):
    """Neither removes what the other is at; the later one stays."""
    folder = tmp_path / "model"
    save(folder, 1)
    started, go_on = threading.Event(), threading.Event()

    def slow(new):
        started.set()
        assert go_on.wait(20)

    thread = threading.Thread(target=save, args=(folder, 3, slow))
    thread.start()
    assert started.wait(20)
    save(folder, 2)
    assert value(folder) == 2
    assert len(list(tmp_path.iterdir())) == 2
    go_on.set()
    thread.join()
    assert value(folder) == 3
    assert len(list(tmp_path.iterdir())) == 1


# One interpreter for all deaths: each case is a fork that dies, or fails, somewhere in a save.
_DEATHS = """
import os, resource, signal, sys, tempfile
from pathlib import Path
import torch
from meshfn.programs import write
from meshfn.programs.checkpoint import Checkpoint
from meshfn.programs.write import write_checkpoint

root = Path(sys.argv[1])
folder = root / "model"

def die(*args, **given):
    os.kill(os.getpid(), signal.SIGKILL)

def save(value, *, at=None, place=folder, **given):
    given = {"config": {}, "generation": {}, "tokenizer": None, "max_shard_size": 4000} | given
    calls = []
    def make():
        calls.append(1)
        return die() if len(calls) == at else torch.full((1000,), value)
    tensors = {f"{i}": make for i in range(4)}
    write_checkpoint(place, tensors, **given)

def patched(name, where, after=False):
    old = getattr(where, name)
    def new(*args, **given):
        if after:
            old(*args, **given)
        die()
    setattr(where, name, new)
    save(2)

class Tokenizer:
    save_pretrained = die

def full():
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
    save(2)

def two_renames():
    write._exchange = lambda a, b: False
    patched("rename", os, after=True)

def read_only():
    os.chmod(place, 0o555)
    if os.getuid() == 0:
        os.setuid(65534)
    try:
        save(2, place=Path(place) / "model")
    except ValueError as error:
        raise SystemExit(str(error).replace(place, "<folder>"))

CASES = {
    "sizes": lambda: save(2, at=2),
    "third shard": lambda: save(2, at=7),
    "tokenizer": lambda: save(2, tokenizer=Tokenizer()),
    "sync": lambda: patched("fsync", os),
    "carrying over": lambda: patched("is_checkpoint_file", write),
    "before the exchange": lambda: patched("_exchange", write),
    "after the exchange": lambda: patched("_exchange", write, after=True),
    "between two renames": two_renames,
    "disk full": full,
}

def died(case):
    sys.stdout.flush()
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return "killed" if code == -signal.SIGKILL else f"exit {code}"
    try:
        case()
    except BaseException as error:
        print(f"[{error if isinstance(error, SystemExit) else type(error).__name__}]", end=" ", flush=True)
        os._exit(1)
    os._exit(0)

def state():
    beside = [path for path in root.iterdir() if path != folder]
    if not folder.exists():
        return f"gone, {len(beside)} beside"
    assert (folder / "README.md").read_text() == "mine"
    opened = Checkpoint(folder)
    return f"holds {({int(x) for name in opened.shapes for x in opened.tensor(name)})}, {len(beside)} beside"

for name, case in CASES.items():
    save(1)
    (folder / "README.md").write_text("mine")
    print(f"{name}: {died(case)}, {state()};", end=" ")
    save(3, max_shard_size="5GB")
    print("then", state())
    assert sorted(os.listdir(folder)) == ["README.md", "config.json", "generation_config.json", "model.safetensors"]
place = tempfile.mkdtemp()  # not below pytest's, which only its owner may enter
print(died(read_only))
os.rmdir(place)
"""


def test_deaths(tmp_path):
    done = subprocess.run([sys.executable, "-c", _DEATHS, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert_expected_inline(
        done.stdout,
        """\
sizes: killed, holds {1}, 0 beside; then holds {3}, 0 beside
third shard: killed, holds {1}, 1 beside; then holds {3}, 0 beside
tokenizer: killed, holds {1}, 1 beside; then holds {3}, 0 beside
sync: killed, holds {1}, 1 beside; then holds {3}, 0 beside
carrying over: killed, holds {1}, 1 beside; then holds {3}, 0 beside
before the exchange: killed, holds {1}, 1 beside; then holds {3}, 0 beside
after the exchange: killed, holds {2}, 1 beside; then holds {3}, 0 beside
between two renames: killed, gone, 2 beside; then holds {3}, 0 beside
[OSError] disk full: exit 1, holds {1}, 0 beside; then holds {3}, 0 beside
[folder "<folder>/model": <folder> is not writable
    fix: choose another place] exit 1
""",
    )


def test_messages(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "mine").mkdir()
    for name in ("a", "b", "c", "d", ".e"):
        (tmp_path / "mine" / name).write_text("")

    def never(new):
        raise AssertionError

    found = [
        message(tmp_path, write_folder, tmp_path / name, never, replaces=is_checkpoint_file)
        for name in ("file", "mine", "no/where/model")
    ]
    one, out = torch.ones(2), tmp_path / "out"
    odd = {"c": one.to(torch.complex128), "s": one.to_sparse(), "m": one.to("meta")}
    found += [
        message(tmp_path, put, tmp_path / "file", {"a": None}),
        message(tmp_path, put, out, {}),
        message(tmp_path, put, out, odd),
        message(tmp_path, put, out, {"a": one}, max_shard_size=0),
        message(tmp_path, put, out, {"a": one}, max_shard_size="5 apples"),
        message(tmp_path, put, out, {"a": one}, max_shard_size=1.5),
        message(tmp_path, put, out, {"a": one}, config={"dtype": torch.float32}),
        message(tmp_path, put, out, {"a": one}, generation={"x": {1, 2}}),
    ]
    assert_expected_inline(
        "\n\n".join(found),
        """\
folder "<folder>/file" is a file
    fix: choose another place

folder "<folder>/mine" holds .e, a, b, and 2 more, but no config.json: it is no checkpoint, and is not replaced
    fix: choose a new or an empty folder

folder "<folder>/no/where/model": there is no folder <folder>/no/where
    fix: mkdir -p <folder>/no/where

folder "<folder>/file" is a file
    fix: choose another place

tensors: there are none to write

tensors cannot be written
    c: torch.complex128 of layout torch.strided cannot be stored
    s: torch.float32 of layout torch.sparse_coo cannot be stored
    m: on the meta device, it has no content

max_shard_size=0: bytes or a text such as "5GB" are needed

max_shard_size='5 apples': bytes or a text such as "5GB" are needed

max_shard_size=1.5: bytes or a text such as "5GB" are needed

config: cannot be written as JSON: Object of type dtype is not JSON serializable

generation: cannot be written as JSON: Object of type set is not JSON serializable""",
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine"]
