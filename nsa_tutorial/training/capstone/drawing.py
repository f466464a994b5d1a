"""The curves of several runs in one picture."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from nsa_tutorial.training.capstone import checkpoints


def runs_in(folder: Path) -> dict[str, list[dict]]:
    """The metrics of each run in `folder`, or of the one that it is, by name.

    Raises:
        ValueError: if there is none.
    """
    found = {}
    for path in sorted(
        [*folder.glob(checkpoints.METRICS), *folder.glob(f"*/{checkpoints.METRICS}")]
    ):
        if lines := checkpoints.lines_until(path.parent, 10**12):
            found[path.parent.name] = lines
    if not found:
        raise ValueError(f"{folder}: there is no run in it, that is no {checkpoints.METRICS}")
    return found


def smooth(values: list[float], span: int) -> list[float]:
    """The mean of the last `span` values at each place."""
    return [
        sum(values[max(0, i + 1 - span) : i + 1]) / min(span, i + 1) for i in range(len(values))
    ]


def draw_runs(folder: Path, picture: Path) -> None:
    """Draw loss and accuracy of the runs in `folder` to the file `picture`."""
    runs, figure = runs_in(folder), Figure(figsize=(9, 3.6), layout="constrained")
    panels = dict(zip(("loss", "accuracy"), figure.subplots(1, 2), strict=True))
    for name, axes in panels.items():
        for run, lines in runs.items():
            span = max(1, len(lines) // 40)
            values = smooth([line[name] for line in lines], span)
            axes.plot([line["step"] for line in lines], values, label=run)
        axes.set(xlabel="step", ylabel=f"{name} (training)")
        axes.spines[["top", "right"]].set_visible(False)
    panels["loss"].legend(frameon=False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=150)
