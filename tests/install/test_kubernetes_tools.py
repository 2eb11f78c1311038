"""The programs that the install guides are tested with are the real ones, of the versions that we say."""

from __future__ import annotations

import pytest
import yaml

from tests.support.kubernetes_tools import BUNDLES, OLD, Bundle, ToolError, tools


@pytest.mark.parametrize("bundle", BUNDLES, ids=str)
def test_each_program_is_of_the_version_that_we_say(bundle: Bundle) -> None:
    found = tools(bundle)
    client = yaml.safe_load(found.kubectl("version", "--client", "--output=yaml"))
    assert client["clientVersion"]["gitVersion"] == f"v{bundle.kubectl}"
    assert found.helm("version", "--template={{.Version}}") == f"v{bundle.helm}"
    assert sorted(path.name for path in found.bin.iterdir()) == ["helm", "kubectl"]


def test_a_wheel_of_other_bytes_is_refused(tmp_path, monkeypatch) -> None:
    links = tmp_path / "links"
    links.mkdir()
    (links / f"{OLD.project.replace('-', '_')}-{OLD.version}-py3-none-any.whl").write_bytes(b"another wheel")
    for name, value in {
        "NO_INDEX": "1",
        "FIND_LINKS": str(links),
        "EXTRA_INDEX_URL": "",
        "CONFIG_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("HIGHWATER_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ToolError, match=rf"(?s)could not fetch .*Expected sha256 {OLD.sha256}"):
        tools(OLD)
    assert not [path for path in tmp_path.rglob("*") if path.name in ("kubectl", "helm")]


def test_a_program_that_fails_says_why() -> None:
    with pytest.raises(ToolError, match=r"kubectl kustomize nowhere ended with 1: .*nowhere"):
        tools(OLD).kubectl("kustomize", "nowhere")
