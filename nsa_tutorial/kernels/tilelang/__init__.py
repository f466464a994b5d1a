"""The kernels in TileLang: a folder for each operator, and beside them what they share."""
