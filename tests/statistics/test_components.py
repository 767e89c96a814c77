"""Principal components and truncated decompositions agree with NumPy's full ones in float64."""

import errno
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import zarr
from arrays import LAYOUTS
from conftest import make, ooc
from decompositions import check_pca, check_scores, check_svd, close, exact, graded

import ooc_gemm
from ooc_gemm import BudgetError, InputError, StoreError, pca, svd
from ooc_gemm.run import stream
from ooc_gemm.statistics.components import planned

LIMIT = {"memory_limit": "2GiB", "device": "cpu"}


KINDS = ["numpy", "dask", "xarray", "h5py", *LAYOUTS]


@pytest.mark.parametrize("shape", [(133, 71), (71, 133)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_input(tmp_path, kind, shape):
    values = graded(shape, 1, mean=3, dtype="f4")
    if kind == "dask":
        x = pytest.importorskip("dask.array").from_array(values, chunks=(50, 40))
    elif kind == "xarray":
        x = pytest.importorskip("xarray").DataArray(values, dims=("observation", "variable"))
    elif kind == "h5py":
        file = pytest.importorskip("h5py").File(tmp_path / "a.h5", "w")
        x = file.create_dataset("a", data=values, chunks=(64, 50), compression="gzip")
    else:
        x = values if kind == "numpy" else make(tmp_path / "a", values, **LAYOUTS[kind])
    p = pca(x, 5, **LIMIT)
    check_pca(p, values, 5, 1e-4)
    assert p.passes == 6
    assert p.components.dtype == p.scores.dtype == np.float32


@pytest.mark.parametrize("shape", [(40, 40), (300, 7), (7, 300), (2, 50), (500, 1), (3, 2)])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_every_component(shape, dtype):
    """As many as there are, in few passes. The last one of a centred wide matrix is nothing."""
    k = min(shape)
    values = np.random.default_rng(2).standard_normal(shape).astype(dtype)
    p = pca(values, k, **LIMIT)
    u, s, vt, _ = exact(values, k)
    bound = 1e-4 if dtype == "f4" else 1e-9
    close(p.singular_values + s[0], s + s[0], bound)
    close(p.components @ p.components.T, np.eye(k), 1e-5)
    close(p.scores @ p.components, (u * s) @ vt, bound)
    assert p.passes == 3
    q = svd(values, k, **LIMIT)
    assert q.passes == 3
    close(q.singular_values, exact(values, k, centred=False)[1], bound)
    close(q.u * q.singular_values @ q.vt, values, bound)


@pytest.mark.parametrize("shape", [(2000, 60), (60, 2000)])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("drift", [False, True])
def test_means_of_ten_thousand_deviations(tmp_path, shape, dtype, drift):
    values = graded(shape, 3, ratio=0.8)
    values /= values.std()
    values += 1e4 * (1 + np.random.default_rng(4).random(shape[1]))
    if drift:  # the first panel tells little of the others
        values[: shape[0] // 2] += 100
    values = values.astype(dtype)
    p = pca(make(tmp_path / "a", values, chunks=(100, 60)), 4, **LIMIT)
    check_pca(p, values, 4, 3e-4 if dtype == "f4" else 1e-6)
    assert p.mean.dtype == np.float64


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "i4", "i8", "f2"])
def test_every_type(dtype):
    rng = np.random.default_rng(5)
    values = np.round(rng.standard_normal((300, 6)) @ rng.standard_normal((6, 40)) * 8).clip(0, 100)
    values = values.astype(dtype)
    check_pca(pca(values, 4, **LIMIT), values, 4, 1e-4)


@pytest.mark.parametrize("shape", [(3001, 90), (90, 3001)])
@pytest.mark.parametrize("dtype", ["i1", "i2", "f2", "f4", "f8"])
def test_means_have_the_digits_of_float64(shape, dtype):
    x = np.random.default_rng(0).integers(-50, 100, shape).astype(dtype)
    x = x if x.dtype.kind == "i" else x / x.dtype.type(7)
    np.testing.assert_allclose(pca(x, 3, **LIMIT).mean, x.mean(axis=0, dtype="f8"), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(400, 50), (50, 400)])
@pytest.mark.parametrize("kind", ["numpy", "zstd"])
def test_svd(tmp_path, shape, kind):
    values = graded(shape, 6, mean=0.5)
    x = values if kind == "numpy" else make(tmp_path / "a", values, **LAYOUTS[kind])
    q = svd(x, 6, **LIMIT)
    u, s, vt, _ = exact(values, 6, centred=False)
    close(q.singular_values, s, 1e-9)
    close(q.u, u, 1e-6)
    close(q.vt, vt, 1e-6)
    assert q.passes == 6


