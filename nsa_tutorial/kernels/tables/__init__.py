"""What the kernels of both languages read besides the tensors."""
