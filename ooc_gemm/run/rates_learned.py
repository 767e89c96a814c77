"""Learns from a finished run on a GPU: the rates of its kernel and bus where nobody has measured them yet,
and at which rate a compressor's chunks are decoded. To measure a kernel before the run would take longer: it
would have to be compiled while everything else waits. A few chunks that are decoded before the run show less
than all of them. On the host, what BLAS reached in a run is added to what was measured briefly before
another."""

import math
from collections.abc import Iterable
from typing import Any

from ..engine.ports import Arithmetic, Device
from ..planning.ledger import parts_of
from ..planning.plan import Plan
from ..planning.problem import MiB
from ..storage.read.source import Opened
from ..support.remembered import recall, remember
from ..support.trace import DECODE as UNPACKING
from ..support.trace import Trace
from .rates import (
    DECODE,
    FILE,
    FOLDERS,
    UNPACK_RATES,
    file_system,
    kernel_key,
    possible,
    sound,
    today,
    unpacking,
)

TRUSTED_SECONDS = 0.02
"""Least busy seconds of a stage from which its rate is learned."""
TRUSTED_SIDE = 2048
"""Least height and width of blocks, and depth of panels, from which the rate of a kernel is learned. What
smaller ones take is mostly their start."""
EVEN = 3.0
"""Most times that multiplications may take what all would take as fast as the shortest. In a run that takes
longer, some have waited, for a kernel that was compiled or loaded, or blocks are very uneven."""
TRUSTED_BYTES = 256 * MiB
"""Least bytes of copies from which their rate is learned."""
BUSY = 8
"""Reads of each reader from which the rate is learned at which they decode: so all of them had some."""
BETTER = 1.05
"""Factor by which a kernel must be faster than in an earlier run for that rate to be replaced."""
LAUNCHES = 4
"""Least number of times that a device has decoded chunks, for its rate to be learned."""
MOST_CHANGED = 4.0
"""Most times by which one run shows another rate. Chunks at an edge may hold little but fill values."""
NOTED = 1.25
"""Factor by which the rate of BLAS must change for its user to be told. Where others use the cores, it
changes a little with every run."""
MULTIPLIED_SECONDS = 0.5
"""Least seconds of multiplying from which the rate of BLAS is learned."""
MULTIPLIED = 0.5
"""And the least share of the run in which it multiplied. Otherwise something else has taken the time."""


NARROW = 256
"""Rows and columns of blocks from which it is learned. Of narrower ones BLAS reaches a part of its rate,
which would be used for all others (AᵀA of 64 columns on 16 cores: 190 Gflop/s, of 512 columns 1,000)."""


def learn(device: Device, arithmetic: Arithmetic, plan: Plan, watch: Trace) -> str:
    """Remember the rates of a GPU's kernel and bus that a finished run has shown, where none are remembered,
    or those of an earlier run were lower.

    Where stages share cores (`Rates.shared`), their times in a run say nothing of each alone. Returns a
    sentence about what is remembered; "" where nothing is.
    """
    used, known = plan.used_rates, recall(FILE).get(device.model, {})
    if plan.budget.device is None or used.shared:
        return ""
    key, names, found = kernel_key(arithmetic), list[str](), dict[str, Any]()
    kernels = possible(known.get("flops"), device.most_flops)
    flops, before = _flops(plan, watch), kernels.get(key, {})
    kernel, panel = key.split()[:2]
    better = not before or (before.get("brief") and flops > BETTER * before["flops"])
    if better and 0 < flops <= device.most_flops(kernel, panel) / used.devices:
        found["flops"] = kernels | {key: {"flops": flops, "thin": used.thin, "brief": True}}
        names.append(f"{key} at {flops / 1e12:.3g} Tflop/s")
    # Other work comes between copies that are converted, and between those that are made beside decoding.
    apart = not (plan.budget.staged or plan.problem.encoded)
    for name in ("upload", "download") if apart else ():
        field, seconds = f"{name}_bytes_per_second", watch.seconds[name]
        trusted = seconds >= TRUSTED_SECONDS and watch.bytes[name] >= TRUSTED_BYTES
        rate = watch.bytes[name] / seconds if trusted else 0.0
        if field not in known and sound(rate):
            found[field] = rate
            names.append(f"{name}s at {rate / 1e9:.3g} GB/s")
    if not names:
        return ""
    _remember(device, known, found)
    return f"rates of this run are remembered: {', '.join(names)}"


def learn_blas(device: Device, arithmetic: Arithmetic, plan: Plan, watch: Trace, seconds: float) -> str:
    """Remember the geometric mean of the rate of BLAS that was known, and of the one that a finished run of
    so many seconds has shown; the latter alone where none was known. Where others use the cores, a machine is
    faster in one hour than in the next. A run of `slices` shows nothing, because its time depends on the
    values.

    A rate that the user has measured (`info --measure`) stays. Returns a sentence about what is remembered;
    "" where nothing is that would matter to the user.
    """
    used, p, multiplied = plan.used_rates, plan.problem, watch.seconds["compute"]
    multiplied /= plan.budget.lanes if plan.k_panels.lanes else 1  # so many threads multiply at a time
    if not used.shared or plan.budget.workers > 1 or arithmetic.kernel == "slices":
        return ""
    known, key = recall(FILE).get(device.model, {}), kernel_key(arithmetic)
    kernels = possible(known.get("flops"), device.most_flops)
    before = kernels.get(key, {})
    if before and not (known.get("brief") or before.get("brief")):
        return ""
    if min(plan.bm, plan.bn) < NARROW:
        return ""
    if multiplied < max(MULTIPLIED_SECONDS, MULTIPLIED * seconds) or p.check_itemsize or p.found_bytes:
        return ""
    predicted = plan.stage_seconds["compute"]
    alone = multiplied
    if not plan.k_panels.lanes:  # other stages use the cores meanwhile, and are predicted by themselves
        alone = max(multiplied / 2, min(multiplied, seconds - (plan.predicted_seconds - predicted)))
    flops, changed = used.flops * predicted / alone, math.inf
    if before:
        flops = mean(before["flops"], flops)
        changed = change(before["flops"], flops)
    if changed < BETTER or flops > device.most_flops(*key.split()[:2]):
        return ""
    rate = {"flops": flops, "thin": before.get("thin", used.thin), "brief": True}
    _remember(device, known, {"flops": kernels | {key: rate}})
    said = f"a rate of this run is remembered: {key} at {flops / 1e12:.3g} Tflop/s"
    return said if changed > NOTED else ""


