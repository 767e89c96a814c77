import importlib.util
import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Done, gpu_missing, ooc

from ooc_gemm.bench import figures, gpu, measure
from ooc_gemm.bench import kernels as bench
from ooc_gemm.cuda_kernels import catalog, roofline
from ooc_gemm.cuda_kernels import tuning as tune
from ooc_gemm.cuda_kernels.config import Config
from ooc_gemm.devices.cuda.gpus import require_cupy
from ooc_gemm.support import cache
from ooc_gemm.support.errors import InputError

ROOT = Path(__file__).resolve().parents[2]


def run(*args: Any) -> Done:
    return ooc("bench", "kernels", *args)


# ---- formulas ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((5, 7, 3), (1, 1)),
        ((5, 7, 3), (2, 4)),
        ((8, 8, 4), (4, 4)),
        ((1, 9, 2), (16, 16)),
        ((4, 6, 0), (2, 2)),
    ],
)
def test_loads_and_stores_are_those_of_a_loop_over_tiles(shape: Any, tile: Any) -> None:
    m, n, k = shape
    loads = stores = operations = 0
    for top in range(0, m, tile[0]):
        for left in range(0, n, tile[1]):
            rows, cols = min(tile[0], m - top), min(tile[1], n - left)
            for _ in range(k):
                loads += rows + cols
                operations += 2 * rows * cols
            stores += rows * cols
    found = roofline.work("float32", m, n, k, tile)
    assert (found.operations, found.loads, found.stores) == (operations, loads, stores)
    assert found.nbytes == 4 * (loads + stores)


def test_ratios_of_a_naive_and_of_a_tiled_kernel() -> None:
    naive = roofline.work("float32", 64, 64, 1000, (1, 1))
    assert naive.loads == 2 * 1000 * 64 * 64
    assert naive.accesses_ratio == pytest.approx(2000 / 2001)  # 2k operations, 2k loads and a store
    assert naive.intensity == pytest.approx(2000 / 2001 / 4)
    tiled = roofline.work("float32", 64, 64, 1000, (32, 32))
    assert tiled.loads == 4 * (32 + 32) * 1000
    mixed = roofline.work("float16", 64, 64, 1000, (32, 32))
    assert mixed.nbytes == 2 * tiled.loads + 4 * 64 * 64  # C is float32
    assert roofline.work("int8", 2, 3, 4, (1, 1)).nbytes == 2 * 24 + 4 * 6
    assert roofline.work("complex64", 2, 3, 4, None).operations == 8 * 24
    assert roofline.work("float64", 2, 3, 4, None).loads is None
    assert roofline.work("float32", 0, 3, 4, (1, 1)).intensity is None


def test_rows_of_some_kernels_come_with_what_they_are_compared_with() -> None:
    rows = [
        {"kernel": kernel, "dtype": dtype}
        for kernel in ("cublas", "cublas-tf32", "ffma", "tf32")
        for dtype in ("float32", "float64")
    ]
    report = {"device": "some", "rows": rows}

    def names(kernels: Any, dtypes: Any) -> list[tuple[str, str]]:
        found = bench.select(report, kernels, dtypes)
        assert found["device"] == "some"
        return [(row["kernel"], row["dtype"]) for row in found["rows"]]

    assert bench.select(report, (), ())["rows"] == rows
    assert names(("tf32",), ("float32",)) == [("cublas-tf32", "float32"), ("tf32", "float32")]
    assert names(("ffma",), ()) == [
        ("cublas", "float32"), ("cublas", "float64"), ("ffma", "float32"), ("ffma", "float64")
    ]  # fmt: skip


def test_place_on_the_roofline() -> None:
    # Peak 100, bandwidth 10: the ridge is at 10 operations a byte.
    assert roofline.place(4, 2, 100, 10) == roofline.Place("memory", 20, 0.2)
    assert roofline.place(50, 20, 100, 10) == roofline.Place("compute", 100, 0.5)
    assert roofline.place(50, 10, 100, 10) == roofline.Place("compute", 100, 0.5)
    assert roofline.place(25, 2, 100, 10) == roofline.Place("caches", 100, 0.25)
    assert roofline.place(25, None, 100, 10) == roofline.Place("compute", 100, 0.25)
    assert roofline.place(25, 2, None, 10) is None


