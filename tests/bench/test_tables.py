"""Tables fit a terminal of 80 columns: no line is longer, and no cell is cut off."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make, ooc

from ooc_gemm.bench import tables
from ooc_gemm.cli import show
from ooc_gemm.planning import report

RESULTS = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "results"
LONG = "/a/folder [of some] :smile: project/" + "with-a-very-long-name-" * 5
"""A mount point longer than a line, in which rich would find markup and an emoji."""


def shown(capsys: pytest.CaptureFixture[str], *parts: Any) -> str:
    """What a terminal of 80 columns shows."""
    out = show.console()
    for part in parts:
        out.print(part)
    return capsys.readouterr().out


def check(text: str) -> None:
    assert text.strip()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


def joined(text: str) -> str:
    """The text without the line breaks and spaces of folded cells."""
    return "".join(text.split())


@pytest.fixture(autouse=True)
def narrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """80 columns, and no measured rates."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("OOC_GEMM_CACHE", str(tmp_path / "cache"))


def test_a_narrower_terminal_gets_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert show.console().width == 80


def test_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads((RESULTS / "kernels_h200.json").read_text())
    text = shown(capsys, tables.heading(found), *tables.kernel_tables(found))
    check(text)
    lines = [line.strip() for line in text.splitlines()]
    assert lines[lines.index("float32: work, and roof") - 1] == ""
    for row in found["rows"]:
        assert row["kernel"] in text
        assert tables.shape_of(row) in text


def test_kernels_of_long_names_that_failed(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads((RESULTS / "kernels_h200.json").read_text())
    rows = [{**row, "kernel": "naive-uncoalesced", "m": 131072, "failed": None} for row in found["rows"][:3]]
    rows[1] = {**rows[1], "failed": "DeviceError: no"}
    check(text := shown(capsys, *tables.kernel_tables({**found, "rows": rows})))
    assert "failed" in text
    check(text := shown(capsys, tables.listing_table()))
    for line in tables.listing():
        assert line["kernel"] in text


@pytest.mark.parametrize("name", ["stress_cpu_codecs", "stress_h200"])
def test_stress(capsys: pytest.CaptureFixture[str], name: str) -> None:
    found = json.loads((RESULTS / f"{name}.json").read_text())
    found["place"]["mounted"] = LONG
    parts = tables.stress_heading(found), tables.stress_table(found), *tables.stress_summary(found)
    check(text := shown(capsys, *parts))
    assert joined(LONG) in joined(text)
    for row in found["rows"]:
        assert tables.shape_of(row) in text
        assert row["types"] in text


def test_rates(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "mount_point", lambda system: LONG)
    ways = {f"{way}_bytes_per_second": 123.4e9 for way in ("read", "cached", "write", "decode")}
    speed = {"flops": 1.234e15}
    rates = {
        "date": "2026-01-01", "flops": {"a-kernel-of-a-long-name complex128 to complex128": speed},
        "upload_bytes_per_second": 1e9, "download_bytes_per_second": 1e9, "touch_bytes_per_second": 1e9,
        "piece_seconds": 1e-7, "folders": {"ext4 1:1": {**ways, "turns": 1.0}},
        "folders_of_several": {"ext4 1:1": {**ways, "turns": 1.0}},
        "unpack_bytes_per_second": {"blosc bitshuffle 9 complex128": 2.3e8},
    }  # fmt: skip
    check(text := shown(capsys, *tables.rates_tables({"A device of a long name, twice": rates})))
    assert joined(LONG)[:20] in joined(text)
    assert "230MB/s" in joined(text).replace(" ", "")
    check(shown(capsys, *tables.rates_tables({"A GPU": {"unpack_bytes_per_second": {"zstd": 1.0}}})))
    check(text := shown(capsys, tables.pairs_table([("cache", LONG)])))
    assert joined(LONG) in joined(text)


def test_engine_and_io(capsys: pytest.CaptureFixture[str]) -> None:
    stage = {"bytes": 1.2e15, "lanes": 64, "busy_seconds": 12345.67, "busy_share": 1.0,
             "bytes_per_second": 123.4e12}  # fmt: skip
    row = {
        "m": 131072, "n": 131072, "k": 131071, "dtype": "complex128", "layout": "squares", "seconds": 12345.6,
        "tflops": 1234.5, "kernel": "a-kernel-of-a-long-name", "device": "cuda:0,1,2,3", "ratio": 1.0,
        "stages": dict.fromkeys(("read", "upload", "compute", "download", "write"), stage),
        "limits": dict.fromkeys(("read", "upload", "compute", "download", "write"), 12345.67),
        "limit_seconds": 12345.67, "limit_by": "store", "predicted_seconds": 12345.67,
        "rates": f"measured 2026-01-01, default rates for {LONG}",
        "peers": {"dask": {"seconds": 12345.67}, "numpy": {"seconds": None, "failed": LONG}},
    }  # fmt: skip
    place = {"mounted": LONG, "type": "ext4"}
    found = {"device": "a GPU", "place": place, "cold": True, "repeat": 3, "rows": [row]}
    check(text := shown(capsys, tables.engine_heading(found), *tables.engine_tables(found)))
    assert text.count("12345.67 s") >= 10
    rows = [
        {"group": "read cached", "way": "in memory", "bytes_per_second": [1.23e9, None, 123e9, 123e9, 123e9]},
    ]
    found = {"place": place, "threads": [1, 4, 16, 64, 128], "rows": rows}
    check(shown(capsys, tables.io_heading(found), tables.io_table(found)))


def test_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make("a", np.ones((40, 60), "f4"), chunks=(1, 60))
    make("b", np.ones((60, 50), "f4"), chunks=(60, 1))
    for command in (["plan", "a", "b"], ["plan", "--gram", "a"]):
        done = ooc(*command, "-d", "cpu", "-M", "1GiB")
        assert done.code == 0, done
        check(done.out)
        assert "default rates (not measured); measure with\n" in done.out
        assert " `ooc-gemm info --measure`\n" in done.out


def test_a_long_value_of_a_plan_is_wrapped() -> None:
    text = report._wrapped("see `ooc-gemm info --measure`, " * 9 + LONG, 15)
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("`ooc-gemm info --measure`") == 9  # each in one line
