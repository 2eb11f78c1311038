"""vLLM asked on the `meta` device: what it will say to a command line, without a device, weights or a network.

`python -m highwater_worker.plan -- vllm serve MODEL ...` runs where vLLM can be imported. vLLM's own parser, model
runner and pool functions answer; a card is pretended, and no tensor holds anything. It refuses to guess: where this
vLLM cannot be asked, the answer is why. The sidecar reads its table of cards, with what a start takes of one (`cards`),
and nothing else imports it. It imports torch and vLLM only when it answers, and nothing else of ours.
"""

from __future__ import annotations

# What an answer rests on beside vLLM's own code; each line once.
PRETENDED: list[str] = []
NOT_COUNTED: list[str] = []
"""Memory that a start takes and no figure here has."""
GUESSED: list[str] = []
LOG: list[str] = []
"""Warnings of vLLM."""


def say(where: list[str], text: str) -> None:
    if text not in where:
        where.append(text)
