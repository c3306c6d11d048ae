"""Checkpoints with experts: files that have them one by one, layers beyond the config's, models that see."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import programs
from meshfn.programs import assemble, dynamo
from meshfn.programs.checkpoint import Checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Kimi_K25Config, Kimi_K25ForConditionalGeneration

from ..families import FAMILIES, SIZES, family
from .test_load import edit, same

IDS = torch.arange(1, 13).view(2, 6)
V3 = SIZES | FAMILIES["deepseek_v3"][1]


@pytest.fixture
def folder(tmp_path):
    family("deepseek_v3").save_pretrained(tmp_path / "deepseek")
    return tmp_path / "deepseek"


def rewrite(folder, change):
    """The tensors as `change` leaves them."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_experts_of_a_module_are_views(name):
    """Of its parameters, in their storage; a correction is the module's own buffer, and no optimiser's."""
    module = family(name)
    model = programs.load(module)
    fused, moe = module.model.layers[1].mlp.experts, model.params.layers[1].mlp
    for leaf in (moe.gate, moe.up):
        assert leaf._base is fused.gate_up_proj
    if name == "deepseek_v3":
        assert moe.down is fused.down_proj
        assert moe.correction_bias is module.model.layers[1].mlp.gate.e_score_correction_bias
        assert not any(t is moe.correction_bias for t in F.tree.trainable(model.params))
    else:
        assert moe.down._base is fused.down_proj
    with torch.no_grad():
        fused.gate_up_proj.zero_()
    assert not moe.up.any()
    (moe.gate.sum() - 2 * moe.up.sum()).backward()
    assert sorted(fused.gate_up_proj.grad.unique().tolist()) == [-2, 1]


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral", "qwen3_moe"])
def test_a_file_may_have_experts_one_by_one_or_together(name, tmp_path):
    """One by one, as published, they are joined as they are read; together, as a module has them, they stay so."""
    module = family(name)
    module.save_pretrained(tmp_path)
    published = programs.load(tmp_path)
    for each in published.params.layers:
        if isinstance(each.mlp, F.MoE):
            assert each.mlp.gate._base is each.mlp.up._base is not None
            assert each.mlp.gate._base.shape[1] == 2 * each.mlp.gate.shape[1]
    trained = F.tree.map(lambda t: t.requires_grad_(), published.params)
    assert len(F.tree.trainable(trained)) == len(F.tree.leaves(trained))
    save_file({n: t.contiguous() for n, t in module.state_dict().items()}, tmp_path / "model.safetensors")
    together = programs.load(tmp_path)
    assert together.config == published.config
    assert same(together.params, published.params)
    programs.save(together, tmp_path / "saved")
    names = set(Checkpoint(tmp_path / "saved").shapes)
    assert any(".experts.0." in each for each in names)
    assert not any("gate_up_proj" in each for each in names)


def test_one_tensor_at_a_time(folder, monkeypatch):
    """Whatever is read has gone into its place before the next is read, and each place is made once."""
    read, made = [], []
    whole, room = Checkpoint.tensor, assemble._storage

    def tensor(self, name, **given):
        assert not read or read[-1]() is None, "the last one is still there"
        found = whole(self, name, **given)
        if ".experts." in name:
            read.append(weakref.ref(found))
        return found

    def storage(parts, shape, *more):
        made.append(shape)
        return room(parts, shape, *more)

    monkeypatch.setattr(Checkpoint, "tensor", tensor)
    monkeypatch.setattr(assemble, "_storage", storage)
    programs.load(folder)
    assert len(read) == 2 * 6 * 3
    assert sorted(made) == 2 * [(6, 28, 48)] + 2 * [(6, 48, 14)]


def test_what_routing_needs_stays_wide(folder):
    """Where the file has it so."""
    for model in (programs.load(folder, dtype=torch.bfloat16, abstract=a) for a in (False, True)):
        wide = {p for p, leaf in F.tree.paths(model.params).items() if leaf.dtype == torch.float32}
        assert wide == F.tree.fp32_paths(model.params) == {
            f".layers[{i}].mlp.{each}" for i in (1, 2) for each in ("router", "correction_bias")
        }  # fmt: skip
        assert model.dtype == torch.bfloat16
    assert programs.load(folder, dtype=torch.float64).params.layers[1].mlp.router.dtype == torch.float64
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    # Not in every version: 5.17 keeps the correction alone.
    kept = {name: t.dtype for name, t in half.state_dict().items() if t.dtype == torch.float32}
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in kept
    programs.save(programs.load(folder, dtype=torch.bfloat16), folder)
    again = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    assert all(torch.equal(t, again[name].to(t.dtype)) for name, t in half.state_dict().items())
    rewrite(folder, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}))
    assert programs.load(folder).params.layers[1].mlp.router.dtype == torch.bfloat16


