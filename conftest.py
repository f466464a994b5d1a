"""The rules by which `pytest --nbval` runs chapters, where nbval is installed.

They are in the package, so that the folder of the chapters holds nothing else.
"""

from importlib.util import find_spec

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Load them, but not in the process that hands tests to others: it need not wait for
    PyTorch."""
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if runs_tests and find_spec("nbval"):
        config.pluginmanager.import_plugin("nsa_tutorial.course.nbval_rules")
