"""Checkpoints as a whole: other names, some layers, other dtypes, fused leaves, damage, there and back."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import programs
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ..families import FAMILIES, family


def edit(folder, **fields):
    """config.json with other fields; None takes one out."""
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.fixture
def folder(tmp_path):
    family("llama", num_hidden_layers=4).save_pretrained(tmp_path / "llama", max_shard_size="30kB")
    return tmp_path / "llama"


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(F.tree.leaves(a), F.tree.leaves(b), strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_module_s_parameters_are_the_leaves(name):
    """The very objects; of fused ones views, through which gradients reach them, and which `trainable` lists."""
    module = family(name)
    model = programs.load(module)
    owned = {id(t) for t in module.state_dict(keep_vars=True).values()}
    for path, leaf in F.tree.paths(model.params).items():
        assert id(leaf if leaf._base is None else leaf._base) in owned, path
    assert {id(t) for t in F.tree.trainable(model.params)} == {id(p) for p in module.parameters()}
    optimizer = torch.optim.SGD(F.tree.trainable(model.params), lr=0.1)
    tokens = torch.randint(1, 97, (2, 9))
    for _ in range(2):
        optimizer.zero_grad()
        F.next_token_loss(model.params, tokens, model.config, tokens)[0].backward()
        optimizer.step()
    got, want = F.decoder(model.params, tokens, model.config)[0], module(tokens).logits
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_an_unknown_type_is_read_like_a_known_one(folder):
    model = programs.load(folder)
    edit(folder, model_type="supernova", nova_rate=None)
    with pytest.raises(ValueError, match='model_type "supernova" is unknown'):
        programs.load(folder)
    like = programs.load(folder, like="llama")
    assert like.config == model.config
    assert same(like.params, model.params)
    programs.save(like, folder)
    tokens = torch.randint(1, 97, (1, 7))
    module = AutoModelForCausalLM.from_pretrained(folder)  # as the family that explained it
    torch.testing.assert_close(module(tokens).logits, F.decoder(like.params, tokens, like.config)[0])
    with pytest.raises(ValueError, match='model_type "gemma" is known, and computes otherwise'):
        programs.load(family("gemma"), like="llama")
    edit(folder, model_type="supernova", attention_multiplier=0.3, attention_dropout=0.0, dark_matter=[])
    with pytest.raises(ValueError, match=r"attention_multiplier=0\.3, unknown"):
        programs.load(folder, like="llama")
    assert programs.load(folder, like="llama", ignore=["attention_multiplier"]).config == model.config


@pytest.mark.parametrize("layers", [[0, 2], range(3), [3, 1], []])
def test_some_layers(folder, layers, tmp_path):
    whole, part = programs.load(folder), programs.load(folder, layers=layers)
    assert len(part.params.layers) == len(part.config.layers) == len(layers)
    for i, at in enumerate(layers):
        assert same(part.params.layers[i], whole.params.layers[at])
    if layers:
        programs.save(part, tmp_path / "part")
        module = AutoModelForCausalLM.from_pretrained(tmp_path / "part", attn_implementation="eager")
        tokens = torch.randint(1, 97, (1, 7))
        torch.testing.assert_close(F.decoder(part.params, tokens, part.config)[0], module(tokens).logits)


def test_some_layers_of_several_kinds(tmp_path):
    family("gemma3").save_pretrained(tmp_path / "gemma")
    part = programs.load(tmp_path / "gemma", layers=[1, 2])
    assert [each.attention.window for each in part.config.layers] == [None, 5]
    programs.save(part, tmp_path / "part")
    assert programs.load(tmp_path / "part").config == part.config
    module, tokens = AutoModelForCausalLM.from_pretrained(tmp_path / "part"), torch.randint(1, 97, (1, 9))
    torch.testing.assert_close(F.decoder(part.params, tokens, part.config)[0], module(tokens).logits)
    abstract = programs.load(tmp_path / "gemma", layers=[1, 2], abstract=True)
    assert abstract.config == part.config


def test_other_dtypes_and_abstract(folder):
    model, half = programs.load(folder), programs.load(folder, dtype=torch.bfloat16, device="cpu")
    for a, b in zip(F.tree.leaves(model.params), F.tree.leaves(half.params), strict=True):
        assert b.dtype == torch.bfloat16
        assert torch.equal(a.bfloat16(), b)
    abstract = programs.load(folder, dtype=torch.float16, abstract=True)
    assert {leaf.device.type for leaf in F.tree.leaves(abstract.params)} == {"meta"}
    assert abstract.dtype == torch.float16
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    assert programs.load(folder, abstract=True).config == model.config
    edit(folder, dtype="bfloat16")
    assert programs.load(folder, abstract=True).dtype == torch.bfloat16


def test_progress_ends_at_its_total(folder):
    steps = []
    programs.load(folder, layers=[1], progress=lambda *step: steps.append(step))
    assert steps[-1] == ("loading weights", 12, 12)


def test_what_a_checkpoint_says_of_generation_stays(tmp_path):
    module = family("llama")
    module.generation_config.update(do_sample=True, temperature=0.5, top_p=0.9, repetition_penalty=1.1)
    said = {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.1}
    model = programs.load(module)
    assert {k: v for k, v in model.sampling.items() if k != "top_k"} == said
    programs.save(model, tmp_path / "saved")
    again = programs.load(tmp_path / "saved")
    assert again.sampling == model.sampling
    program = programs.build(again, max_len=20, compile=False)
    assert program.generate([[1, 2]], max_new_tokens=3, **again.sampling).seeds is not None


def test_saved_half_and_trained(folder, tmp_path):
    model = programs.load(folder, dtype=torch.float16)
    trained = dataclasses.replace(model, params=F.tree.map(lambda t: t * 1.5, model.params))
    programs.save(trained, tmp_path / "half")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert again.dtype == torch.float16
    assert same(programs.load(tmp_path / "half").params, trained.params)


def test_a_module_that_was_packed_in_its_file_is_plain_now(tmp_path):
    module = family("llama")
    module.config.quantization_config = {"quant_method": "gguf", "dequantize": True}
    programs.save(programs.load(module), tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.lm_head.weight, module.lm_head.weight)


def test_saving_over_its_own_source(folder):
    model = programs.load(folder)
    before = F.tree.map(torch.clone, model.params)
    (folder / "README.md").write_text("mine")
    programs.save(model, folder)
    assert same(model.params, before)
    assert same(programs.load(folder).params, before)
    assert (folder / "README.md").read_text() == "mine"


def test_old_configs_say_the_same(folder):
    """As transformers 4 wrote them: rope_theta and rope_scaling at the top."""
    new = programs.load(folder)
    edit(folder, rope_parameters=None, rope_theta=10000.0, torch_dtype="float32", pretraining_tp=1)
    assert programs.load(folder).config == new.config
    scaling = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 32}
    edit(folder, rope_scaling=scaling | {"rope_type": "llama3"})
    assert programs.load(folder).config.layers[0].attention.rope == F.RopeConfig(rope_type="llama3", **scaling)


def test_messages(folder):
    texts = []

    def refused(**given):
        with pytest.raises(ValueError, match=" ") as error:
            programs.load(folder, **given)
        texts.append(str(error.value).replace(str(folder), "<folder>"))

    edit(folder, model_type="supernova")
    refused()
    edit(folder, model_type=None)
    refused()
    edit(folder, model_type="llama", hidden_size=46, head_dim=8)
    refused()
    edit(folder, hidden_size=48, quantization_config={"quant_method": "fp8"})
    refused()
    edit(folder, quantization_config=None, rope_parameters={"rope_type": "yarn", "rope_theta": 1.0, "beta": 3})
    refused()
    edit(folder, rope_parameters=None, hidden_act="swiglu")
    refused()
    edit(folder, hidden_act="silu")
    shard = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    save_file({name: t.to(torch.float8_e4m3fn) for name, t in tensors.items()}, shard)
    refused()
    save_file({f"{name}.twin": t for name, t in tensors.items()}, shard)
    refused()
    shard.write_bytes(shard.read_bytes()[:-8])
    refused()
    save_file(tensors, shard)
    model = programs.load(folder, abstract=True)
    with pytest.raises(ValueError, match="save") as error:
        programs.save(model, folder)
    texts.append(str(error.value))
    with pytest.raises(ValueError, match="save") as error:
        programs.save(programs.Model(name="own", config=model.config, params=F.Decoder.init(model.config, 0)), folder)
    texts.append(str(error.value))
    changed = dataclasses.replace(model.config, logit_scale=2.0)
    params = F.Decoder.init(changed, 0)
    with pytest.raises(ValueError, match="save") as error:
        programs.save(dataclasses.replace(model, config=changed, params=params), folder)
    texts.append(str(error.value))
    with pytest.raises(TypeError, match="ignore") as error:
        programs.load(folder, ignore="logit_scale")
    texts.append(str(error.value))
    assert_expected_inline(
        "\n\n".join(texts),
        """\
