"""Whether a worker's allocator has expandable segments: as torch_npu reads the variables of its process."""

from __future__ import annotations

import pytest

from highwater.model.engine_budget import EngineBudget

OWN, SHARED = "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"


@pytest.mark.parametrize(
    ("environment", "torch_npu", "is_on"),
    [
        ({}, None, False),
        ({"HCCL_BUFFSIZE": "200"}, "2.10.0", False),
        ({OWN: "expandable_segments:True"}, None, True),
        ({OWN: " page_size:1g , expandable_segments : true"}, None, True),
        ({OWN: "expandable_segments:1"}, None, True),
        ({OWN: "expandable_segments:True,expandable_segments:False"}, None, False),
        ({OWN: "expandable_segments:False,expandable_segments:True"}, None, True),
        ({OWN: "max_split_size_mb:256"}, None, False),
        ({OWN: ""}, None, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "2.14.0", False),
        ({SHARED: "expandable_segments:True"}, "2.13.0", True),
        ({SHARED: "expandable_segments:True"}, "2.10.0.post4", False),
        ({SHARED: "expandable_segments:True"}, None, None),
        ({SHARED: "expandable_segments:False"}, None, False),
        ({OWN: "max_split_size_mb:64", SHARED: "expandable_segments:True"}, "2.10.0", False),
        ({OWN: "", SHARED: "expandable_segments:True"}, "2.14.0", True),
    ],
)
def test_the_variables_of_its_process_decide(environment, torch_npu, is_on):
    """Whatever the version of vllm-ascend: it writes them before its workers start."""
    assert EngineBudget(environment=environment, torch_npu_version=torch_npu).expandable_segments is is_on
