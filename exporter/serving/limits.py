"""Limits of a server, declared once: the options of ``linexport serve`` and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from linexport.manifest.options import Panel
from linexport.system.time_limit import DEFAULT

STOPS, LONGEST_STOP, MOST_LOGPROBS = 16, 256, 20
"""Most stop strings of a text, characters of one, and tokens whose probabilities are reported."""

HELP, LEAST, PANEL = "help", "min", "panel"
"""Keys of a field's metadata: a sentence for the command line, the smallest value, a heading."""


def _limit(default: int, panel: Panel, help: str, least: int = 1) -> Any:
    return field(default=default, metadata={HELP: help, LEAST: least, PANEL: panel})


@dataclass(frozen=True)
class Limits:
    """Most that one server takes on; every field has an option of its name."""

    slots: int = _limit(16, Panel.SEQUENCES, "Sequences that are advanced together.")
    queue: int = _limit(64, Panel.REQUESTS, "Requests that may wait for a slot; others get 429.", 0)
    chunk: int = _limit(
        0,
        Panel.SEQUENCES,
        "Tokens of a prompt that are computed between two steps of others; 0 for 64, and on a GPU "
        "for as many as take no longer.",
        0,
    )
    max_body: int = _limit(
        4 * 2**20, Panel.REQUESTS, "Bytes of a request's body, its images in base64 among them."
    )
    max_answer: int = _limit(
        32 * 2**20,
        Panel.REQUESTS,
        "Bytes of an answer, known before anything is computed: others get 413.",
    )
    memory_mib: int = _limit(
        512, Panel.REQUESTS, "MiB of all requests that are read, computed and answered."
    )
    max_prompt: int = _limit(32_768, Panel.SEQUENCES, "Tokens of a prompt, of images as well.")
    max_images: int = _limit(16, Panel.SEQUENCES, "Images of a prompt; 0 takes none.", 0)
    max_pixels: int = _limit(
        2**24,
        Panel.SEQUENCES,
        "Pixels of the images of a prompt together, read from their headers before any is decoded.",
    )
    max_tokens: int = _limit(4_096, Panel.SEQUENCES, "Tokens of a text that is written.")
    idle_seconds: int = _limit(
        300, Panel.SEQUENCES, "Seconds that a sequence of /v2 is kept without a request."
    )
    request_seconds: int = _limit(
        10, Panel.REQUESTS, "Seconds in which a request must have arrived."
    )
    send_seconds: int = _limit(
        30, Panel.REQUESTS, "Seconds that a client may take nothing of its answer."
    )
    buffer: int = _limit(
        512, Panel.REQUESTS, "Pieces of text kept for a slow client before it is cut off."
    )
    connections: int = _limit(512, Panel.REQUESTS, "Connections at a time.")
    cache_mb: int = _limit(
        256, Panel.SEQUENCES, "MB of states after known prefixes of prompts; 0 keeps none.", 0
    )
    grace_seconds: int = _limit(20, Panel.REQUESTS, "Seconds to finish texts after SIGTERM.", 0)
    time_limit: int = _limit(
        DEFAULT,
        Panel.ISOLATION,
        "Seconds of opening the model, and of each call of it; 0 for no limit.",
        0,
    )
    park_mib: int = _limit(1_024, Panel.SEQUENCES, "MiB of parked sequences; the oldest make room.")