@pytest.mark.parametrize("shape", [(300, 64), (64, 300), (80, 80)])
@pytest.mark.parametrize("dtype", ["i1", "f4", "f8"])
@pytest.mark.parametrize("iterations", [0, 1, 4])
def test_values_and_vectors_belong_together(tmp_path, shape, dtype, iterations):
    """Also where singular values are so close that the iterations do not separate them."""
    options, bound = {"iterations": iterations, **LIMIT}, 1e-12 if dtype == "f8" else 3e-6
    for seed in range(4):
        x = (20 * np.random.default_rng(seed).standard_normal(shape) + 3).astype(dtype)
        check_svd(svd(x, 16, **options), x, bound)
        p = pca(x, 16, **options)
        check_scores(p, x, bound)
        written = pca(x, 16, scores=str(tmp_path / "s"), force=True, **options)
        np.testing.assert_array_equal(written.scores[...], p.scores)
    check_scores(pca(x, 16, **options), x, bound)


@pytest.mark.parametrize("shape", [(300, 40), (40, 300)])
@pytest.mark.parametrize("ratio", [0.5, 0.1, 0.02])
def test_small_values_and_vectors_belong_together(shape, ratio):
    rng = np.random.default_rng(1)
    u, v = (np.linalg.qr(rng.standard_normal((extent, 6)))[0] for extent in shape)
    x = (u * 100 * ratio ** np.arange(6)) @ v.T
    check_svd(svd(x, 6, **LIMIT), x, 1e-10)
    check_scores(pca(x, 5, **LIMIT), x, 1e-10)


@pytest.mark.parametrize("shape", [(100, 40), (40, 100)])
def test_rank_deficient(shape):
    rng = np.random.default_rng(7)
    values = rng.standard_normal((shape[0], 3)) @ rng.standard_normal((3, shape[1]))
    p = pca(values, 8, **LIMIT)
    close(p.singular_values[:3], exact(values, 3)[1], 1e-10)
    assert (p.singular_values[3:] <= 1e-7 * p.singular_values[0]).all()
    close(p.components @ p.components.T, np.eye(8), 1e-8)
    close(p.scores @ p.components, values - values.mean(axis=0), 1e-8)
    q = svd(values, 8, **LIMIT)
    close(q.u * q.singular_values @ q.vt, values, 1e-8)
    close(q.u[:, :3].T @ q.u[:, :3], np.eye(3), 1e-8)
    zero = np.zeros((20, 30)) if shape[0] < shape[1] else np.zeros((30, 20))
    q = svd(zero, 4, **LIMIT)
    assert not q.u.any()
    assert not q.singular_values.any()
    close(q.vt @ q.vt.T, np.eye(4), 1e-12)


@pytest.mark.parametrize("shape", [(100, 40), (40, 100)])
def test_constant_columns(shape):
    values = graded(shape, 8)
    values[:, ::4] = 0.1
    p = pca(values, 3, **LIMIT)
    check_pca(p, values, 3, 1e-6)
    assert np.abs(p.components[:, ::4]).max() < 1e-12
    nothing = pca(np.full(shape, 0.1, "f4"), 2, **LIMIT)
    assert (nothing.singular_values == 0).all()
    assert (nothing.explained_variance_ratio == 0).all()
    assert np.isfinite(nothing.components).all()


@pytest.mark.parametrize("shape", [(300, 40), (40, 300)])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(tmp_path, monkeypatch, shape, bad):
    monkeypatch.chdir(tmp_path)
    values = graded(shape, 9)
    values[7, 3] = bad
    with pytest.raises(InputError, match="column 3 holds NaN or infinite numbers"):
        pca(make("a", values, chunks=(50, 40)), 2, scores="s", **LIMIT)
    with pytest.raises(InputError, match="a: column 3 holds NaN or infinite numbers"):
        svd("a", 2, u="s", **LIMIT)
    assert not (tmp_path / "s").exists()


POWERS = [("f4", 1e-44), ("f4", 1e-24), ("f4", 1e-12), ("f4", 1e20), ("f4", 1e35)]
POWERS += [("f8", 1e-320), ("f8", 1e-170), ("f8", 1e150), ("f8", 1e304)]


