"""Hugging Face folders: there and back to the bit, what reading costs, and what is refused."""

from __future__ import annotations

import json
import os
import stat
import struct
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from expecttest import assert_expected_inline
from meshfn.programs.checkpoint import Checkpoint, find_folder
from meshfn.programs.write import is_checkpoint_file, write_checkpoint
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from ..tiny import llama


def message(tmp_path, fn, *args, **given):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        fn(*args, **given)
    return str(error.value).replace(str(tmp_path), "<folder>")


def make(folder, *, config="{}", index=None, **files):
    """A folder of the given files: tensors, or bytes as they are."""
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "config.json").write_text(config)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for name, content in files.items():
        path = folder / (name if "." in name else f"{name}.safetensors")
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            save_file(content, path)
    return folder


def raw(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def u8(start, stop, dtype="U8"):
    return {"dtype": dtype, "shape": [stop - start], "data_offsets": [start, stop]}


def put(folder, tensors, **given):
    given = {"config": {}, "generation": None, "tokenizer": None} | given
    makers = {name: t if callable(t) else (lambda t=t: t) for name, t in tensors.items()}
    write_checkpoint(folder, makers, **given)
    return Checkpoint(folder)


def bits(t):
    return t.detach().cpu().contiguous().flatten().view(torch.uint8).tolist()


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_what_transformers_saves(tmp_path, shard):
    module = llama(tied=True)
    module.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "20KB")
    opened = Checkpoint(tmp_path)
    expected = dict(module.named_parameters())
    assert opened.config["model_type"] == "llama"
    assert opened.generation["pad_token_id"] == module.generation_config.pad_token_id
    assert not opened.has_tokenizer
    assert set(opened.shapes) == set(opened.dtypes) == set(expected)
    for name, p in expected.items():
        assert opened.shapes[name] == tuple(p.shape)
        assert opened.dtypes[name] == p.dtype
        assert torch.equal(opened.tensor(name), p), name


def test_tensors_of_every_kind(tmp_path):
    """Zero-size tensors, scalars, odd names, shards in any order; and the index says the order of names."""
    nan = torch.tensor([0x7FC00001, -0x1, 0x7F800123], dtype=torch.int32).view(torch.float32)
    first = {"scalar": torch.tensor(3.0, dtype=torch.float64), "a/b \u00e9\n'\"{0}": torch.arange(6).view(2, 3)}
    second = {"empty": torch.zeros(0, 3), "nan": nan, "": torch.ones(2, dtype=torch.bfloat16).to(torch.float8_e4m3fn)}
    index = {"nan": "b.safetensors", "scalar": "a.safetensors", **dict.fromkeys(("", "empty"), "b.safetensors")}
    index |= dict.fromkeys(first, "a.safetensors")
    for folder in (make(tmp_path / "1", index=index, b=second, a=first), make(tmp_path / "2", b=second, a=first)):
        opened = Checkpoint(folder)
        assert set(opened.shapes) == set(index)
        for name, expected in (first | second).items():
            found = opened.tensor(name)
            assert (opened.shapes[name], opened.dtypes[name]) == (tuple(found.shape), found.dtype)
            assert found.dtype == expected.dtype
            assert bits(found) == bits(expected), name
    assert list(Checkpoint(tmp_path / "1").shapes) == list(index)


