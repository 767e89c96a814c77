"""The commands for statistics, against NumPy in float64."""

import json
import shutil

import numpy as np
import pytest
import zarr
from conftest import make, ooc

import ooc_gemm


def test_cov_and_corrcoef(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).standard_normal((90, 7)) + 1e3
    make("x", x, chunks=(20, 20))
    small = ("-M", "1GiB", "-d", "cpu")
    done = ooc("cov", "x", "c", "--no-rowvar", "--ddof", "0", *small, "--json", "--verify")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert (found["m"], found["n"], found["k"], found["verified"]) == (7, 7, 90, True)
    assert found["bytes_passed"] > 0
    np.testing.assert_allclose(zarr.open_array("c")[:], np.cov(x, rowvar=False, ddof=0), rtol=1e-9)
    done = ooc("corrcoef", "x", "r", "--chunks", "20,20", *small)
    assert done.code == 0
    assert "r: 90×90 float64" in done.out
    np.testing.assert_allclose(zarr.open_array("r")[:], np.corrcoef(x), rtol=1e-9)


def test_messages_name_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make("x", np.ones((3, 2)), chunks=(2, 2))
    make("c", np.ones((3, 3)), chunks=(2, 2))
    done = ooc("cov", "x", "c")
    assert done.code == 2
    assert "--force" in done.err
    done = ooc("cov", "x", "new", "--ddof", "2")
    assert done.code == 2
    assert "--ddof 2" in done.err


def test_grm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    g = np.random.default_rng(1).integers(-1, 3, (80, 9)).astype("i1")
    make("g", g.T, chunks=(4, 20))
    done = ooc("grm", "g", "c", "--samples", "0", "--maf", "0.2", "--method", "cov", "--json", "-M", "1GiB")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    result = ooc_gemm.grm(g, maf=0.2, method="cov", memory_limit="1GiB")
    np.testing.assert_allclose(zarr.open_array("c")[:], result.array, rtol=1e-6, atol=1e-6)
    assert (found["variants"], found["missing"]) == (result.variants, result.missing)
    done = ooc("grm", "g", "new", "--method", "vanraden", "--no-meanimpute")
    assert done.code == 2
    assert "--method vanraden" in done.err
    assert "--no-meanimpute" in done.err


