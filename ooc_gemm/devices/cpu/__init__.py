"""The device that computes with BLAS in host memory."""
