"""Run by the engine's preStop hook: returns once no request is under way, so that SIGTERM cuts none.

Arguments: the URL of the sidecar's control plane (with environment variables in it), seconds to wait first (until
no new requests arrive), seconds to wait at most.
It asks the sidecar, which ends last. It does not wait for an engine that is dead or hangs, nor without an answer of the
sidecar. It runs in the engine's image: standard library only.
"""

import os
import re
import ssl
import sys
import time
import urllib.request

URL, FIRST, MOST = os.path.expandvars(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
# It is our own pod: the certificate is for the name that clients use, and no proxy of the environment is on the way.
PLAIN = ssl._create_unverified_context()  # noqa: S323 - see above
ASK = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=PLAIN)).open


def under_way() -> float:
    """Return the number of proxied requests in flight; raises an OSError for an engine that is dead or hangs."""
    ASK(f"{URL}/health/deep", timeout=5).close()
    with ASK(f"{URL}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    found = re.search(r"^highwater_proxy_requests_in_flight (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


time.sleep(FIRST)
end = time.monotonic() + MOST
try:
    while under_way() and time.monotonic() < end:
        time.sleep(0.5)
except OSError as exc:
    print(f"nothing to wait for: {exc}", file=sys.stderr)
