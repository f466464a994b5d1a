"""Triton's orders are rows of their own, and a stored run is read, drawn and compared as it was
measured."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from PIL import Image

from nsa_tutorial.bench import __main__ as bench
from nsa_tutorial.bench import comparing, plotting, steps, stored, timing
from nsa_tutorial.bench.inputs import Shape
from nsa_tutorial.bench.measuring import Row
from nsa_tutorial.bench.problem import Problem
from nsa_tutorial.bench.stored import Run
from nsa_tutorial.runtime.order import Order

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = Shape(
    tokens=48, kv_heads=1, group=2, width=16, value_width=16, block_size=16, slots=2,
    dtype="float32", length=8, stride=4,
)  # fmt: skip
TINY_OPTIONS = (
    "--tokens 48 --kv-heads 1 --group 2 --width 16 --block-size 16 --slots 2 --seconds 0.01"
)
ROW = Row(
    **asdict(TINY), operator="selected", kernel="triton", change="", direction="forward",
    lists="random", ms=2.0, ms_low=1.9, ms_high=2.2, dense_ratio=3.0, is_right=True,
)  # fmt: skip
DENSE = replace(ROW, kernel="dense", lists="", ms=6.0, dense_ratio=1.0, is_right=None)
FACTS = {"command": "x", "machine": "a GPU", "python": "3", "torch": "2", "triton": "3"}
STORED = sorted(Path(__file__).parents[1].glob("assets/*_h200.json"))
OTHERS = ("model_lists", "native_host")  # no rows of `Row`
STORED = [path for path in STORED if not path.name.startswith(OTHERS)]


# -- orders --

SELECTED = "nsa_tutorial.kernels.triton.selected"
FUNCTIONS = {  # what runs for an order, and for no other
    "forward": {
        Order.QUERY_TILES: f"{SELECTED}.by_query_tiles:launch",
        Order.KEY_BLOCKS: f"{SELECTED}.by_key_blocks:launch",
        Order.QUERIES: f"{SELECTED}.launch:by_queries",
    },
    "backward": {
        Order.QUERY_TILES: f"{SELECTED}.by_query_tiles_backward:gradient_of_queries",
        Order.KEY_BLOCKS: f"{SELECTED}.by_key_blocks_backward:all_gradients",
        Order.QUERIES: f"{SELECTED}.backward_launch:gradient_of_queries",
    },
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_each_order_is_a_row(
    direction: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each runs its own function, once a row, and is right; what Triton chooses has no name."""
    pytest.importorskip("triton")
    ran = []
    for name in FUNCTIONS[direction].values():
        _record(monkeypatch, name, ran)
    monkeypatch.setattr(timing, "measure", lambda *_, **__: (1.0, 1.0, 1.0))
    path = tmp_path / "x.json"
    chosen = ["--order", "tiles", "auto", "blocks", "queries", "tiles", "--pass", direction]
    arguments = ["--device", "cpu", "--backend", "triton", "reference", *TINY_OPTIONS.split()]
    arguments += ["--tokens", "12"]
    assert bench.main(["selected", *arguments, *chosen, "--no-dense", "--output", str(path)]) == 0
    rows = stored.read(path).rows
    assert [(row.kernel, row.order) for row in rows] == [
        ("triton", "tiles"), ("triton", ""), ("triton", "blocks"), ("triton", "queries"),
        ("reference", ""),
    ]  # fmt: skip
    assert all(row.is_right and row.direction == direction for row in rows)
    counts = {order: ran.count(name) for order, name in FUNCTIONS[direction].items()}
    assert counts[Order.QUERY_TILES] == counts[Order.KEY_BLOCKS] == 1
    assert counts[Order.QUERIES] >= 2  # asked for, and chosen


def _record(monkeypatch: pytest.MonkeyPatch, where: str, ran: list[str]) -> None:
    """Note each call of a function, `"module:name"`."""
    module, name = where.split(":")
    function = getattr(importlib.import_module(module), name)

    def noted(*given: object, **options: object) -> object:
        ran.append(where)
        return function(*given, **options)

    monkeypatch.setattr(f"{module}.{name}", noted)


