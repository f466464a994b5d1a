"""Hygiene of the chapters: what stored outputs must not contain, and the rhythm every chapter
keeps."""

from __future__ import annotations

import ast
import base64
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
import torch

from nsa_tutorial.course import chapters, execute, exercises
from nsa_tutorial.course.chapters import CHAPTERS, Chapter, link_neighbours
from nsa_tutorial.course.exercises import chapter_module
from nsa_tutorial.course.stills import INTERACTIVE, WIDGET

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RHYTHM = ["Predict", "Build", "Picture", "Check", "Recap", "Next"]
TAGS = {"nbval-ignore-output", "raises-exception", "gpu"}

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [c for c in notebook.cells if c.cell_type == "code"]


def tags(cell: nbformat.NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def anchors(text: str) -> set[str]:
    """What `#…` may name in a page: headings, as Jupyter and as GitHub write them, and ids."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    headings = [h.replace("`", "").strip() for h in re.findall(r"^#+ (.+)$", text, re.M)]
    jupyter = {h.replace(" ", "-") for h in headings}
    github = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
    return jupyter | github | set(re.findall(r"(?:id|name)=[\"']([^\"']+)", text))


def dead_links(text: str, folder: Path) -> list[str]:
    """The links of a Markdown page in `folder`, also in its HTML, that lead nowhere."""
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.M | re.S)
    links = re.findall(r"\]\(\s*<?([^)\s>]+)", prose)
    links += re.findall(r"(?:href|src)=[\"']([^\"']+)", prose)
    dead = []
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = unquote(link).partition("#")
        page = folder / name
        there = page.exists() and (not anchor or anchor in anchors(markdown_of(page, text)))
        if not there:
            dead.append(link)
    return dead


def markdown_of(page: Path, otherwise: str = "") -> str:
    """The prose of a file; `otherwise` where the link has no file in it."""
    if page.is_dir():
        return otherwise
    if page.suffix != ".ipynb":
        return page.read_text(encoding="utf-8")
    return "\n\n".join(c.source for c in read(page).cells if c.cell_type == "markdown")


def texts(cell: nbformat.NotebookNode) -> list[str]:
    """Everything textual that a cell's outputs hold."""
    found = []
    for output in cell.outputs:
        found.append(output.get("text", ""))
        found += [
            value for kind, value in output.get("data", {}).items() if kind.startswith("text/")
        ]
        found += output.get("traceback", [])
    return found


@each
def test_valid(path: Path) -> None:
    nbformat.validate(json.loads(path.read_text()))
    ids = [c.id for c in read(path).cells]
    assert len(ids) == len(set(ids))


@each
def test_executed_in_order(path: Path) -> None:
    notebook = read(path)
    assert [c.execution_count for c in code_cells(notebook)] == list(
        range(1, len(code_cells(notebook)) + 1)
    )
    for cell in code_cells(notebook):
        assert cell.source.strip(), f"cell {cell.id} is empty"
    assert notebook.metadata["kernelspec"]["name"] == "python3"
    assert {"codemirror_mode", "mimetype", "version"} <= notebook.metadata[
        "language_info"
    ].keys(), "JupyterLab would add them"
    assert "widgets" not in notebook.metadata


@each
def test_outputs_are_clean(path: Path) -> None:
    for cell in code_cells(read(path)):
        for output in cell.outputs:
            assert output.get("name") != "stderr", f"cell {cell.id}: stderr: {output.get('text')}"
            if output.output_type == "error":
                assert "raises-exception" in tags(cell), f"cell {cell.id}: {output.ename}"
            for kind, data in output.get("data", {}).items():
                assert kind != "image/svg+xml", f"cell {cell.id}: SVG carries a date"
                if kind.startswith("image/"):
                    size = len(base64.b64decode(data))
                    assert size <= 80_000, f"cell {cell.id}: a figure of {size} bytes"
        if "raises-exception" in tags(cell):
            assert any(o.output_type == "error" for o in cell.outputs), (
                f"cell {cell.id}: expected to raise, and did not"
            )
        for text in texts(cell):
            found = re.search(
                r"(?<![\w.])/(?:home|root|tmp|usr|work|opt|var|Users|mnt)/\S*|[A-Z]:\\\\?\w+", text
            )
            assert not found, f"cell {cell.id}: a path of this machine: {found.group()}"
            assert not re.search(r"0x[0-9a-f]{8,}", text), f"cell {cell.id}: an address"


@each
def test_cells_are_short(path: Path) -> None:
    for cell in read(path).cells:
        if cell.cell_type == "code":
            most = 20 if "@tilelang.jit" in cell.source else 16  # a whole kernel and its frame
            most = 48 if "  # 1: " in cell.source else most  # a kernel's frame, with gaps to fill
            assert len(cell.source.splitlines()) <= most, (
                f"cell {cell.id}: {len(cell.source.splitlines())} lines"
            )
            assert not cell.source.rstrip().endswith(";"), f"cell {cell.id}: a trailing semicolon"
            assert "NBVAL" not in cell.source, f"cell {cell.id}: use a cell tag"
            assert not re.search(r"\b(interact|clear_output|update_display)\(", cell.source), (
                f"cell {cell.id}"
            )
        assert set(tags(cell)) <= TAGS, f"cell {cell.id}: unknown tags {tags(cell)}"


@each
def test_a_cell_for_a_gpu_runs_without_one(path: Path) -> None:
    """The tests skip it there; JupyterLab's Run All does not, and would stop at its error."""
    for cell in code_cells(read(path)):
        if "gpu" in tags(cell):
            assert "torch.cuda.is_available()" in cell.source, f"cell {cell.id}"


@each
def test_rhythm(path: Path) -> None:
    notebook = read(path)
    first = notebook.cells[0]
    assert re.match(rf"# {path.stem[:2]} · \S", first.source), (
        "the first cell is the title, '# NN · Title'"
    )
    assert "?" in first.source, "the hook is a question"
    assert re.search(r"\d", first.source.split("\n", 1)[1]), "the hook has a number in it"
    assert re.search(r"\d+ minutes", first.source), "the first cell says how long the chapter takes"
    headings = [
        h
        for c in notebook.cells
        if c.cell_type == "markdown"
        for h in re.findall(r"^## (.+)$", c.source, re.M)
    ]
    expected = [h for h in RHYTHM if h != "Check" or path.stem[3:] in exercises.chapters()]
    assert headings == expected


@each
def test_recap_has_three_sentences_and_the_names(path: Path) -> None:
    source = "\n\n".join(c.source for c in read(path).cells if c.cell_type == "markdown")
    recap = source.split("\n## Recap", 1)[1].split("\n## Next", 1)[0]
    prose = recap.split("|", 1)[0]
    sentences = re.findall(r"[.?!](?=\s|$)", re.sub(r"\$[^$]*\$|`[^`]*`", "x", prose))
    assert len(sentences) == 3, f"the recap has {len(sentences)} sentences"
    assert recap.count("\n|") >= 4, "the recap ends in the table of names"


@each
def test_has_pictures(path: Path) -> None:
    figures = [
        o for c in code_cells(read(path)) for o in c.outputs if "image/png" in o.get("data", {})
    ]
    assert figures


@each
def test_an_interactive_is_stored_as_its_picture(path: Path) -> None:
    """Controls are an error without their kernel, so a page has the picture alone, once."""
    before = b""
    for cell in code_cells(read(path)):
        for output in cell.outputs:
            data = output.get("data", {})
            assert WIDGET not in data, f"cell {cell.id}: stored controls"
            if data.get("text/plain", "").startswith(INTERACTIVE):
                assert "image/png" in data, f"cell {cell.id}: an interactive without its picture"
                assert data["image/png"] != before, f"cell {cell.id}: its picture is above it, too"
            before = data.get("image/png", before)


@each
def test_text_stands_clear_of_a_closed_aside(path: Path) -> None:
    """JupyterLab leaves no room below `<details>`, so one that text follows brings its own."""
    for cell in read(path).cells:
        for head in re.findall(
            r"<details([^>]*)>(?:(?!</details>).)*</details>\n+(?!\s|<details|#)", cell.source, re.S
        ):
            assert "margin-bottom" in head, f"cell {cell.id}: text is glued to an aside"


@each
def test_links_lead_somewhere(path: Path) -> None:
    assert dead_links(markdown_of(path), path.parent) == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "OPERATORS.md"])
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    assert dead_links((ROOT / page).read_text(encoding="utf-8"), ROOT) == []