@pytest.mark.parametrize("shape", [(300, 40), (40, 300)])
@pytest.mark.parametrize(("dtype", "power"), POWERS)
def test_numbers_whose_squares_are_too_large_or_too_small(shape, dtype, power):
    """They are decomposed as if they were multiplied by a power of two."""
    values = (graded(shape, 18, mean=3) * power).astype(dtype)
    exponent = np.frexp(np.abs(values).max())[1]
    bound = 1e-4 if dtype == "f4" else 1e-9
    few = 1e-2 if power in (1e-44, 1e-320) else bound  # what is so small has few digits
    wide = np.ldexp(values.astype("f8"), -exponent)
    p, q = pca(values, 3, **LIMIT), svd(values, 3, **LIMIT)
    u, s, vt, every = exact(wide, 3)
    close(np.ldexp(p.singular_values, -exponent), s, few)
    close(np.ldexp(p.scores.astype("f8"), -exponent), u * s, few)
    close(np.ldexp(p.mean, -exponent), wide.mean(axis=0), few)
    close(p.components, vt, bound)
    close(p.explained_variance_ratio, s**2 / (every**2).sum(), few)
    u, s, vt, _ = exact(wide, 3, centred=False)
    close(np.ldexp(q.singular_values, -exponent), s, few)
    close(q.u, u, bound)
    close(q.vt, vt, bound)
    assert p.passes <= 6 + 3


@pytest.mark.parametrize("shape", [(300, 40), (40, 300)])
@pytest.mark.parametrize("value", [1, 0.9, 3, 0.1])
def test_rounding_that_is_the_same_in_all_rows(shape, value):
    """It is no direction of its own. Sums of equal numbers in float32 lose more digits than others."""
    x = np.full(shape, value, "f4")
    x[::2] *= -1
    largest = float(x[1, 1]) * (shape[0] * shape[1]) ** 0.5
    for call in (pca, svd):
        close(call(x, 1, **LIMIT).singular_values, np.array([largest]), 4e-6)


@pytest.mark.parametrize("shape", [(300, 40), (40, 300)])
def test_results_that_are_too_large(tmp_path, shape):
    x = np.ones(shape, "f4") * np.float32(3e38)
    x[::2] *= -1
    out = tmp_path / "s"
    with pytest.raises(InputError, match="a singular value that is too large for float32; scale the array"):
        pca(x, 2, scores=str(out), **LIMIT)
    assert not out.exists()
    # Sums of equal numbers, as above: 2e-6 with the kernels of some processors.
    close(svd(x, 1, **LIMIT).singular_values, np.array([3e38 * (shape[0] * shape[1]) ** 0.5]), 4e-6)
    with pytest.raises(InputError, match="too large for float64"):
        svd(x.astype("f8") * 5e269, 1, **LIMIT)


