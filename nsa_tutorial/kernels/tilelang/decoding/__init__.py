"""Decoding in TileLang: split attention to a cache, the choice, the merge, and what is written."""
