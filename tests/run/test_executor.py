"""Which device carries out plans in this process."""

import numpy as np
import pytest

import ooc_gemm
from ooc_gemm import devices
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.run import executor


@pytest.fixture
def opened(monkeypatch):
    """Names of the devices that are opened; there seems to be a GPU."""
    found = []

    def open_device(name):
        found.append(name)
        return CPU()

    monkeypatch.setattr(executor, "find_spec", lambda name: object())
    monkeypatch.setattr(executor, "open_device", open_device)
    return found


def test_auto_takes_the_cpu_where_a_gpu_s_libraries_exceed_the_memory_limit(opened):
    """README's commands have a limit of 512 MiB. The process would be larger before there is a plan."""
    said = []
    for limit in (devices.GPU_HOST_BYTES - 1, devices.GPU_HOST_BYTES, "1TiB"):
        executor.open_local("auto", limit, said.append)
    executor.open_local("cuda:1", "1MiB", said.append)
    executor.open_local(CPU(), "1MiB", said.append)
    assert opened == ["cpu", "auto", "auto", "cuda:1"]
    (only,) = said
    assert "704 MiB" in only


@pytest.mark.parametrize("limit", ["512MiB", "1TiB"])
def test_a_product_and_its_plan_say_why_the_cpu_computes(opened, limit):
    x, said = np.ones((8, 8)), []
    ooc_gemm.multiply(x, x, memory_limit=limit, notice=said.append)
    ooc_gemm.topk(x, k=2, memory_limit=limit, notice=said.append)
    assert opened == ["cpu" if limit == "512MiB" else "auto"] * 2
    assert len([text for text in said if "704 MiB" in text]) == (2 if limit == "512MiB" else 0)