@pytest.mark.parametrize("shape", [(900, 50), (50, 900)])
@pytest.mark.parametrize("command", ["pca", "svd"])
def test_written_results_are_the_returned_ones(tmp_path, monkeypatch, shape, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ooc_gemm.run.rows.CHUNK_BYTES", (0, 2000, 0))
    x = make("a", graded(shape, 10, dtype="f4"), chunks=(100, 50))
    name, other = {"pca": ("scores", "components"), "svd": ("u", "vt")}[command]
    call = getattr(ooc_gemm, command)
    kept = call(x, 4, **LIMIT)
    done = call(x, 4, **{name: "out"}, **LIMIT)
    assert isinstance(getattr(done, name), zarr.Array)
    stored = zarr.open_array("out", mode="r")
    assert stored.shape == (shape[0], 4)
    assert stored.chunks == (min(125, shape[0]), 4)
    np.testing.assert_array_equal(stored[...], getattr(kept, name))
    np.testing.assert_array_equal(getattr(done, other), getattr(kept, other))
    assert done.bytes_written >= stored.nbytes
    with pytest.raises(InputError, match="out exists; give force=True"):
        call(x, 4, **{name: "out"}, **LIMIT)
    with pytest.raises(InputError, match="a is, contains or lies inside the input"):
        call(x, 4, **{name: "a"}, force=True, **LIMIT)
    call(x, 3, **{name: "out"}, force=True, **LIMIT)
    assert zarr.open_array("out", mode="r").shape == (shape[0], 3)


@pytest.mark.parametrize("begun", [False, True])
def test_there_is_no_room_for_what_is_kept(tmp_path, monkeypatch, begun):
    x, out = make(tmp_path / "a", graded((300, 40), 11)), tmp_path / "new" / "s"

    def full(dir):
        assert dir == tmp_path
        if begun:
            return open("/dev/full", "w+b")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(StoreError, match=r"file of 7200 bytes cannot be kept in .* make room there"):
        pca(x, 3, scores=str(out), **LIMIT)
    assert not out.parent.exists()


def test_a_failed_run_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make("a", graded((300, 40), 11, dtype="f4"), chunks=(50, 40), compressors=None)
    make("s", np.ones((2, 2)))

    def last(fraction):
        if fraction == 5 / 6:
            (tmp_path / "a" / "c" / "5" / "0").write_bytes(b"no frame")

    with pytest.raises(StoreError, match="chunk c/5/0"):
        pca("a", 3, scores="s", force=True, progress=last, **LIMIT)
    np.testing.assert_array_equal(zarr.open_array("s", mode="r")[...], np.ones((2, 2)))
    with pytest.raises(StoreError):
        pca("a", 3, scores="deep/below/new", **LIMIT)
    assert not (tmp_path / "deep").exists()


def test_it_reads_as_often_as_it_says(tmp_path):
    values = graded((3000, 50), 12, dtype="f4")
    x, fractions = make(tmp_path / "a", values, chunks=(700, 50), compressors=None), []
    whole = 5 * 700 * 50 * 4
    for iterations in (0, 1, 3):
        p = pca(x, 4, iterations=iterations, progress=fractions.append, **LIMIT)
        assert p.passes == iterations + 2
        assert values.nbytes * p.passes <= p.bytes_read <= whole * p.passes
        assert fractions[-1] == 1
        assert fractions == sorted(fractions)
        fractions.clear()


@pytest.mark.parametrize("shape", [(3000, 50), (50, 3000)])
@pytest.mark.parametrize("share", [1, 0.4, 0])
def test_what_is_decoded_stays_in_memory(tmp_path, monkeypatch, shape, share):
    """As far as the limit allows. The result is the same to the bit, and raw chunks are read again."""
    monkeypatch.setattr(stream, "PANEL_BYTES", 1 << 14)
    monkeypatch.setattr(stream, "baseline_bytes", lambda least: 100 << 20)
    values, chunks = graded(shape, 16, mean=3, dtype="f4"), (200, 50) if shape[0] > 50 else (50, 200)
    raw = make(tmp_path / "raw", values, chunks=chunks, compressors=None)
    x, out = make(tmp_path / "a", values, chunks=chunks), str(tmp_path / "s")
    roomy = plan_of(x, out, "1GiB")
    once, kept = roomy.input_bytes, roomy.ledger["kept panels"]
    least = sum(roomy.ledger.values()) - kept
    limit, options = least + int(share * kept), {"iterations": 2, "device": "cpu"}
    plan, found = plan_of(x, out, limit), pca(x, 4, scores=out, memory_limit=limit, **options)
    wanted = pca(x, 4, scores=str(tmp_path / "wanted"), memory_limit=least, **options)
    assert found.bytes_read == plan.bytes_read
    assert (found.bytes_read == once, found.bytes_read == 4 * once) == (share == 1, share == 0)
    assert plan.ledger.get("kept panels", 0) <= share * kept
    assert wanted.bytes_read == 4 * once
    assert pca(raw, 4, **options, memory_limit="1GiB").bytes_read == 4 * values.nbytes
    assert found.scores[...].tobytes() == wanted.scores[...].tobytes()
    check_pca(found, values, 4, 1e-4)


def plan_of(x, out, limit):
    """The plan of `pca` with 4 components and 2 iterations on the CPU."""
    return planned(x, out, 4, True, 2, limit, "cpu", None, notice=print)


def test_the_same_seed_gives_the_same_to_the_bit(tmp_path):
    x = make(tmp_path / "a", graded((3000, 50), 13, dtype="f4"), chunks=(100, 50))
    first, second, other = (pca(x, 4, seed=seed, **LIMIT) for seed in (1, 1, 2))
    assert first.scores.tobytes() == second.scores.tobytes()
    assert first.components.tobytes() == second.components.tobytes()
    close(other.components, first.components, 1e-4)


@pytest.mark.slow
def test_tall_chunks_are_read_by_columns(tmp_path):
    """No row of whole chunks fits the limit; a column of them does."""
    shape = (60_000, 256)
    array = zarr.create_array(tmp_path / "a", shape=shape, chunks=(60_000, 4), dtype="f8")
    values = graded(shape, 14, mean=2)
    array[...] = values
    found = pca(str(tmp_path / "a"), 3, memory_limit="190MiB", device="cpu")
    check_pca(found, values, 3, 1e-6)
    assert found.bytes_read < 1.1 * found.passes * sum(
        file.stat().st_size for file in (tmp_path / "a" / "c").rglob("*") if file.is_file()
    )


@pytest.mark.parametrize("chunks", [(100, 50), (1000, 5)])
def test_a_limit_that_is_too_small(tmp_path, chunks):
    x = make(tmp_path / "a", graded((3000, 50), 15), chunks=chunks)
    with pytest.raises(BudgetError, match=r"too small to decompose .*the smallest that would do") as error:
        pca(x, 4, memory_limit="80MiB", device="cpu")
    least = error.value.minimum_memory_limit
    with pytest.raises(BudgetError):
        pca(x, 4, memory_limit=least - 1, device="cpu")
    close(
        pca(x, 4, memory_limit=least, device="cpu").singular_values, pca(x, 4, **LIMIT).singular_values, 1e-9
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((np.ones((5, 4)), 5), "x is 5×4 and has no 5 components; give a number from 1 to 4"),
        ((np.ones((5, 4)), 0), "give a number from 1 to 4"),
        ((np.ones((0, 4)), 1), "x is 0×4; give some elements"),
        ((np.ones((4, 0)), 1), "x is 4×0; give some elements"),
        ((np.ones((1, 4)), 1), "x has 1 rows; a variance needs two or more"),
        ((np.ones((5, 4)) * 1j, 1), "x is complex"),
        ((np.ones(5), 1), "two dimensions"),
    ],
)
def test_what_cannot_be(given, said):
    with pytest.raises(InputError, match=said):
        pca(*given)
    with pytest.raises(InputError, match="'gpu' is not a device"):
        pca(np.ones((5, 4)), 1, device="gpu")
    with pytest.raises(InputError, match="-1 iterations"):
        svd(np.ones((5, 4)), 1, iterations=-1)