@pytest.mark.parametrize("operator", ["selected", "compressed"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_step_of_triton_can_be_made(operator: str, direction: str) -> None:
    """A step names functions and lines of the kernels: where one is gone, the step fails here, and
    not on the GPU."""
    pytest.importorskip("triton")
    problem = Problem.make(operator, TINY, "cpu", "random" if operator == "selected" else "")
    names = [name for name, _ in steps.steps_of(problem, "triton", direction)]
    assert len(names) == len(set(names)) >= 7


def test_steps_of_the_backward_change_one_query_in_a_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where Triton would choose another order by itself."""
    pytest.importorskip("triton")
    from nsa_tutorial.bench.variants import triton_backward_variants
    from nsa_tutorial.kernels.triton.selected import backward_launch as triton_backward_launch
    from nsa_tutorial.kernels.triton.selected import launch

    problem = Problem.make("selected", replace(TINY, tokens=9), "cpu", "random")
    monkeypatch.setattr(triton_backward_variants, "variant", lambda _: triton_backward_launch)
    chosen = lambda *_, **__: Order.KEY_BLOCKS  # noqa: E731
    monkeypatch.setattr(launch, "order_of", chosen)
    monkeypatch.setattr(triton_backward_launch.by_key_blocks_backward, "all_gradients", None)
    found = dict(steps.steps_of(problem, "triton", "backward"))
    assert found["64-bit offsets"].make()().keys() == {"d_q", "d_k", "d_v"}


# -- files --


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = Run(FACTS, [replace(ROW, order="tiles", note="é"), DENSE])
    stored.write(run, tmp_path / "x.json")
    assert stored.read(tmp_path / "x.json") == run


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_stored_files_are_read(path: Path) -> None:
    """Whatever columns there were when they were measured."""
    run = stored.read(path)
    rows = json.loads(path.read_text())["rows"]
    assert len(run.rows) == len(rows) > 0
    for row, as_stored in zip(run.rows, rows, strict=True):
        assert asdict(row).items() >= as_stored.items()
        assert row.order == as_stored.get("order", "")
        assert row.direction
        has_lists = row.operator in ("selected", "selection", "native", "hugging_face")
        assert bool(row.lists) == (has_lists and not row.kernel.startswith("dense"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{"tokens": 3}]}', '{"rows": 3}'])
def test_what_is_no_run(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"x\.json: expected a \.json file that the benchmark"):
        stored.read(path)
    with pytest.raises(SystemExit):
        bench.main(["compare", str(path), str(path)])
    assert "x.json: expected a .json file" in capsys.readouterr().err


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["plot", str(tmp_path / "x.json"), "--output", str(tmp_path / "x.png")])
    assert "x.json: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["--output", "/home/me/my runs/x.json"], "--output x.json"),
        (["--output=../a=b/x.json", "--plot", "runs/x.png"], "--output=x.json --plot x.png"),
        (["--out", "/tmp/x.json", "--seconds", "0.5"], "--out x.json --seconds 0.5"),
    ],
)
def test_the_command_names_no_folder(given: list[str], kept: str) -> None:
    assert stored.about(["selected", *given])["command"].endswith(f"bench selected {kept}")


# -- comparing --


def test_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows find each other whatever their place; what only one run has is listed."""
    tiles, blocks = replace(ROW, order="tiles", ms=4.0), replace(ROW, order="blocks")
    backward = replace(ROW, direction="backward", ms=None, note="did not run")
    stored.write(Run(FACTS, [ROW, tiles, backward, DENSE]), tmp_path / "a.json")
    after = [backward, blocks, replace(tiles, ms=1.0, is_right=False), replace(ROW, ms=2.5)]
    stored.write(Run({**FACTS, "command": "y"}, after), tmp_path / "b.json")
    assert bench.main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    text = capsys.readouterr().out
    cells = [[x.strip() for x in line.strip("| ").split("|")] for line in text.splitlines()]
    table = [line for line in cells if len(line) > 1]
    assert table[0] == [
        "direction", "lists", "kernel", "order", "before, ms", "after, ms", "after / before",
    ]  # fmt: skip
    assert [line[-3:] for line in table[2:]] == [
        ["2", "2.5", "1.25"], ["4", "1 (wrong)", "0.25"], ["–", "–", "–"],
    ]  # fmt: skip
    assert [line[3] for line in table[2:]] == ["", "tiles", ""]
    assert len({len(line) for line in text.splitlines() if line.startswith("|")}) == 1, "aligned"
    first, second = text.split("Only in the first run:")[1].split("Only in the second run:")
    assert first.strip() == "- dense, forward: 6 ms"
    assert second.strip() == "- triton, order blocks, forward, random lists: 2 ms"
    assert "48 tokens" in text
    assert "Warning" not in text, "another command is no other machine"


@pytest.mark.parametrize("fact", ["machine", "triton"])
def test_another_machine_or_version_is_named(fact: str) -> None:
    text = comparing.compare(Run(FACTS, [ROW]), Run({**FACTS, fact: "other"}, [ROW]))
    first = text.splitlines()[0]
    assert first.startswith("Warning")
    assert f"{fact} {FACTS[fact]}, then other" in first


@pytest.mark.parametrize("name", stored.NAMES)
def test_rows_that_differ_in_a_name_are_not_compared(name: str) -> None:
    value = getattr(ROW, name)
    other = replace(ROW, **{name: value + 1 if isinstance(value, int) else "other"})
    text = comparing.compare(Run(FACTS, [ROW]), Run(FACTS, [other]))
    assert "No row is in both runs." in text
    assert text.count("\n- ") == 2


# -- drawing --


def test_a_picture(tmp_path: Path) -> None:
    """From a stored run or while measuring, a picture with ink in it."""
    path = tmp_path / "x.json"
    arguments = ["selected", "--device", "cpu", "--backend", "reference", *TINY_OPTIONS.split()]
    made = [tmp_path / "a.png", tmp_path / "b.png"]
    assert bench.main([*arguments, "--output", str(path), "--plot", str(made[0])]) == 0
    assert bench.main(["plot", str(path), "--output", str(made[1])]) == 0
    first, second = (Image.open(x).convert("RGB") for x in made)
    assert first.size == second.size
    assert first.width > 300
    assert first.height > 100
    assert first.tobytes() == second.tobytes()
    assert len(first.getcolors(first.width * first.height)) > 10


def test_bars_of_a_picture() -> None:
    """A panel for each pass and kind of lists; dense attention stands in both panels of its pass.
    A bar is as long as the time, and says so."""
    tiles = replace(ROW, order="tiles", ms=1.0, ms_low=None, dense_ratio=6.0)
    wrong = replace(ROW, lists="smooth", is_right=False)
    failed = replace(ROW, lists="smooth", ms=None, ms_low=None, change="x", note="TypeError: no")
    axes = plotting.draw(Run(FACTS, [ROW, tiles, wrong, failed, DENSE])).axes
    assert [axis.get_title() for axis in axes] == ["random lists", "smooth lists"]
    assert [bar.get_width() for bar in axes[0].patches] == [2.0, 1.0, 6.0]
    assert [bar.get_width() for bar in axes[1].patches] == [2.0, 0.0, 6.0]
    assert [text.get_text() for text in axes[0].texts] == ["2 ms, 3×", "1 ms, 6×", "6 ms, 1×"]
    assert [text.get_text() for text in axes[1].texts][:2] == [
        "2 ms, 3×, wrong", "did not run: TypeError: no",
    ]  # fmt: skip
    labels = [text.get_text() for text in axes[0].get_yticklabels()]
    assert labels == ["triton", "triton, tiles", "dense"]
    assert len({bar.get_facecolor() for bar in axes[0].patches}) == 3
    assert all(axis.get_xlim()[1] > 6 for axis in axes)


def test_what_stands_beside_a_bar() -> None:
    """Two digits; of a part of `native` no ratio, as it does less than dense attention."""
    rows = [replace(ROW, dense_ratio=ratio) for ratio in (744.0, 12.3, 0.0042, None)]
    rows += [replace(ROW, operator="native", change=change) for change in ("", "gates")]
    axes = plotting.draw(Run(FACTS, rows)).axes
    told = [text.get_text().removeprefix("2 ms, ") for axis in axes for text in axis.texts]
    assert told == ["740×", "12×", "0.0042×", "2 ms", "3×", "2 ms"]


@pytest.mark.parametrize("count", [1, 2, 4, 5, 7])
def test_no_panel_is_lost(count: int) -> None:
    rows = [replace(ROW, tokens=tokens) for tokens in range(1, count + 1)]
    figure = plotting.draw(Run(FACTS, rows))
    figure.canvas.draw()
    assert len(figure.axes) == count
    assert len({axis.get_title() for axis in figure.axes}) == count


def test_there_must_be_something_to_draw() -> None:
    with pytest.raises(ValueError, match="no row to draw"):
        plotting.draw(Run(FACTS, []))
