"""The command `ooc-gemm`, to which the other files add their commands."""

import click

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _version(context: click.Context, _: click.Parameter, given: bool) -> None:
    """Print the version and exit, where that is asked for."""
    if given:
        from .. import __version__

        click.echo(f"ooc-gemm, version {__version__}")
        context.exit()


@click.group(context_settings=CONTEXT)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Compute C ← α·op(A)·op(B) + β·C for chunked Zarr arrays larger than RAM and larger than the GPU.

    A, B and C are paths or URLs of Zarr arrays, also inside a group (data.zarr/x).
    """
