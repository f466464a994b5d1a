"""How `pytest --nbval` runs the chapters: a short time limit per cell, no addresses in comparisons,
`gpu` cells only on a GPU."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("nbval"):
        return
    if config.option.nbval_sanitize_with is None:
        config.option.nbval_sanitize_with = str(HERE / "sanitize.cfg")
    if (
        int(config.option.nbval_cell_timeout) == 2000
    ):  # nbval's default, far longer than any cell here takes
        config.option.nbval_cell_timeout = 60


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        cell = getattr(item, "cell", None)
        if cell is not None and "gpu" in cell.metadata.get("tags", []):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
