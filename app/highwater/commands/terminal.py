"""The command lines of top, status, reclaim, mark, check, token and completion: options, help, exit statuses.

Their work is done by the modules beside this one. Nothing but click is loaded here: ``highwater --help`` is immediate.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Sequence

import click

from highwater.client.options import (
    ASK_SECONDS,
    URL_VARIABLE,
    control_of,
    ending_well,
    examples,
    json_option,
    own_port,
    sidecar_at,
    url_option,
)
from highwater.commands.sizes import size_option
from highwater.errors import SidecarRefused
from highwater.exit_codes import FAILED
from highwater.files.admin_token import TOKEN_FILE_VARIABLE, find_token

# Each remedy may have to wait until no request runs.
RECLAIM_SECONDS = 600.0
MARK_SECONDS = 60.0
_PROGRAM, _COMPLETION_VARIABLE = "highwater", "_HIGHWATER_COMPLETE"


@click.command(
    epilog=examples(
        "highwater top                          q or Ctrl-C leaves",
        "highwater top --once | less",
        "highwater top --once --json | jq '.ranks[].used_ratio'",
        "highwater top --json >> memory.jsonl   a report a line, until Ctrl-C",
        "HIGHWATER_URL=http://gpu-7:8001 highwater top",
    )
)
@url_option
@click.option("--once", is_flag=True, help="print it once, and end; so it does where the output is no terminal")
@json_option
def top(url: str, *, once: bool, as_json: bool) -> None:
    """Show where the memory is, live: ranks, components, growth, requests, policy, events.

    One bar for each rank, with a line at high water; below them the components of the fullest rank, and their change.
    While the sidecar does not respond, the age of the figures is shown; they continue once it responds again.
    """
    from highwater.commands.top.top import show

    show(url, once=once, as_json=as_json)


@click.command(
    epilog=examples(
        "highwater status",
        "highwater status >/dev/null || echo 'look at it'",
        "highwater status --since 'before bench'   what changed since that mark",
        "highwater status --json | jq -r '.reasons[]'",
    )
)
@url_option
@click.option("--since", metavar="MARK", help="adds what changed since that mark")
@json_option
def status(url: str, since: str | None, *, as_json: bool) -> None:
    """Show where the memory is, on one screen, and whether all is well.

    Exits with 0 if it is, 1 if something needs attention, 2 if the engine is unreachable or hung, 3 if no sidecar
    answers.
    """
    from highwater.client.answers import events_of, report_of
    from highwater.commands.status import judged, since_text, status_json, status_text
    from highwater.text.printable import cleaned

    with sidecar_at(url) as sidecar:
        answer = sidecar.get("/memory", {} if since is None else {"since": since})
        report = report_of(answer)
        listed = sidecar.get("/memory/events", {"limit": "1000"})
    events = events_of(listed.get("events") if isinstance(listed, dict) else [])
    last_reset = next((event for event in events if event.kind == "reset" and event.result is not None), None)
    last_incident = next((event for event in events if event.kind == "incident"), None)
    verdict = judged(report)
    if as_json:
        click.echo(json.dumps(status_json(verdict, answer, last_reset), indent=1))
    else:
        click.echo(status_text(report, verdict, last_reset, now=time.time(), last_incident=last_incident))
        if since is not None:
            click.echo("\n" + since_text(since, cleaned(answer.get("since"))))
    sys.exit(verdict.code)


def _remedies(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    del context, parameter
    from highwater.commands.reclaim import known_remedies

    return [name for name in known_remedies() if name.startswith(incomplete)]


@click.command(
    epilog=examples(
        "highwater reclaim                       release, then reset_encoder_cache",
        "highwater reclaim --dry-run             what would be done or refused",
        "highwater reclaim --free 1GiB           moves that much of the encoder cache to the host",
        "highwater reclaim reset_mm_cache release",
        "highwater reclaim reset_prefix_cache --mode now",
    )
)
@click.argument("remedies", metavar="[REMEDY]...", nargs=-1, shell_complete=_remedies)
@url_option
@click.option(
    "--free",
    "free_bytes",
    metavar="SIZE",
    callback=size_option,
    help="how much trim_encoder_cache moves out on each rank: 1GiB, 512MiB",
)
@click.option(
    "--mode",
    type=click.Choice(["safe", "now"]),
    default="safe",
    show_default=True,
    help="safe: harms no request, or is refused; now: at once, as vLLM does",
)
@click.option("--dry-run", is_flag=True, help="show what would be done or refused, and do nothing")
@json_option
def reclaim(
    url: str, remedies: Sequence[str], free_bytes: int | None, mode: str, *, dry_run: bool, as_json: bool
) -> None:
    """Give memory back, and say what each remedy freed.

    A REMEDY is release, trim_encoder_cache, reset_encoder_cache, reset_mm_cache or reset_prefix_cache; they run in the
    order given. Exits with 1 if any of them was refused or failed, 3 if no sidecar answers.
    """
    from highwater.commands.reclaim import reclaim_text, reclaimed_of, succeeded, wanted

    try:
        body = {"mode": mode, "dry_run": dry_run, "remedies": wanted(remedies, free_bytes) or None}
    except ValueError as exc:
        raise click.UsageError(str(exc)) from exc
    with control_of(url, timeout_seconds=RECLAIM_SECONDS) as sidecar:
        try:
            answer = sidecar.post("/memory/reclaim", body)
        except SidecarRefused as exc:
            if not isinstance(exc.body, dict) or "results" not in exc.body:
                raise
            answer = exc.body
        results = reclaimed_of(answer)
    click.echo(json.dumps(answer, indent=1) if as_json else reclaim_text(results, dry_run=dry_run))
    if not succeeded(results):
        sys.exit(FAILED)


@click.command(
    epilog=examples(
        "highwater mark 'before bench'",
        "highwater status --since 'before bench'   what changed since",
    )
)
@click.argument("name")
@url_option
@json_option
def mark(name: str, url: str, *, as_json: bool) -> None:
    """Name this moment, to compare with later: `highwater status --since NAME`."""
    with control_of(url, timeout_seconds=MARK_SECONDS) as sidecar:
        answer = sidecar.post("/memory/marks", {"name": name})
    at = time.strftime("%H:%M:%S", time.localtime(answer["at"]))
    hint = f"what changed since: highwater status --since {shlex.quote(name)}"
    text = hint if answer["ranks"] else "no rank could be read, so there is nothing to compare with later"
    click.echo(json.dumps(answer, indent=1) if as_json else f"marked {name!r} at {at}; {text}")


@click.command(
    epilog=examples(
        "highwater check",
        "highwater check --url https://vllm-7:8001 || exit 1",
        "highwater check --json | jq -r '.findings[] | select(.level == \"fail\") | .change'",
    )
)
@url_option
@json_option
def check(url: str, *, as_json: bool) -> None:
    """Check that engine and sidecar are set up correctly; say what to change.

    Changes nothing. Exits with 0 if all is as it should be, 1 if there is something to look at, 2 if
    something is wrong, 3 if no sidecar answers.
    """
    from highwater.client.sidecar import SidecarClient
    from highwater.commands.check import check_json, check_text, exit_code, gather

    with ending_well():
        found = gather(
            lambda held: SidecarClient(url, token=held, timeout_seconds=ASK_SECONDS), find_token(url, os.environ)
        )
    # https://no-color.org
    colour = False if os.environ.get("NO_COLOR") else None
    click.echo(json.dumps(check_json(found), indent=1) if as_json else check_text(found), color=colour)
    sys.exit(exit_code(found))


@click.command(
    epilog=examples(
        "TOKEN=$(highwater token)",
        'curl -X POST -H "Authorization: Bearer $(highwater token)" localhost:8001/memory/reclaim',
        "kubectl exec POD -c highwater -- highwater token",
    )
)
@click.option(
    "--port",
    default=None,
    show_default="that of HIGHWATER_URL, else HIGHWATER_CONTROL_PORT, else HIGHWATER_PORT, else 8001",
    type=click.IntRange(1, 65535),
    help="the port of the control plane of the sidecar on this machine",
)
def token(port: int | None) -> None:
    """Print the admin token of the sidecar on this machine.

    Looks into HIGHWATER_ADMIN_TOKEN, then into the file that HIGHWATER_ADMIN_TOKEN_FILE names, then into the file that
    a sidecar with this port makes when it starts. On a terminal it also says where the token was found.
    """
    named = os.environ.get(URL_VARIABLE) if port is None else None
    found = find_token(named or f"http://127.0.0.1:{port or own_port(os.environ)}", os.environ)
    if found.value is None:
        makes = "`highwater serve` makes one at start; --port names its port where that is another"
        if TOKEN_FILE_VARIABLE in os.environ:
            makes = (
                "`highwater serve` makes it where it may write; in Kubernetes it is a Secret's, and `helm upgrade` "
                "makes the chart's own again"
            )
        raise click.ClickException(f"no admin token was found: {found.source}; {makes}")
    if sys.stdout.isatty():
        click.echo(f"from {found.source}:", err=True)
    click.echo(found.value)


@click.command(
    epilog=examples(
        'eval "$(highwater completion bash)"                                   in ~/.bashrc',
        'eval "$(highwater completion zsh)"                                    in ~/.zshrc, after compinit',
        "highwater completion fish > ~/.config/fish/completions/highwater.fish",
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that completes highwater's commands in SHELL (bash 4.4 or newer, zsh, fish)."""
    from click.shell_completion import get_completion_class

    script_class = get_completion_class(shell)
    if script_class is None:
        raise click.ClickException(f"click completes nothing in {shell}")
    try:
        script = script_class(context.find_root().command, {}, _PROGRAM, _COMPLETION_VARIABLE).source()
    except RuntimeError as exc:  # a bash that is too old
        raise click.ClickException(str(exc)) from exc
    click.echo(script)


ALL = (top, status, reclaim, mark, check, token, completion)
