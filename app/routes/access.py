"""Who may use the control paths."""

from __future__ import annotations

import hmac
import ipaddress
import re
from urllib.parse import urlsplit

from fastapi import HTTPException, Request

# What reverse proxies and service meshes add. Whoever comes through one has its address: their own is not known.
_FORWARDED = re.compile(r"forwarded|via|x-real-ip|(?:x-forwarded|x-envoy|l5d)-.*", re.IGNORECASE)
# Istio's sidecar connects from here for everybody in the mesh, and to a plain TCP port without a word about it.
_MESH = ipaddress.ip_address("127.0.0.6")


class Access:
    """A FastAPI dependency that lets control calls through, or says why not.

    With an admin token set, the call must carry it. With none set, only loopback peers may call: a peer that came
    through a reverse proxy, or a web page in the operator's own browser, is not one.

    Args:
        admin_token: The token, or ``None``.
    """

    def __init__(self, admin_token: str | None) -> None:
        self._token = admin_token.encode() if admin_token is not None else None

    def __call__(self, request: Request) -> None:
        """Let the request through.

        Raises:
            HTTPException: 401 without or with a wrong token; 403 from elsewhere when none is set.
        """
        if self._token is not None:
            self._check_token(request)
        elif not _is_local(request):
            raise HTTPException(
                403,
                "control paths are for loopback peers only while no admin_token is set "
                "(HIGHWATER_ADMIN_TOKEN); set one and send it as Authorization: Bearer",
            )

    def _check_token(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # latin-1 is what headers are decoded with; compare_digest takes bytes of any content.
        matches = hmac.compare_digest(given.strip().encode("latin-1"), self._token or b"")
        if scheme.lower() != "bearer" or not matches:
            raise HTTPException(
                401, "this path needs the admin token: Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"}
            )


def _is_local(request: Request) -> bool:
    peer = request.client.host if request.client is not None else ""
    if not _is_loopback(peer) or any(map(_FORWARDED.fullmatch, request.headers)):
        return False
    # A page on another site can make a browser on this machine send a POST here, or point its own name at 127.0.0.1.
    # Browsers then send an Origin, and a Host that is neither localhost nor an address.
    host = request.headers.get("host", "")
    origin = request.headers.get("origin")
    try:
        if origin is not None and urlsplit(origin).netloc != host:
            return False
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:  # brackets that do not match, or hold no address
        return False
    return name == "localhost" or _is_address(name)


def _is_loopback(host: str) -> bool:
    if not _is_address(host):
        return False
    address = _mapped(ipaddress.ip_address(host))
    return address.is_loopback and address != _MESH


def _mapped(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An IPv4 peer on an IPv6 socket shows as ``::ffff:127.0.0.1``."""
    inner = getattr(address, "ipv4_mapped", None)
    return inner or address


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