@pytest.mark.parametrize("shard", ["5GB", 20_000])
def test_transformers_loads_it(tmp_path, shard):
    """Weights, config, generation config and tokenizer come back as they were, from one file and from shards."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")))
    tokenizer.chat_template = "{{ messages }}"
    module = llama(bias=True).to(torch.bfloat16)
    folder = tmp_path / "out"
    opened = put(
        folder,
        dict(module.named_parameters()),
        config=module.config.to_dict(),
        generation=module.generation_config.to_dict(),
        tokenizer=tokenizer,
        max_shard_size=shard,
    )
    assert opened.has_tokenizer
    assert list(opened.shapes) == list(dict(module.named_parameters())) or shard == "5GB"
    names = {path.name for path in folder.glob("*.safetensors")}
    assert names == {"model.safetensors"} if shard == "5GB" else len(names) > 3
    umask = os.umask(0)
    os.umask(umask)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o666 & ~umask}
    back = LlamaForCausalLM.from_pretrained(folder)
    assert back.dtype == torch.bfloat16
    assert back.generation_config.pad_token_id == 0
    for (name, a), b in zip(module.named_parameters(), back.parameters(), strict=True):
        assert bits(a) == bits(b), name
    found = AutoTokenizer.from_pretrained(folder)
    assert found.get_vocab() == tokenizer.get_vocab()
    assert found.chat_template == tokenizer.chat_template
    # and what was saved is claimed by the next save
    assert all(is_checkpoint_file(path.name) for path in folder.iterdir())
    assert not is_checkpoint_file("tokenizer.json", tokenizer=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_bitwise(tmp_path, dtype):
    """NaN payloads, zeros of both signs, denormals; views, names that share memory, tensors without elements."""
    some = torch.randint(-(2**63), 2**63 - 1, (16, 4)).view(dtype)
    some[:, :2].view(torch.uint8).fill_(255)  # all NaN
    whole = torch.nn.Parameter(some)
    tensors = {
        "whole": whole,
        "tied": whole,
        "view": whole[3:9],
        "transposed": whole.t(),
        "strided": whole[::2, ::2],
        "broadcast": whole[:1].expand(5, -1),
        "nothing": whole[5:5],
        "scalar": whole[1, 2],
        "odd /\u00e9\n": whole[9:],
    }
    for i, size in enumerate(["5GB", 200]):
        opened = put(tmp_path / str(i), tensors, max_shard_size=size)
        assert opened.shapes == {name: tuple(t.shape) for name, t in tensors.items()}
        assert set(opened.dtypes.values()) == {dtype}
        for name, t in tensors.items():
            assert bits(opened.tensor(name)) == bits(t), name


def test_faults_are_listed(tmp_path):
    one, two = {"x": torch.ones(3)}, {"x": torch.ones(3), "y": torch.ones(2)}
    whole = raw({"x": u8(0, 3)}, b"abc")
    many = {f"layer.{i}": torch.ones(1) for i in range(13)}
    (tmp_path / "file").write_text("")
    cases = {
        "no-config": {"config": None, "model": one},
        "not-json": {"config": '{"a": 1', "model": one},
        "not-an-object": dict(config="[1]", model=one, **{"generation_config.json": b"\xff"}),
        "no-weights": {},
        "pickles": {"pytorch_model.bin": b"", "pytorch_model-2.bin": b"", "optimizer.pt": b""},
        "lfs": {"model": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"},
        "missing-shards": {
            "index": {**dict.fromkeys(many, "a.safetensors"), "x": "b.safetensors", "z": "c.safetensors"},
            "b": two,
        },
        "not-where-it-should-be": {
            "index": {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"},
            "a": one,
            "b": two,
        },
        "twice": {"a": many, "b": many},
        "index": {"index": {"x": "../a.safetensors", "y": "/etc/b.safetensors"}, "a": one},
        "malformed-index": {"index": ["x"], "a": one},
        "two-sets": {"index": {"x": "a.safetensors"}, "a": one, "model": two},
        "broken": {
            "empty": b"",
            "header": whole[:12],
            "json": raw(b"{{{"),
            "long": whole + b"?",
            "nothing": raw({}, b"?"),
            "overlap": raw({"v": u8(0, 2), "w": u8(1, 3)}, b"abc"),
            "shape": raw({"u": {"dtype": "U8", "shape": 3, "data_offsets": [0, 3]}}, b"abc"),
            "short": whole[:-1],
        },
        "dtypes": {
            "model": raw({"x": u8(0, 3), "y": u8(3, 5, "F4"), "z": u8(5, 6, "Q9")}, b"abcdef"),
        },
    }
    found = [message(tmp_path, Checkpoint, tmp_path / "file")]
    found.append(message(tmp_path, Checkpoint(make(tmp_path / "good", model=one)).tensor, "lm_head.weight"))
    found += [message(tmp_path, Checkpoint, make(tmp_path / name, **case)) for name, case in cases.items()]
    assert_expected_inline(
        "\n\n".join(found),
        """\
