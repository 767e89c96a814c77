"""What a kernel is compiled and launched with: `Config`, which needs no GPU and no library."""

from dataclasses import dataclass

from ..support.intervals import ceil_div

C_TYPE = {"float32": "float", "float64": "double", "int32": "int", "int64": "long long"}
"""NumPy's name of a type → its name in CUDA C++."""


@dataclass(frozen=True)
class Config:
    """Everything that a kernel is compiled and launched with. The conditions that these numbers must meet
    are asserted in the kernel, where they are explained."""

    kernel: str
    """Name of the source file in kernels/*/, without its suffix, and of the function in it."""
    dtype: str
    """NumPy's name for the type of α, β and C."""
    bm: int
    """Rows of C a thread block computes."""
    bn: int
    """Columns of C a thread block computes."""
    block: tuple[int, int]
    """Threads of a block along x and y."""
    macros: tuple[tuple[str, int | str], ...]
    """What the source leaves open: names and values, BM and BN among them."""
    shared_bytes: int = 0
    """Dynamic shared memory of a block, in bytes; 0 if the kernel declares its own."""

    def __post_init__(self) -> None:
        if not self.kernel.isidentifier():
            raise ValueError(f"{self.kernel!r} is no kernel name")

    def value(self, name: str) -> int:
        """Return the value of a macro that is a number; 0 if it is not set."""
        return int(dict(self.macros).get(name, 0))

    @property
    def defines(self) -> tuple[str, ...]:
        """The macros, as compiler options."""
        return tuple(f"-D{name}={value}" for name, value in self.macros)

    def grid(self, m: int, n: int) -> tuple[int]:
        """Return the number of thread blocks for an m×n matrix C, in one dimension."""
        return (ceil_div(m, self.bm) * ceil_div(n, self.bn) * max(1, self.value("SPLIT")),)
