"""A pytest plugin (`-p tests.cheaper`): less processor time for the same tests; what they assert stays as it is.

- The garbage collector rests while tests are collected, and afterwards passes over what was there before the first one.
  Thousands of collected tests and all imported modules are otherwise walked through by every full collection, whichever
  test or part of ours asks for one: a third of a second each time.
- Clients load no authorities of the system or of `certifi` unless a test names its own.
- jsonschema does not compile grammars for formats that no schema of ours has.
"""

from __future__ import annotations

import gc
import os
import ssl
import sys
from collections.abc import Iterator

import certifi
import pytest

# jsonschema compiles 38 of its grammars at import: two seconds, for formats (`iri`) that no schema of ours has.
sys.modules.setdefault("rfc3987_syntax", None)  # so that its import fails


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Collect no garbage while modules are imported: next to nothing of what they make is any."""
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Freeze what is there; `gc.get_freeze_count` tells what a test froze, as without this plugin."""
    gc.enable()
    gc.collect()
    gc.freeze()
    count = gc.get_freeze_count
    of_pytest = count()
    # `trim` refuses where frozen objects may hold the encoder cache unseen: pytest's do not.
    gc.get_freeze_count = lambda: max(count() - of_pytest, 0)


@pytest.fixture(scope="session", autouse=True)
def _no_authorities_but_named() -> Iterator[None]:
    """Load no authorities unless a test names its own: that is most of what a client costs, and no test meets them."""
    load_default, load = ssl.SSLContext.set_default_verify_paths, ssl.SSLContext.load_verify_locations
    at_start = _named_authorities()

    def load_named(context: ssl.SSLContext) -> None:
        if _named_authorities() != at_start:
            load_default(context)

    def load_others(context: ssl.SSLContext, cafile=None, capath=None, cadata=None) -> None:
        if cafile != certifi.where():
            load(context, cafile, capath, cadata)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl.SSLContext, "set_default_verify_paths", load_named)
        patch.setattr(ssl.SSLContext, "load_verify_locations", load_others)
        yield


def _named_authorities() -> list[str | None]:
    return [os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR")]
