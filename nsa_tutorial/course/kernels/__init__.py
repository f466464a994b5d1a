"""Kernels, and plain PyTorch beside them, that are only taught.

Importing one decides how Triton runs it (`runtime.environment.prepare`).
"""

from nsa_tutorial.runtime import environment

environment.prepare()
