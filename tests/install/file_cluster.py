"""A cluster's objects as files, behind the real kubectl and Helm: for the commands of a page that ask for a cluster.

It stands in for the API server's store alone. Every object is rendered by the real Helm; patched, printed and
kustomized by the real kubectl, whose `patch --local` merges as the server does. It keeps a Deployment's revisions, so
that an upgrade that changes nothing makes none. It runs no pod, and sets no defaults: `run`, `exec` and
`rollout status` do nothing.

Run as a program: ``file_cluster.py PROGRAM ARGUMENT...``, with FILE_CLUSTER and FILE_CLUSTER_TOOLS in the environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

# LibYAML's where it is there: ten times as fast.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Object = dict[str, Any]
REVISION = "deployment.kubernetes.io/revision"
_SHIM = '#!/bin/sh\nexec {python} {module} {program} "$@"\n'
_NOT_DONE = (["run"], ["exec"], ["rollout", "status"])


class FileCluster:
    """Objects in a folder."""

    def __init__(self, folder: Path, tools: Path) -> None:
        self._folder, self._tools = folder, tools
        folder.mkdir(parents=True, exist_ok=True)

    def programs(self) -> Path:
        """Return a folder with a kubectl and a helm that ask this cluster."""
        folder = self._folder / "bin"
        folder.mkdir(exist_ok=True)
        for program in ("kubectl", "helm"):
            shim = folder / program
            shim.write_text(_SHIM.format(python=sys.executable, module=Path(__file__).resolve(), program=program))
            shim.chmod(0o755)
        return folder

    def store(self, thing: Object) -> None:
        """Create an object or replace it; a workload whose pods change gets a new revision."""
        path = self._path(thing["kind"], thing["metadata"]["name"])
        if "template" in thing.get("spec", {}):
            before = self._read(path)
            known = self._revisions(path)
            if before is None or before["spec"]["template"] != thing["spec"]["template"]:
                known.append(thing["spec"]["template"])
                path.with_suffix(".revisions").write_text(json.dumps(known))
            thing["metadata"].setdefault("annotations", {})[REVISION] = str(len(known))
        path.write_text(json.dumps(thing))

    def get(self, kind: str, name: str) -> Object:
        """Return an object."""
        found = self._read(self._path(kind, name))
        if found is None:
            raise LookupError(f"{kind.lower()} {name!r} not found")
        return found

    def names(self) -> list[str]:
        return sorted(path.stem.replace("+", "/", 1) for path in self._folder.glob("*.json"))

    def kubectl(self, arguments: list[str]) -> str:
        """Do as kubectl would, and return what it prints."""
        words = _without_namespace(arguments)
        if "--local" in words or words[0] == "kustomize":
            return self._real("kubectl", words)
        if any(words[: len(these)] == these for these in _NOT_DONE):
            return ""
        if words[0] == "get":
            return self._printed(*words[1:])
        if words[0] == "patch":
            self._patch(*words[1:])
        elif words[:2] == ["apply", "-k"]:
            self._store_all(self._real("kubectl", ["kustomize", words[2]]))
        elif words[:2] == ["delete", "-f"]:
            for thing in yaml.load_all(Path(words[2]).read_text(), LOADER):
                self._path(thing["kind"], thing["metadata"]["name"]).unlink()
        elif words[:2] == ["rollout", "undo"]:
            self._undo(words[2], words[3], int(words[4].removeprefix("--to-revision=")))
        else:
            raise NotImplementedError(f"kubectl {' '.join(words)}")
        return ""

    def _printed(self, kind: str, name: str, *options: str) -> str:
        self.get(kind, name)
        return self._real("kubectl", ["patch", "--local", "-f", str(self._path(kind, name)), "-p", "{}", *options])

    def _patch(self, kind: str, name: str, *options: str) -> None:
        self.get(kind, name)
        command = ["patch", "--local", "-f", str(self._path(kind, name)), *options, "-o", "json"]
        self.store(json.loads(self._real("kubectl", command)))

    def helm(self, arguments: list[str]) -> str:
        """Do as Helm would, and return what it prints."""
        verb, *rest = arguments
        if verb in ("install", "upgrade"):
            self._store_all(self._real("helm", ["template", *rest, "--skip-tests"]))
            return ""
        if verb == "uninstall":
            for path in self._folder.glob("*.json"):
                labels = json.loads(path.read_text())["metadata"].get("labels", {})
                if (labels.get("app.kubernetes.io/managed-by"), labels.get("app.kubernetes.io/instance")) == (
                    "Helm",
                    rest[0],
                ):
                    path.unlink()
            return ""
        return self._real("helm", arguments)

    def _undo(self, kind: str, name: str, revision: int) -> None:
        thing = self.get(kind, name)
        thing["spec"]["template"] = self._revisions(self._path(kind, name))[revision - 1]
        self.store(thing)

    def _store_all(self, text: str) -> None:
        for thing in yaml.load_all(text, LOADER):
            if thing:
                self.store(thing)

    def _revisions(self, path: Path) -> list[Any]:
        known = path.with_suffix(".revisions")
        return json.loads(known.read_text()) if known.exists() else []

    def _path(self, kind: str, name: str) -> Path:
        return self._folder / f"{kind.lower()}+{name}.json"

    @staticmethod
    def _read(path: Path) -> Object | None:
        return json.loads(path.read_text()) if path.exists() else None

    def _real(self, program: str, arguments: list[str]) -> str:
        done = subprocess.run([str(self._tools / program), *arguments], stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(done.returncode)
        return done.stdout


def _without_namespace(arguments: list[str]) -> list[str]:
    words = list(arguments)
    if "-n" in words:
        del words[words.index("-n") : words.index("-n") + 2]
    return words


def new_cluster(folder: Path, tools: Path, *things: Object) -> FileCluster:
    """Return an empty cluster with these objects in it."""
    shutil.rmtree(folder, ignore_errors=True)
    cluster = FileCluster(folder, tools)
    for thing in things:
        cluster.store(thing)
    return cluster


def main() -> None:
    _, program, *arguments = sys.argv
    cluster = FileCluster(Path(os.environ["FILE_CLUSTER"]), Path(os.environ["FILE_CLUSTER_TOOLS"]))
    sys.stdout.write(cluster.helm(arguments) if program == "helm" else cluster.kubectl(arguments))


if __name__ == "__main__":
    main()
