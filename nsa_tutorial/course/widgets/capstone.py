"""Pictures of chapter 17: what each variant of attention learns on the recall task, which blocks it
lists as it learns, and what is left when a branch is taken away.

All numbers come from recordings of `python -m nsa_tutorial.training.capstone.record`, which name
their machine. `explore` is the interactive, `draw_run` its picture.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import ipywidgets
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch, Rectangle

from nsa_tutorial.course.figures import PALETTE, Picture, new_figure, readable_on
from nsa_tutorial.course.sheet import Place, Sheet, byte_colour
from nsa_tutorial.course.widgets import Panel, panel
from nsa_tutorial.training.capstone.drawing import smooth
from nsa_tutorial.training.capstone.evaluate import reach
from nsa_tutorial.training.capstone.settings import Settings
from nsa_tutorial.training.capstone.tasks import NONE, Recall

ASSETS = Path(__file__).resolve().parents[3] / "assets"
SHORT, LONG = ASSETS / "capstone_short.json", ASSETS / "capstone_long.json"
NEEDLE, SPEED = ASSETS / "capstone_needle.json", ASSETS / "capstone_speed.json"

# a variant, what a picture calls it, and its colour
NAMES = {
    "dense": ("dense", "key"),
    "nsa": ("NSA", "selected"),
    "no-window": ("NSA without its window", "own block"),
    "learned-choice": ("NSA with a learned choice", "value"),
    "random": ("random slots", "query"),
    "no-selection": ("NSA without its lists", "compressed"),
    "no-summaries": ("NSA without summaries", "line"),
    "window": ("window alone", "window"),
    "separate": ("NSA, separate keys", "masked"),
}
# a task of the panel, and its recording
TASKS = {"recall, 512": SHORT, "recall, 8,192": LONG, "needles, 2,048": NEEDLE}
STEPS = (1, 100, 200, 300, 400, 600, 800, 1000)  # of which lists were kept


# -- recordings --


@functools.cache
def recording(path: Path = SHORT) -> dict | None:
    """A recording, or None where it is not there."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def rows(attention: str, path: Path = SHORT) -> list[dict]:
    """The runs of a variant, by seed. Of the long recordings they are those whose summaries are
    made of the keys that the lists read; "separate" is NSA whose branches have keys of their own.
    """
    data, kind, variant = recording(path), None, attention
    if path != SHORT:
        of_long = "long" if attention in ("dense", "window") else "long-fine"
        kind = of_long if path == LONG else "shared"
    if attention == "separate":
        kind, variant = "long-fine-separate" if path == LONG else "separate", "nsa"
    found = [
        r
        for r in (data["rows"] if data else [])
        if r["attention"] == variant and kind in (None, r.get("size"), r.get("keys"))
    ]
    return sorted(found, key=lambda r: r["seed"])


def found(attention: str, what: str, path: Path = SHORT) -> list[float]:
    """A number that each run of a variant found at its end, by seed."""
    return [r["found"][what] for r in rows(attention, path)]


def mean(values: Sequence[float]) -> float:
    """Of a few numbers."""
    return sum(values) / len(values)


def far(attention: str, path: Path = SHORT) -> float:
    """The mean over the seeds of the share of far answers that were found."""
    return mean(found(attention, "far", path))


def chance() -> float:
    """How often a random slot would hold the answer, the mean of NSA's runs."""
    return mean(found("nsa", "chance"))


def sizes(path: Path = SHORT) -> dict:
    """The settings of NSA's first run."""
    return rows("nsa", path)[0]["settings"]


def told() -> str:
    """What the recording is."""
    data, s = recording(), sizes()
    seeds = len(rows("nsa"))
    return (
        f"{data['machine']}, PyTorch {data['versions']['torch']}: texts of {s['length']} tokens, "
        f"{s['steps']} steps of {s['batch']} texts, {seeds} seeds"
    )


# -- the race --


