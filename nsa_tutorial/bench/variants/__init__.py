"""Probes, variants and a first draft of the kernels: measured, and called by no operator."""