def test_peaks_are_those_of_the_data_sheets() -> None:
    h100 = roofline.peak_flops((9, 0), 132, 1.83e9)
    assert h100["float16"] == pytest.approx(989.4e12, rel=1e-3)
    assert h100["tf32"] == pytest.approx(494.7e12, rel=1e-3)
    assert h100["int8"] == pytest.approx(1978.9e12, rel=1e-3)
    assert roofline.peak_flops((9, 0), 132, 1.98e9)["float64_tensor"] == pytest.approx(66.9e12, rel=1e-3)
    a100 = roofline.peak_flops((8, 0), 108, 1.41e9)
    assert [round(a100[name] / 1e12, 1) for name in ("float32", "float64", "tf32", "float16", "int8")] == [
        19.5, 9.7, 155.9, 311.9, 623.7
    ]  # fmt: skip
    t4 = roofline.peak_flops((7, 5), 40, 1.59e9)
    assert t4["float16"] == pytest.approx(65e12, rel=0.01)
    assert "tf32" not in t4
    assert roofline.peak_flops((99, 0), 132, 1.83e9) == {}


def test_peak_over_a_kernel() -> None:
    peaks = roofline.peak_flops((9, 0), 132, 1.83e9)
    assert roofline.peak_of("ffma", "float32", peaks) == ("float32", peaks["float32"])
    assert roofline.peak_of("fp16x3", "float32", peaks) == ("float16 / 3", peaks["float16"] / 3)
    assert roofline.peak_of("ffma", "float64", peaks) == ("float64", peaks["float64"])
    assert roofline.peak_of("cublas", "complex128", peaks) == ("float64_tensor", peaks["float64_tensor"])
    old = roofline.peak_flops((7, 5), 40, 1.59e9)
    assert roofline.peak_of("cublas", "float64", old) == ("float64", old["float64"])
    assert roofline.peak_of("cublas-tf32", "float32", old) is None
    assert roofline.peak_of("ffma", "int64", peaks) is None


# ---- the error program -------------------------------------------------------------------------


def test_errors_of_a_known_difference() -> None:
    want = np.array([[3.0, -4.0], [3.0, 4.0]])  # root mean square √12.5
    got = (want + np.array([[0.0, 0.5], [0.0, 0.0]])).astype(np.float32)
    found = measure.errors(got, want, 0.1)
    assert found["beyond_percent"] == 25
    assert found["largest"] == 0.5
    assert found["mean_squared"] == 0.0625
    assert found["root_mean_square"] == 12.5**0.5
    assert found["relative_frobenius"] == pytest.approx(0.5 / np.linalg.norm(want))
    assert measure.errors(got, want, 0.2)["beyond_percent"] == 0  # 0.2 · √12.5 > 0.5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["got", "want"])
def test_no_error_that_is_not_finite_passes(bad: float, where: str) -> None:
    want, got = np.ones((4, 5)), np.ones((4, 5), np.float32)
    (want if where == "want" else got)[2, 3] = bad
    with np.errstate(invalid="ignore"):
        found = measure.errors(got, want, 1e30)
    assert found["beyond_percent"] > 0
    assert found["largest"] is found["mean_squared"] is found["relative_frobenius"] is None
    json.dumps(found, allow_nan=False)


def test_errors_of_exact_and_of_empty_results() -> None:
    whole = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert measure.errors(whole, whole.astype(np.float64), 0)["beyond_percent"] == 0
    assert measure.errors(whole, whole.astype(np.int64) + np.array([0, 0, 1]), 0)[
        "beyond_percent"
    ] == pytest.approx(100 / 3)
    zeros = np.zeros((2, 2))
    assert measure.errors(zeros, zeros, 0)["beyond_percent"] == 0
    assert measure.errors(zeros + 1, zeros, 9)["beyond_percent"] == 100
    assert measure.errors(np.zeros((0, 3)), np.zeros((0, 3)), 0)["beyond_percent"] == 0


@pytest.mark.parametrize("dtype", ["float16", "float64", "complex64", "complex128", "int8", "uint8", "int64"])
def test_random_data(dtype: str) -> None:
    rng = np.random.default_rng(0)
    a, b = (measure.random(rng, 300, 200, dtype) for _ in range(2))
    assert a.dtype == dtype
    assert a.shape == (300, 200)
    assert not np.array_equal(a, b)
    if np.dtype(dtype).kind in "iu":
        assert (a.min(), a.max()) == ((0, 255) if dtype == "uint8" else (-128, 127))
    else:
        parts = [a.real, a.imag] if np.iscomplexobj(a) else [a]
        for part in parts:
            assert abs(part.astype(float).mean()) < 0.02
            assert abs(part.astype(float).std() - 1) < 0.02


