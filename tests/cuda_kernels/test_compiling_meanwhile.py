"""Kernels that are not in the cache are compiled while the run goes on, and contexts are made while libraries
are imported; without a GPU."""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import cupy_on_cpu
import numpy as np
import pytest

from ooc_gemm import DeviceError, devices
from ooc_gemm.cuda_kernels import driver, launch
from ooc_gemm.cuda_kernels.config import Config

CONFIG = Config("naive", "float32", 32, 32, (32, 32), (("BM", 32),))


class Compiler:
    """Compiles when it is let; what is loaded and launched is noted."""

    def __init__(self, monkeypatch):
        self.go, self.calls, self.loaded, self.launched = threading.Event(), [], [], []
        self.error, self.cached = None, None
        load = launch.load
        cupy_on_cpu.install(monkeypatch)
        monkeypatch.setattr(launch, "load", load)
        monkeypatch.setattr(launch, "cached_kernel", lambda config, arch: self.cached)
        monkeypatch.setattr(launch, "compile_kernel", self.compile)
        monkeypatch.setattr(launch, "_functions", self.load)
        monkeypatch.setattr(driver, "call", lambda name, *args: self.launched.append((name, args[0])))
        launch._loaded.cache_clear()
        launch._compiled.cache_clear()

    def compile(self, config, arch):
        self.calls.append((config.kernel, arch))
        assert self.go.wait(20)
        if self.error:
            raise self.error
        return b"code"

    def load(self, cubin, config, *names):
        self.loaded.append((cubin, names))
        return {name: SimpleNamespace(ptr=7 + i) for i, name in enumerate(names or (config.kernel,))}


@pytest.fixture
def compiler(monkeypatch):
    found = Compiler(monkeypatch)
    yield found
    found.go.set()
    launch._loaded.cache_clear()
    launch._compiled.cache_clear()


def start(kernel):
    kernel((1,), (1,), (np.int32(1),), SimpleNamespace(ptr=1))


def test_a_kernel_is_compiled_while_the_run_goes_on(compiler):
    found = launch.load(CONFIG, "one", "two")
    assert launch.load(CONFIG, "one", "two") is found
    assert compiler.loaded == [], "not before a launch"
    with ThreadPoolExecutor(4) as pool:
        launches = [pool.submit(start, found[name]) for name in ("one", "two", "one")]
        assert not any(launch.done() for launch in launches)
        compiler.go.set()
        for one in launches:
            one.result(20)
    assert compiler.calls == [("naive", "sm_90a")]
    assert compiler.loaded == [(b"code", ("one", "two"))]
    assert sorted(compiler.launched) == [("cuLaunchKernel", ptr) for ptr in (7, 7, 8)]


def test_what_is_in_the_cache_is_loaded_at_once(compiler):
    compiler.cached = b"kept"
    start(launch.load(CONFIG)["naive"])
    assert compiler.calls == []
    assert compiler.loaded == [(b"kept", ())]


def test_devices_share_what_is_compiled(compiler):
    compiler.go.set()
    for device in (0, 1):
        start(launch._loaded(device, CONFIG, ())["naive"])
    assert len(compiler.calls) == 1
    assert len(compiler.loaded) == 2


def test_an_error_of_the_compiler_is_that_of_the_launch_and_the_next_run_tries_again(compiler):
    compiler.error = DeviceError("The kernel naive does not compile")
    compiler.go.set()
    kernel = launch.load(CONFIG)["naive"]
    for _ in range(2):
        with pytest.raises(DeviceError, match="does not compile"):
            start(kernel)
    compiler.error = None
    start(launch.load(CONFIG)["naive"])
    assert len(compiler.calls) == 2


# ---- contexts ----------------------------------------------------------------------------------


@pytest.fixture
def began(monkeypatch):
    found = []
    monkeypatch.setattr(driver, "begin", found.append)
    monkeypatch.setattr(devices, "find_spec", lambda name: object())
    return found


@pytest.mark.parametrize(("name", "index"), [
    ("auto", 0), ("cuda", 0), ("cuda:2", 2), ("cuda:1,3", 1), ("cuda:all", 0), ("cuda:x", 0),
])  # fmt: skip
def test_the_context_of_the_gpu_that_is_asked_for_is_begun(began, name, index):
    devices.begin(name)
    assert began == [index]


def test_nothing_is_begun_for_the_cpu_or_without_cupy(began, monkeypatch):
    devices.begin("cpu")
    devices.begin("nonsense")
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    devices.begin("auto")
    assert began == []


def test_no_context_is_begun_whose_libraries_exceed_the_memory_limit(began):
    devices.begin("auto", "512MiB")
    assert began == []
    devices.begin("cuda", "512MiB")  # which is refused later, with the smallest limit that would do
    devices.begin("auto", "2GiB")
    devices.begin("auto", "nonsense")
    assert began == [0, 0, 0]


@pytest.mark.parametrize("status", [0, 100])
def test_the_context_is_made_by_another_thread_if_the_driver_starts(monkeypatch, status):
    calls = []

    class Driver:
        def __init__(self, name):
            assert name == "libcuda.so.1"

        def cuInit(self, flags):
            calls.append(("init", flags, threading.current_thread() is threading.main_thread()))
            return status

        def cuDevicePrimaryCtxRetain(self, at, device):
            calls.append(("retain", device))
            return 0

    monkeypatch.setattr(ctypes, "CDLL", Driver)
    driver.begin(3)
    for thread in threading.enumerate():
        if thread.name == "ooc-gemm context":
            thread.join(20)
    assert calls == [("init", 0, False), *([("retain", 3)] if status == 0 else [])]


def test_a_machine_without_a_driver_begins_nothing(monkeypatch):
    def missing(name):
        raise OSError("no such library")

    failed = []
    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(threading, "excepthook", failed.append)
    driver.begin(0)
    for thread in threading.enumerate():
        if thread.name == "ooc-gemm context":
            thread.join(20)
    assert failed == []
