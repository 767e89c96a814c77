"""What `ooc-gemm bench` and `ooc-gemm info` do."""