model_type "supernova" is unknown
    known: cohere, deepseek_v2, deepseek_v3, gemma, gemma2, gemma3_text, glm4_moe_lite, gpt_oss, kimi_k2, kimi_k25, kimi_linear, llama, mistral, mixtral, nemotron, olmo2, olmo_hybrid, phi, phi3, qwen2, qwen3, qwen3_5, qwen3_5_moe, qwen3_5_moe_text, qwen3_5_text, qwen3_moe, qwen3_next, smollm3
    fix: like="llama", where its layers are those of a known family

llama/config.json names no model_type
    known: cohere, deepseek_v2, deepseek_v3, gemma, gemma2, gemma3_text, glm4_moe_lite, gpt_oss, kimi_k2, kimi_k25, kimi_linear, llama, mistral, mixtral, nemotron, olmo2, olmo_hybrid, phi, phi3, qwen2, qwen3, qwen3_5, qwen3_5_moe, qwen3_5_moe_text, qwen3_5_text, qwen3_moe, qwen3_next, smollm3
    fix: like="llama", where its layers are those of a known family

transformers' LlamaConfig refuses the config: Class validation error for validator 'validate_architecture': ValueError: The hidden size (46) is not a multiple of the number of attention heads (6).

config fields that family llama does not explain
    quantization_config={'quant_method': 'fp8'}, unknown
    fix: a checkpoint whose weights are not packed, or abstract=True to plan without them

