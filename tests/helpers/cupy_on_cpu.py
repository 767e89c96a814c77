"""A stand-in for CuPy and NVIDIA's driver, whose device memory is the host's. All of `devices/cuda` runs
on it, and results can be compared with NumPy's. Streams do everything at once; NumPy does what kernels do."""

import ctypes
import importlib
import struct
import sys
import threading
import time
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import ClassVar

import numcodecs
import numpy as np
import ozaki
from ozaki_on_cpu import OzakiKernels

from ooc_gemm.cuda_kernels import driver
from ooc_gemm.engine.standardize import MARGIN

TYPES = {0: "f4", 1: "f8", 2: "f2", 4: "c8", 5: "c16"}
"""cudaDataType → NumPy's name."""
STORED = {
    "signed char": "i1", "unsigned char": "u1", "short": "i2", "unsigned short": "u2", "int": "i4",
    "unsigned int": "u4", "long long": "i8", "unsigned long long": "u8", "float": "f4", "double": "f8",
}  # fmt: skip
"""C++ → NumPy's name."""
TENSOR_MAP = struct.Struct("=4Q")


def matrix(at, rows, cols, ld, dtype):
    """A view of memory: rows × cols elements, `ld` elements from one row to the next."""
    dtype, size = np.dtype(dtype), int(rows and cols and (rows - 1) * ld + cols)
    memory = np.frombuffer((ctypes.c_char * (size * dtype.itemsize)).from_address(int(at)), dtype)
    strides = (int(ld) * dtype.itemsize, dtype.itemsize)
    return np.lib.stride_tricks.as_strided(memory, (int(rows), int(cols)), strides)


def gemm(m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, transposed, types, conjugated=(False, False)):
    """C ← α·op(A)·op(B) + β·C at addresses. `types`: of A, of B if it is another one, and of C. Integers wrap
    around."""
    *operands, out = types
    a = matrix(a, *((k, m) if transposed[0] else (m, k)), lda, operands[0])
    b = matrix(b, *((n, k) if transposed[1] else (k, n)), ldb, operands[-1])
    a, b = a.T if transposed[0] else a, b.T if transposed[1] else b
    a, b = a.conj() if conjugated[0] else a, b.conj() if conjugated[1] else b
    c, wide = (
        matrix(c, m, n, ldc, out),
        {"i": "i8", "u": "i8", "c": "c16"}.get(np.dtype(types[0]).kind, "f8"),
    )
    old = beta * c if beta != 0 else 0
    with np.errstate(invalid="ignore"):
        if a.itemsize == b.itemsize == 1:  # BLAS adds up 8-bit integers exactly
            products = (a.astype("f8") @ b.astype("f8")).astype("i8")
        else:
            products = a.astype(wide) @ b.astype(wide)
        c[...] = (alpha * products if alpha != 0 else 0) + old


