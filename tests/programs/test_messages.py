"""Bad input: each has its own message, before any work."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn import programs
from meshfn.programs import dynamo
from meshfn.programs.cli import main
from transformers import TextStreamer

from ..tiny import llama
from .test_lower import KERNEL


def message(fn, *args, **given):
    with pytest.raises((ValueError, TypeError)) as error:
        fn(*args, **given)
    return str(error.value)


def test_prompts(eager):
    before = [c.k.view(torch.int32).clone() for c in eager.cache]
    generate = eager.generate
    ids = torch.ones(2, 3, dtype=torch.int64)
    found = [
        message(generate, []),
        message(generate, [[1], []]),
        message(generate, [[1, 2], [3, 97]]),
        message(generate, [[-1]]),
        message(generate, [list(range(50))], max_new_tokens=21),
        message(generate, [[1]] * 4),
        message(generate, "text"),
        message(generate, [[1], "text"]),
        message(generate, [[1.5]]),
        message(generate, 3),
        message(generate),
        message(generate, [[1]], max_new_tokens=0),
        message(generate, [[1]], eos_token_id=range(9)),
        message(generate, [[1], [2]], streamer=TextStreamer(None)),
        message(generate, input_ids=ids.float()),
        message(generate, input_ids=ids, attention_mask=ids[:, :2]),
        message(generate, input_ids=ids, attention_mask=torch.tensor([[1, 0, 1], [1, 1, 1]])),
        message(generate, input_ids=ids, attention_mask=torch.tensor([[0, 0, 0], [1, 1, 1]])),
        message(generate, [[1]], attention_mask=ids),
        message(generate, [[1], [2, 3]], attention_mask=ids),
        message(generate, input_ids=ids, attention_mask=torch.tensor([[0.0, -1e9, 0.0]] * 2)),
        message(generate, {"tokens": [[1]]}),
        message(generate, [[1, True]]),
        message(generate, [[1]], eos_token_id=[3.7]),
        message(generate, [[1]], eos_token_id=[3, 97]),
        message(eager.prefill, [[1]], eos_token_id=-1),
    ]
    assert_expected_inline(
        "\n\n".join(found),
        """\
prompts: the batch is empty
    fix: pass at least one prompt

prompts[1]: the prompt is empty
    fix: pass at least one token

prompts[1][1]: token id 97 is outside the vocabulary of 97

prompts[0][0]: token id -1 is outside the vocabulary of 97

prompts[0]: 50 tokens and max_new_tokens=21 exceed max_len=70
    fix: max_len=71

prompts: 4 rows, but the program was built for batch=3
    fix: batch=4

prompts: strings need a tokenizer, and this model has none
    fix: pass lists of token ids

prompts[1]: a list of token ids is needed among others, not str

prompts[0][0]: a token id is an integer, not 1.5

prompts: strings, lists of token ids or input_ids are needed, not int

generate: pass prompts, or input_ids

generate(max_new_tokens=...): a positive integer is needed, not 0

eos_token_id: 9 tokens, at most 8

generate(streamer=...): one row at a time, not 2

input_ids: integers of shape B S are needed, not torch.float32 of shape (2, 3)

attention_mask and input_ids have different shapes: (2, 2) and (2, 3)

attention_mask[0]: zeros between ones; padding may stand on either side only
    fix: pass attention_mask, where pad_token_id is a token like others

prompts[0]: the prompt is empty
    fix: pass at least one token

attention_mask and input_ids have different shapes: (2, 3) and (1, 1)

attention_mask: rows of different lengths need none
    fix: leave it out

attention_mask: zeros and ones are needed, 1 where a token is one

prompts: a mapping needs input_ids, it has tokens

prompts[0][1]: a token id is an integer, not True

eos_token_id: an integer or a list of them is needed, not [3.7]

eos_token_id: token id 97 is outside the vocabulary of 97, and would end no row
    fix: eos_token_id=() for none

eos_token_id: token id -1 is outside the vocabulary of 97, and would end no row
    fix: eos_token_id=() for none""",
    )
    assert all(torch.equal(c.k.view(torch.int32), b) for c, b in zip(eager.cache, before, strict=True))


def test_build(tiny, monkeypatch):
    model = tiny.model
    found = [
        message(programs.build, model, batch=0),
        message(programs.build, model, max_len=1.5),
        message(programs.build, model, dtype=torch.int8),
        message(programs.plan, model, batch="3"),
        message(programs.plan, model, dtype=torch.int8),
        message(programs.build, model, dtype="bfloat16"),
        message(programs.build, model, device="cuda"),
        message(programs.build, model, device="meta"),
        message(programs.build, model, device="xyz"),
        message(programs.plan, model, device="cuda", arch=(9, 0)),
        message(programs.plan, model, arch="sm_90"),
        message(programs.build, model, kernels=[3]),
        message(programs.plan, model, kernels=KERNEL),
        message(programs.plan, model, kernels=[dataclasses.replace(KERNEL, primitive="gatedmlp")]),
        message(programs.plan, model, kernels=[dataclasses.replace(KERNEL, primitive="flash_fwd")]),
        message(programs.plan, model, kernels=[dataclasses.replace(KERNEL, supports=lambda call: True)]),
        message(programs.plan, model, kernels=[dataclasses.replace(KERNEL, supports=lambda c: c.arguments["q"])]),
        message(programs.build, programs.load(tiny.module, abstract=True)),
        message(programs.build, model, strict=True),
    ]
    found.append(message(programs.build, model, kernels=[KERNEL], compile=False))
    monkeypatch.setattr(dynamo, "compiler_problem", lambda device: "torch.compile finds no C++ compiler (install g++)")
    with pytest.warns(UserWarning, match="build") as warned:
        assert not programs.build(model, max_len=16).compiled
    found.append("warning: " + str(warned[0].message))
    assert_expected_inline(
        "\n\n".join(found),
        """\
