"""Selected attention in Triton: three orders of the same sums."""
