"""Selected attention and sliding windows in TileLang."""
