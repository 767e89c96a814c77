"""Devices that make errors on purpose, plans with blocks of any size, and inputs that are hard to check."""

from dataclasses import replace

import numpy as np
from sessions import device_with

from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.devices.cpu.session import CPUSession
from ooc_gemm.devices.cuda.device import CUDA
from ooc_gemm.devices.cuda.session import CUDASession
from ooc_gemm.engine.ports import COMPUTE
from ooc_gemm.planning.candidates import Candidate, Ring
from ooc_gemm.planning.search import finish, make_plan
from ooc_gemm.run import prepare


class _Faulty:
    """Calls `fault(block, values)` with each finished block before it is checked: what it returns, as (row,
    column, bit), is flipped there. `values()`: a copy of the block as it is by then."""

    fault = None

    def check(self, block, c):
        flip = self.fault(block)
        if flip is not None:
            row, col, bit = flip
            self._flip(c, row * block.cols + col, bit)
        return super().check(block, c)

    def _flip(self, c, at, bit):
        raise NotImplementedError


class _FaultyCPU(_Faulty, CPUSession):
    def _flip(self, c, at, bit):
        self._stream.submit(lambda: flip_bit(self._blocks[c][at : at + 1], bit))


class _FaultyCUDA(_Faulty, CUDASession):
    def _flip(self, c, at, bit):
        memory = self._arrays["c", c]
        with self._streams[COMPUTE]:
            flip_bit(memory[at : at + 1], bit)


def flip_bit(element, bit):
    """In place: a bit of an array of one element, counted over re and im of a complex one."""
    words = element.view({1: "u1", 4: "u4"}.get(element.dtype.itemsize, "u8"))
    width = 8 * words.dtype.itemsize
    words[bit // width] ^= words.dtype.type(1 << bit % width)


def faulty(name, fault):
    """A device of this kind."""
    kind, session = (CUDA, _FaultyCUDA) if name == "cuda" else (CPU, _FaultyCPU)
    device = device_with(type("Faulty", (session,), {"fault": staticmethod(fault)}), kind)()
    if name != "cuda":
        device.name = "faulty cpu"
    return device


def upper_bits(dtype, mantissa=8):
    """Sign, exponent and the upper bits of the mantissa of an element in a block; of integers, all bits."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return list(range(8 * dtype.itemsize))
    part = dtype.itemsize * 8 // (2 if dtype.kind == "c" else 1)
    lowest = np.finfo(dtype).nmant - mantissa
    bits = list(range(lowest, part))
    return bits + [part + bit for bit in bits] if dtype.kind == "c" else bits


def with_blocks(bm, bn, bk):
    """What makes plans of these sizes (of multiples of C's chunks), whatever the memory limits are."""

    def make(problem, budget, rates):
        plan = make_plan(problem, budget, rates)
        p = plan.problem
        panels = replace(plan.k_panels, deepest=max(1, min(bk, p.k)), resident=False, columns=0)
        ring = Ring(plan.readers, plan.writers, plan.slots, plan.slot_bytes)
        sizes = min(bm, p.m), min(bn, p.n), panels, plan.c_buffers, ring
        return finish(p, budget, rates, Candidate(p.c, *sizes, by_columns=plan.by_columns, team=plan.team))

    return make


def sent_if_any(problem, sent, budget, rates):
    """The plan in which the device decodes chunks, also where the host would be faster. It takes the place of
    `prepare._fastest`."""
    return prepare.make_plan(sent or problem, budget, rates)


def hard(name, shape, rng, dtype):
    """Inputs whose rounding is not that of a normal distribution."""
    values = rng.standard_normal(shape)
    if name == "positive":
        values = rng.random(shape)
    elif name == "constant":
        values = np.full(shape, 0.1)
    elif name == "cancelling":
        values[:, 1::2] = -values[:, : values.shape[1] // 2 * 2 : 2][:, : values[:, 1::2].shape[1]]
    elif name == "badly scaled":
        values *= 10.0 ** rng.uniform(-15, 15, (shape[0], 1))
    elif name == "one large":
        values[shape[0] // 2, shape[1] // 2] = 1e12
    elif name == "denormal":
        values *= float(np.finfo(dtype).tiny) ** 0.5 / 16
    elif name == "overflowing":
        values *= float(np.finfo(dtype).max) ** 0.5 / 16
    return values.astype(dtype)


class Failing(CPU):
    """Computes some panels, then never again."""

    def __init__(self, threads, after):
        super().__init__(threads)
        self.left = after

    def open(self, plan, operation, trace):
        return FailingSession(self, plan, operation, trace)

    def alive(self):
        return self.left >= 0


class FailingSession(CPUSession):
    """A run on `Failing`."""

    def __init__(self, device, *args):
        super().__init__(device, *args)
        self.device = device

    def multiply(self, *args, **options):
        self.device.left -= 1
        if self.device.left < 0:
            raise OSError("fallen off the bus")
        super().multiply(*args, **options)
