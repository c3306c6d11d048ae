"""`python -m meshfn generate ...` and `python -m meshfn plan ...`."""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["main"]

_SAMPLING = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
}
_DTYPES = ("float32", "bfloat16", "float16", "float64")


def _count(text: str) -> int:
    """A positive integer; argparse names the option and shows the text where it is none."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"a positive integer is needed, not {text}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status: 0, 1 for bad input (with a line that says which), 130 for Ctrl-C."""
    arguments = _parser().parse_args(argv)
    progress = _Progress(sys.stderr)
    try:
        return int(arguments.run(arguments, progress))
    except KeyboardInterrupt:
        progress.clear()
        print("\nstopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader went away (| head). Nothing is left to say to it, at interpreter exit neither.
        sys.stdout = None
        return 0
    except (ValueError, TypeError, ImportError) as error:
        progress.clear()
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m meshfn", description="Generate text, or print what would run.")
    commands = parser.add_subparsers(required=True, metavar="command")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--model", required=True, help="a Hugging Face folder or cached name, a .gguf file, or smollm2-135m"
    )
    common.add_argument("--like", metavar="FAMILY", help="read an unknown model_type as this family")
    common.add_argument("--dtype", choices=_DTYPES, help="the model's unless given")
    common.add_argument("--max-len", type=_count, default=1024, help="tokens, prompt and new ones (%(default)s)")
    common.add_argument("--chunk", type=_count, default=256, help="prompt tokens a prefill call takes (%(default)s)")

    generate = commands.add_parser("generate", parents=[common], help="stream text after a prompt")
    generate.add_argument("--prompt", required=True)
    generate.add_argument("--max-new-tokens", type=_count, default=64, help="(%(default)s)")
    generate.add_argument("--chat", action="store_true", help="put the prompt through the tokenizer's chat template")
    generate.add_argument("--no-compile", action="store_true", help="run eagerly: no build, slower tokens")
    generate.add_argument("--device", help="the model's unless given")
    sampling = generate.add_argument_group("sampling", "as in transformers; the most likely tokens without --do-sample")
    sampling.add_argument("--do-sample", action="store_true", help="draw tokens")
    for name, kind in _SAMPLING.items():
        sampling.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=kind.__name__.upper())
    sampling.add_argument("--stop-strings", nargs="+", metavar="TEXT", help="end with the token that completes one")
    generate.set_defaults(run=_generate)

    plan = commands.add_parser("plan", parents=[common], help="print the plan, without reading weights")
    plan.add_argument("--device", default="cpu", help="need not be present (%(default)s)")
    plan.add_argument("--batch", type=_count, default=1, help="rows (%(default)s)")
    plan.add_argument("--arch", help='such as "sm_90"')
    plan.set_defaults(run=_plan)
    return parser


def _dtype(name: str | None) -> Any:
    import torch

    return None if name is None else getattr(torch, name)


def _plan(arguments: argparse.Namespace, progress: _Progress) -> int:
    from . import load, plan

    model = load(arguments.model, like=arguments.like, abstract=True, progress=progress)
    progress("tracing prefill and decode", 0, 0)
    text = str(
        plan(
            model,
            batch=arguments.batch,
            max_len=arguments.max_len,
            chunk=arguments.chunk,
            dtype=_dtype(arguments.dtype),
            device=arguments.device,
            arch=arguments.arch,
        )
    )
    progress.clear()
    print(text)
    return 0


def _generate(arguments: argparse.Namespace, progress: _Progress) -> int:
    from . import build, load
    from .prompts import read_prompts
    from .sampling import StopStrings, read_controls

    if not arguments.prompt:
        raise ValueError("--prompt: the prompt is empty")
    options: Any = {name: value for name in _SAMPLING if (value := getattr(arguments, name)) is not None}
    if arguments.do_sample:
        options.setdefault("seed", secrets.randbits(31))
    # Checked here too, before a build that may take half a minute.
    read_controls(rows=1, batch=1, vocab_size=2**31, device="cpu", do_sample=arguments.do_sample, **options)
    place = {"dtype": _dtype(arguments.dtype), "device": arguments.device}
    model = load(arguments.model, like=arguments.like, **place, progress=progress)
    StopStrings(arguments.stop_strings, model.tokenizer)
    prompt: Any = arguments.prompt
    if arguments.chat:
        if model.tokenizer is None or not model.tokenizer.chat_template:
            raise ValueError(f"--chat: the tokenizer of {model.name} has no chat template")
        messages = [{"role": "user", "content": prompt}]
        # Ids and not text: the template writes the special tokens that tokenizing its text would add again.
        template = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        prompt = model.tokenizer.apply_chat_template(messages, **template)
    rows = read_prompts(
        prompt,
        tokenizer=model.tokenizer,
        vocab_size=model.config.vocab_size,
        batch=1,
        max_len=arguments.max_len,
        max_new_tokens=arguments.max_new_tokens,
    ).rows
    progress("building, compiles prefill and decode" if not arguments.no_compile else "building", 0, 0)
    program = build(
        model,
        max_len=arguments.max_len,
        chunk=arguments.chunk,
        compile=not arguments.no_compile,
    )
    progress.clear()
    from transformers import TextStreamer

    if not arguments.chat:
        print(arguments.prompt, end="", flush=True)
    streamer = TextStreamer(model.tokenizer, skip_prompt=True, skip_special_tokens=True)
    result = program.generate(
        rows,
        max_new_tokens=arguments.max_new_tokens,
        stop_strings=arguments.stop_strings,
        do_sample=arguments.do_sample,
        streamer=streamer,
        **options,
    )
    print(result.timings, *([f"  seed {options['seed']}"] if arguments.do_sample else []), file=sys.stderr)
    return 0


class _Progress:
    """One line that is written over; silent where nobody watches (a file, a pipe)."""

    def __init__(self, out: Any) -> None:
        self._out, self._live, self._shown = out, out.isatty(), False

    def __call__(self, step: str, done: int, total: int) -> None:
        if self._live:
            count = f" {done}/{total}" if total > 1 else ""
            self._out.write(f"\r\x1b[K{step}{count} ...")
            self._out.flush()
            self._shown = True

    def clear(self) -> None:
        if self._shown:
            self._out.write("\r\x1b[K")
            self._out.flush()
            self._shown = False
