"""A device with memory of its own, of which nothing was measured."""

from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.planning.machine import Rates


class OnTheBus(CPU):
    """A device whose files are read at the rate of a disk by default."""

    def rates(self, arithmetic):
        return Rates(1e12, 3e9, 3e9, 5e10, 5e10, shared=False)