def test_an_unknown_type_is_read_like_a_known_one(folder):
    known = programs.load(folder)
    edit(folder, model_type="supernova", seq_aux=True, ep_size=1)
    like = programs.load(folder, like="deepseek_v3")
    assert like.config == known.config
    assert same(like.params, known.params)


def test_layers_that_predict_more_tokens_are_left_out(folder):
    plain = programs.load(folder)
    edit(folder, num_nextn_predict_layers=2)
    names = ("layers.3.eh_proj.weight", "layers.3.mlp.experts.0.up_proj.weight", "layers.4.embed_tokens.weight")
    rewrite(folder, lambda tensors: tensors.update({f"model.{name}": torch.ones(2) for name in names}))
    assert same(programs.load(folder).params, plain.params)
    edit(folder, num_nextn_predict_layers=1)
    with pytest.raises(F.TreeError, match=r"model\.layers\.4\.embed_tokens\.weight: not expected"):
        programs.load(folder)
    edit(folder, num_hidden_layers=2, num_nextn_predict_layers=3)
    assert len(programs.load(folder).params.layers) == 2
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.extra": torch.ones(2)}))
    with pytest.raises(F.TreeError, match=r"model\.layers\.0\.extra: not expected"):
        programs.load(folder)


@pytest.mark.parametrize(
    ("name", "layers", "dense"),
    [
        ("deepseek_v3", [0, 2], [0]),
        ("deepseek_v3", [2], []),
        ("glm4_moe_lite", [2, 1], [1]),
        ("qwen3_moe", [1, 0], [0]),
        ("qwen3_next", [1, 0], [0]),
        ("kimi_linear", [2, 1], []),
        ("kimi_linear", [1, 0], [1]),
    ],
)
def test_some_layers(name, layers, dense, tmp_path):
    module = family(name)
    module.save_pretrained(tmp_path / "whole")
    part = programs.load(tmp_path / "whole", layers=layers)
    assert [i for i, each in enumerate(part.config.layers) if isinstance(each.mlp, F.MLPConfig)] == dense
    programs.save(part, tmp_path / "part")
    again = programs.load(tmp_path / "part")
    assert again.config == part.config
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "part", attn_implementation="eager", experts_implementation="eager"
    )
    tokens = torch.randint(1, 97, (1, 9))
    torch.testing.assert_close(
        F.decoder(part.params, tokens, part.config)[0], theirs(tokens).logits, rtol=1e-4, atol=1e-4
    )


def test_a_model_that_sees_is_read_as_its_language_model(tmp_path):
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Kimi_K25Config(
        text_config=V3 | {"model_type": "deepseek_v3", "num_hidden_layers": 2},
        vision_config=vision,
        tie_word_embeddings=False,
        projection_hidden_size=16,
    )
    whole = Kimi_K25ForConditionalGeneration._from_config(config)
    whole.config.text_config._experts_implementation = "eager"
    model = programs.load(whole)
    assert model.params.head is whole.lm_head.weight
    assert model.params.embed is whole.model.language_model.embed_tokens.weight
    assert model.family.model_type == model.hf_config["model_type"] == "deepseek_v3"
    tokens = torch.randint(1, 97, (1, 9))
    found = F.decoder(model.params, tokens, model.config)[0]
    torch.testing.assert_close(found, whole(input_ids=tokens).logits, rtol=1e-4, atol=1e-4)
    whole.save_pretrained(tmp_path / "sees")
    assert same(programs.load(tmp_path / "sees").params, model.params)

    def publish(tensors):
        for name in [n for n in tensors if n.startswith("language_model.model.blocks.")]:
            tensors[name.replace(".blocks.", ".layers.")] = tensors.pop(name)

    rewrite(tmp_path / "sees", publish)
    text = json.loads((tmp_path / "sees" / "config.json").read_text())["text_config"]
    edit(tmp_path / "sees", text_config=text | {"model_type": "kimi_k2", "topk_method": "noaux_tc"})
    read = programs.load(tmp_path / "sees")
    assert same(read.params, model.params)
    programs.save(read, tmp_path / "reads")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "reads", experts_implementation="eager")
    torch.testing.assert_close(found, again(tokens).logits, rtol=1e-4, atol=1e-4)

    rewrite(tmp_path / "sees", lambda tensors: tensors.pop("language_model.model.layers.1.mlp.gate.weight"))
    with pytest.raises(F.TreeError) as error:
        programs.load(tmp_path / "sees")
    assert_expected_inline(
        str(error.value),
        """\
checkpoint and config of family deepseek_v3 differ
    .layers[1].mlp.router (language_model.model.layers.1.mlp.gate.weight): missing, "X D" = (6, 48)""",
    )


