"""A node of a cluster, as far as processes need one: volumes are folders, Secrets and ConfigMaps are files in them."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.helm.chart import Object, container, env, mounts


@dataclass(frozen=True)
class Node:
    """What the kubelet would do with what the chart renders, without containers."""

    folder: Path
    everything: list[Object]
    # Beside those of the sidecar's image; by the first word of a command.
    programs: Mapping[str, str] = field(default_factory=dict)

    def volume(self, name: str) -> Path:
        path = self.folder / "volumes" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def here(self, each: Object, text: str) -> str:
        """With each mounted path as the folder that its volume is here; the longest first, as the kernel has it."""
        for path, name in sorted(mounts(each).items(), key=lambda item: -len(item[0])):
            if path not in ("/tmp", "/dev/shm"):
                text = text.replace(path, str(self.volume(name)))
        return text

    def argv(self, each: Object) -> list[str]:
        ours = {"highwater": str(Path(sys.executable).parent / "highwater"), "python3": sys.executable}
        # A shell may be what starts a program; its second word is what it calls itself.
        command, programs = list(each.get("command", [])), {**ours, **self.programs}
        first = 4 if command[:2] in (["sh", "-c"], ["bash", "-c"]) else 0
        command[first] = programs[command[first]]
        return [self.here(each, text) for text in [*command, *each.get("args", [])]]

    def environ(self, each: Object) -> dict[str, str]:
        """Nothing of ours but where programs are."""
        found = {name: self._value(source) for name, source in env(each).items()}
        return {"PATH": os.environ["PATH"]} | {name: self.here(each, text) for name, text in found.items()}

    def _value(self, source: str | Object) -> str:
        if isinstance(source, str):
            return source
        wanted = source["secretKeyRef"]
        return base64.b64decode(self._named("Secret", wanted["name"])["data"][wanted["key"]]).decode()

    def _named(self, kind: str, name: str) -> Object:
        return next(e for e in self.everything if e["kind"] == kind and e["metadata"]["name"] == name)

    def mount(self, each: Object) -> None:
        """Write what ConfigMaps and Secrets bring into their volumes."""
        for volume in each["spec"]["volumes"]:
            if "configMap" in volume:
                data = self._named("ConfigMap", volume["configMap"]["name"])["data"]
                # Paths within are those of the engine's container.
                files = {name: self.here(container(each, "vllm"), text) for name, text in data.items()}
                self.swap(volume["name"], files, mode=0o644)
            if "secret" in volume:
                secret = volume["secret"]
                data = self._named("Secret", secret["secretName"])["data"]
                files = {item["path"]: base64.b64decode(data[item["key"]]).decode() for item in secret["items"]}
                self.swap(volume["name"], files, mode=secret["defaultMode"])

    def swap(self, name: str, files: Mapping[str, str], *, mode: int) -> None:
        """Put files into a volume as the kubelet does: in a new folder, to which one link is turned in one step."""
        volume = self.volume(name)
        made = volume / f"..{len([*volume.iterdir()])}"
        made.mkdir()
        for file, text in files.items():
            path = made / file
            path.write_text(text, encoding="utf-8")
            # The kubelet gives it to root and to the pod's group; a test that is not root can be the owner alone.
            path.chmod(mode if os.geteuid() == 0 else mode & 0o600)
            if not (volume / file).is_symlink():
                (volume / file).symlink_to(f"..data/{file}")
        draft = volume / "..data_tmp"
        draft.symlink_to(made.name)
        draft.replace(volume / "..data")
