"""Runs our CUDA kernels on the CPU, under sanitizers. cuda_on_cpu.h says how threads and barriers are
emulated; here programs are made with g++, and given problems."""

import re
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from ..cuda_kernels.catalog import KERNELS, Kernel
from ..cuda_kernels.compile import headers, kernel_source
from ..cuda_kernels.config import Config

ORDERS = ("forward", "backward", "shuffled")
"""How the threads of a block take turns between barriers."""

_HEADER = Path(__file__).with_name("cuda_on_cpu.h")
_COUNTED = Path(__file__).with_name("counted.h")
LARGEST_MATRIX = 1 << 20
"""Bytes of the largest matrix that the emulated memory holds."""
_COMPILE = [
    "g++", "-std=c++17", "-Og", "-g1",
    "-fsanitize=address,undefined,bounds-strict", "-fno-sanitize-recover=all",
    "-fsanitize-sections=shared_memory",
]  # fmt: skip


SIGNATURE = (
    "long long m, long long n, long long k, T alpha, const T* A, long long lda, const T* B, long long ldb, "
    "T beta, T* C, long long ldc"
)


def compiler_missing() -> str:
    """Why kernels cannot be compiled here; empty if they can."""
    if shutil.which("g++") is None:
        return "running kernels on the CPU needs g++"
    for library in ("libasan.so", "libubsan.so"):
        command = ["g++", f"-print-file-name={library}"]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if found == library:
            return f"running kernels on the CPU needs {library}, which g++ does not have here"
    return ""


class Fault(Exception):
    """What a sanitizer found, or a barrier that not all threads came to."""


@dataclass(frozen=True)
class Problem:
    """C ← α·op(A)·op(B) + β·C, with the matrices as stored; their rows may be longer than needed."""

    m: int
    n: int
    k: int
    alpha: float
    a: np.ndarray
    b: np.ndarray
    beta: float
    c: np.ndarray
    order: str
    shift: int = 0
    """Elements from a 16-byte boundary to the first one of each matrix."""


@dataclass(frozen=True)
class Counts:
    """What all threads of a kernel did in one run. An element is one number of A, B or C, or of a copy in
    shared memory; numbers in registers are not counted."""

    operations: int
    """Additions and multiplications."""
    global_loads: int
    """Elements read from global memory."""
    global_stores: int
    """Elements written to global memory."""
    shared_loads: int
    """Elements read from shared memory."""
    shared_stores: int
    """Elements written to shared memory."""
    global_load_lines: int
    """Lines of 128 bytes that warps read: a warp whose 32 threads read one line in one access counts 1."""
    global_store_lines: int
    """Lines of 128 bytes that warps wrote."""
    shared_load_passes: int
    """Passes over the 32 banks of shared memory in which warps read. A warp needs as many for one access as
    it reads different words of 4 bytes from one bank."""
    shared_store_passes: int
    """Passes over the banks in which warps wrote."""