def draw_race(path: Path = SHORT) -> Picture:
    """Far answers found, a row for each variant and a dot for each seed."""
    names = [name for name in NAMES if rows(name, path)]
    figure, axes = new_figure(8.4, 0.9 + 0.34 * len(names))
    axis = axes[0, 0]
    for y, name in enumerate(names):
        values, colour = found(name, "far", path), NAMES[name][1]
        axis.barh(y, mean(values), 0.56, color=PALETTE[colour], alpha=0.45)
        axis.plot(values, [y] * len(values), "o", color=PALETTE[colour], markersize=6,
                  markeredgecolor=PALETTE["text"], markeredgewidth=0.6)  # fmt: skip
        axis.text(max(values) + 0.025, y, f"{mean(values):.0%}", va="center", fontsize=9.5)
    axis.set_yticks(range(len(names)), [NAMES[name][0] for name in names], fontsize=9.5)
    axis.set(ylim=(len(names) - 0.5, -0.5), xlim=(0, 1.1))
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axis.set_xlabel("far answers found on held-out texts; a dot is a seed")
    shares = [f"{NAMES[n][0]} {far(n, path):.0%}" for n in ("dense", "nsa", "random", "window")]
    return Picture(figure, "Far answers found: " + ", ".join(shares))


def draw_curves(path: Path = SHORT) -> Picture:
    """The training loss of every variant, the mean of its seeds and their range."""
    figure, axes = new_figure(8.6, 3.5, columns=2, width_ratios=(1.9, 1))
    axis, legend = axes[0]
    last = {}
    for name, (_, colour) in NAMES.items():
        if not (runs := rows(name, path)):
            continue
        curves = np.array([smooth([point[1] for point in r["curve"]], 3) for r in runs])
        step = [point[0] for point in runs[0]["curve"]]
        axis.fill_between(step, curves.min(0), curves.max(0), color=PALETTE[colour], alpha=0.2,
                          linewidth=0)  # fmt: skip
        axis.plot(step, curves.mean(0), color=PALETTE[colour], linewidth=1.8)
        last[name] = curves[:, -1].mean()
    axis.set(xlabel="step", ylabel="training loss (nats)", ylim=(0, None))
    legend.axis("off")
    for i, (name, loss) in enumerate(sorted(last.items(), key=lambda item: -item[1])):
        legend.plot([0, 0.12], [-i, -i], color=PALETTE[NAMES[name][1]], linewidth=2.5)
        legend.text(0.16, -i, f"{loss:.2f}  {NAMES[name][0]}", va="center", fontsize=9)
    legend.set(xlim=(0, 1.2), ylim=(-len(last), 1))
    legend.text(0, 0.75, "loss at the end", va="center", fontsize=9)
    return Picture(
        figure,
        f"At the end, NSA's loss is {last['nsa']:.2f}, dense {last['dense']:.2f}, random slots "
        f"{last['random']:.2f}, the window's {last['window']:.2f}",
    )


# -- the task --