checkpoint "<folder>/file" is not a folder

checkpoint "<folder>/good" has no tensor "lm_head.weight"

checkpoint "<folder>/no-config" cannot be read
    config.json: missing

checkpoint "<folder>/not-json" cannot be read
    config.json: not JSON: Expecting ',' delimiter: line 1 column 8 (char 7)

checkpoint "<folder>/not-an-object" cannot be read
    config.json: a JSON object is needed, not list
    generation_config.json: not JSON: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte

checkpoint "<folder>/no-weights" cannot be read
    no safetensors file

checkpoint "<folder>/pickles" cannot be read
    no safetensors file, but optimizer.pt, pytorch_model-2.bin, pytorch_model.bin: pickles, which are not read
        fix: in transformers, AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other)

checkpoint "<folder>/lfs" cannot be read
    model.safetensors: a git-lfs pointer, not the weights
        fix: git lfs pull

checkpoint "<folder>/missing-shards" cannot be read
    a.safetensors: missing, the index has it for "layer.0", "layer.1", "layer.2", and 10 more
    c.safetensors: missing, the index has it for "z"

checkpoint "<folder>/not-where-it-should-be" cannot be read
    "y": the index has it in a.safetensors, which has no such tensor
    "z": the index has it in b.safetensors, which has no such tensor
    "x": in two files, a.safetensors and b.safetensors

checkpoint "<folder>/twice" cannot be read
    "layer.0": in two files, a.safetensors and b.safetensors
    "layer.1": in two files, a.safetensors and b.safetensors
    "layer.10": in two files, a.safetensors and b.safetensors
    "layer.11": in two files, a.safetensors and b.safetensors
    "layer.12": in two files, a.safetensors and b.safetensors
    "layer.2": in two files, a.safetensors and b.safetensors
    "layer.3": in two files, a.safetensors and b.safetensors
    "layer.4": in two files, a.safetensors and b.safetensors
    "layer.5": in two files, a.safetensors and b.safetensors
    "layer.6": in two files, a.safetensors and b.safetensors
    and 3 more

checkpoint "<folder>/index" cannot be read
    model.safetensors.index.json: ../a.safetensors is outside of the folder
    model.safetensors.index.json: /etc/b.safetensors is outside of the folder

checkpoint "<folder>/malformed-index" cannot be read
    model.safetensors.index.json: weight_map, from tensor to file, is missing or malformed

checkpoint "<folder>/two-sets" cannot be read
    model.safetensors: there, and model.safetensors.index.json names a.safetensors instead
        fix: remove whichever is stale

checkpoint "<folder>/broken" cannot be read
    empty.safetensors: size 0, but its header alone takes 8: truncated, or no safetensors file
    header.safetensors: size 12, but its header alone takes 68: truncated, or no safetensors file
    json.safetensors: its header is malformed: no safetensors file, or a corrupt one
    long.safetensors: size 72, but its header says 71: corrupt
    nothing.safetensors: size 11, but its header says 10: corrupt
    overlap.safetensors: corrupt: Error while deserializing header: invalid offset for tensor `w`
    shape.safetensors: its header is malformed: no safetensors file, or a corrupt one
    short.safetensors: size 70, but its header says 71: truncated

