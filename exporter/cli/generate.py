"""``linexport generate``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from linexport.cli.errors import guarded_in_time, print_json
from linexport.cli.help import add_command
from linexport.cli.options import (
    DEFAULT_TOKENS,
    ArtifactPath,
    Json,
    KeyOption,
    NewerThan,
    ProviderOption,
    Strict,
    Threads,
    TimeLimit,
    completion,
    opener,
)
from linexport.cli.output import echo
from linexport.errors import UsageError
from linexport.manifest.options import Panel
from linexport.system import unread
from linexport.system.terminal import visible_text
from linexport.system.time_limit import DEFAULT
from linexport.targets.runtime.providers import CPU

if TYPE_CHECKING:
    from linexport.artifact import Artifact
    from linexport.artifact.text.speculation import Draft


def generate(
    artifact: ArtifactPath,
    prompt: Annotated[
        list[str],
        typer.Option(
            help="Text to continue. Several are continued together, in one batch.",
            rich_help_panel=Panel.COMMON,
        ),
    ],
    image: Annotated[
        list[Path] | None,
        typer.Option(
            help="File of an image, for a model with a vision tower; may be repeated. With --chat "
            "images come before the text; otherwise the prompt has an image token for each.",
            rich_help_panel=Panel.INPUT,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Answer the prompt as a user's message, by the model's chat template.",
            rich_help_panel=Panel.COMMON,
        ),
    ] = False,
    system: Annotated[
        str | None,
        typer.Option(help="With --chat: the system's message.", rich_help_panel=Panel.COMMON),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most tokens to write. Default: as generation_config.json says, or "
            f"{DEFAULT_TOKENS}.",
            rich_help_panel=Panel.COMMON,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="0 takes the argmax; more is more random. Without it and the options below, as "
            "the model's generation_config.json says, else the argmax; with --top-k, --top-p or "
            "--min-p alone, 1.",
            rich_help_panel=Panel.DECODING,
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Sample from that many largest logits; 0 from all.",
            rich_help_panel=Panel.DECODING,
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Sample from the fewest likeliest tokens that have this probability together.",
            rich_help_panel=Panel.DECODING,
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Sample from tokens that have this share of the largest probability, or more.",
            rich_help_panel=Panel.DECODING,
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Divide the logits of tokens already in the text by this, or multiply negative "
            "ones; 1 leaves them.",
            rich_help_panel=Panel.DECODING,
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="Text before which to end; may be given several times. Default: as "
            "generation_config.json says.",
            rich_help_panel=Panel.DECODING,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            help="Seed of the samples; text i of a batch has the seed plus i.",
            rich_help_panel=Panel.DECODING,
        ),
    ] = 0,
    draft: Annotated[
        str | None,
        typer.Option(
            help="Propose tokens, and check several in a call; the text is the same. ngram: what "
            "followed the last tokens earlier in the text; mtp: the model's head for multi-token "
            "prediction; else the artifact of a smaller model with the same tokens.",
            autocompletion=completion(lambda: ("ngram", "mtp")),
            rich_help_panel=Panel.DECODING,
        ),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            help="Write control characters of the text as they are. A terminal obeys them; "
            "otherwise they are escapes, such as \\x1b.",
            rich_help_panel=Panel.OUTPUT,
        ),
    ] = False,
    time_limit: TimeLimit = DEFAULT,
    key: KeyOption = None,
    newer_than: NewerThan = None,
    provider: ProviderOption = CPU,
    strict: Strict = False,
    threads: Threads = 0,
    json: Json = False,
) -> None:
    """Continue texts with a language model, token by token, from its state."""
    with guarded_in_time(json, time_limit):
        from linexport.artifact import NGramDraft
        from linexport.artifact.text.generating import GenerationRequest
        from linexport.cli.texts import GeneratedTexts

        if system is not None and not chat:
            raise UsageError("--system is the message of a conversation: give --chat too.")
        if image and (len(prompt) > 1 or draft is not None):
            raise UsageError(
                "--image takes one prompt and no --draft. Leave out the others, or the images."
            )
        if draft is not None and len(prompt) > 1:
            raise UsageError(
                f"--draft takes one prompt; found {len(prompt)}. Leave out one of both."
            )
        opened = opener(threads, provider, strict, key, newer_than)
        model = opened(artifact)
        proposals: Draft | None = None
        if draft is not None:
            own: dict[str, Callable[[], Draft]] = {"ngram": NGramDraft, "mtp": model.mtp_draft}
            proposals = own[draft]() if draft in own else _smaller(opened(draft), model)
        request = GenerationRequest(
            *(max_tokens, temperature, top_k, top_p, min_p, repetition_penalty),
            seed=seed,
            stop_strings=stop or None,
        )
        texts = GeneratedTexts.begin(
            *(model, prompt, request, system if chat else None),
            chat=chat,
            images=image or (),
            exact=raw and not json,
        )
        alone = len(prompt) == 1 and not json
        show = _show_raw if raw else _show
        texts.write(proposals, show if alone else _discard)
        if json:
            print_json(
                {
                    "status": "ok",
                    "artifact": str(artifact),
                    **texts.record(),
                    "seed": seed,
                    "draft": None if proposals is None else _counts(proposals),
                }
            )
            return
        show("\n" if alone else "".join(f"{text}\n" for text in texts.whole(chat)))
        echo(texts.summary(), err=True)
        if proposals is not None:
            counts = _counts(proposals)
            echo(
                f"{counts['accepted']} of {counts['proposed']} proposed tokens were accepted, "
                f"in {counts['calls']} calls",
                err=True,
            )


def _smaller(small: Artifact, model: Artifact) -> Draft:
    """Return an artifact as the draft of a larger one.

    Raises:
        UsageError: it has another vocabulary.
    """
    from linexport.artifact.text.language_interface import language_interface

    sizes = [language_interface(m.manifest).vocabulary for m in (small, model)]
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"{small.path} has a vocabulary of {sizes[0]}; expected {sizes[1]}, that of "
            f"{model.path}. A draft has the same tokens as the model: choose another, or "
            "--draft ngram."
        )
    return small.draft()


def _counts(draft: Draft) -> dict[str, int]:
    return {"proposed": draft.proposed, "accepted": draft.accepted, "calls": draft.calls}


def _show(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    _write(visible_text(text).encode(encoding, "replace"))


def _show_raw(text: str) -> None:
    _write(text.encode("utf-8", "surrogateescape"))


def _write(content: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(content)
    sys.stdout.flush()
    if unread.left():
        raise BrokenPipeError


def _discard(text: str) -> None:
    pass


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        generate,
        "linexport generate model.artifact --prompt 'Once upon a time'",
        "linexport generate model.artifact --chat --prompt 'Why is the sky blue?'",
        "linexport generate model.artifact --prompt Hello --temperature 0.7 --top-p 0.9",
    )
