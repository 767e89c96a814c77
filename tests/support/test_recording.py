"""Recordings take a bounded amount of memory, and lose no time, bytes or pieces."""

import itertools
import json
import os
import tempfile
import threading
import time
import tracemalloc

import numpy as np
import pytest

import ooc_gemm
from ooc_gemm.support import recording
from ooc_gemm.support.errors import InputError, StoreError
from ooc_gemm.support.recording import Recording, Span, Spans, current
from ooc_gemm.support.trace import Trace


def test_many_spans_become_few_that_add_up_to_as_much():
    spans, number = Spans(most=50), 3000
    for index, track in itertools.product(range(number), ("read 1", "read 2", "write 3")):
        spans.add(track, Span(track.split()[0], index, index + 0.5, 0.5, 7))
    lanes = spans.lanes()
    found = [span for _, lane in lanes for span in lane]
    assert 3 <= len(found) <= 50
    assert [stage for stage, _ in lanes] == ["read", "read", "write"]
    assert sum(span.count for span in found) == 3 * number
    assert sum(span.nbytes for span in found) == 3 * number * 7
    assert sum(span.busy for span in found) == 3 * number * 0.5
    for _, lane in lanes:
        assert (lane[0].start, lane[-1].stop) == (0, number - 0.5)
        assert all(one.stop <= other.start for one, other in itertools.pairwise(lane))


def test_threads_that_follow_each_other_share_a_lane():
    spans = Spans()
    for number in range(20):
        spans.add(f"read {number}", Span("read", number, number + 1, 1, 0))
        spans.add(f"compute {number}", Span("compute", number, number + 1.5, 1, 0))
    assert sorted((stage, len(lane)) for stage, lane in spans.lanes()) == [
        ("compute", 10),
        ("compute", 10),
        ("read", 20),
    ]


def test_samples_of_memory_are_thinned_out(monkeypatch):
    monkeypatch.setattr(recording, "MOST_SAMPLES", 8)
    monkeypatch.setattr(recording, "FIRST_PERIOD", 0.001)
    with Recording() as made:
        deadline = time.perf_counter() + 10
        while made._memory._period < 0.01 and time.perf_counter() < deadline:
            time.sleep(0.005)
    times = [at for at, _ in made.memory]
    assert 2 <= len(times) <= 9
    assert times == sorted(times)
    assert all(nbytes > 1 << 20 for _, nbytes in made.memory)


def test_traces_hand_their_spans_to_the_recording_of_their_thread():
    before = Trace()
    with Recording() as made:
        trace, left_out, elsewhere = Trace(), Trace(recorded=False), []
        thread = threading.Thread(target=lambda: elsewhere.append(current()))
        thread.start()
        thread.join()
        for one in (before, trace, left_out):
            one.add("read", time.perf_counter(), nbytes=5)
    assert elsewhere == [None]
    assert [(stage, [span.nbytes for span in lane]) for stage, lane in made.spans.lanes()] == [("read", [5])]
    assert current() is None


def test_a_recording_keeps_what_ended_the_run():
    with pytest.raises(KeyboardInterrupt), Recording() as made:
        raise KeyboardInterrupt
    assert isinstance(made.error, KeyboardInterrupt)
    assert made.seconds > 0


def test_a_trace_of_a_million_spans_takes_little_memory(tmp_path):
    file, count = tmp_path / "trace.json", 20_000
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        trace = Trace(file)
        for number in range(count):
            start = number * 1e-3
            trace.add("read", start, start + 5e-4, f"read {number % 3}", 8, operand="a", chunk=(number, 7))
        trace.add("compute", 0.0, 10.0, "compute", block=3)
        timeline = trace.timeline(10)
        trace.write()
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < 3 << 20
    assert list(tmp_path.iterdir()) == [file]
    assert timeline.seconds == pytest.approx(20, abs=0.01)
    assert timeline.busy["compute"] == pytest.approx([1.0] * 5 + [0.0] * 5, abs=0.01)
    assert set(timeline.busy) == {"read", "compute"}
    events = json.loads(file.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == count + 1
    assert spans[5]["args"] == {"bytes": 8, "operand": "a", "chunk": [5, 7]}
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["read 1", "read 2", "read 3", "compute 1"]


def test_a_folder_that_takes_no_files_has_room_for_a_trace_that_exists(tmp_path, monkeypatch):
    file, make = tmp_path / "trace.json", tempfile.TemporaryFile

    def refuses(*args, dir=None, **options):
        if dir is not None:
            raise PermissionError(13, "Permission denied")
        return make(*args, **options)

    monkeypatch.setattr(tempfile, "TemporaryFile", refuses)
    trace = Trace(file)
    trace.add("read", 1.0, 2.0)
    trace.write()
    assert len(json.loads(file.read_text())["traceEvents"]) == 3


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a file on a full disk")
def test_a_file_is_left_alone_where_spans_cannot_be_kept(tmp_path, monkeypatch):
    file = tmp_path / "trace.json"
    file.write_text("of a run before")
    full = open("/dev/full", "r+b")  # noqa: SIM115 - the trace closes it
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **options: full)
    trace = Trace(file)
    trace.add("read", 1.0, 2.0)
    with pytest.raises(StoreError, match=r"cannot be written: No space left on device; the result itself"):
        trace.write()
    assert file.read_text() == "of a run before"


def test_a_timeline_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    trace = Trace(tmp_path / "trace.json")
    trace.add("read", 1.0, 2.0)

    def full(data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ooc_gemm.support.span_file.json.dumps", full)
    with pytest.raises(StoreError, match="No space left on device"):
        trace.write()
    assert list(tmp_path.iterdir()) == []


def test_a_trace_whose_spans_have_no_place_is_refused(tmp_path, monkeypatch):
    def refuses(**options):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuses)
    x = np.ones((3, 3))
    with pytest.raises(InputError, match=r"the trace .*t.json cannot be written there: Too many open files"):
        ooc_gemm.multiply(x, x, device="cpu", trace=tmp_path / "t.json")
