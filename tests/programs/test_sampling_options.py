"""What a user may ask of sampling: read and refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from meshfn import functional as F
from meshfn.functional.sampling import Controls, fold_seed, sample
from meshfn.programs.chooser import Chooser
from meshfn.programs.sampling import prompt_counts, read_controls
from meshfn.programs.steps import State

PROGRAM = {"rows": 2, "vocab_size": 97, "device": "cpu", "batch": 3}


def message(fn, *args, **given):
    with pytest.raises((ValueError, TypeError)) as error:
        fn(*args, **given)
    return f"{type(error.value).__name__}: {error.value}"


def test_defaults_are_those_of_transformers_and_padding_is_off():
    controls, seeds = read_controls(**PROGRAM, do_sample=True, seed=5)
    off = Controls.off(3, 97)
    found = {path: leaf.tolist() for path, leaf in F.tree.paths(controls).items()}
    assert found.pop(".do_sample") == [True, True, False]
    assert found.pop(".top_k") == [50, 50, 97]
    assert found.pop(".seed") == [fold_seed(5, 0), fold_seed(5, 1), 0]
    assert seeds == [fold_seed(5, 0), fold_seed(5, 1)]
    assert all(values == getattr(off, path[1:]).tolist() for path, values in found.items())
    assert all(a.dtype == b.dtype for a, b in zip(F.tree.leaves(controls), F.tree.leaves(off), strict=True))


def test_values_reach_their_rows():
    given = {
        "do_sample": True, "temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": -0.5,
        "frequency_penalty": 2,
    }  # fmt: skip
    controls, _ = read_controls(**PROGRAM, **given)
    for name, value in given.items():
        leaf = getattr(controls, name)
        assert torch.equal(leaf[:2], torch.tensor([value] * 2, dtype=leaf.dtype)), name
    assert controls.top_p[0].item() == 0.9


def test_none_and_0_switch_off():
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    for controls, _ in (
        read_controls(**PROGRAM, **dict.fromkeys(names)),
        read_controls(**PROGRAM, top_k=0),
        read_controls(**PROGRAM, top_k=10**30),
    ):
        off = F.tree.paths(Controls.off(3, 97))
        assert all(torch.equal(leaf, off[path]) for path, leaf in F.tree.paths(controls).items() if path != ".seed")


def test_numbers_of_numpy_are_numbers():
    controls, seeds = read_controls(
        **PROGRAM,
        do_sample=True,
        temperature=np.float32(0.5),
        top_k=np.int64(7),
        top_p=np.float64(0.5),
        seed=np.array([3, 4]),
    )
    assert (controls.temperature[0], controls.top_k[0], controls.top_p[0]) == (0.5, 7, 0.5)
    assert seeds == [3, 4]
    assert read_controls(**PROGRAM, do_sample=True, seed=torch.tensor([2**63 - 1, 0]))[1] == [2**63 - 1, 0]
    assert (
        read_controls(**PROGRAM, do_sample=True, seed=np.int64(3))[1]
        == read_controls(**PROGRAM, do_sample=True, seed=3)[1]
    )


def test_seeds():
    fresh = [read_controls(**PROGRAM)[1] for _ in range(3)]
    assert len({seed for seeds in fresh for seed in seeds}) == 6
    assert all(0 <= seed < 2**63 for seeds in fresh for seed in seeds)
    torch.manual_seed(0)
    assert read_controls(**PROGRAM)[1] not in fresh, "a fresh seed is none of torch's generator"
    assert read_controls(**PROGRAM, do_sample=True, seed=[8, 8])[1] == [8, 8]


def test_a_row_is_drawn_again_alone_from_its_seed():
    logits = torch.randn(3, 97)
    positions, eos = torch.tensor([4, 5, 6]), torch.tensor([], dtype=torch.int64)
    for seed in (None, 7):
        given = {"rows": 3, "vocab_size": 97, "device": "cpu", "do_sample": True, "top_k": 0}
        controls, seeds = read_controls(**given, batch=3, seed=seed)
        token, *_ = sample(logits, positions, torch.zeros(3, 97).int(), controls, eos)
        for i in range(3):
            alone, _ = read_controls(**{**given, "rows": 1}, batch=2, seed=[seeds[i]])
            two = torch.stack((logits[i], torch.zeros(97)))
            again, *_ = sample(two, torch.tensor([4 + i, -1]), torch.zeros(2, 97).int(), alone, eos)
            assert again[0] == token[i]


def test_what_asks_for_nothing_computes_nothing():
    no = [{}, {"top_k": 50, "temperature": 1.0}, {"repetition_penalty": None, "presence_penalty": 0}]
    yes = [{"do_sample": True}, {"repetition_penalty": 1.1}, {"presence_penalty": -1}, {"frequency_penalty": 0.1}]
    sizes = {"batch": 2, "vocab_size": 97, "max_new_tokens": 3, "device": torch.device("cpu")}
    state = State.empty(2, 97, torch.float32, "cpu")
    for given in no + yes:
        chosen = Chooser([[1]], **sizes, **given)(state, torch.tensor([0, -1]), torch.tensor([-1]))
        assert (chosen is state) == (given in no)
    with pytest.raises(ValueError, match="which mps lacks"):
        Chooser([[1]], **sizes | {"device": torch.device("mps")}, do_sample=True)
    Chooser([[1]], **sizes | {"device": torch.device("mps")})


def test_prompt_counts():
    counts = prompt_counts([[1, 3, 3], [0]], 3, 5, "cpu")
    assert counts.tolist() == [[0, 1, 0, 2, 0], [1, 0, 0, 0, 0], [0] * 5]
    assert counts.dtype == torch.int32


def test_messages_of_options():
    def refused(**given):
        return message(read_controls, **PROGRAM, **given)

    found = [
        refused(do_sample="yes"),
        refused(do_sample=True, temperature=0),
        refused(temperature=0),
        refused(do_sample=True, temperature=-1.0),
        refused(temperature=float("nan")),
        refused(temperature="hot"),
        refused(temperature=True),
        refused(temperature=torch.tensor(1.0)),
        refused(temperature=1e-50),
        refused(top_p=1.5),
        refused(top_p=float("nan")),
        refused(min_p=-0.1),
        refused(repetition_penalty=0),
        refused(repetition_penalty=[1.1]),
        refused(presence_penalty=float("inf")),
        refused(frequency_penalty=1e39),
        refused(top_k=-1),
        refused(top_k=2.5),
        refused(top_k=True),
        refused(temperature=10**400).partition("=")[0],
        refused(seed=3),
        refused(seed=-1),
        refused(seed=[1, 2**63]),
        refused(seed=[1, 2, 3]),
        refused(seed=[1, 2.5]),
        refused(seed="7"),
        refused(seed=True),
    ]
    assert_expected_inline(
        "\n\n".join(found),
        """\