build(batch=...): a positive integer is needed, not 0

build(max_len=...): a positive integer is needed, not 1.5

build(dtype=torch.int8): cpu cannot run it
    known: torch.float32, torch.bfloat16, torch.float16, torch.float64

plan(batch=...): a positive integer is needed, not '3'

plan(dtype=torch.int8): cpu cannot run it
    known: torch.float32, torch.bfloat16, torch.float16, torch.float64

build(dtype='bfloat16'): a torch.dtype is needed
    known: torch.float32, torch.bfloat16, torch.float16, torch.float64

build(device="cuda"): no CUDA device is available
    fix: programs.plan(model, device="cuda", arch="sm_90") prints the plan without one

build(device="meta"): nothing runs there
    fix: programs.plan(model) prints the plan

device="xyz": no such device
    fix: "cpu" or "cuda"

plan(arch=(9, 0)): an architecture such as "sm_90" is needed

plan(arch="sm_90"): the plan is for a device of type cpu, which has none
    fix: device="cuda" with it, or no arch

kernels: a programs.Kernel is needed, not int
    fix: programs.Kernel(name=..., primitive=..., op=torch.ops.<namespace>.<name>.default)

kernels: a list is needed, not Kernel
    fix: kernels=[programs.Kernel(...)]

kernels: test_gated serves "gatedmlp", and no primitive is named so
    fix: did you mean "gated_mlp"?

kernels: test_gated serves "flash_fwd", and no primitive is named so
    fix: print(plan) has their names in its second column

Kernel(test_gated): supports returned True for a call of gated_mlp
    fix: return None for what it computes, else the reason why not, in a few words

Kernel(test_gated): supports raised KeyError: 'q', for a call of gated_mlp
    its arguments: x, norm_weight, gate, up, gate_bias, up_bias, activation, norm_bias, norm_type, eps, zero_centered, scale_in_fp32

build: the model has no weights, it was loaded with abstract=True
    fix: load it without

build(strict=True): no kernel for
    prefill k_BSKE (apply_rope): compiler (no cpu kernel)
    prefill q_BSHE (apply_rope): compiler (no cpu kernel)
    prefill part (write_tokens): compiler (no cpu kernel)
    prefill part_1 (write_tokens): compiler (no cpu kernel)
    prefill k_positions (slot_positions): compiler (no cpu kernel)
    prefill sample_advance (sample_advance): compiler (no cpu kernel)
    decode k_BSKE (apply_rope): compiler (no cpu kernel)
    decode q_BSHE (apply_rope): compiler (no cpu kernel)
    decode part (write_tokens): compiler (no cpu kernel)
    decode part_1 (write_tokens): compiler (no cpu kernel)
    decode k_positions (slot_positions): compiler (no cpu kernel)
    decode sample_advance (sample_advance): compiler (no cpu kernel)

build(kernels=...): kernels are put into compiled graphs
    fix: compile=True

warning: build: torch.compile finds no C++ compiler (install g++); this program runs eagerly, as with compile=False""",
    )


def test_parameters(eager):
    params = eager.params
    q = ".layers[1].attention.q"

    def replace(new):
        eager.params = F.tree.replace(params, {q: new})

    old = F.tree.paths(params)[q].detach()
    found = [message(replace, new) for new in (old[:-1], old.double())]
    assert_expected_inline(
        "\n\n".join(found),
        """\
program.params do not match in 1 leaf
    .layers[1].attention.q: "((K/tp G) E) D/dp" = (48, 48), but the tensor has (47, 48)

program.params: other parameters than it was built for
    .layers[1].attention.q: float32 on cpu with strides (48, 1), but the tensor is float64 on cpu with strides (48, 1)""",
    )
    assert eager.params is params


def test_full_rows(eager):
    state = eager.prefill([list(range(69))])
    state = eager.decode(state)
    assert_expected_inline(
        message(eager.decode, state), """decode: a row holds max_len=70 tokens; there is no slot for another"""
    )


def test_one_call_at_a_time(eager):
    with eager._alone(), pytest.raises(RuntimeError) as error:
        eager.generate([[1]])
    assert_expected_inline(
        str(error.value),
        """\
