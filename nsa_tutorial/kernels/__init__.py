"""Part III: attention in TileLang and Triton. Chapters 09 to 11."""
