"""`python -m ooc_gemm.cli` is `ooc-gemm`."""

from .entry import main

main()
