"""The benchmark of the operators: `python -m nsa_tutorial.bench`."""
