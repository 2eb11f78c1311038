"""The joins in docs/metrics.md, as Prometheus evaluates them beside the exporters of the devices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from .conftest import promtool

ROOT = Path(__file__).resolve().parents[2]
JOINS = re.findall(r"```promql\n(.*?)```", (ROOT / "docs" / "metrics.md").read_text(), re.DOTALL)
LABELS = 'job="highwater",instance="a",node="n1",host="h",device="{device}",dp_rank="0",product="x"'
# Two ranks of one device, one of another; the other node's device of the same number is not ours.
SERIES = {
    f'highwater_device_info{{{LABELS.format(device="cuda:0")},rank="0",physical_index="2",uuid="GPU-a"}}': 1,
    f'highwater_device_info{{{LABELS.format(device="cuda:0")},rank="1",physical_index="2",uuid="GPU-a"}}': 1,
    f'highwater_device_info{{{LABELS.format(device="cuda:1")},rank="2",physical_index="3",uuid="GPU-b"}}': 1,
    'DCGM_FI_DEV_GPU_TEMP{job="dcgm",UUID="GPU-a",gpu="2"}': 61,
    'DCGM_FI_DEV_GPU_TEMP{job="dcgm",UUID="GPU-b",gpu="3"}': 62,
    'DCGM_FI_DEV_GPU_TEMP{job="dcgm",UUID="GPU-c",gpu="4"}': 99,
    'npu_chip_info_temperature{job="npu",node="n1",id="2"}': 61,
    'npu_chip_info_temperature{job="npu",node="n1",id="3"}': 62,
    'npu_chip_info_temperature{job="npu",node="n2",id="2"}': 99,
}


def test_there_is_a_join_for_each_exporter():
    assert [re.findall(r"DCGM|npu_chip", join) for join in JOINS] == [["DCGM"], ["npu_chip"]]


@pytest.mark.parametrize("join", JOINS, ids=["dcgm", "npu"])
def test_each_rank_gets_its_devices_temperature(join, tmp_path):
    expected = [{"labels": f'{{rank="{rank}"}}', "value": value} for rank, value in ((0, 61), (1, 61), (2, 62))]
    case = {
        "interval": "1m",
        "input_series": [{"series": series, "values": str(value)} for series, value in SERIES.items()],
        "promql_expr_test": [{"expr": f"sum by (rank) ({join})", "eval_time": "0m", "exp_samples": expected}],
    }
    (tmp_path / "joins.yaml").write_text(yaml.safe_dump({"tests": [case]}))
    promtool("test", "rules", tmp_path / "joins.yaml")
