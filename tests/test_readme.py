"""What the README shows is what happens; its snippet runs in programs/test_smollm2.py."""

from __future__ import annotations

import dataclasses
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from meshfn import functional as F
from meshfn import programs
from meshfn import sharding as sh

from .families import Letters, family

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_a_layer_of_your_own():
    code = snippet("print(params) lists them")
    found = {"torch": torch, "F": F}
    exec(code, found)
    assert isinstance(found["params"], F.Attention)


def snippet(word):
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if word in c)
    return code


def test_training():
    model = programs.load(family("llama"))
    program = programs.build(model, max_len=20, compile=False)
    before = program.score([[1, 2, 3]])[0]
    found = {"torch": torch, "F": F, "model": model, "program": program, "ids": torch.tensor([[1, 2, 3]] * 4)}
    exec(snippet("program.params = F.tree.map"), found)
    assert program.score([[1, 2, 3]])[0].sum() > before.sum()
    torch.testing.assert_close(found["value"], -before.mean(), rtol=1e-4, atol=1e-4)


def test_rollout_and_training(capsys):
    module = family("llama")
    model = programs.load(module)
    program = programs.build(model, batch=2, max_len=20, chunk=8, compile=False)
    before = module.lm_head.weight.detach().clone()
    code = snippet("programs.train_step(").replace("max_grad_norm=1.0", "max_grad_norm=1.0, compile=False")
    found = {"torch": torch, "F": F, "programs": programs, "model": model, "program": program}
    exec(code, {**found, "prompts": [[1, 2], [3]]})
    assert f"```python\n{snippet('programs.train_step(')}```\n```\n{capsys.readouterr().out}```\n" in README
    assert not torch.equal(module.lm_head.weight, before)


def test_checkpoints(tmp_path):
    family("llama", num_hidden_layers=4).save_pretrained(tmp_path)
    code = snippet("like=").replace("HuggingFaceTB/SmolLM2-135M", str(tmp_path))
    params = programs.load(tmp_path, dtype=torch.bfloat16).params
    exec(code, {"torch": torch, "dataclasses": dataclasses, "programs": programs, "folder": tmp_path, "params": params})
    assert programs.load(tmp_path).dtype == torch.bfloat16


def test_sampling():
    model = dataclasses.replace(programs.load(family("llama")), tokenizer=Letters())
    program = programs.build(model, batch=4, max_len=50, compile=False)
    code = "generation = " + snippet("num_return_sequences").strip()
    found = {"program": program, "prompts": [[1, 2, 3]]}
    exec(code, found)
    generation = found["generation"]
    assert len({tuple(row) for row in generation.tokens}) == 4
    again = program.generate([[1, 2, 3]], do_sample=True, temperature=0.8, top_p=0.95, seed=[generation.seeds[2]])
    assert again.tokens == [generation.tokens[2]]


def test_the_error_is_as_shown():
    q, k = torch.ones(2, 5, 9, 64), torch.ones(2, 5, 3, 32)
    with pytest.raises(F.ShapeError) as error:
        F.dot_product_attention(q, k, k)
    assert f"ShapeError: {error.value}\n" in README


def test_what_snippets_print_is_shown(capsys):
    for word in (
        "sh.reshard(x.sin()",
        "layout.plan(",
        "layout.stack(",
        "print(F.balance_loss(",
        "empty = F.empty_caches([gdn]",
    ):
        code = snippet(word)
        exec(code, {})
        printed = capsys.readouterr().out
        shown = README.split(code)[1].split("```\n")[2]
        assert printed == shown


def test_a_rule_of_your_own():
    found = {}
    for word in ("empty = F.empty_caches([gdn]", "F.gdn_output("):
        exec(snippet(word), found)
    cfg = dataclasses.replace(found["gdn"], initializer_range=0.3)
    params, x = F.GDN.init(cfg, seed=0, dtype=torch.float64), torch.randn(2, 70, 64, dtype=torch.float64)
    torch.testing.assert_close(found["mine"](params, x, cfg), F.gdn(params, x, cfg)[0], rtol=1e-9, atol=1e-9)


def test_a_step_of_training_over_ranks():
    """As one rank has it, whose documents are told by `segment_ids` and positions."""
    found = {}
    exec(snippet("layout.stack("), found)
    cfg, ids = found["cfg"], torch.randint(0, 50, (2, 97))
    given = F.Decoder.init(cfg, seed=0, dtype=torch.float64), ids[:, :-1], cfg, ids[:, 1:]
    params = F.tree.leaves(F.tree.map(lambda p: p.requires_grad_(), given[0]))
    places = torch.cat((torch.arange(40), torch.arange(56)))[None]
    told = {"positions": places, "segment_ids": (torch.arange(96) >= 40).long().expand(2, 96)}
    ours, wanted = found["loss"](*given, cu_seqlens=[0, 40, 96])[0], F.next_token_loss(*given, **told)[0]
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(loss, params) for loss in (ours, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-12)


def test_layouts_of_latent_attention(capsys):
    runpy.run_path(str(Path(__file__).parent.parent / "examples/mla_layouts.py"))
    lines = capsys.readouterr().out.splitlines()
    table = "\n".join(line for line in lines if line.startswith("|"))
    assert table.count("mla_") == 5
    assert f"\n\n{table}\n\n" in README

    found = {"F": F, "sh": sh}
    exec(snippet("attention = F.MLAConfig"), found)
    exec(snippet('sh.shard(F.mla, sh.mla_latent("u", "g", tp="tp")'), found)
    cfg = found["attention"]
    params, x = F.MLA.init(cfg, seed=0, dtype=torch.float64), torch.randn(2, 96, 64, dtype=torch.float64)
    y, _ = sh.simulate(found["layer"], found["mesh"])(params, x, cfg)
    torch.testing.assert_close(y, F.mla(params, x, cfg, positions=torch.arange(96)[None])[0], rtol=1e-12, atol=1e-12)


