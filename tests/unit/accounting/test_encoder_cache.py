"""The encoder cache over all ranks."""

from __future__ import annotations

from highwater.accounting.attribution import account
from highwater.accounting.encoder_cache import encoder_totals
from tests.fakes.engine import IMAGE_BYTES, IMAGES
from tests.unit.accounting.story import story, worker


def test_encoder_totals_count_entries_once_and_bytes_on_every_rank():
    """Every tensor-parallel rank holds a full copy; a text model has none at all."""
    totals = encoder_totals(story(images=True))
    assert totals is not None
    assert (totals.entries, totals.device_bytes) == (IMAGES, 2 * IMAGES * IMAGE_BYTES)
    assert encoder_totals([account(worker(used_bytes=1))]) is None
