"""What the operators stand on: the machine, the checks, the costs, and TileLang on the CPU."""
