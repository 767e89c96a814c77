"""The command `ooc-gemm`, to which the other files add their commands."""

import click

PROGRAM = "ooc-gemm"
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _version(context: click.Context, _: click.Parameter, given: bool) -> None:
    """Print the version and exit, where that is asked for."""
    if given:
        from .. import __version__

        click.echo(f"ooc-gemm, version {__version__}")
        context.exit()


EPILOG = """\b
Exit status:
  0    done
  1    failed while running; an output with --resume can be continued
  2    bad input or usage; nothing was written
  3    verification failed
  130  interrupted; an output with --resume can be continued
  143  terminated, or ended by --stop-before; likewise

An environment variable gives an option to all commands that have it, as OOC_GEMM_MEMORY_LIMIT=8GiB gives
--memory-limit, or to one, as OOC_GEMM_MULTIPLY_MEMORY_LIMIT does. Flags are 1 or 0. The command line counts
before the variable of a command, and that before the one of all commands.
"""


class Group(click.Group):
    """Commands whose options can also be given by environment variables."""

    group_class = type  # groups inside are of this class, too

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Adds a command, and names the variables of its options."""
        super().add_command(cmd, name)
        command = f"{PROGRAM} {(self.name or '').removeprefix(PROGRAM)} {cmd.name}"
        for option in cmd.params:
            if isinstance(option, click.Option):
                option.envvar = [_variable(command, option), _variable(PROGRAM, option)]


def _variable(command: str, option: click.Option) -> str:
    """Return the variable of an option: OOC_GEMM_TOPK_DEVICE for `ooc-gemm topk` and `--device`."""
    words = [*command.split(), max(option.opts, key=len).lstrip("-")]
    return "_".join(words).replace("-", "_").upper()


@click.group(PROGRAM, cls=Group, context_settings=CONTEXT, epilog=EPILOG)
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

    A, B and C are paths or URLs of Zarr arrays, also inside a group (data.zarr/x). A and B may also be files
    of NumPy (x.npy), datasets in HDF5 and NetCDF-4 files (file.h5::/path/to/dataset), or Zarr arrays in zip
    archives (x.zip, x.zip::path).
    """
