"""How a plan of parameters is computed: fused on the CPU, one Triton kernel on CUDA."""