def test_messages(folder, tmp_path):
    texts = []

    def refused(source=folder, **given):
        with pytest.raises(ValueError, match=" ") as error:
            programs.load(source, **given)
        texts.append(str(error.value).replace(str(folder), "<folder>"))

    part = programs.load(folder, layers=[2, 0])
    with pytest.raises(ValueError, match="save") as error:
        programs.save(part, tmp_path / "part")
    texts.append(str(error.value))
    edit(folder, topk_method="greedy")
    refused()
    edit(folder, topk_method=None, n_group=4)
    refused()
    edit(folder, n_group=3, quantization_config={"quant_method": "mxfp4"})
    refused()
    edit(folder, quantization_config=None)
    mlp = "model.layers.1.mlp"

    def damage(tensors):
        tensors.pop(f"{mlp}.experts.3.gate_proj.weight")
        tensors[f"{mlp}.experts.4.down_proj.weight"] = torch.ones(48, 13)
        tensors[f"{mlp}.experts.6.up_proj.weight"] = torch.ones(14, 48)
        tensors[f"{mlp}.gate.e_score_correction_bias"] = torch.ones(1)

    rewrite(folder, damage)
    refused()
    rewrite(folder, lambda tensors: [tensors.pop(n) for n in list(tensors) if ".experts." in n])
    refused()
    for name, fields in {
        "deepseek_v2": {"topk_method": "noaux_tc", "norm_topk_prob": True},
        "deepseek_v2-lite": {"norm_topk_prob": True, "num_key_value_heads": 3, "scoring_func": "sigmoid"},
        "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse", "linear"]},
        "mixtral": {"router_jitter_noise": 0.1},
    }.items():
        module = family(name)
        for field, value in fields.items():
            setattr(module.config, field, value)
        refused(module)
    assert_expected_inline(
        "\n\n".join(texts),
        """\
save: config.json counts the layers without experts from the first on, and here others come before them
    fix: load(layers=...) with those first, or save the parameters with the config they came with

config fields that family deepseek_v3 does not explain
    topk_method='greedy', right where it is 'noaux_tc'
    fix: load(..., ignore=['topk_method']), if you know that they change nothing

MoEConfig(n_group=4): num_experts=6 do not divide over it

config fields that family deepseek_v3 does not explain
    quantization_config={'quant_method': 'mxfp4'}, unknown
    fix: a checkpoint whose weights are not packed, or abstract=True to plan without them

checkpoint and config of family deepseek_v3 differ
    .layers[1].mlp.gate[3] (model.layers.1.mlp.experts.3.gate_proj.weight): missing, "F/tp D/dp" = (14, 48)
    .layers[1].mlp.down[4] (model.layers.1.mlp.experts.4.down_proj.weight): "D/dp F/tp" = (48, 14), but the tensor has (48, 13)
    .layers[1].mlp.correction_bias (model.layers.1.mlp.gate.e_score_correction_bias): "X" = (6,), but the tensor has (1,)
    model.layers.1.mlp.experts.6.up_proj.weight: not expected, it has (14, 48)

checkpoint and config of family deepseek_v3 differ
    .layers[1].mlp.gate[0] (model.layers.1.mlp.experts.0.gate_proj.weight): missing, "F/tp D/dp" = (14, 48)
    .layers[1].mlp.up[0] (model.layers.1.mlp.experts.0.up_proj.weight): missing, "F/tp D/dp" = (14, 48)
    .layers[1].mlp.gate[1] (model.layers.1.mlp.experts.1.gate_proj.weight): missing, "F/tp D/dp" = (14, 48)
    .layers[1].mlp.up[1] (model.layers.1.mlp.experts.1.up_proj.weight): missing, "F/tp D/dp" = (14, 48)
    .layers[1].mlp.gate[2] (model.layers.1.mlp.experts.2.gate_proj.weight): missing, "F/tp D/dp" = (14, 48)
    .layers[1].mlp.up[2] (model.layers.1.mlp.experts.2.up_proj.weight): missing, "F/tp D/dp" = (14, 48)
    .layers[1].mlp.gate[3] (model.layers.1.mlp.experts.3.gate_proj.weight): missing, "F/tp D/dp" = (14, 48)
    .layers[1].mlp.up[3] (model.layers.1.mlp.experts.3.up_proj.weight): missing, "F/tp D/dp" = (14, 48)
    .layers[1].mlp.gate[4] (model.layers.1.mlp.experts.4.gate_proj.weight): missing, "F/tp D/dp" = (14, 48)
    .layers[1].mlp.up[4] (model.layers.1.mlp.experts.4.up_proj.weight): missing, "F/tp D/dp" = (14, 48)
    .layers[1].mlp.gate[5] (model.layers.1.mlp.experts.5.gate_proj.weight): missing, "F/tp D/dp" = (14, 48)
    .layers[1].mlp.up[5] (model.layers.1.mlp.experts.5.up_proj.weight): missing, "F/tp D/dp" = (14, 48)
    and 25 more

topk_method="noaux_tc" is unknown
    known: greedy, group_limited_greedy

config fields that family deepseek_v2 does not explain
    num_key_value_heads=3, right where it is 6
    norm_topk_prob=True, right where it is False
    scoring_func='sigmoid', right where it is 'softmax'
    fix: load(..., ignore=['num_key_value_heads', 'norm_topk_prob', 'scoring_func']), if you know that they change nothing

mlp_layer_types: linear unknown
    known: dense, sparse

config fields that family mixtral does not explain
    router_jitter_noise=0.1, right where it is 0.0
    fix: load(..., ignore=['router_jitter_noise']), if you know that they change nothing""",
    )