checkpoint "<folder>/dtypes" cannot be read
    model.safetensors: "y" has dtype F4, which is not supported
    model.safetensors: "z" has dtype Q9, which is not supported""",
    )


def test_a_config_is_enough(tmp_path):
    index = {"x": "a.safetensors", "y": "b.safetensors"}
    lfs = b"version https://git-lfs.github.com/spec/v1\n"
    for name, case in {
        "alone": {"tokenizer.json": b"{}"},
        "shard": {"index": index, "a": {"x": torch.ones(3)}},
        "lfs": {"model": lfs},
    }.items():
        opened = Checkpoint(make(tmp_path / name, config='{"model_type": "llama"}', **case), weights=False)
        assert opened.config == {"model_type": "llama"}
        assert opened.generation == opened.shapes == opened.dtypes == {}
        assert opened.has_tokenizer == (name == "alone")
    opened = Checkpoint(make(tmp_path / "whole", model={"x": torch.ones(3)}), weights=False)
    assert opened.shapes == {"x": (3,)}
    assert opened.tensor("x").tolist() == [1, 1, 1]
    assert_expected_inline(
        message(tmp_path, Checkpoint, make(tmp_path / "broken", model=b"?"), weights=False),
        """\
checkpoint "<folder>/broken" cannot be read
    model.safetensors: size 1, but its header alone takes 8: truncated, or no safetensors file""",
    )


def test_tensors_own_their_memory(tmp_path):
    """A file that is cut short, or replaced, leaves what was read alone; and is not taken for the one that was opened."""
    opened = Checkpoint(make(tmp_path / "x", model={"x": torch.arange(10000), "y": torch.ones(2)}))
    x = opened.tensor("x")
    assert "model.safetensors" not in Path("/proc/self/maps").read_text()
    path = tmp_path / "x" / "model.safetensors"
    os.truncate(path, 100)
    assert torch.equal(x, torch.arange(10000))
    x += 1  # and it may be written
    found = message(tmp_path, opened.tensor, "y")
    path.unlink()
    assert message(tmp_path, opened.tensor, "y") == found
    assert_expected_inline(
        found,
        """\
checkpoint "<folder>/x": model.safetensors changed after it was opened
    fix: load again""",
    )


_PEAK = """
import gc, sys, torch
from meshfn.programs.checkpoint import Checkpoint

def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024

opened = Checkpoint(sys.argv[1])
dtype = getattr(torch, sys.argv[2])
opened.tensor("small", dtype=dtype)  # what the library costs at its first use
gc.collect()
open("/proc/self/clear_refs", "w").write("5")  # VmHWM from here on
before = peak()
model = {name: opened.tensor(name, dtype=dtype) for name in opened.shapes}
print(peak() - before)
"""


@pytest.mark.parametrize(("dtype", "model"), [("float32", 96), ("float16", 48), ("float64", 192)])
def test_peak_memory(tmp_path, dtype, model):
    """The model, one tensor of the file, and 4 MB for whatever else: neither a second model nor the mapped file."""
    make(tmp_path / "x", model={"small": torch.ones(1), **{f"{i}": torch.ones(2**21) for i in range(12)}})
    done = subprocess.run([sys.executable, "-c", _PEAK, str(tmp_path / "x"), dtype], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert model < float(done.stdout) < model + 8 + 4


def test_find_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "x.bin").write_text("")
    stored = tmp_path / "hub" / "models--owner--name.v1"
    snapshot = make(stored / "snapshots" / "0123abcd", index={"x": "a.safetensors"})
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("0123abcd")
    assert find_folder("owner/name.v1") == snapshot
    assert find_folder("models") == Path("models")
    for source in ("models/x.bin", "models/y.gguf", "name", "a/b/c", "../x", "/a/b", "a--b/c", "x" * 3000, ""):
        assert find_folder(source) is None, source
    found = [message(tmp_path, Checkpoint, snapshot), message(tmp_path, find_folder, "owner/other-1.5B")]
    assert_expected_inline(
        "\n\n".join(found),
        """\
checkpoint "<folder>/hub/models--owner--name.v1/snapshots/0123abcd" cannot be read
    a.safetensors: missing, the index has it for "x"

source "owner/other-1.5B" is neither a folder nor in the local cache of the hub
    fix: hf download owner/other-1.5B""",
    )