@pytest.mark.parametrize("k", [1, 16, 907, 8192])
def test_the_threshold_passes_rounding_and_catches_a_lost_product(k: int) -> None:
    rng = np.random.default_rng(k)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, k), (k, 64)))
    want = a.astype(float) @ b.astype(float)
    limit = measure.rounding("ffma", "float32", k)
    straight = np.zeros((64, 64), np.float32)
    for i in range(k):
        straight += a[:, i : i + 1] * b[i]
    assert measure.errors(straight, want, limit)["beyond_percent"] == 0
    lost = straight - (a[:, :1] * b[0])
    assert measure.errors(lost, want, limit)["beyond_percent"] > 90
    assert measure.rounding("int8", "int8", k) == 0
    assert measure.rounding("dmma", "float64", k) < limit < measure.rounding("tf32", "float32", k)


# ---- which kernels -----------------------------------------------------------------------------


def test_pairs() -> None:
    assert ("ffma", "float32") in bench.pairs((), ())
    assert bench.pairs(("ffma", "ffma"), ("float64", "int64")) == [("ffma", "float64"), ("ffma", "int64")]
    assert bench.pairs(("cublas",), ("int8",)) == [("cublas", "int8")]
    with pytest.raises(InputError, match="ffma"):
        bench.pairs(("ffma",), ("complex128",))
    with pytest.raises(InputError, match="choose among"):
        bench.pairs(("absent",), ())
    with pytest.raises(InputError, match="--list"):
        bench.pairs((), ("float8",))


def test_list_names_every_kernel() -> None:
    done = run("--list")
    assert done.code == 0
    assert max(map(len, done.out.splitlines())) <= 100
    lines = json.loads(run("--list", "--json").out)
    assert [line["kernel"] for line in lines] == [*catalog.KERNELS, *gpu.CUBLAS]
    for line in lines:
        assert line["kernel"] in done.out
        assert line["explanation"].split()[0] in done.out


@pytest.mark.parametrize("args", [(), ("--tune",), ("--kernel", "ffma", "--size", "64", "--json")])
def test_without_a_gpu_it_exits_2_with_one_sentence(args: Any) -> None:
    if not gpu_missing():
        pytest.skip("there is a GPU")
    done = run(*args)
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert done.err.startswith("Error: kernels run on an NVIDIA GPU, and there is no")


@pytest.mark.parametrize("args", [("--m", 3), ("--size", 0), ("--kernel", "absent"), ("--plot", "x.pdf")])
def test_wrong_usage_exits_2(args: Any) -> None:
    assert run(*args).code == 2


# ---- tuning ------------------------------------------------------------------------------------


@pytest.fixture
def two_configs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Config]:
    """A kernel `toy` in two configurations, and an empty cache."""
    monkeypatch.setenv("OOC_GEMM_CACHE", str(tmp_path / "cache"))
    first = Config("toy", "float32", 32, 32, (64, 1), (("BM", 32), ("BN", 32)))
    configs = [first, replace(first, bm=64, macros=(("BM", 64), ("BN", 32)))]
    kernel = catalog.Kernel("toy", "", ("float32",), lambda dtype, trans_a, trans_b: configs, False)
    monkeypatch.setitem(catalog.KERNELS, "toy", kernel)
    return configs


def _best(shape: tuple[int, int, int], device: str = "GPU") -> Config:
    return tune.best_config("toy", "float32", False, False, *shape, device, 132)


def test_tuning_is_remembered_by_device_and_class(two_configs: list[Config]) -> None:
    def seconds(kernel: str, dtype: str, ta: bool, tb: bool, shape: Any, configs: Any) -> list[float | None]:
        assert (kernel, dtype, configs) == ("toy", "float32", two_configs)
        return {"large": [2.0, 1.0], "small": [1.0, 2.0], "deep": [None, 3.0]}.get(
            tune.shape_class(*shape), [None, None]
        )

    default, other = two_configs
    assert _best((8192, 8192, 8192)) == default
    chosen = list(tune.choose([("toy", "float32")], seconds, "GPU"))
    assert [(choice.shape, choice.config, choice.seconds) for choice in chosen] == [
        ("small", default, 1.0), ("deep", other, 3.0), ("large", other, 1.0)
    ]  # fmt: skip
    assert _best((8192, 8192, 8192)) == _best((4096, 4096, 64)) == _best((512, 512, 65536)) == other
    assert _best((907, 907, 907)) == _best((64, 8192, 8192)) == default
    assert _best((8192, 8192, 8192), "another GPU") == default
    assert [path.name for path in cache.folder().iterdir()] == ["tuned.json"]  # no temporary file
    list(tune.choose([("toy", "float32")], seconds, "another GPU"))
    assert _best((8192, 8192, 8192)) == _best((8192, 8192, 8192), "another GPU") == other


