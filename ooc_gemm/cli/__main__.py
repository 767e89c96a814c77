"""Makes `python -m ooc_gemm.cli` the same as `ooc-gemm`."""

from . import main

main()
