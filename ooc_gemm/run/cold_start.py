"""What the first product of a process on a GPU takes longer than later ones, because its context is made, and
libraries and kernels are loaded. Whether the command line or a call begins that makes no difference here."""

import math
from dataclasses import replace

from ..engine.ports import Device
from ..planning.plan import Plan
from ..support.remembered import recall, remember
from .rates import FILE
from .rates_learned import BETTER, change, mean

FIELD = "cold_seconds"
USUAL_SECONDS = 0.13
"""Seconds where none are remembered of a device (an H200, 14 products of the command line whose modules were
compiled: .06 to .15)."""
MOST_CHANGED = 2.0
"""Most times by which one run shows other seconds. It may have waited for a kernel that was compiled."""
SHORT = 4.0
"""How many times as long as these seconds the rest of a run may be that shows them. A longer run shows the
error of its own prediction."""

_ready = set[str]()
"""Names of the devices that this process has used."""


def note_used(device: Device) -> None:
    """Note that this process uses a device, so that a later product is none that makes it ready."""
    _ready.add(device.name)


def counted(plan: Plan, device: Device) -> Plan:
    """Return the plan with the seconds in which the device is made ready, if this process has not used it."""
    if plan.budget.device is None or device.name in _ready:
        return plan
    seconds = _remembered(device)
    return replace(plan, predicted_seconds=plan.predicted_seconds + seconds, starting_seconds=seconds)


def learn(device: Device, plan: Plan, seconds: float) -> None:
    """Remember the geometric mean of the seconds that were expected, and of those that the first run of a
    process on a device, which took so many `seconds`, has shown."""
    before = plan.starting_seconds
    warm = plan.predicted_seconds - before
    if not before or warm > SHORT * before:
        return
    now = mean(before, seconds - warm, MOST_CHANGED)
    if change(before, now) >= BETTER:
        remember(FILE, device.model, {FIELD: now})


def _remembered(device: Device) -> float:
    """Return the seconds that are remembered of a device, or the usual ones."""
    found = recall(FILE).get(device.model, {}).get(FIELD)
    if isinstance(found, int | float) and 0 < found < math.inf:
        return float(found)
    return USUAL_SECONDS
