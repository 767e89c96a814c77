"""Compiles the C sources of ooc_gemm/storage/io while the package is built or installed."""

import sysconfig
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_NATIVE = Path(__file__).with_name("ooc_gemm") / "storage" / "io" / "native.py"


class Hook(BuildHookInterface[Any]):
    """Adds the library to the wheel, where there is a C compiler."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles the library. A wheel that holds it is for this platform, and for any Python."""
        spec = spec_from_file_location("native", _NATIVE)
        assert spec, "it is a file"
        assert spec.loader, "it is a file of Python"
        native = module_from_spec(spec)
        spec.loader.exec_module(native)
        library = native.compile_library()
        if library is not None:
            build_data["artifacts"].append(library.relative_to(self.root).as_posix())
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"
