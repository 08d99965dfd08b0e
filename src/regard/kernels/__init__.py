"""Triton kernels. Each has a readable reference elsewhere; the modules are imported only where a kernel is launched."""
