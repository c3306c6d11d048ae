"""GGUF files: a tiny model there and back, and what is refused."""

from __future__ import annotations

import gguf
import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import programs

from ..tiny import VARIANTS, llama, ours


def write(path, module, *, leave_out=(), extra=None, add_field=None):
    """What llama.cpp's converter writes of a Llama: its names, and q and k rows in interleaved rotary order."""
    config = module.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(128)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if add_field:
        writer.add_float32(*add_field)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, t in module.named_parameters():
        ggml = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if ggml in leave_out:
            continue
        t = t.detach()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:
                t = t.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(ggml, t.contiguous().numpy())
    for name, t in (extra or {}).items():
        writer.add_tensor(name, t.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("variant", ["gqa-tied", "gqa-bias", "mha"])
def test_there_and_back(tmp_path, variant):
    module = llama(**VARIANTS[variant], rms_norm_eps=2**-17)  # a float32 in the file
    path = write(tmp_path / "tiny.gguf", module)
    steps = []
    loaded = programs.load(path, progress=lambda *step: steps.append(step))
    expected = ours(module)
    assert loaded.config == expected.config
    assert loaded.tokenizer is None
    for (name, a), b in zip(F.tree.paths(loaded.params).items(), F.tree.leaves(expected.params), strict=True):
        assert torch.equal(a, b), name
    assert steps[-1][1] == steps[-1][2] == len(F.tree.leaves(loaded.params))
    abstract = programs.load(str(path), abstract=True)
    assert F.tree.structure(abstract.params) == F.tree.structure(loaded.params)


def test_faults_are_listed(tmp_path):
    module = llama()
    cases = [
        {"leave_out": ["blk.1.ffn_up.weight", "output_norm.weight"]},
        {"extra": {"blk.0.attn_sinks.weight": torch.ones(3)}},
        {"add_field": ("llama.rope.scaling.factor", 2.0)},
    ]
    found = []
    for i, case in enumerate(cases):
        with pytest.raises(ValueError, match="e") as error:
            programs.load(write(tmp_path / f"{i}.gguf", module, **case))
        found.append(str(error.value))
    writer = gguf.GGUFWriter(tmp_path / "gpt2.gguf", "gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="gpt2") as error:
        programs.load(tmp_path / "gpt2.gguf")
    assert_expected_inline(
        "\n\n".join([*found, str(error.value)]),
        """\
checkpoint and config of family llama differ
    .layers[1].mlp.up (model.layers.1.mlp.up_proj.weight): missing, "F/tp D/dp" = (40, 48)
    .norm.weight (model.norm.weight): missing, "D" = (48,)

checkpoint and config of family llama differ
    blk.0.attn_sinks.weight: not expected, it has (3,)

GGUF metadata that family llama does not know: llama.rope.scaling.factor

GGUF architecture "gpt2" is unknown
    known: llama""",
    )