def test_what_is_no_longer_shipped_or_damaged_is_not_used(two_configs: list[Config]) -> None:
    default, other = two_configs
    list(tune.choose([("toy", "float32")], lambda *_: [2.0, 1.0], "GPU"))
    assert _best((8192, 8192, 8192)) == other
    two_configs.pop()
    assert _best((8192, 8192, 8192)) == default
    for text in ("", "[1]", '{"GPU": 3}', "{"):
        (cache.folder() / "tuned.json").write_text(text)
        assert _best((8192, 8192, 8192)) == default


def test_one_configuration_is_not_timed(two_configs: list[Config]) -> None:
    two_configs.pop()
    assert list(tune.choose([("toy", "float32")], lambda *_: pytest.fail("timed"), "GPU")) == []


def test_each_class_is_timed_with_a_shape_of_its_own() -> None:
    assert {name: tune.shape_class(*shape) for name, shape in tune.SHAPES.items()} == {
        name: name for name in tune.SHAPES
    }
    assert tune.shape_class(131072, 64, 4096) == "narrow"
    assert tune.shape_class(1, 1, 1) == "small"


# ---- what is shown -----------------------------------------------------------------------------


def _report() -> dict[str, Any]:
    """As of an H200, with one kernel that failed and one that is wrong."""
    peaks = roofline.peak_flops((9, 0), 132, 1.98e9)
    rows = []
    for size in (907, 8192):
        for kernel, tflops, tile in (
            ("cublas", 51.5, None),
            ("naive_uncoalesced", 0.5, (1, 1)),
            ("ffma", 52.0, (128, 256)),
        ):
            asked = roofline.work("float32", size, size, size, tile)
            name, peak = roofline.peak_of(kernel, "float32", peaks) or ("", 0.0)
            place = roofline.place(tflops * 1e12, asked.intensity, peak, 4.2e12)
            assert place
            rows.append(
                {
                    "kernel": kernel, "dtype": "float32", "m": size, "n": size, "k": size, "failed": None,
                    "correct": True, "seconds": asked.operations / tflops / 1e12, "tflops": tflops,
                    "rival": "cublas", "ratio": tflops / 51.5, "operations": asked.operations,
                    "loads": asked.loads, "stores": asked.stores, "accesses_ratio": asked.accesses_ratio,
                    "intensity": asked.intensity, "peak": name, "peak_flops": peak,
                    "roof": {"bound": place.bound, "flops": place.roof_flops, "fraction": place.fraction},
                    "error": {"beyond_percent": 0.0, "mean_squared": 3.4e-10, "largest": 1.2e-4,
                              "relative_frobenius": 8.1e-7, "not_finite": 0},
                }
            )  # fmt: skip
    return {
        "suite": "kernels", "date": "2026-11-21T00:00:00+00:00", "repeat": 7, "rows": rows,
        "bandwidth_bytes_per_second": 4.2e12, "device": {"name": "NVIDIA H200", "multiprocessors": 132},
        "versions": {"cublas": 130000, "cupy": "14.0.0"},
    }  # fmt: skip


def _spoil(report: dict[str, Any]) -> dict[str, Any]:
    first, second = report["rows"][1], report["rows"][2]
    kept = ("kernel", "dtype", "m", "n", "k")
    report["rows"][1] = {name: first[name] for name in kept} | {"failed": "DeviceError: no"}
    second["correct"] = False
    second["error"] |= {
        "beyond_percent": 100.0, "mean_squared": None, "largest": None, "relative_frobenius": None,
        "not_finite": 12,
    }  # fmt: skip
    return report


def test_tables_fit_100_columns_and_say_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text(json.dumps(_report()))
    done = run("--from", tmp_path / "good.json")
    assert (done.code, done.err) == (0, "")
    assert max(map(len, done.out.splitlines())) <= 100
    for text in ("8192³", "naive_uncoalesced", "52", "1.01", "3.4e-10", "8.1e-07", "memory", "compute"):
        assert text in done.out
    (tmp_path / "bad.json").write_text(json.dumps(_spoil(_report())))
    done = run("--from", tmp_path / "bad.json")
    assert done.code == 3
    assert "naive_uncoalesced float32 907³ failed: DeviceError: no" in done.err
    assert "ffma float32 907³ is wrong: 100 %" in done.err
    assert "NaN" in done.out
    assert "failed" in done.out