def test_gram_of_a_standardised_array(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(2).integers(-1, 5, (70, 8)).astype("f4")
    make("x", x, chunks=(20, 4))
    asked = ("--center", "columns", "--scale", "columns", "--missing", "-1")
    done = ooc("gram", "x", "c", "--transpose", *asked, "-M", "1GiB", "-d", "cpu", "--json")
    assert (done.code, done.err) == (0, "")
    there = np.ma.masked_equal(x.astype("f8"), -1)
    z = ((there - there.mean(axis=0)) / there.std(axis=0)).filled(0)
    np.testing.assert_allclose(zarr.open_array("c")[:], z.T @ z, rtol=1e-5, atol=1e-4)
    assert json.loads(done.out)["bytes_passed"] > 0


def test_multiply_with_elements_of_a_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(3)
    x, y, w = rng.integers(-1, 5, (70, 8)).astype("f4"), rng.random((70, 5)).astype("f4"), rng.random(70)
    make("x", x, chunks=(20, 4))
    make("y", y, chunks=(20, 4))
    make("w", w, chunks=(16,))
    asked = ("--center", "columns", "--scale", "columns", "--missing", "-1", "--weights", "w")
    limits = ("-M", "1GiB", "-d", "cpu")
    done = ooc("multiply", "x", "y", "c", "--transpose-a", *asked, *limits, "--verify")
    assert (done.code, done.err) == (0, "")
    there = np.ma.masked_equal(x.astype("f8"), -1)
    z = ((there - there.mean(axis=0)) / there.std(axis=0)).filled(0)
    np.testing.assert_allclose(zarr.open_array("c")[:], z.T @ (w[:, None] * y), rtol=1e-5, atol=1e-4)
    done = ooc("gram", "x", "k", "--transpose", "--weights", "w", *limits)
    assert (done.code, done.err) == (0, "")
    np.testing.assert_allclose(zarr.open_array("k")[:], x.T @ (w[:, None] * x), rtol=1e-5, atol=1e-4)
    for args in (("plan", "x", "y", "--transpose-a"), ("plan", "x", "--gram", "--transpose-a")):
        plain, changed = (json.loads(ooc(*args, *more, *limits, "--json").out) for more in ((), asked))
        assert plain["ledger"]["transforms"] == 0
        assert changed["ledger"]["transforms"] > 0


def test_weights_that_cannot_be_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make("x", np.ones((6, 4), "f4"), chunks=(4, 4))
    make("short", np.ones(3), chunks=(2,))
    make("complex", np.ones(4, "c8"), chunks=(2,))
    for name, word in (("short", "needs 4 numbers"), ("x", "one dimension"), ("complex", "real numbers")):
        done = ooc("multiply", "x", "x", "c", "--transpose-b", "--weights", name, "-d", "cpu")
        assert done.code == 2
        assert word in done.err
    assert ooc("multiply", "x", "x", "c", "--transpose-b", "--weights", "none", "-d", "cpu").code == 2


def test_decoded_operands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x = np.arange(12, dtype="i2").reshape(3, 4)
    for name, factor in (("x", 0.5), ("y", 4.0)):
        make(name, x, chunks=(2, 2))
        zarr.open_array(name).attrs.update({"scale_factor": factor, "add_offset": 1.0, "_FillValue": 7})
    done = ooc("multiply", "x", "y", "c", "--transpose-b", "--decode-cf", "-M", "1GiB", "-d", "cpu")
    assert (done.code, done.err) == (0, "")
    left, right = (np.where(x == 7, 0, x * factor + 1) for factor in (0.5, 4.0))
    np.testing.assert_allclose(zarr.open_array("c")[:], left @ right.T, rtol=1e-6)
    done = ooc("gram", "x", "k", "--decode-cf", "--missing", "3", "-M", "1GiB", "-d", "cpu")
    assert done.code == 2
    assert "which --decode-cf follows; leave out" in done.err


def test_plans_of_statistics_are_what_runs_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make("x", np.random.default_rng(4).standard_normal((300, 40)).astype("f4"), chunks=(64, 40))
    small = ("-M", "1GiB", "-d", "cpu", "--json")
    for command in (
        ("cov", "x", "c", "--no-rowvar"),
        ("corrcoef", "x", "r", "--chunks", "64,64"),
        ("topk", "x", "n", "-k", 3, "--graph"),
        ("threshold", "x", "t", "--least", 0.4),
        ("threshold", "x", "x", "d", "--least", 9, "--metric", "dot"),
    ):
        done = ooc(*command, "--plan", *small)
        assert done.code == 0, done.err
        assert sorted(path.name for path in tmp_path.iterdir()) == ["x"]
        planned = json.loads(done.out)
        assert planned["feasible"]
        assert ("is read once before" in done.err) == (command[0] in ("cov", "corrcoef"))
        done = ooc(*command, *small)
        assert done.code == 0, done.err
        found = json.loads(done.out)
        assert planned["bytes_read"] == found["bytes_read"]
        if command[0] != "threshold":
            assert planned["bytes_written"] == found["bytes_written"]
        assert planned["bm"] == found["plan"]["bm"]
        out = tmp_path / command[2 if command[2] != "x" else 3]
        assert out.exists()
        shutil.rmtree(out)
    for command in ("cov", "topk"):
        done = ooc(command, "x", "new", "--plan", "-M", "1MiB", "-d", "cpu", "--json")
        assert done.code == 2
        assert json.loads(done.out)["minimum_memory_limit"] > 1 << 20
    done = ooc("topk", "x", "new", "-k", 3, "--plan", "-M", "1GiB", "-d", "cpu")
    assert "reduced as they come" in done.out


@pytest.mark.parametrize("command", [("topk", "x", "out"), ("threshold", "x", "out", "--least", 0.4)])
def test_plans_count_what_a_check_reads(tmp_path, monkeypatch, command):
    """Of raw chunks, of which any row takes as many bytes."""
    monkeypatch.chdir(tmp_path)
    values = np.random.default_rng(4).standard_normal((300, 40)).astype("f4")
    make("x", values, chunks=(64, 40), compressors=None)
    options = ("-M", "1GiB", "-d", "cpu", "--json")
    plain = json.loads(ooc(*command, "--plan", *options).out)
    planned = json.loads(ooc(*command, "--plan", "--verify", *options).out)
    assert planned["bytes_read"] == plain["bytes_read"] + (300 + 8) * 160
    found = json.loads(ooc(*command, "--verify", *options).out)
    assert (found["bytes_read"], found["verified"]) == (planned["bytes_read"], True)


@pytest.mark.parametrize("command", [("gram",), ("grm", "--meanimpute"), ("grm",), ("king",)])
def test_plans_of_symmetric_products(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    make("g", np.random.default_rng(1).integers(0, 3, (80, 30)).astype("i1"), chunks=(20, 20))
    options = (*command[1:], "-M", "1GiB", "-d", "cpu")
    planned = ooc(command[0], "g", "c", *options, "--plan", "--json")
    assert planned.code == 0, planned.err
    assert [path.name for path in tmp_path.iterdir()] == ["g"]
    plan = json.loads(planned.out)
    assert plan["feasible"] is True
    done = ooc(command[0], "g", "c", *options, "--json")
    found = json.loads(done.out)
    for name in ("bm", "bn", "bk", "bytes_read", "bytes_written", "symmetric", "memory_limit"):
        assert plan[name] == found["plan"][name], name
    assert (plan["bytes_read"], plan["bytes_written"]) == (found["bytes_read"], found["bytes_written"])
    table = ooc(command[0], "g", "c", *options, "--plan", "-f")
    assert table.code == 0
    assert "symmetric: one half is computed" in table.out
    assert max(map(len, table.out.splitlines())) <= 80
    assert ("is read once before that" in table.err) == (command[0] == "king")


def test_a_plan_tells_of_the_pass_before_it(tmp_path, monkeypatch):
    """C does not fit the limit as one block, so that genotypes are not standardized in its panels."""
    monkeypatch.chdir(tmp_path)
    make("g", np.ones((40, 3000), "i1"), chunks=(20, 300))
    told = ooc("grm", "g", "c", "--plan", "-M", "128MiB", "-d", "cpu", "--meanimpute", "--chunks", "300,300")
    assert (told.code, told.err.count("to find the frequencies of alleles")) == (0, 1), told


@pytest.mark.parametrize(
    "command",
    [
        ("pca", "x", "out", "-k", 3),
        ("svd", "z", "out", "-k", 2, "--iterations", 1),
        ("pca", "w", "out", "-k", 3),
        ("lstsq", "x", "y", "out", "--intercept"),
        ("lstsq", "z", "v", "out"),
    ],
)
def test_plans_of_passes_are_what_runs_do(tmp_path, monkeypatch, command):
    """Of raw and of compressed chunks (z), of a tall array and of a wide one."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(5)
    raw, coded = {"chunks": (64, 16), "compressors": None}, {"chunks": (50, 40)}
    for name, shape, layout in (
        ("x", (333, 40), raw),
        ("z", (333, 40), coded),
        ("w", (40, 333), raw),
        ("y", (333, 3), coded),
    ):
        make(name, rng.standard_normal(shape).astype("f4"), **layout)
    make("v", rng.standard_normal(333), chunks=(100,))
    limit = ("-M", "1GiB", *(() if command[0] == "lstsq" else ("-d", "cpu")))
    planned = ooc(*command, *limit, "--plan", "--json")
    assert planned.code == 0, planned.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v", "w", "x", "y", "z"]
    plan = json.loads(planned.out)
    assert plan["feasible"] is True
    assert plan["predicted_seconds"] >= sum(plan["stage_seconds"].values()) > 0
    assert 80 << 20 < plan["host_bytes"] == sum(plan["ledger"].values()) <= plan["memory_limit"] == 1 << 30
    done = ooc(*command, *limit, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    for name in ("passes", "bytes_read", "bytes_written", "device"):
        assert plan[name] == found[name], name
    table = ooc(*command, *limit, "--plan")
    assert (table.code, table.err) == (0, "")
    assert f"{plan['rows']}×{plan['columns']} float32" in table.out
    assert max(map(len, table.out.splitlines())) <= 80
    refused = ooc(*command, "-M", "1MiB", *limit[2:], "--plan", "--json")
    assert refused.code == 2
    assert json.loads(refused.out)["minimum_memory_limit"] > 1 << 20


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("cov", "x", "out", "--ddof", 6), "no degrees of freedom for --ddof 6"),
        (("cov", "x", "out", "--no-rowvar", "--ddof", 31), "no degrees of freedom for --ddof 31"),
        (("cov", "empty", "out", "--bias"), "no degrees of freedom for --ddof 0"),
        (("corrcoef", "empty", "out"), "empty has no observations"),
        (("pca", "x", "out", "-k", 2, "--seed", -1), "seed is -1"),
    ],
)
def test_plans_refuse_what_runs_refuse(tmp_path, monkeypatch, command, said):
    monkeypatch.chdir(tmp_path)
    make("x", np.ones((30, 6), "f4"), chunks=(8, 6))
    make("empty", np.ones((6, 0), "f4"), chunks=(8, 6))
    for more in ((), ("--plan",)):
        done = ooc(*command, *more, "-M", "1GiB", "-d", "cpu")
        assert (done.code, said in done.err) == (2, True), done
    assert ooc("cov", "x", "out", "--ddof", 5, "--plan").code == 0


@pytest.mark.parametrize(
    "command",
    [
        ("multiply", "x", "x", "out", "--transpose-b"),
        ("gram", "x", "out"),
        ("topk", "x", "out", "-k", 2),
        ("threshold", "x", "new", "--least", 0.5),
        ("pca", "x", "out", "-k", 2),
        ("svd", "x", "out", "-k", 2),
        ("plan", "x", "x", "--transpose-b"),
    ],
)
def test_a_limit_on_device_memory_that_has_no_effect(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    make("x", np.random.default_rng(0).standard_normal((30, 6)).astype("f4"), chunks=(8, 6))
    for more in (("--plan",), ()) if command[0] not in ("multiply", "plan") else ((),):
        done = ooc(*command, *more, "-M", "1GiB", "-d", "cpu", "-D", "1GiB")
        assert done.code == 0, done
        assert done.err.count("Note: --device-memory-limit has no effect, because the CPU computes") == 1


@pytest.mark.parametrize(
    ("command", "held"),
    [
        (("topk", "x", "out", "-k", 2), 6400),
        (("topk", "x", "./x", "out", "-k", 2), 6400),
        (("topk", "x", "y", "out", "-k", 2), 12800),
        (("threshold", "x", "out", "--least", 0.5), 6400),
        (("plan", "x", "x", "--transpose-b"), 6400),
        (("plan", "x", "y", "--transpose-b"), 12800),
    ],
)
def test_an_array_that_is_both_inputs_counts_once(tmp_path, monkeypatch, command, held):
    monkeypatch.chdir(tmp_path)
    for name in "xy":
        make(name, np.ones((200, 8), "f4"), chunks=(50, 8), compressors=None)
    options = [*command, "-M", "1GiB", "-d", "cpu", *([] if command[0] == "plan" else ["--plan"])]
    plan = json.loads(ooc(*options, "--json").out)
    assert plan["lower_bound_bytes"] == held + (200 * 200 * 4 if command[0] == "plan" else 0)  # reduced: no C
    inputs = "the input holds" if held == 6400 else "the inputs hold"
    assert f"({inputs} {held / 1024:.1f} KiB)" in ooc(*options).out