transformers' LlamaConfig refuses the config: "Missing required keys in `rope_parameters` for 'rope_type'='yarn': {'factor'}"

MLPConfig(hidden_act="swiglu") is unknown
    known: gelu, gelu_pytorch_tanh, relu2, silu

llama: weights in formats that are not computed with
    model.embed_tokens.weight: float8_e4m3fn
    model.layers.0.self_attn.q_proj.weight: float8_e4m3fn
    fix: a checkpoint in bfloat16, float16, float32 or float64

checkpoint "<folder>" cannot be read
    "model.embed_tokens.weight": the index has it in model-00001-of-00009.safetensors, which has no such tensor
    "model.layers.0.self_attn.q_proj.weight": the index has it in model-00001-of-00009.safetensors, which has no such tensor

checkpoint "<folder>" cannot be read
    model-00001-of-00009.safetensors: size 28040, but its header says 28048: truncated

save: the model has no weights, it was loaded with abstract=True
    fix: load it without

save: the model came from no checkpoint, so no family says how to write it

save: model.config differs from what was read, in logit_scale; config.json would not say so
    fix: save the parameters with the config they came with

load(ignore='logit_scale'): a list of names of config fields is needed""",
    )


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("llama", {"is_causal": False}, "is_causal=False"),
        ("gemma", {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "silu"}, "hidden_activation='silu', right"),
        ("gemma3", {"attn_logit_softcapping": 1.0}, "attn_logit_softcapping: family gemma3_text has no capped scores"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "a field is missing or malformed"),
        ("llama", {"attention_bias": "no"}, "transformers' LlamaConfig refuses the config"),
        ("llama", {"num_attention_heads": 0}, "refuses the config|is needed, not 0"),
        ("llama", {"layer_types": ["full_attention"] * 3}, "layer_types="),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers: 1 entries"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm=True"),
        ("phi3", {"full_attn_mod": 2}, "full_attn_mod=2, right where it is 1"),
    ],
)
def test_fields_that_would_compute_otherwise_are_refused_by_name(tmp_path, name, fields, said):
    family(name).save_pretrained(tmp_path)
    edit(tmp_path, **fields)
    with pytest.raises(ValueError, match=said):
        programs.load(tmp_path)


def test_fields_at_the_top_of_older_configs_win(tmp_path):
    """As in transformers: a context at the top, before the one among the rotary parameters."""
    module = family("llama-yarn")
    module.save_pretrained(tmp_path)
    edit(tmp_path, original_max_position_embeddings=8)
    assert programs.load(tmp_path).config.layers[0].attention.rope.original_max_position_embeddings == 8
    tokens = torch.randint(1, 97, (1, 40))
    model = programs.load(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    torch.testing.assert_close(
        F.decoder(model.params, tokens, model.config)[0], theirs(tokens).logits, rtol=1e-4, atol=1e-4
    )
    family("smollm3").save_pretrained(tmp_path / "more")
    edit(tmp_path / "more", no_rope_layers=[1, 0, 1, 1, 1])
    assert [each.attention.rope is None for each in programs.load(tmp_path / "more").config.layers] == [
        False,
        True,
        False,
    ]


def test_gelu_in_a_gemma_config_is_the_approximation(tmp_path):
    family("gemma").save_pretrained(tmp_path)
    for fields in ({"hidden_act": "gelu"}, {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}):
        edit(tmp_path, **fields)
        assert programs.load(tmp_path).config.layers[0].mlp.hidden_act == "gelu_pytorch_tanh"


def test_a_head_that_the_config_ties_away_is_not_dropped(folder):
    edit(folder, tie_word_embeddings=True)
    with pytest.raises(F.TreeError, match="two different tensors"):
        programs.load(folder)


def test_gradients_of_fused_leaves_are_there_or_refused():
    module = family("phi3").requires_grad_(False)
    model = programs.load(module)
    assert F.tree.trainable(model.params) == []
    module.requires_grad_(True)
    with pytest.raises(F.TreeError, match="load again, after requires_grad_"):
        F.tree.trainable(model.params)
    model = programs.load(module)
    assert len(F.tree.trainable(model.params)) == len(list(module.parameters()))
    module.model.layers[0].requires_grad_(False)
    assert len(F.tree.trainable(model.params)) == len([p for p in module.parameters() if p.requires_grad])


def test_a_parameter_given_other_memory_is_noticed():
    module = family("phi3")
    program = programs.build(programs.load(module), max_len=20, chunk=8, compile=False)
    weight = module.model.layers[0].self_attn.qkv_proj.weight
    weight.data = weight.data * 2
    with pytest.raises(
        ValueError, match=r"layers\[0\]\.attention\.q: cut from a tensor that has been given other memory"
    ):
        program.generate([[1, 2]], max_new_tokens=2)


def test_a_state_of_a_ring_belongs_to_its_step():
    program = programs.build(programs.load(family("mistral")), max_len=30, chunk=8, compile=False)
    first = program.prefill([[1, 2, 3, 4, 5, 6, 7]])
    second = program.decode(first)
    program.decode(second)
    for old in (first, second):
        with pytest.raises(ValueError, match="not of this program's last step"):
            program.decode(old)


def test_the_working_folder_is_not_replaced(folder, monkeypatch):
    model = programs.load(folder)
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match="the working folder lies in it"):
        programs.save(model, ".")
    monkeypatch.chdir(folder.parent)
    programs.save(model, folder.name)
    monkeypatch.setenv("HOME", str(folder.parent))
    programs.save(model, "~/home")
    assert programs.load("~/home").config == model.config
    (folder.parent / "loop").symlink_to("loop")
    with pytest.raises(ValueError, match="loop"):
        programs.save(model, folder.parent / "loop")