def test_dead_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A heading")
    text = (
        "# One `two` & three\n[a](there.md) [b](there.md#A-heading) [c](#One-two-&-three) "
        "[d](https://example.org) [e](gone.md) [f](#Two) [g](there.md#B) ![h](gone.png)\n"
        '<a href="there.md">i</a> <img alt="" src="gone.svg"> <a href=\'#Three\'>j</a>\n'
        "`[not](a.link)`\n```\n# no heading\n```\n[k](#no-heading)"
    )
    gone = ["gone.md", "#Two", "there.md#B", "gone.png", "#no-heading", "gone.svg", "#Three"]
    assert dead_links(text, tmp_path) == gone


@pytest.mark.parametrize("chapter", [c for c in CHAPTERS if c.is_ready], ids=lambda c: c.name)
def test_every_chapter_ends_with_its_neighbours(chapter: Chapter) -> None:
    last = read(NOTEBOOKS[0].parent / chapter.file).cells[-1]
    assert re.search(r"^## Next$", last.source, re.M), "the last section is Next"
    assert not link_neighbours(chapter, write=False), "run python -m nsa_tutorial.course.chapters"


def plain(text: str) -> str:
    """The words of a text, in one line and without stress."""
    return " ".join(text.replace("*", "").split())


@each
def test_what_is_stored_of_a_guess_is_what_is_told(path: Path) -> None:
    """Questions and reasons; no run compares these cells, whose outputs are the reader's."""
    if path.stem[3:] not in exercises.chapters():
        pytest.skip("a chapter without exercises")
    known = {p.name: p for p in getattr(chapter_module(path.stem[3:]), "PREDICTIONS", ())}
    for cell in code_cells(read(path)):
        stored = " ".join(
            out.get("text", "") + out.get("data", {}).get("text/plain", "") for out in cell.outputs
        )
        for kind, name in re.findall(r'\b(predict|reveal)\("(\w+)"', cell.source):
            told = known[name].question if kind == "predict" else known[name].reason
            assert plain(told) in plain(stored), name


