"""``linexport generate``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from linexport.cli.errors import guarded, print_json
from linexport.cli.options import ArtifactPath, Json, Threads
from linexport.errors import UsageError
from linexport.system import unread

if TYPE_CHECKING:
    from linexport.artifact import Artifact
    from linexport.artifact.speculation import Draft
    from linexport.artifact.tokenizer import Decoder


def generate(
    artifact: ArtifactPath,
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to write.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the argmax; more is more random.")
    ] = 0.0,
    top_k: Annotated[
        int, typer.Option(min=0, help="Sample from that many largest logits; 0 from all.")
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Sample from the fewest likeliest tokens that have this probability together.",
        ),
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Sample from tokens that have this share of the largest probability, or more.",
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 0,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="ngram|ARTIFACT",
            help="Propose tokens that are then checked several in a call: what followed the last "
            "ones where they were in the text before, or what a smaller model with the same "
            "tokens continues with. The text is the same.",
        ),
    ] = None,
    threads: Threads = 0,
    json: Json = False,
) -> None:
    """Continue a text with a language model, token by token, from its state."""
    with guarded(json):
        from linexport.artifact import NGramDraft, load
        from linexport.artifact.language_interface import language_interface
        from linexport.artifact.tokenizer import context, find_tokenizer

        model = load(artifact, threads=threads)
        vocabulary = language_interface(model.manifest).vocabulary
        tokenizer = find_tokenizer(model.path, vocabulary, model.verified)
        ids = tokenizer.encode(prompt)
        proposals: Draft | None = None
        if draft is not None:
            proposals = NGramDraft() if draft == "ngram" else _smaller(draft, model, threads)
        tokens = model.generate(
            ids,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            draft=proposals,
        )
        show = _discard if json else _show
        show(prompt)
        written = _write(tokens, tokenizer.decoder(), show)
        show("\n")
        first, following = written.milliseconds()
        stopped = "length" if len(written.tokens) == max_tokens else "end"
        if stopped == "end" and len(ids) + len(written.tokens) == context(
            model.path, model.verified
        ):
            stopped = "context"
        if json:
            print_json(
                {
                    "status": "ok",
                    "artifact": str(artifact),
                    "prompt": prompt,
                    "prompt_tokens": len(ids),
                    "text": written.text,
                    "tokens": written.tokens,
                    "stopped": stopped,
                    "seed": seed,
                    "first_token_ms": round(first, 3),
                    "next_token_ms": round(following, 3),
                    "draft": None if proposals is None else _counts(proposals),
                }
            )
        else:
            typer.echo(
                f"{len(written.tokens)} tokens after {len(ids)} of the prompt: "
                f"{first:.1f} ms to the first, {following:.2f} ms for each further one",
                err=True,
            )
            if proposals is not None:
                counts = _counts(proposals)
                typer.echo(
                    f"{counts['accepted']} of {counts['proposed']} proposed tokens were accepted, "
                    f"in {counts['calls']} calls",
                    err=True,
                )


def _smaller(folder: str, model: Artifact, threads: int) -> Draft:
    """Open the artifact of a draft.

    Raises:
        UsageError: it has another vocabulary.
    """
    from linexport.artifact import load
    from linexport.artifact.language_interface import language_interface

    small = load(folder, threads=threads)
    sizes = [language_interface(m.manifest).vocabulary for m in (small, model)]
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"{folder} has a vocabulary of {sizes[0]}; expected {sizes[1]}, that of {model.path}. "
            "A draft has the same tokens as the model: choose another, or --draft ngram."
        )
    return small.draft()


def _counts(draft: Draft) -> dict[str, int]:
    return {"proposed": draft.proposed, "accepted": draft.accepted, "calls": draft.calls}


@dataclass(frozen=True)
class _Written:
    """Generated ids with their times; ``times`` begins before the first token."""

    tokens: list[int]
    text: str
    times: list[float]

    def milliseconds(self) -> tuple[float, float]:
        """Return the time to the first token, and the mean for each further one."""
        start, *ends = self.times
        if not ends:
            return 0.0, 0.0
        return 1e3 * (ends[0] - start), 1e3 * (ends[-1] - ends[0]) / max(1, len(ends) - 1)


def _write(tokens: Iterable[int], decode: Decoder, show: Callable[[str], None]) -> _Written:
    written, pieces, times = [], [], [time.perf_counter()]
    for token in tokens:
        times.append(time.perf_counter())
        written.append(token)
        pieces.append(decode(token))
        show(pieces[-1])
    pieces.append(decode.end())
    show(pieces[-1])
    return _Written(written, "".join(pieces), times)


def _show(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
    if unread.left():
        raise BrokenPipeError


def _discard(text: str) -> None:
    pass


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(generate)
