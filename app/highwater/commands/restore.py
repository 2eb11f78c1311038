"""``highwater restore``: the way back from a trim."""

from __future__ import annotations

from typing import Any

import click

from highwater.client.options import control_of, examples, json_option, show, url_option

# Outputs go back to the device in rounds.
WORKER_SECONDS = 300.0


@click.command(epilog=examples("highwater restore"))
@url_option
@json_option
def restore(url: str, *, as_json: bool) -> None:
    """Bring back to the device what trim_encoder_cache moved to host memory.

    Exits with 0 when it is done, 1 if the sidecar refuses or a worker cannot, 3 if no sidecar answers.
    """
    with control_of(url, timeout_seconds=WORKER_SECONDS) as sidecar:
        answer = sidecar.post("/memory/encoder-cache/restore")
        text = restored_text(answer)
    show(answer, text, as_json=as_json)


def restored_text(answer: Any) -> str:  # noqa: ANN401 - JSON
    from highwater.client.answers import understood
    from highwater.readings.rank import rank_title
    from highwater.text.printable import cleaned
    from highwater.text.table import table
    from highwater.units import size_text

    with understood("/memory/encoder-cache/restore"):
        ranks: Any = cleaned(answer)["ranks"]
        names = [rank_title(rank.get("dp_rank"), rank["rank"]) for rank in ranks]
        sizes = [(str(rank["restored_entries"]), size_text(rank["restored_bytes"])) for rank in ranks]
        rows = [[name, *size] for name, size in zip(names, sizes, strict=True)]
    return table(["rank", "entries brought back", "bytes"], rows) if rows else "nothing was on the host"
