"""The host side of kernels/: which there are, how they are compiled, chosen and launched."""