def test_attributes_that_are_not_applied(tmp_path):
    make(tmp_path / "a", graded((30, 20), 16), attributes={"scale_factor": 0.1})
    with pytest.warns(UserWarning, match="scale_factor"):
        pca(str(tmp_path / "a"), 2, **LIMIT)


# ------------------------------------------------------------------------------------- command line


def test_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = graded((200, 40), 17)
    make("a", values, chunks=(50, 40))
    options = ["-k", 3, "-M", "2GiB", "-d", "cpu"]
    done = ooc("pca", "a", "s", *options, "--save-components", "c")
    assert done.code == 0
    assert "s: scores of 3 components, with" in done.out
    u, s, vt, _ = exact(values, 3)
    close(zarr.open_array("s", mode="r")[...], u * s, 1e-6)
    close(zarr.open_array("c", mode="r")[...], vt, 1e-6)
    done = ooc("pca", "a", "s", *options)
    assert (done.code, "s exists; give --force" in done.err) == (2, True)
    done = ooc("pca", "a", "t", *options, "--save-components", "c")
    assert (done.code, "c exists; give --force" in done.err) == (2, True)
    for command, option in (("pca", "--save-components"), ("svd", "--save-vt")):
        for place in ("n", "n/m"):
            done = ooc(command, "a", "n", *options, option, place)
            assert (done.code, f"{place} is, contains or lies inside the output n;" in done.err) == (2, True)
    done = ooc("pca", "a", "n", *options, "--seed", -1)
    assert (done.code, "seed is -1; give an integer of 0 or more" in done.err) == (2, True)
    found = json.loads(ooc("svd", "a", "s", *options, "-f", "--json", "--save-vt", "v").out)
    u, s, vt, _ = exact(values, 3, centred=False)
    np.testing.assert_allclose(found["singular_values"], s, rtol=1e-9)
    assert "u" not in found
    close(zarr.open_array("s", mode="r")[...], u, 1e-6)
    close(zarr.open_array("v", mode="r")[...], vt, 1e-6)
    found = json.loads(ooc("pca", "a", "s", *options, "-f", "--json").out)
    assert set(found) == {
        *(
            "passes",
            "seconds",
            "bytes_read",
            "bytes_written",
            "peak_host_bytes",
            "peak_device_bytes",
            "device",
        ),
        *("singular_values", "explained_variance", "explained_variance_ratio"),
    }


PROGRAM = """
import sys, ooc_gemm
limit = int(sys.argv[3])
p = ooc_gemm.pca(sys.argv[1], 20, iterations=1, scores=sys.argv[2], memory_limit=limit, device="cpu")
print(p.peak_host_bytes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", [160 << 20, 300 << 20])
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((60_000, 1000), {"chunks": (2048, 1000)}),
        ((60_000, 1000), {"chunks": (1024, 600), "compressor": "zstd"}),
        ((1000, 60_000), {"chunks": (500, 1000), "compressor": "zstd"}),
    ],
)
def test_the_process_keeps_within_its_limit(tmp_path, shape, layout, limit):
    a, s = str(tmp_path / "a"), str(tmp_path / "s")
    ooc_gemm.random(a, shape, distribution="uniform", **layout)
    command = [sys.executable, "-c", PROGRAM, a, s, str(limit)]
    peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert peak <= limit
