"""Serving: the cache of a layer that decodes (chapter 15)."""
