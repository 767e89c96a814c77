"""Learns the rates of a GPU's kernel and bus from a finished run, where nobody has measured them yet. To
measure them before the run would take longer: the kernel would have to be compiled while everything else
waits.
"""

from typing import Any

from ..engine.ports import Arithmetic, Device
from ..planning.plan import Plan
from ..support.remembered import recall, remember
from ..support.trace import Trace
from .rates import FILE, kernel_key, possible, sound, today

TRUSTED_SECONDS = 0.02
"""Least busy seconds of a stage from which its rate is learned."""


def learn(device: Device, arithmetic: Arithmetic, plan: Plan, watch: Trace) -> str:
    """Remember the rates of a GPU's kernel and bus that a finished run has shown, where none are remembered.

    Where stages share cores (`Rates.shared`), their times in a run say nothing of each alone. Returns a
    sentence about what is remembered; "" where nothing is.
    """
    used, known = plan.used_rates, recall(FILE).get(device.model, {})
    if plan.budget.device is None or used.shared:
        return ""
    key, names, found = kernel_key(arithmetic), list[str](), dict[str, Any]()
    seconds = watch.seconds["compute"]
    if key not in possible(known.get("flops"), device.most_flops) and seconds >= TRUSTED_SECONDS:
        # The prediction contains what panels and edges cost besides; the trace adds up all devices.
        flops = used.flops * plan.stage_seconds["compute"] / seconds
        kernel, panel = key.split()[:2]
        if 0 < flops <= device.most_flops(kernel, panel) / used.devices:
            found["flops"] = known.get("flops", {}) | {key: {"flops": flops, "thin": used.thin}}
            names.append(f"{key} at {flops / 1e12:.3g} Tflop/s")
    for name in () if plan.budget.staged else ("upload", "download"):
        field, seconds = f"{name}_bytes_per_second", watch.seconds[name]
        rate = watch.bytes[name] / seconds if seconds >= TRUSTED_SECONDS else 0.0
        if field not in known and sound(rate):
            found[field] = rate
            names.append(f"{name}s at {rate / 1e9:.3g} GB/s")
    if not names:
        return ""
    if not known.get("date"):
        found |= {"date": today(), "brief": True}
    remember(FILE, device.model, found)
    return f"rates of this run are remembered: {', '.join(names)}"
