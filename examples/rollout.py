# %% [markdown]
# # A policy gradient on one program
# Rollout, train, rollout: a small model draws continuations, a reward says how good each is, and a step makes the
# better ones likelier (Williams 1992; the baseline is the mean of the draws of one prompt, as in Shao et al. 2024,
# arXiv:2402.03300). The program that draws reads the weights that the step writes.
#
# The reward is the share of new tokens that are one more than the token before; one that knows nothing gets 1 in 24.

# %%
from __future__ import annotations

import functools
from typing import Any

import torch
from meshfn import functional as F
from meshfn import programs
from torch import Tensor
from tqdm import tqdm

VOCAB, PROMPTS, DRAWS, NEW = 24, 4, 8, 12


def model_of(seed: int = 0) -> programs.Model:
    norm = F.NormConfig()
    delta = F.GDNConfig(
        hidden_size=48, num_key_heads=2, num_value_heads=4, key_head_dim=12, value_head_dim=12, norm=norm
    )
    heads = F.AttentionConfig(
        hidden_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        output_gate=True,
        norm=norm,
        rope=F.RopeConfig(),
    )
    mlp = F.MLPConfig(hidden_size=48, intermediate_size=96, norm=norm)
    layers = tuple(F.LayerConfig(attention=each, mlp=mlp) for each in (delta, heads))
    cfg = F.DecoderConfig(vocab_size=VOCAB, hidden_size=48, layers=layers, norm=norm)
    params = F.tree.map(lambda leaf: leaf.requires_grad_(), F.Decoder.init(cfg, seed))
    return programs.Model(name="policy", config=cfg, params=params)


# %% [markdown]
# ## The batch
# What a rollout returns is what a step takes: sequences and attention_mask as they are, loss_mask for what is new.
# The step shifts labels; what else stands in the batch reaches the loss as it is, so log-probabilities of new tokens
# are put where their targets are, at the token before.


# %%
def rewards_of(sequences: Tensor) -> Tensor:
    """sequences `B S`, the last NEW tokens new -> `B`."""
    new, before = sequences[:, -NEW:], sequences[:, -NEW - 1 : -1]
    return (new == (before + 1) % VOCAB).float().mean(1)


def batch_of(drawn: programs.Generation) -> tuple[dict[str, Tensor], Tensor]:
    rewards = rewards_of(drawn.sequences)
    groups = rewards.view(-1, DRAWS)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-2)
    mask = torch.zeros_like(drawn.attention_mask)
    mask[:, -NEW:] = 1
    logprobs = torch.zeros(mask.shape)
    logprobs[:, -NEW - 1 : -1] = torch.tensor(drawn.logprobs)
    batch = {"input_ids": drawn.sequences, "attention_mask": drawn.attention_mask, "loss_mask": mask}
    return {**batch, "logprobs": logprobs, "advantages": advantages.view(-1, 1)}, rewards


def policy_gradient(params: F.Decoder, cfg: F.DecoderConfig, batch: Any, forward: Any) -> Any:
    """A sum over new tokens, of which the step takes the mean. The ratio is 1 where the step's log-probabilities are
    the rollout's; and they are, up to rounding, since the weights are the same."""
    logits, _ = forward(F.decoder, params, batch["input_ids"], cfg)
    there, targets = batch["targets"] >= 0, batch["targets"].clamp_min(0)
    logprobs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    ratio = (logprobs - batch["logprobs"]).masked_fill(~there, 0).exp()
    worst = (ratio.detach() - 1).abs().max()
    return -(ratio * batch["advantages"] * there).sum(), {"off_policy": worst * there.sum()}


# %% [markdown]
# ## The loop


# %%
def train(rounds: int = 80, *, compile: bool = True) -> list[float]:
    """-> the mean reward of each round."""
    model = model_of()
    program = programs.build(model, batch=PROMPTS * DRAWS, max_len=32, chunk=8, compile=compile)
    optimizer = functools.partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.0, fused=True)
    step = programs.train_step(model.config, optimizer, policy_gradient, max_grad_norm=1.0, compile=compile)
    params, opt_state, found = model.params, step.init(model.params), []
    draw = torch.Generator().manual_seed(0)
    bar = tqdm(range(rounds), unit="round")
    for i in bar:
        prompts = torch.randint(0, VOCAB, (PROMPTS, 4), generator=draw).tolist()
        options: Any = {"do_sample": True, "top_k": 0, "seed": i, "num_return_sequences": DRAWS}
        drawn = program.generate(prompts, max_new_tokens=NEW, eos_token_id=(), return_logprobs=True, **options)
        batch, rewards = batch_of(drawn)
        params, opt_state, metrics = step(params, opt_state, batch)
        found.append(rewards.mean().item())
        bar.set_postfix(reward=f"{found[-1]:.2f}", off_policy=f"{metrics['off_policy'].item():.0e}")
    return found


# %%
if __name__ == "__main__":
    rewards = train()
    for i in range(0, len(rewards), 10):
        each = rewards[i : i + 10]
        print(f"rounds {i:3} to {i + len(each) - 1:3}: mean reward {sum(each) / len(each):.2f}")
