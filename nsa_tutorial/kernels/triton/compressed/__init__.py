"""Attention to summaries in Triton."""
