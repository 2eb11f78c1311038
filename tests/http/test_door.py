"""The door on the control plane: its state, the requests with images, and whose they are."""

from __future__ import annotations

import hashlib

from tests.http.test_control_plane import TOKEN, both_on_ports
from tests.http.test_proxy_door import PATH, chat, png
from tests.patience import until

KEY = {"authorization": "Bearer sk-client"}
BEARER = {"authorization": f"Bearer {TOKEN}"}


async def test_requests_with_images_are_listed_without_content():
    async with both_on_ports(admin_token=TOKEN, door={"mode": "on", "decoded_bytes": 4_000_000}) as sidecar:
        url = f"http://127.0.0.1:{sidecar.port}"
        await sidecar.client.post(url + PATH, content=chat(png(640, 480)), headers=KEY)
        await sidecar.client.post(url + PATH, content=b'{"messages": []}', headers=KEY)
        assert (await sidecar.client.post(url + PATH, content=chat(png(8192, 8192)))).status_code == 413
        await until(lambda: all(each.status for each in sidecar.app.services.requests()))

        listed = (await sidecar.client.get(url + "/memory/requests", headers=BEARER)).json()["requests"]
        assert (listed[0]["state"], listed[0]["status"]) == ("refused", 413)
        assert listed[1]["client"] == hashlib.sha256(b"sk-client").hexdigest()[:12]
        (image,) = listed[1]["largest"]
        assert image == {"form": "png", "width": 640, "height": 480, "frames": 1}
        assert listed[1]["cost"]["decoded_bytes"] == 640 * 480 * 4

        (one,) = (await sidecar.client.get(url + "/memory/requests?limit=1")).json()["requests"]
        assert one["client"] is None
        unknown = (await sidecar.client.get(url + "/memory/requests")).json()["requests"][1]
        assert unknown["client"] not in (None, listed[1]["client"])

        door = (await sidecar.client.get(url + "/memory")).json()["door"]
        assert (door["mode"], door["why"]) == ("on", "door.mode is set")
        assert (door["decoded_bytes"], door["requests_total"]) == ({"taken": 0, "limit": 4_000_000}, 2)
        page = (await sidecar.client.get(url + "/metrics?engine=0")).text
        assert 'highwater_door_refused_total{reason="door_too_large"} 1.0' in page
        assert 'highwater_proxy_refused_total{reason="door_too_large"} 1.0' in page