@each
def test_exercises_are_all_there(path: Path) -> None:
    """Statement, stub with the solution's parameters, check: in that order, and as shipped not
    attempted."""
    chapter = path.stem[3:]
    if chapter not in exercises.chapters():
        pytest.skip("a chapter without exercises")
    known = exercises.chapter_exercises(chapter)
    assert len(known) >= 3
    cells = code_cells(read(path))
    for name, exercise in known.items():
        position = next(
            (
                i
                for i, c in enumerate(cells)
                if re.match(rf'exercise\("{chapter}", "{name}"\)', c.source)
            ),
            None,
        )
        assert position is not None, f"{name}: its statement is not shown"
        stub, checking = cells[position + 1], cells[position + 2]
        function = next(
            n
            for n in ast.walk(ast.parse(stub.source))
            if isinstance(n, ast.FunctionDef) and n.name == name
        )
        assert [a.arg for a in function.args.args] == list(
            inspect.signature(exercise.solution).parameters
        )
        assert checking.source.strip() == f'check("{chapter}", {name}={name})'
        assert tags(checking) == ["nbval-ignore-output"]
        assert checking.outputs[0].data["text/plain"] == f"○ {name}: not attempted yet."
    imported = re.search(
        r"from nsa_tutorial.course import (.+)", "\n".join(c.source for c in cells)
    ).group(1)
    assert {"check", "exercise", "solution"} <= set(re.split(r",\s*", imported)), (
        "a reader who is stuck calls solution()"
    )


