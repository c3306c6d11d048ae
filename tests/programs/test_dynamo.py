"""What we take from torch's private compiler interfaces, held to what programs/dynamo.py says of it."""

from __future__ import annotations

import operator

import torch
from meshfn.programs import dynamo
from torch._dynamo.utils import counters


def test_captures_a_graph_with_sources_and_regions():
    def key(x, w):
        return x.stride(0)

    body = dynamo.region(lambda x, w: torch.nn.functional.linear(x, w).relu(), "body", key)

    def fn(params, x):
        for w in params["weights"]:
            x = body(x, w)
        return x

    weights = [torch.empty(4, 4, device="meta") for _ in range(3)]
    graph = dynamo.capture(fn, {"weights": weights}, torch.empty(2, 4, device="meta"))
    sources = [dynamo.source_of(n) for n in graph.graph.find_nodes(op="placeholder")]
    assert sorted(s or "" for s in sources) == [
        "params['weights'][0]",
        "params['weights'][1]",
        "params['weights'][2]",
        "x",
    ]
    called = [r for n in graph.graph.nodes if (r := dynamo.region_of(n)) is not None]
    assert len(called) == 3
    assert len({id(body) for body, _ in called}) == 1, "the region was traced more than once"


def test_a_dynamic_size_compiles_once():
    count = []

    def backend(graph, inputs):
        count.append(1)
        return graph.forward

    base = torch.arange(65)
    fn = dynamo.compile_with(lambda t: t.sum(), backend)
    for n in (2, 3, 32, 64):
        assert int(fn(dynamo.dynamic_size(base[:n], 0, max=64))) == n * (n - 1) // 2
    assert len(count) == 1


def test_compiled_functions_of_one_body_are_apart():
    """More of them than Dynamo's limit of compiles for one code object."""

    def make(k):
        return lambda x: x * k

    for k in range(20):
        fn = dynamo.compile_with(make(k), lambda graph, inputs: graph.forward)
        assert float(fn(torch.ones(()))) == k


def test_another_text_of_ours_is_compiled_anew(monkeypatch, tmp_path):
    """The cache on disk knows a primitive by its name, and must not serve what an older version of it computed."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    hits = []
    for text in ("one", "one", "other"):
        monkeypatch.setattr(dynamo, "_digest", lambda text=text: text)
        counters.clear()
        dynamo.compile_with(lambda x: x.sin() + 1, dynamo.inductor)(torch.ones(3))
        hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 1, 0]


def test_somebody_else_s_composite_op_is_compiled_anew(monkeypatch, tmp_path):
    """Its text may have changed, and the cache on disk knows its name alone."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    library = torch.library.Library("nobody", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
    body = dynamo.region(lambda x: torch.ops.nobody.twice.default(x) + 1, "nobody_s", lambda x: 0)
    hits = []
    for fn in (torch.ops.nobody.twice.default, lambda x: body(body(x))):
        for _ in range(2):
            counters.clear()
            compiled = dynamo.compile_with(lambda x, fn=fn: fn(x).sin(), dynamo.inductor)
            torch.testing.assert_close(compiled(torch.ones(3)), fn(torch.ones(3)).sin())
            hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0] * 4


def test_the_digest_is_of_all_our_rooms(tmp_path):
    digest = dynamo._digest.__wrapped__
    found = {digest(tmp_path)}
    for room in ("functional", "sharding", "programs/families"):
        (tmp_path / room).mkdir(parents=True)
        (tmp_path / room.partition("/")[0] / "__init__.py").touch()
        for text in ("one", "other"):
            (tmp_path / room / "file.py").write_text(text)
            found.add(digest(tmp_path))
    assert len(found) == 7
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").write_text("no part of it")
    assert digest(tmp_path) in found


def test_one_graph_sums_over_few_and_over_many():
    """Inductor writes a sum of more than 4096 numbers in another way."""
    longest = dynamo.longest_sum(torch.device("cpu"))
    assert longest in (None, 4096)
    compiles = []

    def backend(graph, inputs):
        compiles.append(1)
        return dynamo.inductor(graph, inputs)

    base = torch.randn(3, 9000)
    fn = dynamo.compile_with(lambda x: x.sum(-1), backend)
    for n in (32, 4096, *((4097, 8999) if longest is None else ())):
        x = dynamo.dynamic_size(base[:, :n], 1, max=longest or 8999)
        torch.testing.assert_close(fn(x), x.sum(-1), rtol=1e-4, atol=1e-4)
    assert compiles == [1]


def test_the_compiler_is_found():
    assert dynamo.compiler_problem(torch.device("cpu")) is None


def test_sizes_of_one_program_are_no_news_to_another():
    """Dynamo remembers the sizes a source line has met and makes the next ones dynamic; programs must not notice."""

    def make():
        return lambda t: t.sum()

    shapes = []

    def backend(graph, inputs):
        (node,) = (n for n in graph.graph.find_nodes(op="placeholder") if n.type is not torch.SymInt)
        shapes.append(tuple(node.meta["example_value"].shape))
        return graph.forward

    for n in (3, 4, 5):
        dynamo.compile_with(make(), backend)(torch.ones(n))
    assert shapes == [(3,), (4,), (5,)]
    assert all(type(n) is int for (n,) in shapes)


def test_regions_of_one_code_and_other_closures_stay_apart():
    def make(k):
        return lambda x: x * k

    two, three = (dynamo.region(make(k), name, lambda x: 0) for k, name in ((2.0, "two"), (3.0, "three")))
    compiled = dynamo.compile_with(lambda x: three(two(two(x))), lambda graph, inputs: graph.forward)
    assert float(compiled(torch.ones(()))) == 12.0


def test_a_dynamic_size_knows_its_largest():
    n = dynamo.dynamic_size(torch.arange(9), 0, max=40)
    graph = dynamo.capture(lambda x: torch.cat((x, torch.ones(3))) * 2, n)
    (product,) = (node for node in graph.graph.nodes if node.op == "call_function" and node.target is operator.mul)
    assert dynamo.largest(dynamo.value_of(product).shape[0]) == 43
    assert dynamo.largest(7) == 7


def test_graphs_are_counted_and_another_function_s_result_is_taken_without_a_warning():
    """Warnings are errors here."""
    before = dynamo.graphs()
    fn = dynamo.compile_with(lambda x: x.sin(), lambda graph, inputs: graph.forward)
    made = torch.ones(3, requires_grad=True) * 2
    torch.testing.assert_close(dynamo.without_warning(fn)(made), made.sin())
    fn(made)
    assert dynamo.graphs() == before + 1
