"""Sliding windows in Triton."""
