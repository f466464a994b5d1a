"""The choice of blocks in Triton: scores, then the pick."""
