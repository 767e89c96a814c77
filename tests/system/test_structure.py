"""The table of imports: which package may use which, and where each library is used."""

import ast
import functools
import sys

import pytest
from sources import trees

LOW = {"support", "planning"}
USES = {
    "support": set(),
    "planning": {"support"},
    "storage": LOW,
    "engine": LOW,
    "cuda_kernels": LOW,
    "ladder": LOW | {"cuda_kernels"},
    "devices": LOW | {"engine", "cuda_kernels"},
    "run": LOW | {"storage", "engine", "devices"},
    "statistics": LOW | {"storage", "engine", "devices", "run"},
    "api": LOW | {"storage", "engine", "devices", "run"},
    "dask": LOW | {"storage", "engine", "devices", "run", "api"},
    "bench": LOW | {"storage", "engine", "cuda_kernels", "devices", "run", "api"},
    "reporting": LOW | {"devices"},
    "cli": LOW | {"storage", "devices", "run", "statistics", "api", "dask", "bench", "reporting"},
}
"""For each package those that it may import; all may import the version from `ooc_gemm`."""
INSIDE = {"storage": ("io", "format", "read", "write")}
"""For each package of sub-packages these in their order: each may import those before it."""
LIBRARIES = {
    "zarr": ("storage/", "bench/random_products.py"),
    "cupy": ("cuda_kernels/", "devices/cuda/"),
    "cuda": ("cuda_kernels/compile.py",),
    "matplotlib": ("bench/figures.py",),
    "bokeh": ("reporting/figures.py", "reporting/page.py"),
    "jinja2": ("reporting/page.py",),
    "click": ("cli/", "ladder/__main__.py"),
    "numcodecs": ("storage/format/codec.py", "storage/format/zstd.py", "bench/random_products.py"),
    "google_crc32c": ("storage/format/shards.py",),
    "obstore": ("storage/io/client.py", "storage/io/objects.py"),
    "botocore": ("storage/io/client.py",),
    "dask": ("dask/", "storage/read/arrays.py"),
    "distributed": ("dask/",),
    "h5py": ("storage/read/hdf5.py",),
    "onnxruntime": ("devices/cpu/matmul_integer.py",),
}
"""For each library the files that may import it."""


@functools.cache
def modules():
    """Every file of the package, its path in it, and what it imports: (module, name, whether at the top)."""
    every = []
    for path, tree in trees().items():
        folder = ("ooc_gemm", *path.parent.parts)
        found = []
        at_top = [
            inner for node in tree.body for inner in (node.body if isinstance(node, ast.If) else [node])
        ]
        top = {id(node) for node in at_top}  # also imports for types alone
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found += [(alias.name, "", id(node) in top) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = folder[: len(folder) + 1 - node.level] if node.level else ()
                module = ".".join([*base, *filter(None, [node.module])])
                found += [(module, alias.name, id(node) in top) for alias in node.names]
        every.append((path, found))
    return every


def package_of(module, name):
    """`storage` of `ooc_gemm.storage.io`; "" of what `ooc_gemm` itself defines."""
    parts = [*module.split("."), name]
    return parts[1] if len(parts) > 1 and parts[1] in USES else ""


@pytest.mark.parametrize("package", USES)
def test_imports_point_one_way(package):
    seen = False
    for path, found in modules():
        if path.with_suffix("").parts[0] != package:
            continue
        seen = True
        used = {package_of(module, name) for module, name, _ in found if module.split(".")[0] == "ooc_gemm"}
        assert used <= USES[package] | {package, ""}, (str(path), used - USES[package])
    assert seen


@pytest.mark.parametrize("package", INSIDE)
def test_imports_inside_a_package_point_one_way(package):
    order, seen = INSIDE[package], set()
    for path, found in modules():
        if path.parts[0] != package or len(path.parts) < 3:
            continue
        here = path.parts[1]
        seen.add(here)
        parts = [
            [*module.split("."), name][1:3] for module, name, _ in found if module.startswith("ooc_gemm.")
        ]
        used = {inner for outer, inner in parts if outer == package}
        assert used <= set(order[: order.index(here) + 1]), (str(path), used)
    assert seen == set(order)


def test_each_library_is_used_in_its_place():
    for path, found in modules():
        for library in {module.split(".")[0] for module, *_ in found} & set(LIBRARIES):
            assert path.as_posix().startswith(LIBRARIES[library]), (str(path), library)


def test_planning_uses_the_standard_library_alone():
    for path, found in modules():
        if path.parts[0] == "planning":
            names = {module.split(".")[0] for module, *_ in found}
            assert names <= {*sys.stdlib_module_names, "ooc_gemm"}, str(path)


def test_no_files_import_each_other_in_a_circle():
    every = {
        ".".join(("ooc_gemm", *path.with_suffix("").parts)).removesuffix(".__init__"): found
        for path, found in modules()
    }
    uses = {}
    for name, found in every.items():
        at_top = {(module, f"{module}.{what}") for module, what, top in found if top}
        used = {inner if inner in every else module for module, inner in at_top}
        uses[name] = (used & set(every)) - {name, "ooc_gemm"}
    while uses:
        free = {name for name, used in uses.items() if not used & set(uses)}
        assert free, f"in circles, or above them: {sorted(uses)}"
        uses = {name: used for name, used in uses.items() if name not in free}