def run_nbval(folder: Path, *cells: tuple[str, str, list[str]]) -> str:
    """What `pytest --nbval` says of a notebook of (source, stored text, tags), set up as a
    chapter."""
    kernel = {"name": "python3", "display_name": "", "language": "python"}
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})
    for source, text, cell_tags in cells:
        outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []
        facts = {"outputs": outputs, "execution_count": 1, "metadata": {"tags": cell_tags}}
        notebook.cells.append(nbformat.v4.new_code_cell(source, **facts))
    nbformat.write(notebook, folder / "chapter.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbval", "-p", "no:cacheprovider"]
    command += ["-p", "nsa_tutorial.course.nbval_rules", "chapter.ipynb"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


@pytest.mark.exhaustive
def test_nbval_compares_sanitises_and_leaves_out(tmp_path: Path) -> None:
    """Text is compared but for times, addresses and where a tag says so; a GPU's cell waits."""
    said = run_nbval(
        tmp_path,
        ("print('three')", "three\n", []),
        (
            "print('took 12.5 ms at', object())",
            "took 99.9 ms at <object object at 0x7fffffffffff>\n",
            [],
        ),
        ("print('mine')", "yours\n", ["nbval-ignore-output"]),
        ("import torch; assert torch.cuda.is_available()", "", ["gpu"]),
        ("print('four')", "five\n", []),
    )
    passed = "4 passed" if torch.cuda.is_available() else "3 passed, 1 deselected"
    assert f" 1 failed, {passed} " in said.splitlines()[-1]
    assert re.findall(r"^FAILED chapter\.ipynb::.*Cell (\d)", said, re.M) == ["4"]


@pytest.mark.exhaustive
def test_nbval_compares_stored_measurements_whatever_the_tags_say(tmp_path: Path) -> None:
    """Their times, too; but not what the course says of a reader's answer."""
    measured = "file = 'triton_forward_h200.json'; print({!r})"
    ignored = ["nbval-ignore-output"]
    said = run_nbval(
        tmp_path,
        (measured.format("took 12.5 ms"), "took 12.5 ms\n", ignored),
        (measured.format("took 12.5 ms"), "took 12.6 ms\n", ignored),
        (measured.format("took 12.5 ms"), "took 12.6 ms\n", []),
        (measured.format("○ a_guess: no guess yet."), "✗ a_guess: you said 4.\n", ignored),
    )
    assert " 2 failed, 2 passed " in said.splitlines()[-1]
    assert re.findall(r"^FAILED chapter\.ipynb::.*Cell (\d)", said, re.M) == ["1", "2"]


def test_neighbours_are_written_once_and_follow_the_chapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The command on a course of two chapters, then of a third and the one before it."""
    monkeypatch.setattr(chapters, "NOTEBOOKS", tmp_path)

    def add(number: int, title: str) -> Path:
        cells = [f"# {number:02d} · {title}: more", "## Next\n\nAnd [Map](#x) then."]
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(c) for c in cells])
        path = tmp_path / CHAPTERS[number].file
        execute.write(path, notebook)
        return path

    first, second = add(0, "Begin"), add(1, "Look up")
    assert chapters.main(["--check"]) == 1
    assert chapters.main([]) == 0
    assert chapters.main(["--check"]) == 0
    there = "[Map](00_start_here.ipynb#The-map)"
    begin = f"{there} · [Look up](01_dense_attention.ipynb) →"
    assert read(first).cells[-1].source == f"## Next\n\nAnd [Map](#x) then.\n\n{begin}"
    line = f"← [Begin](00_start_here.ipynb) · {there}"
    coming = f"{line} · Grouped query attention (in preparation)"
    assert read(second).cells[-1].source.splitlines()[-1] == coming
    add(3, "Run on")
    assert chapters.main([]) == 0
    further = f"{coming} · [Run on](03_online_softmax.ipynb) →"
    assert read(second).cells[-1].source.splitlines()[-1] == further
    add(2, "Share")
    assert chapters.main([]) == 0
    ready = f"{line} · [Share](02_grouped_query_attention.ipynb) →"
    assert read(second).cells[-1].source == f"## Next\n\nAnd [Map](#x) then.\n\n{ready}"
    stored = second.read_text(encoding="utf-8")
    assert not execute.write(second, read(second)), "another form than that of execute"
    assert chapters.main([]) == 0
    assert second.read_text(encoding="utf-8") == stored
    assert capsys.readouterr().out.count("written") == 7