def test_layouts_of_hybrid_models(capsys):
    runpy.run_path(str(Path(__file__).parent.parent / "examples/hybrid_layouts.py"))
    lines = capsys.readouterr().out.splitlines()
    table = "\n".join(line for line in lines if line.startswith("|"))
    assert table.count("gdn_scan") == 6
    assert f"\n\n{table}\n\n" in README


def test_whole_models(tmp_path, capsys):
    runpy.run_path(str(Path(__file__).parent.parent / "examples/whole_models.py"))
    assert capsys.readouterr().out.count("exchanges on each rank") == 2

    module = family("deepseek_v3")
    module.save_pretrained(tmp_path / "folder")
    model = programs.load(module.double())
    found = {"cfg": model.config, "params": model.params}
    code = snippet("sh.spread(sh.mla_latent(tp=")
    exec(code, found)
    assert "latent attention, experts" in str(found["plan"])
    want = F.next_token_loss(model.params, found["ids"][:, :-1], model.config, found["ids"][:, 1:])
    torch.testing.assert_close((found["total"], found["count"]), want, rtol=1e-12, atol=1e-12)

    found |= {"programs": programs, "folder": tmp_path / "folder", "mesh": sh.Mesh(u=1)}
    found["model"] = sh.shard(F.next_token_loss, sh.mla_latent(), found["mesh"], S=32)
    exec(snippet("programs.load_shards").replace('"checkpoint"', repr(str(tmp_path / "checkpoint"))), found)
    mine = found["mine"]
    assert all(map(torch.equal, F.tree.leaves(found["params"]), F.tree.leaves(mine.params)))
    assert mine.read == sum(x.numel() * x.element_size() for x in F.tree.leaves(mine.params))


@pytest.mark.parametrize("drawn", [True, False])
def test_the_notebook_of_gated_delta_nets(drawn, monkeypatch, capsys):
    if not drawn:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    found = runpy.run_path(str(Path(__file__).parent.parent / "examples/gdn_notebook.py"))
    assert ("after token 5" in capsys.readouterr().out) != drawn
    figure = found["picture"](found["states"])
    assert (figure is not None) == drawn
    assert not drawn or len(figure.axes) == len(found["states"])


def test_training_with_the_balance_loss():
    model = programs.load(family("qwen3_moe"))
    found = {"F": F, "params": model.params, "cfg": model.config, "ids": torch.tensor([[1, 2, 3]] * 4)}
    exec(snippet("1e-3 * F.balance_loss"), found)
    found["loss"].backward()
    assert all(p.grad is not None for p in F.tree.trainable(model.params))


def test_a_step_of_training():
    code = snippet("sum_gradients").replace("S=4096", "S=6")
    layer = F.LayerConfig(
        attention=F.AttentionConfig(hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4),
        mlp=F.MLPConfig(hidden_size=8, intermediate_size=6),
    )
    cfg = F.DecoderConfig(vocab_size=11, hidden_size=8, layers=(layer,))
    params = F.tree.map(lambda p: p.requires_grad_(), F.Decoder.init(cfg, 0, dtype=torch.float64))
    tokens = torch.randint(0, 11, (2, 6))

    def body(mesh):
        given = {"F": F, "sh": sh, "mesh": mesh, "params": params, "cfg": cfg, "tokens": tokens, "labels": None}
        found = {**given, "cu_seqlens": [0, 4, 6]}
        exec(code, found)
        return found["grads"]

    targets = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], 1)
    targets[:, 3] = -100
    positions = torch.tensor([[0, 1, 2, 3, 0, 1]])
    ids = torch.tensor([[0, 0, 0, 0, 1, 1]] * 2)
    total, count = F.next_token_loss(params, tokens, cfg, targets, positions=positions, segment_ids=ids)
    wanted = torch.autograd.grad(total / count, F.tree.leaves(params))
    for grads in sh.Threads(sh.Mesh(dp=2, u=2)).run(body):
        torch.testing.assert_close(F.tree.leaves(grads), list(wanted), rtol=1e-12, atol=1e-12)


def test_kernels_of_a_gpu(capsys):
    exec(snippet('device="cuda", arch="sm_90"'), {})
    out = capsys.readouterr().out
    shown = re.search(r"```\n(decode   B=1 S=1.*?)```", README, re.DOTALL)
    assert shown is not None
    missing = [line for line in shown[1].splitlines() if line.strip() != "..." and line not in out.splitlines()]
    assert missing == []


def test_a_kernel_of_your_own(capsys):
    model = programs.load(family("llama"), abstract=True)
    found = {"torch": torch, "F": F, "programs": programs, "model": model}
    exec(snippet("programs.Kernel("), found)
    prefill, decode = capsys.readouterr().out.split("decode   B=1")
    assert prefill.count("apply_rope") == prefill.count("compiler (mine: more than one token)") == 2
    lines = [line for line in decode.splitlines() if " apply_rope " in line]
    assert len(lines) == 2
    assert all(line.endswith(" mine") for line in lines)

    gpu = {"device": "cuda", "arch": "sm_90", "dtype": torch.bfloat16}  # there its node would be part of a larger one
    ours, theirs = (str(programs.plan(model, kernels=some, **gpu)) for some in ((), (found["mine"],)))
    assert ("qkv_rope_cache" in ours, "qkv_rope_cache" in theirs) == (True, False)
    assert len([line for line in theirs.splitlines() if line.endswith(" mine")]) == 2
