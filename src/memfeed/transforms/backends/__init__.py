"""Backends that carry out a plan of parameters: CPU code, and one Triton kernel for CUDA."""
