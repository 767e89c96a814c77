"""The machine as the planner sees it: the rates of its stages, and its memory. The defaults of `Rates`
describe a machine that nobody has measured; each says where its number comes from. `ooc-gemm info --measure`
replaces those that it can measure."""

import math
from dataclasses import dataclass

from ..support.intervals import ceil_div

CACHED = 0.9
"""Share of the inputs in memory (`Rates.cached`) from which readers count as waiting for no disk."""


@dataclass(frozen=True)
class Rates:
    """How fast the machine is: in bytes per second and in seconds, unless a field says otherwise."""

    flops: float
    """Operations per second of the kernel, on all devices together."""
    read: float
    write: float
    upload: float
    """Bytes per second from host memory to all devices together."""
    download: float
    shared: bool
    """Whether every stage runs on the same cores, so that their times add up; otherwise they overlap."""
    read_seconds: float = 6e-6
    """Seconds of one read call beside its bytes; calls do not overlap. A `pread` from Python takes 5 to
    10 µs, in which it holds the interpreter lock."""
    stream: float = math.inf
    """Bytes per second that one reader gets."""
    latency: float = 0.0
    """Seconds that a read waits for its first byte. Readers wait at the same time."""
    piece_seconds: float = 60e-6
    """Seconds of one piece's way through the ring beside its bytes, and of a chunk's of C; pieces do not
    overlap in this. It is the time of the Python code that hands a piece on."""
    turn_seconds: float = 3e-4
    """Seconds of a turn in which a device with memory of its own gets nothing: the conductor opens the next
    one, and readers wake up (.5 ms in AᵀA of 262144 × 768 on an H100)."""
    thin: float = 32.0
    """Panel depth at which a multiplication takes twice its time: it reads and writes C once."""
    decode: float = math.inf
    """Decoded bytes per second of all readers, for chunks that must be decoded."""
    unpack: float = 0.0
    """Decoded bytes per second of one part of a chunk that a device decodes, beside others; 0 where that is
    not known."""
    touch: float = 6e9
    """Bytes a second at which fresh host memory can be had (and made ready for copies to the device). The
    system clears each page first."""
    turns: float = 0.5
    """How reads and writes share the store: time of both at once, of equally long ones, over the sum of
    their times alone. 1: they take turns; ½: they do not disturb each other."""
    entering: float = 0.5
    """How reads, and copies to devices with memory of their own, share the host's memory, in the same way."""
    leaving: float = 0.5
    """How writes, and copies from such devices, share it."""
    devices: int = 1
    """Number of devices that `flops` is the sum of."""
    at_once: int = 1
    """Number of devices that host memory can feed at full speed at a time. `upload` and `download` are sums
    over so many."""
    start: float = 0.0
    """Seconds before the first read and after the last write, in addition to those for slots."""
    begin: float = 0.0
    """Seconds in which a new C is begun, while the first panels are read."""
    cached: float = 0.0
    """Share of the bytes of all inputs for which no reader waits: they are in memory, as files or in the page
    cache, or on a disk that is no slower. 0 also where nobody has looked."""
    note: str = ""
    """Where these numbers come from, for the reader of the plan."""
    exchange: float = 500e6
    """Bytes per second of a block that one worker of a cluster gets from another and adds to its own: half of
    a network of 10 Gbit/s."""
    network: float = 1e9
    """Bytes per second of pieces that one worker of a cluster gets from others, while it gives them as many:
    about what a network of 10 Gbit/s carries each way."""
    one_store: bool = False
    """Whether the workers of a cluster share `read` and `write`, because all files lie on one file system;
    otherwise each worker has them to itself."""
    busy_readers: int = 4
    """Reader threads that the store needs to give all of `read`; fewer get a share each. An NVMe disk needs
    several requests at a time, of 1 MiB and more, to keep all of its channels busy."""
    edge: float = 64.0
    """Height or width of a block at which multiplying takes twice its time: half a tile, of which 128 rows or
    columns are usual, is lost at its edge on average."""
    ready_again: float = 300.0
    """Columns of a block whose products take as long as making a panel of op(A) ready once more, where op(A)
    stays on the device as it was uploaded (fp16x3 on an H200: three times its bytes pass through the device's
    memory)."""
    hidden_cost: float = 0.12
    """What a second of a stage that another hides is worth, in seconds. Others use the disk and the bus, too,
    so between plans of nearly the same time the one that moves less wins; a stage that takes as long as the
    longest one may cost a plan no more than about a tenth of its time."""

    def reading(self, readers: int) -> float:
        """Return the bytes per second that this many reader threads get from the store."""
        # Where all stages share the cores, the cores are what reading waits for, not the disk.
        share = 1.0 if self.shared else min(1.0, readers / self.busy_readers)
        return min(self.read * share, readers * self.stream)


@dataclass(frozen=True)
class Budget:
    """Limits in bytes, and the memory that is in use before a plan takes any."""

    host: int
    """Most memory that the process may hold resident."""
    host_baseline: int
    """Memory of the interpreter, the libraries and the stacks of threads."""
    device: int | None
    """Most memory of the device; None where it computes in host memory."""
    device_baseline: int = 0
    """Memory of the device's context and of the workspaces of its libraries."""
    workspace: int = 0
    """Scratch memory of the device's arithmetic, in the memory in which the device computes."""
    staged: bool = False
    """Whether uploads are converted on the device, which needs memory for them there
    (`ledger.staged_bytes`)."""
    readers: int = 4
    """Most reader threads. The device says how many it wants (`Limits.readers`); a store far away wants more.
    4 is the least that keeps a disk busy (`Rates.busy_readers`)."""
    writers: int = 2
    """Most writer threads (`Limits.writers`). With 2, one chunk is encoded while another is written."""
    workers: int = 1
    """Number of processes, each with this budget, to which blocks are dealt."""
    connection: int = 0
    """Bytes of each thread that talks to another machine. There are many of them, and fewer are tried, too,
    for what all of them hold may not fit."""
    weights: tuple[int, ...] = (1,)
    """Speed of each of several devices. Blocks are cut into bands of rows in proportion, and limits and
    baselines of the device are those of each."""
    step: int = 0
    """Bytes that a thread without the interpreter has on their way at a time between a file and a device, in
    places of its own, which are in `host_baseline`; 0 where there are none."""
    eighths: int = 0
    """How many eighths of `host` are in `host_baseline`, which grows with the limit."""
    chunk: int = 0
    """Bytes that the process holds for each chunk of C until all of C is stored."""
    in_memory: bool = False
    """Whether all inputs are in memory: in files, or in this process (`StoreTraits.asynchronous`)."""
    decodes: int = 0
    """Most parts of chunks that the device decodes at a time (`Limits.decodes`)."""
    lanes: int = 0
    """Most threads that multiply pairs of panels alone at a time (`Panels.lanes`); 0: none may."""
    cores: int = 0
    """Cores that the lanes of this process may use; 0: as many as `lanes`."""
    linked: bool = True
    """Whether devices can read each other's memory. Then the panels of op(B) are uploaded to one of them,
    from which the others take them."""

    def enough(self, nbytes: int) -> int:
        """Return the smallest limit of the host that allows what takes so many bytes with this limit."""
        return ceil_div(8 * (nbytes - self.eighths * (self.host // 8)), 8 - self.eighths)


def nobody_waits(budget: Budget, rates: Rates) -> bool:
    """Whether readers wait for no disk, because what they read is in memory."""
    return budget.in_memory or rates.cached >= CACHED