class Kernel(OzakiKernels):
    """One of our kernels, as NumPy would compute it."""

    launched: ClassVar[list[str]] = []
    """Names of all that have run in a test."""

    def __init__(self, config, name):
        self.config, self.name = config, name

    def __call__(self, grid, block, args, stream, shared_bytes=0):
        driver.check_launch(self.name, grid, block, shared_bytes)
        self.launched.append(self.name)
        args = [arg.item() for arg in args]
        getattr(self, self.name, self._product)(grid, *args)

    def _product(self, grid, *args):
        macros, value = dict(self.config.macros), self.config.value
        if self.config.kernel == "mma":
            assert value("PRODUCTS") == 1
            types = self._tensor_types()
            transposed = bool(value("A_MN")), not value("B_MN")
        else:
            types = ({"double": "f8", "float": "f4"}.get(macros.get("SOURCE"), self.config.dtype),)
            transposed = bool(value("TRANS_A")), bool(value("TRANS_B"))
        m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, *_ = args
        if value("GUARDED") and not matrix(args[-1], 1, 1, 1, "u4")[0, 0]:
            return
        gemm(m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, transposed, (*types, self.config.dtype))
        self._no_more_slices(grid[1] if len(grid) > 1 else 1, m, n, c, ldc)

    def _tensor_types(self):
        """Types of A and of B."""
        value = self.config.value
        return [
            {1: "f2", 2: "f4", 3: "u1" if value(f"{name}_UNSIGNED") else "i1"}[value("TYPE")] for name in "AB"
        ]

    def _no_more_slices(self, slices, m, n, c, ldc):
        """The first slice of k holds the whole product."""
        for slice in range(1, slices):
            at = c + slice * m * ldc * np.dtype(self.config.dtype).itemsize
            matrix(at, m, n, ldc, self.config.dtype)[...] = 0

    def wgmma(self, grid, a_map, b_map, m, n, k, drawn, *args):
        assert not matrix(drawn, 1, 1, 1, "u4")[0, 0]
        assert self.config.value("PRODUCTS") == 1
        (a, k_a, m_a, lda), (b, k_b, n_b, ldb) = (
            TENSOR_MAP.unpack(x[: TENSOR_MAP.size]) for x in (a_map, b_map)
        )
        assert k_a == k_b == max(1, k)
        assert a % 16 == b % 16 == lda % 16 == ldb % 16 == 0
        if self.config.value("EPILOGUE") == 1:
            a_lines, b_lines, c, ldc, plane, count, moduli, per_row, above = args
            planes = self.config.value("PER_MODULUS") * moduli
            for rows, apart, there in ((m, a_lines, m_a), (n, b_lines, n_b)):
                assert (planes - 1) * apart + rows <= there <= planes * apart
            lines = a_lines, b_lines
            self.products_of_residues((a, lda), (b, ldb), m, n, k, c, ldc, plane, lines, count, moduli)
            return
        alpha, beta, c, ldc, _, _, skip, slices, per_row, above = args
        assert (m_a, n_b) == (m, n)
        types = self._tensor_types()
        assert np.dtype(types[0]).itemsize == 1
        if self.config.value("EPILOGUE") == 2:
            if not matrix(skip, 1, 1, 1, "u4")[0, 0]:
                sums = ozaki.exact(matrix(a, m, k, lda, "i1"), matrix(b, n, k, ldb, "i1"))
                least = matrix(c, 1, 1, 1, "i4")
                least[...] = min(least[0, 0], sums.min())
            return
        gemm(m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, (False, True), (*types, self.config.dtype))
        self._no_more_slices(slices, m, n, c, ldc)
        if per_row:  # what lies above the diagonal may be anything
            made = matrix(c, m, n, ldc, self.config.dtype)
            made[~np.tri(m, n, above, dtype=bool)] = 99

    def cut(self, grid, fours, x, y):
        assert grid[0] * 256 >= fours
        size = np.dtype(self.config.dtype).itemsize
        planes = matrix(y, size, 4 * fours, 4 * fours, "u1")
        planes[...] = matrix(x, 4 * fours, size, size, "u1").T

    def sum(self, grid, m, n, slices, alpha, x, beta, c, ldc, skip):
        assert grid[0] * 256 >= m * n
        dtype = self.config.dtype
        part = {"float": "f4", "double": "f8", "int": "i4"}[dict(self.config.macros)["PART"]]
        x = matrix(x, slices, m * n, m * n, part).sum(0, dtype=dtype).reshape(m, n)
        c = matrix(c, m, n, ldc, dtype)
        c[...] = alpha * x + (beta * c if beta else 0)

    def transpose(self, grid, rows, cols, x, ldx, y, ldy):
        matrix(y, cols, rows, ldy, self.config.dtype)[...] = matrix(x, rows, cols, ldx, self.config.dtype).T

    def mirror(self, grid, n, c, ldc):
        c = matrix(c, n, n, ldc, self.config.dtype)
        c[...] = np.tril(c) + np.tril(c, -1).T

    def place(self, grid, rows, cols, x, ldx, y, ldy, *rest):
        *vectors, gone, missing, fill = rest
        macros, panel, turned = (
            dict(self.config.macros),
            np.dtype(self.config.dtype),
            self.config.value("TURNED"),
        )
        stored = "f2" if macros["HALF"] else STORED[macros["SOURCE"]]
        x = matrix(x, rows, cols, ldx, stored)
        y = matrix(y, *((cols, rows) if turned else (rows, cols)), ldy, panel)
        real = {"float": "f4", "double": "f8"}[macros["REAL"]]

        def numbers(at, axis, neutral):
            extent = (rows, cols)[axis]
            found = matrix(at, 1, extent, extent, real)[0] if at else np.full(extent, neutral, real)
            return found[:, None] if axis == 0 else found

        by_row, by_col = (
            [numbers(at, axis, i == 2) for i, at in enumerate(vectors[3 * axis : 3 * axis + 3])]
            for axis in (0, 1)
        )
        with np.errstate(all="ignore"):
            found = x.astype(real)
            for shift in (*by_row[:2], *by_col[:2]):
                found -= shift
            found = found * by_row[2] * by_col[2]
        where = x == missing if gone == 1 else np.isnan(x) if gone == 2 else np.False_
        found = np.where(where, np.dtype(real).type(fill), found)
        y[...] = found.T if turned else found

    def centre(self, grid, rows, cols, x, ldx, rows_by, cols_by, scale):
        x = matrix(x, rows, cols, ldx, self.config.dtype)
        with np.errstate(all="ignore"):
            by_row = matrix(rows_by, rows, 1, 1, "f8") if rows_by else 0.0
            by_col = matrix(cols_by, 1, cols, cols, "f8") if cols_by else 0.0
            x[...] = x - by_row * scale - by_col * scale

    def standardize(self, grid, k, m, x, ldx, gone, missing, least, scaled, shares, marks, ldm, lacking):
        real, along_k = (
            {"float": "f4", "double": "f8"}[dict(self.config.macros)["REAL"]],
            self.config.value("ALONG_K"),
        )
        assert grid[0] * (32 if along_k else 1) >= k
        shape = (m, k) if along_k else (k, m)
        lines = matrix(x, *shape, ldx, real)
        lines = lines.T if along_k else lines
        lacks = {0: lines != lines, 1: lines == missing, 2: np.isnan(lines)}[gone] & (gone > 0)
        with np.errstate(all="ignore"):
            inside = (lines >= -MARGIN) & (lines <= 2 + MARGIN)
            p = np.where(lacks, 0, np.where(inside, lines, np.float64(1e300))).sum(1) / (
                2.0 * (m - lacks.sum(1))
            )
            counts = ~(np.minimum(p, 1 - p) < least)
            mean = np.where(counts & ~np.isnan(p), 2 * p, 0)
            variance = mean * (1 - mean / 2)
            by = np.where(counts & (variance > 0), 1 / np.sqrt(variance) if scaled else 1.0, 0).astype(real)
            high = mean.astype(real)
            changed = (lines - high[:, None] - (mean - high).astype(real)[:, None]) * by[:, None]
        lines[...] = np.where(lacks, 0, changed)
        matrix(shares, 1, k, k, "f8")[0] = p
        matrix(lacking, 1, 1, 1, "u8")[...] += np.uint64(lacks[counts].sum())
        if marks:
            marked = matrix(marks, *shape, ldm, "i1")
            (marked.T if along_k else marked)[...] = lacks & counts[:, None]

    def narrow(self, grid, cols, c, pitch, row, height, width, across, lost):
        out = np.dtype(self.config.dtype)
        part = {"float": "f4", "double": "f8", "int": "i4", "long long": "i8"}[
            dict(self.config.macros)["FROM"]
        ]
        sums = np.dtype("c16" if out.kind == "c" else part)
        x = matrix(c, grid[0], cols, pitch, sums).copy()
        with np.errstate(all="ignore"):
            y = matrix(c, grid[0], cols, pitch * sums.itemsize // out.itemsize, out)
            y[...] = x
        if out.kind in "iu":
            exact = x.astype("i8")
            info = np.iinfo(out)
            bad = (exact < max(int(info.min), -(2**63))) | (exact > min(int(info.max), 2**63 - 1))
        else:
            exact, bad = np.zeros(x.shape, "i8"), np.isinf(y) & np.isfinite(x)
        for i, j in np.argwhere(bad):
            at = ((row + i) // height * across + j // width) * 24
            chunk = matrix(lost + at, 1, 3, 3, "i8")[0]
            chunk += 1, 0, 0
            chunk[1:] = min(chunk[1], exact[i, j]), max(chunk[2], exact[i, j])

    def best(
        self, grid, cols, c, ldc, scale, shift, others, first, diagonal, keep, fresh, nothing, out, nbytes
    ):
        rows = grid[0]
        dtype = {"float": "f4", "double": "f8"}[dict(self.config.macros)["SCORE"]]
        x = matrix(c, rows, cols, ldc, self.config.dtype).astype(dtype)
        records, scores_at = matrix(out, rows, nbytes, nbytes, "u1"), keep * np.dtype(dtype).itemsize
        old, old_columns = (
            records[:, :scores_at].view(dtype),
            records[:, scores_at : scores_at + 4 * keep].view("i4"),
        )
        with np.errstate(all="ignore"):
            x = x * matrix(scale, 1, cols, cols, dtype) if scale else x
            x = x - matrix(shift, 1, cols, cols, dtype) if shift else x
        if others:
            x[np.arange(rows)[:, None] + diagonal == np.arange(cols)] = nothing
        x[np.isnan(x)] = nothing
        columns = np.broadcast_to(np.arange(first, first + cols), x.shape)
        padding = np.full((rows, keep), nothing), np.full((rows, keep), -1)
        past = padding if fresh else (np.where(old_columns < 0, nothing, old), old_columns)
        x, columns = np.hstack([x, past[0]]), np.hstack([columns, past[1]])
        order = np.lexsort((columns, -x), axis=1)[:, :keep]
        scores = np.take_along_axis(x, order, 1)
        columns = np.where(np.isneginf(scores), -1, np.take_along_axis(columns, order, 1))
        old[...], old_columns[...] = scores, columns

    def zstd(self, grid, *args):
        self._decode(numcodecs.Zstd(), *args)

    def blosc(self, grid, *args):
        self._decode(numcodecs.Blosc(), *args)

    def _decode(self, codec, chunks, count, parts, stored, to, rooms, room_bytes, failed):
        for at, nbytes, place, wanted in np.frombuffer(chunks, "u4").reshape(-1, 4)[:count].tolist():
            data = ctypes.string_at(stored + 16 * at, nbytes)
            out = np.frombuffer((ctypes.c_char * wanted).from_address(to + 16 * place), "u1")
            try:
                found = codec.decode(data)
                assert len(found) == wanted
                out[:] = np.frombuffer(found, "u1")
            except (AssertionError, RuntimeError, ValueError):
                matrix(failed, 1, 1, 1, "u4")[...] += np.uint32(1)

    def _rows(self, side, at, rows, depth):
        name = dict(self.config.macros)[side]
        return matrix(at, rows, depth, depth, "f2" if name == "Half" else STORED[name]).astype("f8")

    def pairs(self, grid, keep, depth, left, right, columns, differences, sums, norms):
        columns = matrix(columns, grid[0], keep, keep, "i4")
        x, y = (
            self._rows("LEFT", left, grid[0], depth),
            self._rows("RIGHT", right, columns.max(initial=0) + 1, depth),
        )
        with np.errstate(all="ignore"):
            for row, found in zip(
                x, zip(columns, matrix(sums, grid[0], keep, keep, "f8"), strict=True), strict=True
            ):
                values = np.square(row - y[found[0]]) if differences else row * y[found[0]]
                found[1][...] = np.where(found[0] < 0, 0, values.sum(1))
            if norms:
                matrix(norms, 1, grid[0], grid[0], "f8")[...] = np.square(x).sum(1)

    def squares(self, grid, rows, depth, right, found):
        assert grid[0] * 8 >= rows
        with np.errstate(all="ignore"):
            matrix(found, 1, rows, rows, "f8")[...] = np.square(self._rows("RIGHT", right, rows, depth)).sum(
                1
            )

    def totals(self, grid, rows, depth, right, norms, found):
        assert grid[0] * 256 >= depth
        finite = np.isfinite(matrix(norms, 1, rows, rows, "f8")[0])
        there = matrix(found, grid[1], depth, depth, "f8")
        there[...] = 0
        there[-1] = self._rows("RIGHT", right, rows, depth)[finite].sum(0)

    def signs(self, grid, count, seed, x):
        kind = self._check_type()
        matrix(x, 1, count, count, kind)[...] = np.random.default_rng(seed).choice([-1, 1], count)

    def rows(self, grid, count, cols, width, x, ldx, v, out, squares, conjugate):
        self._reduce(matrix(x, count, cols, ldx, self.config.dtype), v, out, squares, conjugate)

    def columns(self, grid, count, cols, x, ldx, v, out, squares, conjugate):
        self._reduce(matrix(x, count, cols, ldx, self.config.dtype).T, v, out, squares, conjugate)

    def _check_type(self):
        kind = self.config.value("KIND")
        return {2: "c16", 3: "i8" if self.config.value("WIDE") else "i4"}.get(kind, "f8")

    def _reduce(self, x, v, out, squares, conjugate):
        lines, depth = x.shape
        wide = (x.conj() if conjugate else x).astype(self._check_type())
        matrix(out, 1, lines, lines, wide.dtype)[0] += wide @ matrix(v, 1, depth, depth, wide.dtype)[0]
        if squares:
            matrix(squares, 1, lines, lines, "f8")[0] += (abs(wide) ** 2).sum(1)


class Array(np.ndarray):
    """A CuPy array."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


class Memory:
    def __init__(self, nbytes):
        self.size, self.bytes = nbytes, np.full(nbytes + 512, 0xFF, np.uint8)  # NaN, or -1
        self.ptr = -(-self.bytes.ctypes.data // 512) * 512


def memory_taken(monkeypatch):
    """The list to which the bytes of each allocation are added from now on."""
    taken = []

    class Noted(Memory):
        def __init__(self, nbytes):
            taken.append(nbytes)
            super().__init__(nbytes)

    monkeypatch.setattr("cupy.cuda.Memory", Noted)
    return taken


class Stream:
    numbers = iter(range(1, 10**9))

    def __init__(self, non_blocking=False, priority=0):
        self.ptr = next(self.numbers)

    def __enter__(self):
        return self

    def __exit__(self, *what):
        pass

    def synchronize(self):
        pass


def ndarray(shape, dtype, pointer):
    memory, at = pointer
    found = matrix(memory.ptr + at, 1, *shape, shape[0], dtype)[0].view(Array)
    found.memory = memory
    return found


def gemm_ex(
    handle, op_b, op_a, n, m, k, alpha, b, type_b, ldb, a, type_a, lda, beta, c, type_c, ldc, compute, how
):
    assert type_a == type_b
    assert compute == (70 if TYPES[type_c] in ("f8", "c16") else 68)
    alpha, beta = (matrix(at, 1, 1, 1, TYPES[type_c])[0, 0] for at in (alpha, beta))
    Kernel.launched.append("gemmEx")
    gemm(
        m,
        n,
        k,
        alpha,
        a,
        lda,
        b,
        ldb,
        beta,
        c,
        ldc,
        (op_a > 0, op_b > 0),
        (TYPES[type_a], TYPES[type_c]),
        (op_a == 2, op_b == 2),
    )


def gemm_batch(
    handle, op_b, op_a, n, m, k, alpha, b, type_b, ldb, step_b, a, type_a, lda, step_a, beta, c, type_c, ldc,
    step_c, count, compute, how,
):  # fmt: skip
    size = np.dtype(TYPES[type_a]).itemsize
    for i in range(count):
        places = (at + i * step * size for at, step in ((b, step_b), (a, step_a), (c, step_c)))
        b_at, a_at, c_at = places
        gemm_ex(
            handle, op_b, op_a, n, m, k, alpha, b_at, type_b, ldb, a_at, type_a, lda, beta, c_at, type_c, ldc,
            compute, how,
        )  # fmt: skip


def copy_in_turn(packed, stream):
    arrive(stream)
    copy_2d(packed)


def copy_2d(packed):
    fields = driver._COPY.unpack(packed)
    source = fields[3] if fields[2] == driver.HOST else fields[4]
    target = fields[10] if fields[9] == driver.HOST else fields[11]
    source_pitch, target_pitch = fields[6], fields[13]
    width, rows = fields[14:]
    for row in range(rows):
        ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def use_context(context):
    return int(context != 500)


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
def copy_packed(at, stream):
    packed = ctypes.string_at(at, driver._COPY.size)
    with passing:
        under_way.setdefault(stream or 0, []).append(packed)
    (sent if driver._COPY.unpack(packed)[2] == driver.HOST else brought).append(at)
    return 0


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
def record_event(event, stream):
    """Makes the copies of the stream, unless the event is one of those that `make_event` has made."""
    if event in made_events:
        with passing:
            under_way.setdefault(stream or 0, []).append(event)
            if late is not None:
                late[event] = time.monotonic() + LATE_SECONDS
    elif event == 1000:
        arrive(stream)
    else:
        return 1
    return 0


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint)
def make_event(at, flags):
    with passing:
        at[0] = 10**9 + len(made_events)
        made_events.append(at[0])
    return int(flags != 2)


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def query_event(event):
    """Every other time makes the copies before the event, or after some time. Otherwise it has not
    happened."""
    queries.append(event)
    with passing:
        for stream in [stream for stream, work in under_way.items() if event in work]:
            if time.monotonic() < late[event] if late is not None else len(queries) % 2:
                return NOT_READY
            arrive(stream, event)
    return 0


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
def pin(memory, nbytes, flags):
    return int(flags != 1)


@ctypes.CFUNCTYPE(ctypes.c_int)
def fail():
    return 1


def arrive(stream, event=None):
    """Make the copies under way in a stream; up to an event, where one is given."""
    with passing:
        all_work = under_way.get(stream or 0, [])
        while all_work and (event is None or event in all_work):
            work = all_work.pop(0)
            if isinstance(work, bytes):
                copy_2d(work)


sent, brought = [], []
"""Copies to and from a device that threads without the interpreter have made."""
under_way, made_events, queries, passing = {}, [], [], threading.RLock()
"""Their copies that the device has not made yet, and events, by their stream; the events that they made; and
all of which they have asked whether they have happened."""
late, LATE_SECONDS = None, 2e-3
"""The time at which each event happens, where a test has made this a dictionary."""
NOT_READY = 600
FAILS = ctypes.cast(fail, ctypes.c_void_p).value
SENDING = [
    ctypes.cast(call, ctypes.c_void_p).value
    for call in (use_context, copy_packed, record_event, make_event, query_event, pin)
]


def tensor_map(at, dtype, rank, ptr, extents, pitch, *rest):
    """Describe a matrix as `Kernel.wgmma` reads it: address, columns, rows, bytes from row to row."""
    described = TENSOR_MAP.pack(ptr, *struct.unpack("=2Q", extents), *struct.unpack("=Q", pitch))
    ctypes.memmove(at, described, len(described))


def set_at(value, kind=ctypes.c_void_p):
    """What writes a number to the address that a driver's function is given."""

    def write(at, *rest):
        at._obj.value = value

    return write


def driver_function(name):
    work = {
        "cuEventCreate": set_at(1000),
        "cuEventElapsedTime": set_at(1.0),
        "cuDevicePrimaryCtxRetain": set_at(500),
        "cuMemcpy2DAsync_v2": copy_in_turn,
        "cuTensorMapEncodeTiled": tensor_map,
        "cuMemsetD8Async": lambda at, value, nbytes, stream: ctypes.memset(at, value, nbytes),
    }.get(name, lambda *args: None)

    def call(*args):
        work(*args)
        return 0

    return call


class Runtime(SimpleNamespace):
    """What stands in for CUDA's runtime. It is a key, as a module is."""

    __eq__, __hash__ = object.__eq__, object.__hash__


def install(monkeypatch, capability="90", devices=1):
    """Makes it `cupy` for the rest of a test, with so many devices of this compute capability."""

    class Device:
        attributes: ClassVar[dict[str, int]] = {
            "MultiProcessorCount": 8,
            "MaxSharedMemoryPerMultiprocessor": 228 << 10,
        }
        compute_capability = capability

        def __init__(self, index=0):
            self.id = index

        def use(self):
            pass

    class Failure(Exception):
        status = 0

    properties = {
        "name": b"stand-in",
        "major": int(capability[:-1]),
        "minor": int(capability[-1]),
        "multiProcessorCount": 8,
        "clockRate": 1_000_000,
    }
    runtime = Runtime(
        getDeviceCount=lambda: devices,
        getDeviceProperties=lambda index: properties,
        memGetInfo=lambda: (8 << 30, 8 << 30),
        deviceGetAttribute=lambda attribute, index: 1_000_000,
        hostRegister=lambda *args: None,
        hostUnregister=lambda at: None,
        deviceSynchronize=lambda: None,
        CUDARuntimeError=Failure,
        memcpyAsync=lambda to, at, nbytes, kind, stream: ctypes.memmove(to, at, nbytes),
    )
    cuda = SimpleNamespace(
        Device=Device,
        Memory=Memory,
        MemoryPointer=lambda memory, at: (memory, at),
        Stream=Stream,
        runtime=runtime,
        cublas=SimpleNamespace(gemmEx=gemm_ex, gemmStridedBatchedEx=gemm_batch, CUBLASError=Failure),
        device=SimpleNamespace(get_cublas_handle=lambda: 1),
        driver=SimpleNamespace(CUDADriverError=Failure),
        memory=SimpleNamespace(OutOfMemoryError=Failure),
    )
    cupy = SimpleNamespace(cuda=cuda, ndarray=ndarray, copyto=np.copyto, conjugate=np.conjugate)
    cupy.__spec__ = ModuleSpec("cupy", None)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(driver, "_keeping", driver_function)
    monkeypatch.setattr(driver, "_yielding", driver_function)
    monkeypatch.setattr(driver, "_sending", lambda: SENDING)
    driver._context.cache_clear()
    driver.events.cache_clear()
    monkeypatch.setattr("ooc_gemm.devices.cuda.pinned._kept", {})
    sent.clear()
    brought.clear()
    queries.clear()
    Kernel.launched.clear()
    Kernel.decided.clear()

    def load(config, *names):
        return {name: Kernel(config, name) for name in names or (config.kernel,)}

    importlib.import_module("ooc_gemm.devices.cuda.device")
    for name, module in list(sys.modules.items()):
        if name.startswith("ooc_gemm.") and hasattr(module, "load") and "cuda" in name:
            monkeypatch.setattr(module, "load", load)