def draw_text(pairs: int = 16, seed: int = 66) -> Picture:
    """One small text of the task: pairs, questions, and where each answer was told."""
    task = Recall(2 * pairs, 1, seed)
    texts = task.texts(0)
    tokens, target, distance = (x[0].tolist() for x in texts)
    figure, axes = new_figure(8.6, 2.3)
    axis = axes[0, 0]
    asked = [t for t in range(2 * pairs) if target[t] != NONE]
    for t, token in enumerate(tokens):
        is_key = t % 2 == 0
        colour = "key" if is_key else "value"
        colour = "query" if t in asked else colour
        x = t + 0.25 * (t // 2)
        axis.add_patch(Rectangle((x, 0), 0.94, 1, facecolor=PALETTE[colour]))
        shown = chr(65 + token) if is_key else token - task.keys
        axis.text(x + 0.47, 0.5, shown, ha="center", va="center", fontsize=9,
                  color=readable_on(colour))  # fmt: skip
    for t in asked:
        start, end = (u + 0.25 * (u // 2) for u in (t, t - distance[t] + 1))
        axis.add_patch(FancyArrowPatch((start + 0.47, 1.05), (end + 0.47, 1.05), arrowstyle="->",
                       connectionstyle=f"arc3,rad={0.28 if distance[t] > 12 else 0.4}",
                       mutation_scale=10, color=PALETTE["query"], linewidth=1.1))  # fmt: skip
        axis.text(start + 0.47, -0.35, f"{distance[t]}", ha="center", fontsize=9)
    axis.text(-0.3, -0.35, "back", ha="right", fontsize=9)
    axis.set(xlim=(-2, 2.27 * pairs), ylim=(-0.8, 4.2))
    axis.axis("off")
    return Picture(
        figure,
        f"{pairs} pairs of a key (letter) and a value; {len(asked)} keys come again and ask "
        f"(orange), at most {max(distance[t] for t in asked)} tokens later",
    )


def draw_distance(path: Path = SHORT) -> Picture:
    """Accuracy by how far back the answer lies."""
    figure, axes = new_figure(8.4, 3.2)
    axis = axes[0, 0]
    for name in ("dense", "nsa", "random", "no-selection", "window"):
        if not (runs := rows(name, path)):
            continue
        label, colour = NAMES[name]
        table = [r["found"]["by_distance"] for r in runs]
        values = np.array([[entry["accuracy"] for entry in row] for row in table])
        x = range(len(table[0]))
        axis.fill_between(x, values.min(0), values.max(0), color=PALETTE[colour], alpha=0.2,
                          linewidth=0)  # fmt: skip
        axis.plot(x, values.mean(0), "o-", color=PALETTE[colour], markersize=4, label=label)
    bins = [(entry["from"], entry["to"]) for entry in table[0]]
    axis.set_xticks(range(len(bins)), [f"{a}" if a == b else f"{a}–{b}" for a, b in bins])
    axis.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axis.set(xlabel="tokens between a question and its answer", ylim=(-0.04, 1.06))
    axis.legend(frameon=False, fontsize=9, loc="lower left")
    last = [mean([r["found"]["by_distance"][-1]["accuracy"] for r in rows(n, path)])
            for n in ("nsa", "dense")]  # fmt: skip
    return Picture(
        figure,
        f"NSA loses with distance: of the farthest answers it finds {last[0]:.0%}, dense "
        f"attention {last[1]:.0%}",
    )


# -- a run of the reader's --


def draw_live(losses: Sequence[float], values: int = 64) -> Picture:
    """Losses of a short run, beside that of a guess."""
    figure, axes = new_figure(7.4, 2.7)
    axis, guess = axes[0, 0], math.log(values)
    axis.plot(range(1, len(losses) + 1), losses, color=PALETTE["selected"], linewidth=1.6)
    axis.axhline(guess, color=PALETTE["faint"], linestyle="--", linewidth=1)
    axis.text(len(losses), guess + 0.04, f"a guess: ln {values} = {guess:.2f}", ha="right",
              va="bottom", fontsize=9)  # fmt: skip
    axis.set(xlabel="step", ylabel="training loss (nats)")
    ten = mean(list(losses)[-10:])
    return Picture(figure, f"The last ten of {len(losses)} steps have a mean loss of {ten:.2f}")


# -- lists --


def far_questions(row: dict) -> list[int]:
    """The positions in a run's text whose answers neither window nor two latest blocks reach."""
    sees = reach(Settings(**row["settings"]))
    return [t for t, d in enumerate(row["text"]["distance"]) if d >= sees]


def answers(row: dict) -> dict[int, int]:
    """The block of the answer of each far question."""
    back, size = row["text"]["distance"], row["settings"]["block_size"]
    return {t: (t - back[t]) // size for t in far_questions(row)}


def hits_at(row: dict, step: int) -> float:
    """The share of the far questions of the text whose list held the answer at a step."""
    lists = row["lists"][str(step)]
    told = answers(row)
    return mean([float(block in lists[t]) for t, block in told.items()])


def _lists_image(row: dict, step: int) -> np.ndarray:
    """The blocks that each far question lists, `[blocks, questions, 3]`, by their colours."""
    s, lists = row["settings"], row["lists"][str(step)]
    asked, size = far_questions(row), s["block_size"]
    image = np.full((s["length"] // size, len(asked), 3), 255, dtype=np.uint8)
    for column, t in enumerate(asked):
        own = t // size
        image[: own + 1, column] = byte_colour("masked")
        for block in lists[t]:
            if block >= 0:
                forced = block == 0 or block > own - 2
                image[block, column] = byte_colour("own block" if forced else "selected")
    return image


def _draw_lists(axis: Axes, row: dict, step: int) -> None:
    axis.imshow(_lists_image(row, step), origin="lower", aspect="auto", interpolation="none")
    lists = row["lists"][str(step)]
    for column, (t, block) in enumerate(answers(row).items()):
        is_hit = block in lists[t]
        axis.plot(column, block, "o", markersize=5.5, markeredgewidth=1.2,
                  markeredgecolor=PALETTE["text"],
                  markerfacecolor=PALETTE["compressed"] if is_hit else "white")  # fmt: skip
    axis.set_xlabel(f"its {len(answers(row))} far questions", fontsize=9)
    axis.set_xticks([])


def draw_film(steps: Sequence[int] = (1, 200, 400, 1000)) -> Picture:
    """The lists of one held-out text as NSA learns, and random ones."""
    (row, *_), (random, *_) = rows("nsa"), rows("random")
    figure, axes = new_figure(9.6, 3.1, columns=len(steps) + 1)
    for axis, step in zip(axes[0], steps, strict=False):
        _draw_lists(axis, row, step)
        axis.set_title(f"NSA, step {step:,}\n{hits_at(row, step):.0%} hits", fontsize=9.5)
    _draw_lists(axes[0, -1], random, steps[-1])
    axes[0, -1].set_title(f"random slots\n{hits_at(random, steps[-1]):.0%} hits", fontsize=9.5)
    for axis in axes[0, 1:]:
        axis.set_yticks([])
    axes[0, 0].set_ylabel("block of the past", fontsize=9)
    return Picture(
        figure,
        f"As NSA learns, its lists come to hold {hits_at(row, steps[-1]):.0%} of this text's far "
        f"answers; {hits_at(row, steps[0]):.0%} at first",
    )


# -- a branch taken away --


def far_without(variant: str) -> float:
    """Far answers that trained NSA finds without a branch, or with random slots: the mean."""
    return mean([r["without"][variant]["far"] for r in rows("nsa")])


def draw_without() -> Picture:
    """Trained NSA whole, and with one thing taken away, a dot for each seed."""
    names = {"": "whole", "no-window": "no window", "no-summaries": "no summaries added",
             "random": "random slots", "no-selection": "no lists"}  # fmt: skip
    figure, axes = new_figure(8.0, 2.6)
    axis = axes[0, 0]
    for y, variant in enumerate(names):
        values = [r["without"][variant]["far"] if variant else r["found"]["far"]
                  for r in rows("nsa")]  # fmt: skip
        axis.barh(y, mean(values), 0.56, color=PALETTE["selected"], alpha=0.45)
        axis.plot(values, [y] * len(values), "o", color=PALETTE["selected"], markersize=6,
                  markeredgecolor=PALETTE["text"], markeredgewidth=0.6)  # fmt: skip
        axis.text(max(values) + 0.02, y, f"{mean(values):.0%}", va="center", fontsize=9.5)
    axis.set_yticks(range(len(names)), list(names.values()), fontsize=9.5)
    axis.set(ylim=(len(names) - 0.5, -0.5), xlim=(0, 1.1))
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axis.set_xlabel("far answers found; a dot is a seed")
    left = {name: f"{far_without(name):.0%}" for name in ("no-selection", "no-summaries")}
    return Picture(
        figure,
        f"Without its lists, trained NSA falls from {far('nsa'):.0%} to {left['no-selection']}; "
        f"without summaries it keeps {left['no-summaries']}",
    )


# -- long texts and needles --


def draw_long() -> Picture:
    """Far answers and hits in long texts, a dot for each seed."""
    figure, axes = new_figure(8.8, 3.1)
    axis = axes[0, 0]
    order = ("dense", "nsa", "no-summaries", "random", "no-selection", "separate", "window")
    renamed = {"nsa": "NSA, shared keys", "no-summaries": "NSA, summaries only choose"}
    names = [name for name in order if rows(name, LONG)]
    for y, name in enumerate(names):
        values, colour = found(name, "far", LONG), NAMES[name][1]
        axis.barh(y, mean(values), 0.56, color=PALETTE[colour], alpha=0.45)
        axis.plot(values, [y] * len(values), "o", color=PALETTE[colour], markersize=6,
                  markeredgecolor=PALETTE["text"], markeredgewidth=0.6)  # fmt: skip
        told = f"{mean(values):.0%}"
        if rows(name, LONG)[0]["found"].get("hits") is not None:
            told += f"   (hits {mean(found(name, 'hits', LONG)):.0%})"
        axis.text(max(values) + 0.025, y, told, va="center", fontsize=9.5)
    labels = [renamed.get(name, NAMES[name][0]) for name in names]
    axis.set_yticks(range(len(names)), labels, fontsize=9.5)
    axis.set(ylim=(len(names) - 0.5, -0.5), xlim=(0, 1.15))
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axis.set_xlabel(f"far answers found after {sizes(LONG)['steps']:,} steps; a dot is a seed")
    shares = [far(name, LONG) for name in ("nsa", "separate", "random")]
    return Picture(
        figure,
        "{:,} tokens: with shared keys NSA finds {:.0%}, with separate ones {:.0%}, random slots "
        "{:.0%}".format(sizes(LONG)["length"], *shares),
    )


def draw_needle() -> Picture:
    """The needle found by depth and length, for each variant; the mean of its seeds."""
    order = ("dense", "nsa", "random", "separate", "window")
    names = [name for name in order if rows(name, NEEDLE)]
    figure, axes = new_figure(10.4, 2.5, columns=len(names))
    shares = {}
    for axis, name in zip(axes[0], names, strict=True):
        runs = rows(name, NEEDLE)
        found = np.mean([r["map"] for r in runs], 0)
        shares[name] = found[-1].mean()
        colour = np.array(to_rgb(PALETTE["selected"]))
        axis.imshow(1 - found[..., None] * (1 - colour), aspect="auto", interpolation="none")
        for (i, j), share in np.ndenumerate(found):
            axis.text(j, i, f"{100 * share:.0f}", ha="center", va="center", fontsize=6.5,
                      color="white" if share > 0.6 else PALETTE["text"])  # fmt: skip
        axis.set_title(NAMES[name][0], fontsize=9.5)
        axis.set_yticks([])
        axis.set_xticks([0, found.shape[1] - 1], ["first", "last"])
        axis.set_xlabel("where the needle is", fontsize=9)
    lengths = rows(names[0], NEEDLE)[0]["lengths"]
    axes[0, 0].set_yticks(range(len(lengths)), [f"{n:,}" for n in lengths])
    axes[0, 0].set_ylabel("tokens of the text", fontsize=9)
    told = ", ".join(f"{NAMES[n][0]} {share:.0%}" for n, share in shares.items())
    return Picture(figure, f"Needles found in texts of {lengths[-1]:,} tokens: {told}")


def tokens_per_second() -> dict[str, dict[int, float]]:
    """Of a model's forward and backward pass: dense and NSA, by the length of the text."""
    found: dict[str, dict[int, float]] = {"dense": {}, "nsa": {}}
    for r in recording(SPEED)["rows"]:
        found[r["attention"]][r["tokens"]] = r["tokens"] / r["ms"] * 1000
    return found


def pays_from() -> tuple[int, int]:
    """The longest recorded text for which dense attention is quicker, and the next one."""
    speed = tokens_per_second()
    lengths = sorted(speed["dense"])
    last = max(n for n in lengths if speed["dense"][n] > speed["nsa"][n])
    return last, lengths[lengths.index(last) + 1]


def draw_speed() -> Picture:
    """Tokens per second of a model in training, by the length of its text."""
    speed, data = tokens_per_second(), recording(SPEED)
    figure, axes = new_figure(8.0, 3.2)
    axis, lengths = axes[0, 0], sorted(speed["dense"])
    for name, values in speed.items():
        y = [values[n] / 1000 for n in lengths]
        axis.loglog(lengths, y, "o-", color=PALETTE[NAMES[name][1]], base=2, linewidth=2)
        axis.text(lengths[-1] * 1.12, y[-1], NAMES[name][0], va="center", fontsize=10)
    a, b = pays_from()
    axis.axvspan(a, b, color=PALETTE["faint"], alpha=0.25, linewidth=0)
    axis.set_xticks(lengths, [f"{n // 1024}k" for n in lengths])
    axis.set_yticks([32, 64, 128, 256, 512], ["32", "64", "128", "256", "512"])
    axis.minorticks_off()
    axis.set(xlim=(lengths[0] * 0.85, lengths[-1] * 1.9), xlabel="tokens of the text",
             ylabel="1,000 tokens a second")  # fmt: skip
    most = lengths[-1]
    return Picture(
        figure,
        f"On one {data['machine'].removeprefix('NVIDIA ')}, NSA trains faster from {b // 1024}k "
        f"tokens on, and {speed['nsa'][most] / speed['dense'][most]:.1f} times as fast at "
        f"{most // 1024}k",
    )


# -- one run, looked at --


def sentence(task: str, attention: str, seed: int, step: int) -> str:
    """What the explorer says."""
    label = NAMES[attention][0]
    if not (runs := rows(attention, TASKS[task])):
        return f"{label} was not recorded for this task."
    row = runs[seed]
    if "map" in row:
        shares = ", ".join(
            f"{mean(line):.0%} of {n:,} tokens"
            for n, line in zip(row["lengths"], row["map"], strict=True)
        )
        return f"{label}, seed {seed}: the needle is found in texts as follows: {shares}."
    f = row["found"]
    told = f"{label}, seed {seed}: {f['accuracy']:.1%} of all answers, {f['far']:.1%} of the far."
    if f.get("hits") is not None:
        told += f" Its lists hold {f['hits']:.1%} of the far answers (chance: {f['chance']:.1%})."
    if "lists" in row:
        told += f" In this text, at step {step}: {hits_at(row, step):.0%}."
    return told


def draw_run(
    task: str = "recall, 512", attention: str = "nsa", seed: int = 0, step: int = 1000
) -> Picture:
    """One run: its loss, its accuracy by distance or the needle's by depth, and its lists where
    they were kept."""
    sheet, path = Sheet(8.5, 3.3), TASKS[task]
    label, colour = NAMES[attention]
    if not (runs := rows(attention, path)):
        sheet.text(0.55, 1.5, f"{label} was not recorded for this task.", size=10)
        return Picture(sheet.figure, f"{label}: not recorded")
    row = runs[seed]
    end = row["settings"]["steps"]
    left = sheet.chart(Place(0.55, 0.62, 2.15, 2.0), (0, end), (0, 6))
    left.title("training loss")
    for other in ("dense", "window"):
        curve = [(step, min(loss, 6)) for step, loss, _ in rows(other, path)[0]["curve"]]
        left.lines([curve], "masked", 1.5)
        left.words([(0.98 * end, curve[-1][1] + 0.15, other)], size=8, ha="right", va="bottom")
    left.lines([[(step, min(loss, 6)) for step, loss, _ in row["curve"]]], colour, 2)
    left.bottom([0, end // 2, end], name="step")
    left.left([0, 2, 4, 6])
    if "map" in row:
        shares = row["map"][-1]
        at = [str(i) for i in range(len(shares))]
        title, name = f"needles in {row['lengths'][-1]:,} tokens", "place, from the first on"
    else:
        bins = row["found"]["by_distance"]
        shares, at = [b["accuracy"] for b in bins], [str(b["from"]) for b in bins]
        title, name = "accuracy by distance", "tokens back, from"
    wide = len(shares) > 9
    middle = sheet.chart(Place(3.3, 0.62, 2.2, 2.0), (-0.5, len(shares) - 0.5), (0, 1.1))
    middle.title(title)
    middle.boxes([(i - 0.38, 0, 0.76, share) for i, share in enumerate(shares)], colour)
    middle.words([(i, share + 0.02, f"{100 * share:.0f}") for i, share in enumerate(shares)],
                 size=6.5 if wide else 8, va="bottom")  # fmt: skip
    shown = range(0, len(shares), 3 if wide else 1)
    middle.bottom(shown, [at[i] for i in shown], name)
    middle.left([0, 0.5, 1], ["0", "50 %", "100 %"])
    place = Place(6.15, 0.62, 2.2, 2.0)
    if "lists" in row:
        _put_lists(sheet, place, row, step)
    else:
        sheet.text(6.15, 1.5, "Lists were kept of NSA\nand of random slots,\n512 tokens, seed 0.",
                   size=9)  # fmt: skip
    told = mean(shares) if "map" in row else row["found"]["far"]
    what = "needles" if "map" in row else "far answers"
    return Picture(sheet.figure, f"{label}: {told:.0%} of the {what}")


def _put_lists(sheet: Sheet, place: Place, row: dict, step: int) -> None:
    """The lists of a text on a sheet, with its answers."""
    sheet.image(place, _lists_image(row, step)[::-1])
    N, size = row["settings"]["length"], row["settings"]["block_size"]
    lists, told = row["lists"][str(step)], answers(row)
    chart = sheet.chart(place, (0, len(told)), (0, N // size))
    chart.title(f"lists at step {step}")
    edge = {"markeredgecolor": PALETTE["text"], "markeredgewidth": 1}
    for is_hit, colour in ((True, "compressed"), (False, "white")):
        points = [(column + 0.5, block + 0.5) for column, (t, block) in enumerate(told.items())
                  if (block in lists[t]) == is_hit]  # fmt: skip
        if points:
            chart.dots(points, colour, 5, **edge)
    chart.bottom([], name=f"the {len(told)} far questions of a text", line=False)
    chart.left([0, N // size], name="block", line=False)


def explore() -> Panel:
    """The interactive: task, variant, seed and step → loss, accuracy by distance, lists."""

    def render(task: str, attention: str, seed: int, step: int) -> tuple[Picture, str]:
        return draw_run(task, attention, seed, step), sentence(task, attention, seed, step)

    def idle(task: str, attention: str, seed: int, step: int) -> set[str]:
        runs = rows(attention, TASKS[task])
        if not runs:
            return {"seed", "step"}
        return set() if "lists" in runs[seed] else {"step"}

    return panel(
        "one run",
        render,
        idle=idle,
        task=ipywidgets.Dropdown(options=list(TASKS), description="task"),
        attention=ipywidgets.Dropdown(
            options=[(label, name) for name, (label, _) in NAMES.items()], value="nsa",
            description="attention",
        ),
        seed=ipywidgets.SelectionSlider(options=(0, 1, 2), value=0, description="seed"),
        step=ipywidgets.SelectionSlider(options=STEPS, value=1000, description="step"),
    )  # fmt: skip
