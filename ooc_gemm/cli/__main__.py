"""`python -m ooc_gemm.cli` is `ooc-gemm`."""

from .commands import main

main()
