"""Attention to summaries in TileLang."""
