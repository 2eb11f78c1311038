"""What the runbooks ask of kubectl, for one pod: its containers' commands, logs and ports, and the objects' names.

Run as a program. `KUBECTL_POD` names a JSON file of what the chart made: the pod's namespace and name, each container's
environment and log, its ports as they are on this machine, and every object's kind, namespace, name and labels.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


def main() -> int:
    """Do as one command line says; what it does not know is an error, as it is of kubectl."""
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    asked = _parser().parse_args(sys.argv[1:end])
    asked.command = sys.argv[end + 1 :]
    pod = json.loads(Path(os.environ["KUBECTL_POD"]).read_text(encoding="utf-8"))
    return {"exec": _exec, "logs": _logs, "port-forward": _forward, "get": _get}[asked.verb](asked, pod)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kubectl")
    parser.add_argument("-n", "--namespace")
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("exec")
    run.add_argument("pod")
    run.add_argument("-c", dest="container", required=True)
    logs = verbs.add_parser("logs")
    logs.add_argument("pod")
    logs.add_argument("-c", dest="container", required=True)
    logs.add_argument("--previous", action="store_true")
    logs.add_argument("--tail", type=int)
    forward = verbs.add_parser("port-forward")
    forward.add_argument("pod")
    forward.add_argument("ports")
    get = verbs.add_parser("get")
    get.add_argument("kinds")
    get.add_argument("name", nargs="?")
    get.add_argument("-A", dest="everywhere", action="store_true")
    get.add_argument("-l", dest="labels", default="")
    get.add_argument("-o", dest="output")
    return parser


def _container(asked: argparse.Namespace, pod: dict[str, Any]) -> dict[str, Any]:
    if (asked.namespace, asked.pod) != (pod["namespace"], pod["name"]):
        raise SystemExit(f'Error from server (NotFound): pods "{asked.pod}" not found')
    if asked.container not in pod["containers"]:
        raise SystemExit(f"error: container {asked.container} is not valid for pod {asked.pod}")
    return pod["containers"][asked.container]


def _exec(asked: argparse.Namespace, pod: dict[str, Any]) -> int:
    return subprocess.run(asked.command, env=_container(asked, pod)["env"], check=False).returncode


def _logs(asked: argparse.Namespace, pod: dict[str, Any]) -> int:
    lines = Path(_container(asked, pod)["log"]).read_text(encoding="utf-8").splitlines()
    sys.stdout.writelines(f"{line}\n" for line in lines[-asked.tail if asked.tail else 0 :])
    return 0


def _forward(asked: argparse.Namespace, pod: dict[str, Any]) -> int:
    local, _, remote = asked.ports.partition(":")
    with socket.create_server(("127.0.0.1", int(local))) as listener:
        print(f"Forwarding from 127.0.0.1:{local} -> {remote}", flush=True)  # noqa: T201 - as kubectl does
        while True:
            client, _ = listener.accept()
            there = socket.create_connection(("127.0.0.1", pod["ports"][remote]))
            threading.Thread(target=_join, args=(client, there), daemon=True).start()


def _join(client: socket.socket, there: socket.socket) -> None:
    with client, there, selectors.DefaultSelector() as ready:
        ready.register(client, selectors.EVENT_READ, there)
        ready.register(there, selectors.EVENT_READ, client)
        while True:
            for key, _ in ready.select():
                data = key.fileobj.recv(65536)
                if not data:
                    return
                key.data.sendall(data)


def _get(asked: argparse.Namespace, pod: dict[str, Any]) -> int:
    wanted = {kind.removesuffix("s") for kind in asked.kinds.lower().split(",")}
    labels = dict(pair.split("=", 1) for pair in asked.labels.split(",") if pair)
    found = [
        each
        for each in pod["objects"]
        if each["kind"].lower() in wanted
        and (asked.everywhere or each["namespace"] == asked.namespace)
        and asked.name in (None, each["name"])
        and labels.items() <= each["labels"].items()
    ]
    if not found:
        raise SystemExit("No resources found")
    sys.stdout.writelines(f"{each['namespace']}  {each['kind'].lower()}/{each['name']}\n" for each in found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