def test_parameters_that_lie_otherwise_are_compiled_again_with_a_warning(monkeypatch):
    """What training makes of a view of a fused tensor has no gaps."""
    monkeypatch.setattr(dynamo, "inductor", lambda graph, inputs: graph.forward)
    model = programs.load(family("mixtral", num_hidden_layers=1))
    program = programs.build(model, max_len=12, chunk=4)
    grads = torch.func.grad(lambda p: F.next_token_loss(p, IDS[:, :-1], model.config, IDS[:, 1:])[0])(model.params)
    trained = F.tree.map(lambda p, g: (p - 0.1 * g).detach(), model.params, grads)
    assert trained.layers[0].mlp.gate.stride() != model.params.layers[0].mlp.gate.stride()
    with pytest.warns(UserWarning, match=r"\.layers\[0\]\.mlp\.gate, \.layers\[0\]\.mlp\.up lie otherwise in memory"):
        program.params = trained
    found = program.generate([[1, 2, 3]], max_new_tokens=4).tokens[0]
    logits, _ = F.decoder(trained, torch.tensor([[1, 2, 3, *found]]), model.config)
    assert logits[0, 2:-1].argmax(-1).tolist() == found
    assert (program.prefill.compiles, program.decode.compiles) == (2, 2)
    program.params = F.tree.map(torch.clone, trained)
    program.generate([[1, 2, 3]], max_new_tokens=4)
    assert (program.prefill.compiles, program.decode.compiles) == (2, 2)
    routers = {p: t.double() for p, t in F.tree.paths(trained).items() if "router" in p}
    with pytest.raises(ValueError, match=r"router: float32 on cpu .* but the tensor is float64"):
        program.params = F.tree.replace(trained, routers)


def test_what_was_not_read_is_not_written_over(tmp_path):
    """Layers that predict further tokens; and what a model that sees has beside its language model."""
    module = family("deepseek_v3")
    module.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.ones(2)}))
    edit(tmp_path, num_nextn_predict_layers=1)
    model = programs.load(tmp_path)
    with pytest.raises(
        ValueError, match=r"has 1 tensors that were not read and would be lost, such as model\.layers\.3"
    ):
        programs.save(model, tmp_path)
    programs.save(model, tmp_path / "other")
    programs.save(model, tmp_path / "other")


def test_converted_copies_have_no_gaps():
    """Of views of fused tensors too: what the plan says is what is allocated."""
    for name in ("mixtral", "gpt_oss"):
        program = programs.build(programs.load(family(name)), max_len=12, chunk=4, dtype=torch.bfloat16, compile=False)
        held = sum(t.untyped_storage().nbytes() for t in program._weights._converted.values())
        assert program.plan.converted == held