TypeError: generate(do_sample='yes'): True or False is needed, not str

ValueError: generate(temperature=0): must be above 0
    fix: do_sample=False for the most likely tokens

ValueError: generate(temperature=0): must be above 0
    fix: leave it out, do_sample=False needs none

ValueError: generate(temperature=-1.0): must be above 0
    fix: do_sample=False for the most likely tokens

ValueError: generate(temperature=nan): must be finite
    fix: leave it out, do_sample=False needs none

TypeError: generate(temperature='hot'): a number is needed, not str
    fix: temperature=1.0

TypeError: generate(temperature=True): a number is needed, not bool
    fix: temperature=1.0

TypeError: generate(temperature=tensor(1.)): a number is needed, not Tensor
    fix: temperature=1.0

ValueError: generate(temperature=1e-50): is so extreme that scores in fp32 would overflow; 1e-30 to 1e30 is enough
    fix: leave it out, do_sample=False needs none

ValueError: generate(top_p=1.5): must be between 0 and 1
    fix: top_p=1.0, or None, to switch it off

ValueError: generate(top_p=nan): must be finite
    fix: top_p=1.0, or None, to switch it off

ValueError: generate(min_p=-0.1): must be between 0 and 1
    fix: min_p=0.0, or None, to switch it off

ValueError: generate(repetition_penalty=0): must be above 0
    fix: repetition_penalty=1.0, or None, to switch it off

TypeError: generate(repetition_penalty=[1.1]): a number is needed, not list
    fix: repetition_penalty=1.0

ValueError: generate(presence_penalty=inf): must be finite
    fix: presence_penalty=0.0, or None, to switch it off

ValueError: generate(frequency_penalty=1e+39): is so extreme that scores in fp32 would overflow; 1e-30 to 1e30 is enough
    fix: frequency_penalty=0.0, or None, to switch it off

ValueError: generate(top_k=-1): must not be negative
    fix: top_k=0, or None, to switch it off

TypeError: generate(top_k=2.5): an integer is needed, not float
    fix: top_k=0, or None, to switch it off

TypeError: generate(top_k=True): an integer is needed, not bool
    fix: top_k=0, or None, to switch it off

ValueError: generate(temperature

ValueError: generate(seed=3): no token is drawn
    fix: do_sample=True, or leave it out

ValueError: generate(seed=-1): must be in [0, 2**63)
    fix: seed % 2**63, 9223372036854775807

ValueError: generate(seed[1]=9223372036854775808): must be in [0, 2**63)
    fix: seed[1] % 2**63, 0

ValueError: generate(seed=[...]): 3 seeds for 2 rows
    fix: one a row, or a single integer for all

TypeError: generate(seed[1]=2.5): an integer is needed, not float

TypeError: generate(seed='7'): an integer, or a list of them, one a row, is needed, not str
    fix: seed=0

TypeError: generate(seed=True): an integer, or a list of them, one a row, is needed, not bool
    fix: seed=0""",
    )
