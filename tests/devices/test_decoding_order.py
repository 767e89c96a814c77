"""When a GPU decodes chunks, and how many at a time, on a stand-in for one."""

import time
from dataclasses import replace
from threading import Condition, Lock

import numpy as np
import pytest
from conftest import make
from faults import sent_if_any, with_blocks
from sent_chunks import ZSTD, before_each, decoded, matrices, product, stored

import ooc_gemm
from ooc_gemm.cuda_kernels import driver
from ooc_gemm.devices.cuda.decoding import Decoding
from ooc_gemm.devices.cuda.session import CUDASession
from ooc_gemm.engine.ports import UPLOAD
from ooc_gemm.planning import ledger

pytestmark = pytest.mark.usefixtures("small_chunks")


def test_more_chunks_than_are_decoded_at_a_time(monkeypatch):
    monkeypatch.setattr(ledger, "MOST_DECODED", 5)
    x, y, wanted = matrices(shape=(900, 500, 400))
    stored(x, y)
    _, c = product()
    assert np.array_equal(c, wanted.real)
    assert decoded() >= (15 * 7 + 8 * 6) // 5


def test_chunks_of_a_later_panel_wait_until_there_are_many(monkeypatch):
    """A few chunks take as long to decode as many."""
    x, y, wanted = matrices(shape=(128, 4 * 144, 144))
    make("a", x, compressors=ZSTD, chunks=(64, 144))
    make("b", y, compressors=ZSTD, chunks=(144, 72))
    monkeypatch.setattr(ledger, "MOST_DECODED", 4)  # as many as a pair of panels has
    monkeypatch.setattr(ooc_gemm.run.prepare, "_fastest", sent_if_any)
    monkeypatch.setattr(ooc_gemm.run.prepare, "make_plan", with_blocks(128, 144, 144))
    upload, record, came, ended, changed = Decoding.upload, CUDASession.record, [], [], Condition()

    def in_turn(self, data, piece, buffer):
        """One piece of a panel comes before the panel before it is complete, but after its last piece."""
        panel = (piece.cols if piece.operand == "a" else piece.rows)[0] // 144
        with changed:
            assert changed.wait_for(lambda: panel <= len(ended) or len(came) == 4 * panel, 10)
            found = upload(self, data, piece, buffer)
            high = 64 if piece.operand == "a" else 144
            came.extend([panel] * (-(-piece.rows[1] // high) - piece.chunk[0]))
            changed.notify_all()
        return found

    def late(self, stream, pair=None):
        if stream != UPLOAD:
            return record(self, stream, pair)
        with changed:
            assert changed.wait_for(lambda: len(came) > min(15, 4 * len(ended) + 4), 10)
            ended.append(pair)
            found = record(self, stream, pair)
            changed.notify_all()
        return found

    monkeypatch.setattr(Decoding, "upload", in_turn)
    monkeypatch.setattr(CUDASession, "record", late)
    found, c = product()
    assert np.array_equal(c, wanted.real)
    assert found.plan.panel_count == len(ended) == 4
    assert len(came) == 16
    assert decoded() == 4


def test_few_chunks_wait_for_others_while_the_device_decodes(monkeypatch):
    """The device is said to decode what it was given first until all 16 chunks have come."""
    x, y, wanted = matrices(shape=(64, 8 * 72, 64))
    make("a", x, compressors=ZSTD, chunks=(64, 72))
    make("b", y, compressors=ZSTD, chunks=(72, 64))
    monkeypatch.setattr(ooc_gemm.run.prepare, "_fastest", sent_if_any)

    def with_buffers(*given):
        plan = with_blocks(64, 64, 72)(*given)
        return replace(plan, k_panels=replace(plan.k_panels, buffers=8))

    monkeypatch.setattr(ooc_gemm.run.prepare, "make_plan", with_buffers)
    upload, came, stop, one_by_one = Decoding.upload, [], time.monotonic() + 20, Lock()

    def comes(self, data, piece, buffer):
        with one_by_one:
            time.sleep(5e-3)
            found = upload(self, data, piece, buffer)
            came.append(piece)
        return found

    monkeypatch.setattr(Decoding, "upload", comes)
    pending = property(lambda self: len(came) < 16 and time.monotonic() < stop)
    monkeypatch.setattr(driver.Event, "pending", pending)
    found, c = product()
    assert np.array_equal(c, wanted.real)
    assert found.plan.panel_count == 8
    assert len(came) == 16
    assert decoded() <= 3, "a few, then eight, which are all at a time, and then the others"


def test_each_place_waits_until_what_lies_there_is_decoded_and_decoding_for_copies(monkeypatch):
    """The stand-in does everything at once, so this looks at what streams are told to wait for."""
    monkeypatch.setattr(ledger, "MOST_DECODED", 5)
    log, copy, wait, record = [], driver.copy, driver.wait, driver.Events.record

    def copies(to, target, pitch, source, source_pitch, width, rows, stream):
        log.append(("copy", stream, target, width))
        return copy(to, target, pitch, source, source_pitch, width, rows, stream)

    def waits(stream, event):
        log.append(("wait", stream, event))
        return wait(stream, event)

    def records(self, stream):
        event = record(self, stream)
        log.append(("record", stream, event))
        return event

    def decodes(args, stream):
        table = np.frombuffer(args[0].tobytes(), "u4").reshape(-1, 4)[: int(args[1])]
        spans = [(int(args[3]) + 16 * int(row[0]), int(row[1])) for row in table]
        log.append(("decode", stream.ptr, spans, None))

    monkeypatch.setattr(driver, "copy", copies)
    monkeypatch.setattr(driver, "wait", waits)
    monkeypatch.setattr(driver.Events, "record", records)
    before_each(monkeypatch, "zstd", decodes)
    stored(*matrices(shape=(900, 500, 400))[:2])
    product()

    def before(at, stream):
        """Places in the log that are done before a stream goes on at this place of it."""
        reached, done = {stream: at}, set()
        for i in range(at - 1, -1, -1):
            kind, other, what, *_ = log[i]
            if i >= reached.get(other, -1):
                continue
            done.add(i)
            if kind == "wait":
                source = next(j for j in range(i) if log[j][0] == "record" and log[j][2] is what)
                reached[log[source][1]] = max(reached.get(log[source][1], -1), source)
        return done

    arrived, used, again = {}, [], 0
    for at, (kind, stream, what, size) in enumerate((*one, None)[:4] for one in log):
        if kind == "decode":
            for address, _ in what:
                assert arrived[address] in before(at, stream), "it is decoded before it has come"
            used += [(at, *span) for span in what]
        elif kind == "copy":
            arrived[what] = at
            for launched, address, length in used:
                if address < what + size and what < address + length:
                    assert launched in before(at, stream), "it comes where others are still being decoded"
                    again += 1
    assert again > 50
