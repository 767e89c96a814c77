"""Out-of-core matrix multiplication."""
