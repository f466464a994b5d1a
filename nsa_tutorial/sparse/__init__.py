"""Part II: attention, sparsely. Chapters 05 to 08."""
