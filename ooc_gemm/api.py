"""The public functions multiply, gram and plan: each builds a request and has it carried out."""

import os
from collections.abc import Callable
from typing import Any

from .engine.ports import Device
from .planning.plan import Plan
from .run.labels import check_aligned, labelled_product
from .run.observer import Observer
from .run.prepare import prepare
from .run.request import Operand, Precision, Request, Triangle, gram_operands
from .run.result import Result
from .run.retry import carry_out, result_of
from .storage.io.zarr_internals import refuse_event_loop
from .support.trace import Trace


def multiply(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    alpha: complex | None = None,
    beta: complex | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    adjoint_a: bool = False,
    adjoint_b: bool = False,
    memory_limit: str | int | None = None,
    device: str | Device = "auto",
    device_memory_limit: str | int | None = None,
    precision: Precision = "highest",
    kernel: str = "auto",
    out_dtype: Any = None,
    chunks: tuple[int, int] | None = None,
    shards: tuple[int, int] | None = None,
    compressor: str | None = None,
    rechunk: bool = False,
    verify: bool = False,
    force: bool = False,
    resume: bool = False,
    trace: str | os.PathLike[str] | None = None,
    progress: Callable[[float, Plan, Trace], None] | None = None,
    notice: Callable[[str], None] | None = None,
) -> Result:
    """C (m×n) ← α·op(A) (m×k)·op(B) (k×n) + β·C.

    Parameters
    ----------
    a, b : str, os.PathLike, zarr.Array, array-like or Operand
        The inputs: a path, a URL, an open Zarr array, anything with shape, dtype and slicing, or an
        `Operand`, which says what happens to the elements before they are multiplied. A path may be that of a
        file of NumPy (`"x.npy"`) or of a dataset in an HDF5 or NetCDF-4 file (`"file.h5::/path/to/dataset"`,
        which needs the extra `hdf5`). Where an input is neither Zarr's nor NumPy's, a few pieces are read
        first to measure how much memory one takes.
    c : str, os.PathLike or zarr.Array, optional
        Where the result goes. A path or URL is created, and its dimensions are called as those of the inputs.
        In a group, or in a folder whose name ends with `.zarr`, new folders above it become groups, and what
        the inputs have as coordinates of these dimensions is copied beside it, unless something of that name
        is there. An open
        Zarr array is filled: its shape and type must be those of the result, and its chunks, codecs and
        attributes stay. By default C is a NumPy array, or an xarray.DataArray where an input is one.
    alpha, beta : complex, default 1 and 0
        α and β. β ≠ 0 needs an existing C.
    transpose_a, transpose_b : bool, default False
        Multiply with the transpose of an input.
    adjoint_a, adjoint_b : bool, default False
        Multiply with the conjugate transpose of an input.
    memory_limit : str or int, optional
        Most host memory that the process may hold resident: `"8GiB"`, or bytes. By default 60 % of what the
        process may use.
    device : str or Device, default "auto"
        `"auto"`, `"cpu"`, `"cuda"`, `"cuda:N"`, or several GPUs that work as one: `"cuda:0,1"`, `"cuda:all"`.
    device_memory_limit : str or int, optional
        Most memory of each device. By default 90 % of what is free.
    precision : {"highest", "high", "medium"}, default "highest"
        Least accuracy of float32 products. `"medium"` allows TF32; `"high"` is computed as `"highest"`.
    kernel : str, default "auto"
        The kernel: the fastest that keeps the precision, or the one of this name.
    out_dtype : dtype, optional
        Type of C. By default NumPy's promotion of the inputs, but int32 for 8-bit integers and int64 for
        others: integers are exact, and a sum that does not fit is an error. float16 stays float16.
    chunks, shards : (int, int), optional
        Rows and columns of the chunks and shards of a new C. By default chunks near 16 MiB and no shards.
    compressor : str, optional
        `"none"` (the default), `"zstd"`, `"zstd:LEVEL"` or `"blosc"`.
    rechunk : bool, default False
        Copy A or B to better chunks first, beside C, where the plan shows that it pays.
    verify : bool, default False
        Check every block of C while it is on the device, and compute what fails once more.
    force : bool, default False
        Replace a C that exists. In an object store it is removed first; in a folder it is kept until the new
        one is finished.
    resume : bool, default False
        Continue an interrupted run of the same problem, with these or other limits, on this or another
        device. alpha, beta, out_dtype, chunks, shards and compressor are those it was begun with, unless they
        are given again. Where there is no C yet, begin; where C is finished and is the result already, do
        nothing.
    trace : str or os.PathLike, optional
        File for a timeline of every stage. Of copies between files in memory and a GPU, which need no slot,
        it shows one MiB in 256.
    progress : callable, optional
        Called with (fraction, plan, trace) as the work goes on.
    notice : callable, optional
        Called with sentences: the plan's advice on chunks, before anything is written; blocks that fail their
        check; and what concerns the answer, which is a UserWarning where there is no `notice`: inputs whose
        attributes or masks are not applied, and finite results that are infinite in C's type.

    Returns
    -------
    Result
        What was done, with sizes in bytes and times in seconds. Its `array` is C: a zarr.Array where it was
        stored, otherwise a NumPy array. Of an xarray.DataArray it has the dimensions and their coordinates.

    Raises
    ------
    InputError, BudgetError
        Before anything is written: the request cannot be carried out, or not within a memory limit.
    StoreError, RangeError, DeviceError, VerificationError
        While running. C is then not a Zarr array but an unfinished one, which `resume` continues.
    """
    request = Request(
        Operand.of(a, transpose_a, adjoint_a),
        Operand.of(b, transpose_b, adjoint_b),
        c,
        alpha=alpha,
        beta=beta,
        memory_limit=memory_limit,
        device=device,
        device_memory_limit=device_memory_limit,
        precision=precision,
        kernel=kernel,
        out_dtype=out_dtype,
        chunks=chunks,
        shards=shards,
        compressor=compressor,
        rechunk=rechunk,
        verify=verify,
        force=force,
        resume=resume,
    )
    check_aligned(request)
    return labelled_product(request, result_of(carry_out(request, Observer(progress, notice, trace))))


