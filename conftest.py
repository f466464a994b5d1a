"""The rules by which `pytest --nbval` runs chapters, where nbval is installed.

They are in the package, so that the folder of the chapters holds nothing else.
"""

from importlib.util import find_spec

pytest_plugins = ["nsa_tutorial.course.nbval_rules"] if find_spec("nbval") else []
