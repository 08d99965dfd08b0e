"""Kernels written in Triton, each beside a readable reference elsewhere. A file here is imported only where it runs."""