class Emulator:
    """A program that runs kernels: name → configuration and source."""

    def __init__(
        self, folder: Path, kernels: Mapping[str, tuple[Config, str]], counting: bool = False
    ) -> None:
        """Compile the program in a folder. `counting`: whether it counts accesses and operations of kernels
        whose macro ELEMENT is the type of all their numbers. Raises ValueError if a source is wrong."""
        self._counting = counting
        self._index = {name: i for i, name in enumerate(kernels)}
        self._config = {name: config for name, (config, _) in kernels.items()}
        self._program = folder / "program"
        lines, cases = [f'#include "{_COUNTED if counting else _HEADER}"'], []
        for i, (config, source) in enumerate(kernels.values()):
            path = folder / f"{i}.cu"
            source = _with_dynamic_memory(source)
            path.write_text(_with_whole_vectors(source) if counting else source, encoding="utf-8")
            # A namespace is not enough to tell functions apart that are extern "C".
            macros = (*config.macros, (config.kernel, f"kernel{i}"))
            if counting:
                macros = tuple(
                    (name, _counted(value) if name == "ELEMENT" else value) for name, value in macros
                )
            lines += [f"#define {name} {value}" for name, value in macros]
            lines += [f"namespace source{i} {{", f'#include "{path}"', "}"]
            lines += [f"#undef {name}" for name, _ in macros]
            cases += [f"case {i}: cuda_on_cpu::run(source{i}::kernel{i}, problem); break;"]
        lines += ["int main() {", "cuda_on_cpu::Problem problem;"]
        lines += ["while (std::fread(&problem, sizeof problem, 1, stdin) == 1)", "switch (problem.kernel) {"]
        lines += [*cases, "}", "}", ""]
        main = folder / "main.cpp"
        main.write_text("\n".join(lines), encoding="utf-8")
        done = subprocess.run([*_COMPILE, main, "-o", self._program], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(done.stderr)

    def run(self, name: str, problems: Sequence[Problem]) -> list[np.ndarray]:
        """What the kernel makes of every problem's C, padding included. Raises Fault."""
        return [c for c, _ in self.run_counted(name, problems)]

    def run_counted(self, name: str, problems: Sequence[Problem]) -> list[tuple[np.ndarray, Counts]]:
        """What `run` returns, with the counts of each run, which are all 0 unless the program counts. Raises
        Fault."""
        config = self._config[name]
        given = b"".join(_encoded(self._index[name], config, problem) for problem in problems)
        done = subprocess.run([self._program], input=given, capture_output=True, timeout=250)
        out, results = done.stdout, []
        counts_bytes = 8 * len(fields(Counts)) if self._counting else 0
        for problem in problems:
            count = _extent(problem.c, problem.n)
            c_bytes = count * problem.c.itemsize
            if len(out) < c_bytes + counts_bytes or (count == 0 and done.returncode):
                break
            c = problem.c.copy()
            c.ravel()[:count] = np.frombuffer(out[:c_bytes], config.dtype)
            numbers = struct.unpack(f"{counts_bytes // 8}q", out[c_bytes : c_bytes + counts_bytes])
            results.append((c, Counts(*(numbers or (0,) * len(fields(Counts))))))
            out = out[c_bytes + counts_bytes :]
        if done.returncode:
            raise Fault(f"{name}, problem {len(results)}:\n{done.stderr.decode(errors='replace')}")
        return results


def whole_source(name: str) -> str:
    """The text of a kernel with its headers in the places of the #include lines. A program holds several
    kernels, each in a namespace of its own, so that each needs its own copy of what headers define."""
    source = kernel_source(name)
    for header, text in headers(source).items():
        source = source.replace(f'#include "{header}"', text)
    return source


def _encoded(index: int, config: Config, p: Problem) -> bytes:
    """As cuda_on_cpu.h reads it."""
    nothing_read = p.alpha == 0 or p.k == 0
    a_cols = 0 if nothing_read else p.m if config.value("TRANS_A") else p.k
    b_cols = 0 if nothing_read else p.k if config.value("TRANS_B") else p.n
    pairs = (p.a, a_cols), (p.b, b_cols), (p.c, p.n)
    a, b, c = (matrix.ravel()[: _extent(matrix, cols)].tobytes() for matrix, cols in pairs)
    integers = (
        index, ORDERS.index(p.order), *config.grid(p.m, p.n), *config.block, config.shared_bytes,
        p.shift * p.c.itemsize, len(a), len(b), len(c),
        p.m, p.n, p.k, p.a.shape[1], p.b.shape[1], p.c.shape[1],
    )  # fmt: skip
    return struct.pack(f"{len(integers)}q2d", *integers, p.alpha, p.beta) + a + b + c


def _extent(matrix: np.ndarray, cols: int) -> int:
    """Elements up to the last one that is named, which ends before the padding of the last row."""
    rows, ld = matrix.shape
    return (rows - 1) * ld + cols if rows and cols else 0


def _with_dynamic_memory(source: str) -> str:
    """An array whose size comes with the launch is no C++."""
    pointer = r"\1* const \2 = reinterpret_cast<\1*>(cuda_on_cpu::dynamic_shared_memory.first);"
    return re.sub(r"extern __shared__ (\w+) (\w+)\[\];", pointer, source)


def _counted(value: int | str) -> str:
    """The type that counts in the place of a number's."""
    return f"cuda_on_cpu::Counted<{value}>"


def _with_whole_vectors(source: str) -> str:
    """Copies of a vector count as one access of a thread, and not as one for each element."""
    members = r"\1\n    COPIES_COUNT_ONCE(Vec, V)"
    return re.sub(r"(struct alignas\(16\) Vec \{\n    T v\[V\];)", members, source)


def _is_plain(kernel: Kernel) -> bool:
    """Runs on the oldest GPUs, which takes no assembly, and with the arguments that all the ladder takes."""
    config = kernel.configs(kernel.dtypes[0], False, False)[0]
    source = kernel_source(config.kernel).replace("__restrict__", "").replace("i64", "long long")
    arguments = re.search(rf"\b{config.kernel}\(([^)#]*)", source)
    return kernel.min_arch <= 75 and arguments is not None and arguments[1].split() == SIGNATURE.split()


PLAIN = [name for name, kernel in KERNELS.items() if _is_plain(kernel)]
