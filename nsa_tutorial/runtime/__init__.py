"""What the operators build on: the machine, argument checks, and TileLang on the CPU."""
