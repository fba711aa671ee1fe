"""Kernels for the CPU, compiled on the machine: products with small weights, and attention."""
