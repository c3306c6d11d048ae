# %% [markdown]
# # A hybrid learns a poem
# A language model of 2.5 million parameters, three gated delta nets and one gated attention, learns the text below
# byte by byte, in a few minutes on two cores. The program that shows what it says is built once, before the first step,
# on the very weights that the step writes: there is nothing to hand over, and nothing is compiled or copied in between.

# %%
from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from meshfn import functional as F
from meshfn import programs
from tqdm import tqdm

# Lewis Carroll, "Jabberwocky", from Through the Looking-Glass (1871).
TEXT = """\
'Twas brillig, and the slithy toves
Did gyre and gimble in the wabe;
All mimsy were the borogoves,
And the mome raths outgrabe.

"Beware the Jabberwock, my son!
The jaws that bite, the claws that catch!
Beware the Jubjub bird, and shun
The frumious Bandersnatch!"

He took his vorpal sword in hand:
Long time the manxome foe he sought--
So rested he by the Tumtum tree,
And stood awhile in thought.

And as in uffish thought he stood,
The Jabberwock, with eyes of flame,
Came whiffling through the tulgey wood,
And burbled as it came!

One, two! One, two! And through and through
The vorpal blade went snicker-snack!
He left it dead, and with its head
He went galumphing back.

"And hast thou slain the Jabberwock?
Come to my arms, my beamish boy!
O frabjous day! Callooh! Callay!"
He chortled in his joy.

'Twas brillig, and the slithy toves
Did gyre and gimble in the wabe;
All mimsy were the borogoves,
And the mome raths outgrabe.
"""

# %% [markdown]
# ## The model
# One frozen config with an entry a layer. Every block has its norm in front; attention has a gate at its output and
# turns a quarter of each head, as Qwen3.5 does.

# %%
D, VOCAB, ROWS, LENGTH = 256, 256, 8, 64


def config() -> F.DecoderConfig:
    norm = F.NormConfig()
    delta = F.GDNConfig(
        hidden_size=D, num_key_heads=4, num_value_heads=4, key_head_dim=32, value_head_dim=32, norm=norm
    )
    heads = F.AttentionConfig(
        hidden_size=D,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        output_gate=True,
        norm=norm,
        rope=F.RopeConfig(partial_rotary_factor=0.25),
    )
    mlp = F.MLPConfig(hidden_size=D, intermediate_size=2 * D, norm=norm)
    layers = tuple(F.LayerConfig(attention=each, mlp=mlp) for each in (delta, delta, delta, heads))
    return F.DecoderConfig(vocab_size=VOCAB, hidden_size=D, layers=layers, norm=norm)


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode(errors="replace")


def batches() -> Any:
    """Rows cut from the text anywhere, without end."""
    text = torch.tensor(list(TEXT.encode()))
    draw = torch.Generator().manual_seed(0)
    while True:
        begin = torch.randint(0, len(text) - LENGTH, (ROWS, 1), generator=draw)
        yield {"input_ids": text[begin + torch.arange(LENGTH)]}


# %% [markdown]
# ## The loop
# A step is a function; params come back as they were given, with other numbers in them. Metrics are tensors: reading
# them waits, so they are read once in a while.


# %%
def train(steps: int = 200, every: int = 20, *, compile: bool = True) -> list[float]:
    """Print what the model says as it learns -> the loss of each step, in nats a byte."""
    cfg = config()
    params = F.tree.map(lambda leaf: leaf.requires_grad_(), F.Decoder.init(cfg, seed=0))
    model = programs.Model(name="poem", config=cfg, params=params, tokenizer=Bytes())
    print(model)
    program = programs.build(model, max_len=160, chunk=16, compile=compile)
    step = programs.train_step(
        cfg,
        functools.partial(torch.optim.AdamW, lr=2e-3, betas=(0.9, 0.95), fused=True),
        max_grad_norm=1.0,
        compile=compile,
    )
    opt_state, losses = step.init(params), []
    bar = tqdm(zip(range(steps), batches(), strict=False), total=steps, unit="step")
    for i, batch in bar:
        opt_state["param_groups"][0]["lr"] = 2e-3 * min(1.0, (i + 1) / 20, 2 * (1 - i / steps))
        params, opt_state, metrics = step(params, opt_state, batch)
        losses.append(metrics["loss"])
        if i % every == every - 1:
            (text,) = program.generate(["'Twas brillig"], max_new_tokens=80).text
            bar.set_postfix(loss=f"{losses[-1].item():.3f}")
            bar.write(f"{i + 1:4}  {losses[-1].item():.3f}  'Twas brillig{text}".replace("\n", " / "))
    if compile:
        print(f"compiled: prefill {program.prefill.compiles}, decode {program.decode.compiles}, layers {step.compiles}")
    return [loss.item() for loss in losses]


def picture(losses: list[float], file: Path) -> bool:
    """Write the loss curve as a picture, if matplotlib is there (the extra `plot`)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(losses)
    axes.set(xlabel="step", ylabel="nats a byte", title="A hybrid learns a poem", yscale="log")
    figure.savefig(file)
    return True


# %%
if __name__ == "__main__":
    losses = train()
    file = Path("train_tiny.png")
    print(f"loss {losses[0]:.2f} to {losses[-1]:.3f}", f"drawn in {file}" if picture(losses, file) else "")
