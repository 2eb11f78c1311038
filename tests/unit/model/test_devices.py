"""The device families: the sidecar's table and the worker's classes know the same ones, and the same of each."""

from __future__ import annotations

from highwater.diagnose.finding import ADVICE
from highwater.model.components import COMPONENT_NAMES
from highwater.model.rank import DEVICES, Device
from highwater_worker.devices import FAMILIES


def test_sidecar_and_worker_know_the_same_families():
    assert {kind: row.is_host_memory for kind, row in DEVICES.items()} == {
        family.type: family.is_host_memory for family in FAMILIES
    }


def test_a_row_names_advice_and_components_that_exist():
    for row in DEVICES.values():
        assert {*row.against_fragmentation, *row.against_non_torch} <= ADVICE.keys()
        assert set(row.release_frees) <= set(COMPONENT_NAMES)


def test_of_an_unknown_device_nothing_is_assumed():
    assert not Device(type=None).traits.is_host_memory
    assert Device(type="tpu").traits == Device().traits