def gram(
    a: Any,
    c: Any = None,
    *,
    transpose: bool = False,
    triangle: Triangle | None = None,
    alpha: complex | None = None,
    beta: complex | None = None,
    memory_limit: str | int | None = None,
    device: str | Device = "auto",
    device_memory_limit: str | int | None = None,
    precision: Precision = "highest",
    kernel: str = "auto",
    out_dtype: Any = None,
    chunks: tuple[int, int] | None = None,
    shards: tuple[int, int] | None = None,
    compressor: str | None = None,
    rechunk: bool = False,
    verify: bool = False,
    force: bool = False,
    resume: bool = False,
    trace: str | os.PathLike[str] | None = None,
    progress: Callable[[float, Plan, Trace], None] | None = None,
    notice: Callable[[str], None] | None = None,
) -> Result:
    """C (m×m) ← α·A·Aᵀ + β·C with A m×k. Complex A is not conjugated.

    One half of C is computed, with half of the reads of `multiply`; both are written, and C = Cᵀ to the bit.
    That saves nothing where β ≠ 0, for the old C need not be symmetric, nor where the sides of C's chunks
    have no common multiple small enough for square blocks: then `plan.problem.symmetric` of the result is
    False.

    Parameters
    ----------
    a : str, os.PathLike, zarr.Array, array-like or Operand
        The input, as of `multiply`. Of an `Operand` with weights w, C ← α·A·diag(w)·Aᵀ + β·C.
    c : str, os.PathLike or zarr.Array, optional
        Where the result goes, as of `multiply`. By default a NumPy array is returned.
    transpose : bool, default False
        Compute α·Aᵀ·A + β·C with A k×m instead.
    triangle : {"lower"}, optional
        Store the lower triangle of C, with its diagonal; what is above is 0, and chunks there are not
        written. By default all of C is stored.
    alpha, beta : complex, default 1 and 0
        α and β. β ≠ 0 needs an existing C.
    memory_limit : str or int, optional
        Most host memory, in bytes or as `"8GiB"`. By default 60 % of what the process may use.
    device : str or Device, default "auto"
        The device or devices, as of `multiply`.
    device_memory_limit : str or int, optional
        Most memory of each device. By default 90 % of what is free.
    precision : {"highest", "high", "medium"}, default "highest"
        Least accuracy of float32 products.
    kernel : str, default "auto"
        The kernel: the fastest that keeps the precision, or the one of this name.
    out_dtype : dtype, optional
        Type of C. By default as of `multiply`.
    chunks, shards : (int, int), optional
        Rows and columns of the chunks and shards of a new C. By default chunks near 16 MiB and no shards.
    compressor : str, optional
        `"none"` (the default), `"zstd"`, `"zstd:LEVEL"` or `"blosc"`.
    rechunk : bool, default False
        Copy A to better chunks first, beside C, where the plan shows that it pays.
    verify : bool, default False
        Check every block of C while it is on the device, and compute what fails once more.
    force : bool, default False
        Replace a C that exists.
    resume : bool, default False
        Continue an interrupted run of the same problem, as of `multiply`.
    trace : str or os.PathLike, optional
        File for a timeline of every stage. Of copies between files in memory and a GPU, which need no slot,
        it shows one MiB in 256.
    progress : callable, optional
        Called with (fraction, plan, trace) as the work goes on.
    notice : callable, optional
        Called with sentences for the user, as of `multiply`.

    Returns
    -------
    Result
        What was done, as of `multiply`, with C as its `array`.

    Raises
    ------
    InputError, BudgetError, StoreError, RangeError, DeviceError, VerificationError
        As `multiply`.
    """
    request = Request(
        *gram_operands(a, transpose),
        c,
        symmetric=True,
        triangle=triangle,
        alpha=alpha,
        beta=beta,
        memory_limit=memory_limit,
        device=device,
        device_memory_limit=device_memory_limit,
        precision=precision,
        kernel=kernel,
        out_dtype=out_dtype,
        chunks=chunks,
        shards=shards,
        compressor=compressor,
        rechunk=rechunk,
        verify=verify,
        force=force,
        resume=resume,
    )
    check_aligned(request)
    return labelled_product(request, result_of(carry_out(request, Observer(progress, notice, trace))))


