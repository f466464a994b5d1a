"""The kernels in Triton: a folder for each operator, and beside them what they share."""
