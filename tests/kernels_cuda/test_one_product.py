"""Several products as one: what is computed, where weights lie, and what a plan says of it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib

import pytest
import torch
from meshfn import functional as F
from meshfn import programs
from meshfn.functional import tree
from meshfn.kernels_cuda.one_product import as_one, norm_linear
from meshfn.programs import dynamo
from meshfn.programs.beside import beside_text, groups
from meshfn.programs.cuda import CUDA_KERNELS
from meshfn.programs.lower import lower
from meshfn.programs.sizes import Target
from meshfn.programs.weights import Weights

from ..families import family

load_module = importlib.import_module("meshfn.programs.load")

D = 24


def weights(widths, dtype=torch.float64, together=True):
    generator = torch.Generator().manual_seed(len(widths))
    whole = torch.randn(sum(widths), D, generator=generator, dtype=torch.float64).to(dtype)
    return list(whole.split(widths)) if together else [w.clone() for w in whole.split(widths)]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("widths", [(5, 3), (16, 4, 4), (7, 0, 3, 1, 2, 9)])
@pytest.mark.parametrize("shape", [(0, D), (1, D), (2, 9, D), (17, D)])
def test_products(shape, widths, together, monkeypatch):
    x = torch.randn(*shape[:-1], 2 * D, dtype=torch.float64)[..., ::2]  # not contiguous
    ws, bs = (
        weights(widths, together=together),
        [torch.randn(widths[0], dtype=torch.float64), *[None] * len(widths[1:])],
    )
    product, seen = torch.mm, []
    monkeypatch.setattr(torch, "mm", lambda *args, **kwargs: seen.append(args) or product(*args, **kwargs))
    found = norm_linear(x, None, ws, bs)
    assert len(seen) == (1 if together else len(widths))
    torch.testing.assert_close(list(found), F.norm_linear(x, None, ws, bs))


def test_gradients_and_transforms():
    x, ws = torch.randn(9, D, dtype=torch.float64, requires_grad=True), weights((4, 3))
    ws = [w.detach().clone().requires_grad_() for w in ws]
    assert torch.autograd.gradcheck(
        lambda *given: tuple(norm_linear(given[0], None, list(given[1:]), [None, None])), (x, *ws)
    )
    batched = torch.func.vmap(lambda x: tuple(norm_linear(x, None, ws, [None, None])))(x.detach()[:, None])
    torch.testing.assert_close(list(batched), [F.linear(x.detach(), w)[:, None] for w in ws])


def test_wrong_arguments():
    with pytest.raises(
        TypeError, match=r"one_product\(w1=...\): it is torch.float32, and the kernel reads torch.float64"
    ):
        norm_linear(torch.ones(9, D, dtype=torch.float64), None, [*weights((2,)), torch.ones(3, D)], [None, None])
    with pytest.raises(ValueError, match="one_product"):
        norm_linear(torch.ones(9, D), None, [torch.ones(2, D), torch.ones(3, D + 1)], [None, None])


def test_where_weights_lie():
    q, k, v = weights((4, 2, 3))
    assert as_one([q, k, v]).shape == (9, D)
    assert as_one([k, v]).data_ptr() == k.data_ptr()
    apart = [(q, v), (k, q), (q, k.clone()), (q, k[:, ::2]), (q.clone(), k)]
    assert [as_one(pair) for pair in apart] == [None] * 5
    # Handles on one memory, of which the last alone has the storage of all: as a program hands fused projections over.
    handles = [torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(w)) for w in (q, k)]
    assert as_one(handles) is None
    torch.testing.assert_close(as_one([*handles, v]), torch.cat((q, k, v)))


@pytest.mark.parametrize(
    "norm", [None, {}, {"zero_centered": True, "scale_in_fp32": True}, {"norm_type": "layer_norm", "bias": True}]
)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu2"])
def test_a_gated_mlp_in_parts(norm, activation):
    """The graph computes what the primitive does, with one product for gate and up."""
    cfg = F.MLPConfig(hidden_size=D, intermediate_size=40, hidden_act=activation, bias=activation == "gelu",
                      norm=None if norm is None else F.NormConfig(**norm))  # fmt: skip
    params = tree.map(lambda leaf: leaf + 0.1, F.MLP.init(cfg, seed=3))
    x = torch.randn(3, 5, D)
    module = dynamo.capture(lambda params, x: x + F.mlp(params, x, cfg), params, x)
    lower(module, Target("cuda", torch.float32, "sm_90"), CUDA_KERNELS)
    names = [dynamo.op_name(node) for node in module.graph.nodes]
    assert "meshfn_cuda::products" in names
    assert "meshfn::gated_mlp" not in names
    given = {"x": x, **{f"params{path}": leaf for path, leaf in tree.paths(params).items()}}
    with torch.no_grad():
        found = module(*(given[dynamo.source_of(node)] for node in module.graph.find_nodes(op="placeholder")))
        torch.testing.assert_close(found[0], x + F.mlp(params, x, cfg))


@pytest.mark.parametrize("name", ["llama", "phi3", "deepseek_v3", "kimi_linear"])
def test_what_lies_together_is_what_one_product_reads(name):
    """In the order in which it does; and fused projections, which have one leaf each for q, k and v, do so at once."""
    model = programs.load(family(name))
    found = programs.plan(model, device="cuda", arch="sm_90", dtype=torch.float32, batch=16, max_len=64, chunk=32)
    decode, together = found.phases["decode"], set()
    bodies = {body: decode.graph.region_names(body) for body in decode.graph.regions()}
    for body, names in {**bodies, decode.graph.module: decode.graph.input_names()}.items():
        calls = [node for node in body.graph.nodes if dynamo.op_name(node) == "meshfn_cuda::products"]
        together |= {tuple(names[w].rpartition("]")[2].removeprefix("layer") for w in node.args[2]) for node in calls}
    assert together
    assert together <= {tuple(path.partition("]")[2] for path in group) for group in groups(model.params)}
    every = len(groups(model.params))
    begin = every if name == "phi3" else 0
    apart = "" if begin == every else "; weights of the others lie apart, see programs.side_by_side"
    assert beside_text(model.params, set()) == f"one_product: {begin} of {every}{apart}"
    with contextlib.nullcontext() if name == "phi3" else pytest.warns(UserWarning, match="require gradients"):
        params = programs.side_by_side(model.params)
    assert beside_text(params, set()) == f"one_product: {every} of {every}"
    assert beside_text(model.params, set(tree.paths(params))) == f"one_product: {every} of {every}"
    assert all(torch.equal(leaf, tree.paths(model.params)[path]) for path, leaf in tree.paths(params).items())
    assert name == "phi3" or not any(tree.paths(params)[path]._is_view() for group in groups(params) for path in group)
    # As a program hands them to a step: each a storage of its own, as regions need, and still side by side.
    live = tree.leaves(Weights(params, torch.device("cpu"), torch.float32).live())
    assert len({leaf.untyped_storage()._cdata for leaf in live}) == len(live)
    by_path = dict(zip(tree.paths(params), live, strict=True))
    assert all(as_one([by_path[path] for path in group]) is not None for group in groups(params))


def test_copies_of_what_is_trained_say_so_and_can_be_trained():
    model = programs.load(family("llama"))
    params = model.params
    held = torch.optim.SGD(tree.trainable(params), lr=1.0)
    text = (
        r"params\.layers\[0\]\.attention\.q, .* and 13 more require gradients, and these are copies(.|\n)*fix: .*optim"
    )
    with pytest.warns(UserWarning, match=text):
        copies = programs.side_by_side(params)
    before, known = tree.map(torch.clone, copies.layers), {id(leaf) for leaf in held.param_groups[0]["params"]}
    trained = tree.trainable(copies)
    assert len(trained) == len(tree.trainable(params))
    assert sum(id(leaf) not in known for leaf in trained) == 15
    F.decoder(copies, torch.tensor([[1, 2, 3]]), model.config)[0].square().sum().backward()
    torch.optim.SGD(trained, lr=1.0).step()
    moved = [not torch.equal(*pair) for pair in zip(tree.leaves(before), tree.leaves(copies.layers), strict=True)]
    assert all(moved)
    assert beside_text(copies, set()) == "one_product: 6 of 6"
    programs.side_by_side(copies)  # what lies so already stays, and nothing is said


def test_a_gpu_s_weights_are_read_side_by_side(tmp_path, monkeypatch):
    family("llama").save_pretrained(tmp_path)
    plain, made = programs.load(tmp_path), load_module.assemble

    def on_a_gpu(family, cfg, layers, source, progress):
        return made(family, cfg, layers, dataclasses.replace(source, device=torch.device("cuda")), progress)

    monkeypatch.setattr(load_module, "assemble", on_a_gpu)
    model = programs.load(tmp_path)
    every = len(groups(model.params))
    assert beside_text(plain.params, set()).startswith(f"one_product: 0 of {every}")
    assert beside_text(model.params, set()) == f"one_product: {every} of {every}"
    assert tree.paths(model.params).keys() == tree.paths(plain.params).keys()
    assert all(map(torch.equal, tree.leaves(model.params), tree.leaves(plain.params)))
    programs.save(model, tmp_path / "again")
    assert all(map(torch.equal, tree.leaves(programs.load(tmp_path / "again").params), tree.leaves(plain.params)))