def test_heights_are_spread() -> None:
    assert figures.spread([], 1) == []
    assert figures.spread([1, 5, 9], 2) == [1, 5, 9]
    assert figures.spread([4, 4, 4], 2) == [2, 4, 6]
    heights = figures.spread([0, 0.1, 1.0, 5, 5], 1)
    assert all(b - a >= 1 - 1e-9 for a, b in pairwise(heights))


def test_each_kernel_has_a_colour_of_its_own():
    names = [name for name in catalog.KERNELS if "float32" in gpu.dtypes_of(name)]
    styles = dict(figures._styles((name, [{"kernel": name}]) for name in names))
    assert len({look["color"] for look in styles.values()}) == len(names) > 12


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_plot(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"kernels.{suffix}"
    figures.plot(_report(), str(path))
    if suffix == "png":
        assert path.read_bytes().startswith(b"\x89PNG")
    else:
        text = path.read_text(encoding="utf-8")
        for label in ("naive_uncoalesced", "ffma", "cublas", "8192", "TFLOP/s", "float32 peak", "4.20 TB/s"):
            assert label in text


def test_plot_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"ooc-gemm\[plot\]"):
        figures.check_plot(str(tmp_path / "x.svg"))
    with pytest.raises(InputError, match="folder"):
        figures.check_plot(str(tmp_path / "absent" / "x.svg"))


def test_readme_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec
    assert spec.loader
    tables: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    text = "a\n<!-- benchmark:kernels_h200 -->\nold\n<!-- /benchmark -->\nb\n"
    empty = tables.render(text)
    assert empty == "a\n<!-- benchmark:kernels_h200 -->\n<!-- /benchmark -->\nb\n"
    (tmp_path / "kernels_h200.json").write_text(json.dumps(_spoil(_report())))
    full = tables.render(empty)
    assert "| float32, TFLOP/s | 907³ | 8192³ |" in full
    assert "| ffma | failed | 52 (1.01) |" in full
    assert "| cublas | 51.5 | 51.5 |" in full
    assert tables.render(full) == full
    (tmp_path / "rungs_h200.json").write_text(json.dumps({**_report(), "commit": "1234567"}))
    rungs = tables.render(text.replace("kernels", "rungs"))
    assert "| cublas | 51.5 | 51.5 |" in rungs
    assert ", commit 1234567.\n" in rungs


# ---- on a GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_end_to_end(tmp_path: Path) -> None:
    if why := gpu_missing():
        pytest.skip(why)
    pytest.importorskip("matplotlib")
    picture = tmp_path / "kernels.svg"
    done = run(
        "--kernel", "ffma", "--kernel", "cublas", "--size", 907, "--repeat", 3, "--json", "--plot", picture
    )
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert [row["kernel"] for row in report["rows"]] == ["cublas", "ffma"]
    for row in report["rows"]:
        assert row["failed"] is None
        assert row["correct"] is True
        assert row["ratio"] > 0.1
        assert 0 < row["error"]["relative_frobenius"] < 1e-5
        assert row["error"]["root_mean_square"] == pytest.approx(907**0.5, rel=0.02)
        assert len(row["seconds_all"]) == 3
    assert report["device"]["clock_hertz"] > 1e8
    assert report["device"]["memory_bandwidth_bytes_per_second"] > 1e10
    assert "ffma" in picture.read_text(encoding="utf-8")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("cublas", dtype) for dtype in gpu.dtypes_of("cublas")] + [("cublas-tf32", "float32")],
)
@pytest.mark.parametrize("trans", [(False, False), (True, False), (False, True), (True, True)])
def test_cublas_is_right_for_all_types_and_transpositions(kernel: str, dtype: str, trans: Any) -> None:
    if why := gpu_missing():
        pytest.skip(why)
    report = bench.run([(kernel, dtype)], [(96, 160, 224)], repeat=1, trans_a=trans[0], trans_b=trans[1])
    (row,) = [row for row in report["rows"] if row["kernel"] == kernel]
    assert row["failed"] is None
    assert row["correct"] is True


@pytest.mark.gpu
def test_an_array_of_another_shape_is_refused() -> None:
    if why := gpu_missing():
        pytest.skip(why)
    cupy = require_cupy("kernels run")
    gemm = gpu.open_gemm("ffma", "float32", False, False, 8, 8, 8)
    a, b, c = (cupy.zeros((8, 8), "f") for _ in range(3))
    for wrong in ((a[:7], b, c), (a, b[:, :7], c), (a, b, c[:, ::2]), (a, b.T, c)):
        with pytest.raises(ValueError, match="in rows"):
            gemm(1, wrong[0], wrong[1], 0, wrong[2], cupy.cuda.get_current_stream())
