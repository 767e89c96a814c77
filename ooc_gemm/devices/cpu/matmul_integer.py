"""Exact products of matrices of bytes by onnxruntime's operator MatMulInteger.

On processors without dot products of bytes the library may add in 16 bits, which saturate, so the product is
tried once with values for which that shows. Models are made here, because they are a hundred bytes: ONNX's
own package would be another dependency. The numbers of fields are those of onnx.proto3.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from ...engine.ports import Array

HOST_BYTES = 48 << 20
"""Memory of the library and of its models, in bytes (20 and 17 MiB, measured)."""
Multiply = Callable[[Array, Array, Array], None]
"""A function of two contiguous matrices, of uint8 and of int8, and of one of int32, which becomes their
product."""
_UINT8, _INT8, _INT32 = 2, 3, 6
"""Numbers of element types in ONNX."""


def installed() -> bool:
    """Return whether onnxruntime is installed."""
    return find_spec("onnxruntime") is not None


@cache
def exact() -> bool:
    """Return whether this machine multiplies bytes exactly: pairs of the largest products exceed 16 bits."""
    if not installed():
        return False
    values = np.array([0, 1, 127, 128, 254, 255], np.uint8)
    a = np.resize(values[::-1], (67, 260))
    b = np.resize(values, (260, 66)).view(np.int8)
    a[:3], b[:, :2], b[:, 2:4] = 255, -128, 127
    found = np.empty((67, 66), np.int32)
    try:
        model(False, False, 0, 0)(a, b, found)
    except Exception:  # a library that does not load, or of another version, is one that is not there
        return False
    return bool((found == a.astype(np.int64) @ b.astype(np.int64)).all())


@cache
def model(turn_a: bool, turn_b: bool, zero_a: int, zero_b: int) -> Multiply:
    """Return a function that multiplies matrices of any size. turn_a, turn_b: whether they are stored
    transposed. zero_a, zero_b: what is subtracted from their elements."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False  # memory goes back at once
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        _described(turn_a, turn_b, zero_a, zero_b), options, providers=["CPUExecutionProvider"]
    )

    def multiply(a: Array, b: Array, out: Array) -> None:
        binding = session.io_binding()
        for bind, name, x in (
            (binding.bind_input, "a", a), (binding.bind_input, "b", b), (binding.bind_output, "c", out)
        ):  # fmt: skip
            bind(name, "cpu", 0, x.dtype.type, x.shape, x.ctypes.data)
        session.run_with_iobinding(binding)

    return multiply


def _described(turn_a: bool, turn_b: bool, zero_a: int, zero_b: int) -> bytes:
    """Return an ONNX model that computes op(a)·op(b) = c."""
    nodes, names = list[bytes](), list[str]()
    for name, turned in (("a", turn_a), ("b", turn_b)):
        names.append(name + "t" if turned else name)
        if turned:
            order = _field(1, "perm") + _field(8, 1) + _field(8, 0) + _field(20, 7)
            nodes.append(_node("Transpose", [name], names[-1]) + _field(5, order))
    nodes.append(_node("MatMulInteger", [*names, "za", "zb"], "c"))
    zeros = [("za", _UINT8, bytes([zero_a])), ("zb", _INT8, bytes([zero_b % 256]))]
    graph = b"".join(
        [
            *(_field(1, node) for node in nodes),
            _field(2, "product"),
            *(_field(5, _field(2, kind) + _field(8, name) + _field(9, byte)) for name, kind, byte in zeros),
            _field(11, _matrix("a", _UINT8)),
            _field(11, _matrix("b", _INT8)),
            _field(12, _matrix("c", _INT32)),
        ]
    )  # fmt: skip
    return _field(1, 7) + _field(7, graph) + _field(8, _field(1, "") + _field(2, 13))


def _node(kind: str, inputs: list[str], output: str) -> bytes:
    return b"".join([*(_field(1, name) for name in inputs), _field(2, output), _field(4, kind)])


def _matrix(name: str, kind: int) -> bytes:
    """Describe a matrix of any size."""
    shape = _field(1, b"") * 2
    return _field(1, name) + _field(2, _field(1, _field(1, kind) + _field(2, shape)))


def _field(number: int, value: Any) -> bytes:
    """Return a field of a protocol buffer: an integer, or a text or message shorter than 2 MiB."""
    if isinstance(value, int):
        return _integer(8 * number) + _integer(value)
    data = value.encode() if isinstance(value, str) else value
    return _integer(8 * number + 2) + _integer(len(data)) + data


def _integer(value: int) -> bytes:
    """Return a number in groups of seven bits, the lowest first."""
    found = bytearray()
    while value > 127:
        found.append(value % 128 + 128)
        value //= 128
    return bytes([*found, value])