this program is in use by another call, and has one cache
    fix: build a second one""",
    )


def test_command_line_checks_before_it_builds(capsys, monkeypatch, tiny):
    """Whatever is wrong with the arguments is said before weights are read, or at least before anything compiles."""
    monkeypatch.setattr(programs, "build", None)
    monkeypatch.setattr(programs, "load", lambda source, **given: tiny.model)
    found = []
    for more in (["--max-new-tokens", "0"], ["--max-len", "x"]):
        with pytest.raises(SystemExit):
            main(["generate", "--model", "m", "--prompt", "p", *more])
        found.append(capsys.readouterr().err.splitlines()[-1])
    for command in (
        ["generate", "--model", "m", "--prompt", ""],
        ["generate", "--model", "m", "--prompt", "p"],
        ["generate", "--model", "m", "--prompt", "p", "--chat"],
        ["plan", "--model", "m", "--device", "xyz"],
        ["plan", "--model", "m", "--device", "cuda", "--arch", "banana"],
        ["plan", "--model", "m", "--arch", "sm_90"],
    ):
        assert main(command) == 1
        out, err = capsys.readouterr()
        assert out == ""
        found.append(err.strip())
    assert_expected_inline(
        "\n".join(found),
        """\
python -m meshfn generate: error: argument --max-new-tokens: a positive integer is needed, not 0
python -m meshfn generate: error: argument --max-len: invalid _count value: 'x'
error: --prompt: the prompt is empty
error: prompts: strings need a tokenizer, and this model has none
    fix: pass lists of token ids
error: --chat: the tokenizer of LlamaForCausalLM has no chat template
error: device="xyz": no such device
    fix: "cpu" or "cuda"
error: plan(arch="banana"): an architecture such as "sm_90" is needed
error: plan(arch="sm_90"): the plan is for a device of type cpu, which has none
    fix: device="cuda" with it, or no arch""",
    )


def test_ctrl_c_leaves_no_mess(capsys, monkeypatch):
    def interrupted(source, **given):
        given["progress"]("loading weights", 1, 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(programs, "load", interrupted)
    assert main(["generate", "--model", "m", "--prompt", "p"]) == 130
    assert capsys.readouterr() == ("", "\nstopped\n")


def test_command_line_says_it_in_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "meshfn", "plan", "--model", "nowhere.gguf"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert_expected_inline(
        done.stderr,
        """\
error: source "nowhere.gguf" is neither a file nor a folder nor a known name
    known: "smollm2-135m", a Hugging Face folder or the name of a cached one, a .gguf file
""",
    )


def test_wrong_objects_name_the_right_one(eager):
    model = eager.model
    found = [
        message(programs.build, "smollm2-135m"),
        message(programs.plan, llama()),
        message(programs.save, model.params, "somewhere"),
        message(programs.build, programs.Shards(model.config, model.params, None, 0)),
        message(programs.side_by_side, model),
        message(eager.generate, [[1]], max_length=9),
        message(eager.generate, [[1]], tokenizer=None),
        message(eager.generate, [[1]], num_beams=4).splitlines()[0],
        message(eager.generate, [[1]], streamer=TextStreamer),
        message(eager.generate, [[{"role": "user", "content": "hi"}]]),
        message(eager.generate, [[1]], do_sample=True, top_k=50.0),
        message(programs.load, llama(), ignore=["my_scale"]),
        message(programs.load, llama().model).splitlines()[-1],
    ]
    assert_expected_inline(
        "\n\n".join(found),
        """\
build: a programs.Model is needed, not str
    fix: programs.load(...) makes one, of a module, a folder or a name

plan: a programs.Model is needed, not LlamaForCausalLM
    fix: programs.load(...) makes one, of a module, a folder or a name

save: a programs.Model is needed, not Decoder
    fix: dataclasses.replace(model, params=params), with the model they came from

build: a programs.Model is needed, not Shards
    fix: dataclasses.replace(programs.load(source, abstract=True), params=mine.params), if these are mine

side_by_side(params=...): a Decoder is needed, not Model
    fix: model.params

generate: max_length unknown
    known: prompts, input_ids, attention_mask, max_new_tokens, eos_token_id, pad_token_id, stop_strings, num_return_sequences, return_logprobs, streamer, do_sample, temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, seed
    fix: max_new_tokens=..., without the prompt

generate: tokenizer unknown
    known: prompts, input_ids, attention_mask, max_new_tokens, eos_token_id, pad_token_id, stop_strings, num_return_sequences, return_logprobs, streamer, do_sample, temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, seed
    fix: leave it out, the model has its own

generate: num_beams unknown

generate(streamer=...): an object with put and end is needed, not a class

prompts[0][0]: a message of a chat is no token id
    fix: model.tokenizer.apply_chat_template(messages, add_generation_prompt=True)

generate(top_k=50.0): an integer is needed, not float
    fix: top_k=50

load(ignore=...): the config has no my_scale

    fix: pass the ...ForCausalLM module, with its head""",
    )
