"""The command `ooc-gemm`, to which the other files add their commands."""

import click

from .. import __version__

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(context_settings=CONTEXT)
@click.version_option(__version__, prog_name="ooc-gemm")
def cli() -> None:
    """Compute C ← α·op(A)·op(B) + β·C for chunked Zarr arrays larger than RAM and larger than the GPU.

    A, B and C are paths or URLs of Zarr arrays, also inside a group (data.zarr/x).
    """