def plan(
    a: Any,
    b: Any,
    *,
    alpha: complex | None = None,
    beta: complex | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    adjoint_a: bool = False,
    adjoint_b: bool = False,
    memory_limit: str | int | None = None,
    device: str | Device = "auto",
    device_memory_limit: str | int | None = None,
    precision: Precision = "highest",
    kernel: str = "auto",
    out_dtype: Any = None,
    chunks: tuple[int, int] | None = None,
    shards: tuple[int, int] | None = None,
    compressor: str | None = None,
    rechunk: bool = False,
    verify: bool = False,
) -> Plan:
    """What `multiply` with the same arguments would do. Runs nothing and writes nothing.

    Parameters
    ----------
    a, b : str, os.PathLike, zarr.Array, array-like or Operand
        The inputs, as of `multiply`. Where an input is neither Zarr's nor NumPy's, a few pieces of it are
        read to measure how much memory one takes.
    alpha, beta : complex, default 1 and 0
        α and β. No C is read, whatever β is.
    transpose_a, transpose_b : bool, default False
        Multiply with the transpose of an input.
    adjoint_a, adjoint_b : bool, default False
        Multiply with the conjugate transpose of an input.
    memory_limit : str or int, optional
        Most host memory, in bytes or as `"8GiB"`. By default 60 % of what the process may use.
    device : str or Device, default "auto"
        The device or devices, as of `multiply`.
    device_memory_limit : str or int, optional
        Most memory of each device. By default 90 % of what is free.
    precision : {"highest", "high", "medium"}, default "highest"
        Least accuracy of float32 products.
    kernel : str, default "auto"
        The kernel: the fastest that keeps the precision, or the one of this name.
    out_dtype : dtype, optional
        Type of C. By default as of `multiply`.
    chunks, shards : (int, int), optional
        Rows and columns of the chunks and shards of C. By default chunks near 16 MiB and no shards.
    compressor : str, optional
        `"none"` (the default), `"zstd"`, `"zstd:LEVEL"` or `"blosc"`.
    rechunk : bool, default False
        Plan for operands that are copied to better chunks first. The advice of the plan says which are.
    verify : bool, default False
        Every block of C is checked while it is on the device.

    Returns
    -------
    Plan
        `print(plan)` shows it as a table; `plan.to_dict()` has its numbers.

    Raises
    ------
    InputError
        The request cannot be carried out.
    BudgetError
        It does not fit a memory limit; `minimum_memory_limit` is the smallest that would do.
    """
    refuse_event_loop()
    request = Request(
        Operand.of(a, transpose_a, adjoint_a),
        Operand.of(b, transpose_b, adjoint_b),
        writes=False,
        alpha=alpha,
        beta=beta,
        memory_limit=memory_limit,
        device=device,
        device_memory_limit=device_memory_limit,
        precision=precision,
        kernel=kernel,
        out_dtype=out_dtype,
        chunks=chunks,
        shards=shards,
        compressor=compressor,
        rechunk=rechunk,
        verify=verify,
    )
    return prepare(request.check(), observer=Observer()).plan
