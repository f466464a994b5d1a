"""The choice of blocks in TileLang: scores, then the pick."""
