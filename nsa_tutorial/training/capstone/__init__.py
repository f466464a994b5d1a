"""The capstone: train a small decoder with each variant of attention (chapter 17)."""