def learn_decoding(device: Device, inputs: Iterable[Opened], plan: Plan, watch: Trace) -> str:
    """Remember the rate at which the readers of a run for a GPU have read and decoded chunks, where it is
    above the one that the plan was made with. They do nothing else meanwhile.

    `inputs`: the operands, of which all must be made by one compressor and lie in one file system. Returns a
    sentence about what is remembered; "" where nothing is.
    """
    rates, found = plan.used_rates, list(inputs)
    p, several = plan.problem, len(plan.budget.weights) > 1
    if plan.budget.device is None or rates.shared or several or p.reads_c or p.encoded:
        return ""
    kinds = {(opened.source.codec, opened.place and file_system(opened.place)) for opened in found}
    ((codec, system), *others) = kinds
    seconds, nbytes = watch.seconds["read"] / plan.readers, watch.bytes["upload"]
    if others or not (codec and system) or watch.spans["read"] < BUSY * plan.readers:
        return ""
    if seconds < TRUSTED_SECONDS or nbytes < TRUSTED_BYTES:
        return ""
    rate = sound(nbytes / seconds)
    if rate <= BETTER * rates.decode:
        return ""
    folders, name = recall(FILE).get(device.model, {}).get(FOLDERS[False], {}), f"{DECODE}{codec}"
    before = folders.get(system, {"date": today(), "brief": True})
    folders = folders | {system: before | {f"{name}_bytes_per_second": rate}}
    remember(FILE, device.model, {FOLDERS[False]: folders})
    return f"a rate of this run is remembered: chunks of {codec} are decoded at {rate / 1e9:.3g} GB/s"


def learn_unpacking(device: Device, inputs: Iterable[Opened], plan: Plan, watch: Trace) -> str:
    """Remember the rate at which the fastest launch has shown that the device decodes a part of a chunk, or
    the geometric mean of that and of the one that is remembered. What multiplies meanwhile slows others down.
    Each rate that changes costs the next product a new search for its plan (40 ms), so what is remembered
    first is all that was shown.

    `inputs`: the operands, of which all must be made by one compressor. Returns a sentence about what is
    remembered; "" where nothing is.
    """
    codecs, p, usual = {opened.source.codec for opened in inputs}, plan.problem, plan.used_rates.unpack
    sent = {(s.encoded, s.chunk_bytes) for s in p.encoded}
    if len(codecs) > 1 or len(sent) != 1 or watch.spans[UNPACKING] < LAUNCHES:
        return ""
    (codec,), s = codecs, p.encoded[0]
    shown = s.chunk_bytes / parts_of(s) / max(1e-9, watch.least[UNPACKING])
    known = recall(FILE).get(device.model, {})
    found = mean if codec in unpacking(known) else clamped
    rate = found(usual, shown, MOST_CHANGED)
    if change(usual, rate) < BETTER:
        return ""
    _remember(device, known, {UNPACK_RATES: unpacking(known) | {codec: rate}})
    said = f"the device decodes a part of a chunk of {codec} at {rate / 1e9:.3g} GB/s"
    return f"a rate of this run is remembered: {said}"


def _remember(device: Device, known: dict[str, Any], found: dict[str, Any]) -> None:
    """Remember what was found of a device. If nothing was known of it, that counts as measured briefly."""
    remember(FILE, device.model, found if known.get("date") else found | {"date": today(), "brief": True})


def mean(before: float, shown: float, most: float = math.inf) -> float:
    """Return the geometric mean of what was expected and of what a run has shown, which counts as no more
    than `most` times as large or as small."""
    return math.sqrt(before * clamped(before, shown, most))


def clamped(before: float, shown: float, most: float) -> float:
    """Return what a run has shown, but no more than `most` times as large or as small as before."""
    return min(most * before, max(before / most, shown))


def change(before: float, now: float) -> float:
    """Return how many times as large or as small as before something is."""
    return max(before / now, now / before)


def _flops(plan: Plan, watch: Trace) -> float:
    """Return the operations per second of a kernel on one device; 0 where the run does not show it. The
    prediction contains what panels and edges cost besides, and the trace adds up all devices."""
    seconds = watch.seconds["compute"]
    if plan.problem.encoded:  # chunks are decoded beside it
        return 0.0
    if seconds < TRUSTED_SECONDS or min(plan.bm, plan.bn, plan.bk) < TRUSTED_SIDE:
        return 0.0
    if seconds > EVEN * watch.least["compute"] * watch.spans["compute"]:
        return 0.0
    return plan.used_rates.flops * plan.stage_seconds["compute"] / seconds
