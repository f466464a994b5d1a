"""Run notebooks in a clean kernel and store their outputs, so that a diff shows only what changed.

    python -m nsa_tutorial.course.execute             every chapter
    python -m nsa_tutorial.course.execute 01 online   those whose file name has one of these in it
    python -m nsa_tutorial.course.execute --refresh   new outputs also where they differ every time

Stored are: execution counts from 1, outputs without timestamps and without widget state, joined
streams. Running it twice changes nothing: a cell tagged `nbval-ignore-output` keeps the output it
has where the new one differs only in numbers (timings, say), and a cell tagged `gpu` is skipped,
its output kept, where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from nsa_tutorial.course.stills import WIDGET, is_live

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
TIMEOUT_S = 120


class _Client(NotebookClient):
    """A client that does not run cells tagged `gpu` where there is no GPU."""

    skip_gpu = False

    async def async_execute_cell(self, cell, cell_index, **keywords):
        if self.skip_gpu and "gpu" in cell.metadata.get("tags", []):
            return cell
        return await super().async_execute_cell(cell, cell_index, **keywords)


def execute(
    notebook: nbformat.NotebookNode, *, folder: Path = NOTEBOOKS, refresh: bool = False
) -> nbformat.NotebookNode:
    """Run a notebook from top to bottom and return it with reviewable outputs.

    Args:
        notebook: the notebook; it is changed in place.
        folder: the kernel's working directory.
        refresh: also replace the outputs of cells tagged `nbval-ignore-output`.

    Raises:
        CellExecutionError: at the first cell that fails and is not tagged `raises-exception`.
    """
    import torch

    kept = {c.id: c.outputs for c in notebook.cells if c.cell_type == "code"}
    client = _Client(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    client.coalesce_streams = True
    client.skip_gpu = not torch.cuda.is_available()
    client.execute()
    count = 0
    for cell in notebook.cells:
        cell.metadata = {k: v for k, v in cell.metadata.items() if k in ("tags", "jupyter")}
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        tags = cell.metadata.get("tags", [])
        cell.outputs = [output for output in cell.outputs if not is_live(output)]
        volatile = "nbval-ignore-output" in tags and not refresh
        if (volatile and _outline(kept[cell.id]) == _outline(cell.outputs)) or (
            "gpu" in tags and client.skip_gpu
        ):
            cell.outputs = kept[cell.id]
        for output in cell.outputs:
            _settle(output, cell)
    notebook.metadata = {
        "kernelspec": {
            "display_name": "Python 3 (ipykernel)",
            "language": "python",
            "name": "python3",
        },
        # the kernel's own, which JupyterLab would write, too
        "language_info": notebook.metadata["language_info"],
    }
    return notebook


def _outline(outputs: list[nbformat.NotebookNode]) -> list[str]:
    """Outputs without their numbers and pictures: what stays when only a measurement changes."""
    told = []
    for output in outputs:
        data = output.get("data", {})
        texts = [output.get("text", ""), data.get("text/plain", "")]
        if "image/png" not in data:  # a picture's HTML is its pixels
            texts.append(data.get("text/html", ""))
        told.append(f"{output.output_type}: {re.sub(r'[0-9.]+', '#', ' '.join(texts))}")
    return told


def _settle(output: nbformat.NotebookNode, cell: nbformat.NotebookNode) -> None:
    """Take out of an output what differs from run to run and says nothing, and what lives only
    as long as its kernel: numbers of cells, controls, a picture's HTML."""
    if output.output_type == "execute_result":
        output.execution_count = cell.execution_count
    if "metadata" in output:  # of a picture, its size and its text for those who do not see it
        output.metadata = {k: v for k, v in output.metadata.items() if k == "image/png"}
        if "image/png" in output.data:
            output.data.pop("text/html", None)  # the same picture once more
    output.get("data", {}).pop(WIDGET, None)


def write(path: Path, notebook: nbformat.NotebookNode) -> bool:
    """Write a notebook in one fixed form; True if the file changed."""
    text = nbformat.writes(notebook, version=4) + "\n"
    text = json.dumps(json.loads(text), indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8")
    return True


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m nsa_tutorial.course.execute", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "chapters", nargs="*", help="parts of file names; all chapters if none is given"
    )
    parser.add_argument(
        "--refresh", action="store_true", help="also replace outputs that differ from run to run"
    )
    chosen = parser.parse_args(arguments)
    paths = [
        p
        for p in sorted(NOTEBOOKS.glob("*.ipynb"))
        if not chosen.chapters or any(c in p.name for c in chosen.chapters)
    ]
    if not paths:
        print(f"no notebook in {NOTEBOOKS.name}/ matches {' '.join(chosen.chapters)}")
        return 2
    for path in paths:
        start = time.perf_counter()
        try:
            notebook = execute(nbformat.read(path, as_version=4), refresh=chosen.refresh)
        except CellExecutionError as error:
            print(f"{path.name}: a cell failed\n{error}")
            return 1
        changed = write(path, notebook)
        print(
            f"{path.name}: {time.perf_counter() - start:.1f} s, "
            f"{'written' if changed else 'unchanged'}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
