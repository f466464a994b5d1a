"""A notebook as a page of the book.

A cell keeps its source and its stored outputs, and what needs a kernel gives way:

- a prediction asks for a guess, and its answer is a fold, with what led to each wrong guess;
- an exercise shows its statement and its hints as folds, and leads to its stages and mistakes;
- a figure that moves without a kernel moves here, too;
- what would judge an answer, or count what was solved, is left out;
- a picture is a file with its text, so that the page stays small.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
from markdown_it import MarkdownIt
from nbformat import NotebookNode

from book import places
from nsa_tutorial.course import exercises, moving
from nsa_tutorial.course.exercises import Exercise, Prediction

STYLE = re.compile(r"\s*<style>.*?</style>\s*", re.S)
_CALL = r"\b{}\(\s*\"(\w+)\"(?:,\s*\"(\w+)\")?"
_MARKDOWN = MarkdownIt()


def page(notebook: NotebookNode, file: str, figures: Path) -> NotebookNode:
    """The page of a chapter.

    Args:
        notebook: the chapter, which is changed.
        file: its name in `notebooks/`.
        figures: the folder for its pictures, which is there.
    """
    stem = file.removesuffix(".ipynb")
    styles: set[str] = set()
    for i, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            cell.source = links(cell.source)
        elif cell.cell_type == "code":
            _code(cell)
            for k, output in enumerate(cell.outputs):
                _output(output, styles, figures / f"{stem}_{i}_{k}.png")
    first = notebook.cells[0]
    title, _, rest = first.source.partition("\n")
    first.source = f"{title}\n\n{_openers(file)}\n{rest}"
    return notebook


def links(text: str) -> str:
    """Markdown whose links to files of the repository lead there, or are none."""

    def there(match: re.Match[str]) -> str:
        address = places.source(match["path"])
        return f"[{match['said']}]({address})" if address else match["said"]

    return re.sub(r"\[(?P<said>[^\]]+)\]\(\.\./(?P<path>[^)#]+)[^)]*\)", there, text)


def _openers(file: str) -> str:
    """The line below a chapter's title."""
    found = places.openers(file).items()
    return '<p class="openers">' + " ".join(
        f'<a href="{address}"{" download" if "_static" in address else ""}>{said}</a>'
        for said, address in found
    ) + "</p>\n"  # fmt: skip


# -- code cells --


def _code(cell: NotebookNode) -> None:
    """Fold, replace or leave out what a page cannot do."""
    source, tags = cell.source, cell.metadata.setdefault("tags", [])
    if cell.metadata.get("jupyter", {}).get("source_hidden"):
        tags.append("hide-input")
    if names := re.findall(_CALL.format("figure"), source):
        tags.append("hide-input")
        cell.outputs = [_html(moving.fragment(name)) for name, _ in names]
    elif re.search(r"\b(?:check|progress)\(", source):
        tags.append("remove-cell")
    elif match := re.search(_CALL.format("exercise"), source):
        tags.append("remove-input")
        exercise = exercises.chapter_exercises(match[1])[match[2]]
        cell.outputs = [_markdown(statement(exercise, match[1]))]
    elif names := re.findall(_CALL.format("reveal"), source):
        tags.append("hide-cell")
        cell.metadata["mystnb"] = {"code_prompt_show": "The answer", "code_prompt_hide": "Fold"}
        _answer(cell, [exercises.prediction(name) for name, _ in names])
    elif re.search(_CALL.format("predict"), source):
        if all(re.match(r"predict\(|\s|\)|[A-Z, ]+ = ", line) for line in source.splitlines()):
            tags.append("remove-input")
        cell.outputs = [o for o in cell.outputs if "nsa-said" not in _html_of(o)]
        cell.outputs.append(_html('<p class="guess">Make your guess before you read on.</p>'))


def _answer(cell: NotebookNode, predictions: list[Prediction]) -> None:
    """Leave the advice to guess out of an answer, and say what led to wrong guesses."""
    for output in cell.outputs:
        if "nsa-said" in _html_of(output):
            output.data["text/html"] = re.sub(
                r"<p>Next time, guess first.*?</p>", "", _html_of(output)
            )
    for prediction in predictions:
        said = [(guess, text) for guess, text in prediction.thoughts if not callable(guess)]
        if said:
            items = "".join(
                f"<dt>You said {html.escape(str(guess))}?</dt><dd>{inline(text)}</dd>"
                for guess, text in said
            )
            cell.outputs.append(_html(f'<dl class="thoughts">{items}</dl>'))


def statement(exercise: Exercise, chapter: str, *, is_here: bool = False) -> str:
    """What a page says of an exercise: its text, its hints as folds, and where its stages are,
    unless they are on the same page."""
    stars = "★" * exercise.difficulty + "☆" * (3 - exercise.difficulty)
    folds = "\n\n".join(fold(f"Hint {i}", hint) for i, hint in enumerate(exercise.hints, 1))
    more = f"[Stages, solution and mistakes](exercises_{chapter}.html#{exercise.name})"
    head = "" if is_here else f"**Exercise: `{exercise.name}`** · "
    return (
        f"{head}{exercise.minutes} minutes · {stars}\n\n"
        f"{links(exercise.statement.strip())}\n\n{folds}\n\n{'' if is_here else more}"
    )


def fold(title: str, text: str) -> str:
    """Markdown that opens by a click."""
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def inline(text: str) -> str:
    """A sentence of Markdown as HTML."""
    return _MARKDOWN.renderInline(text)


# -- outputs --


def _html_of(output: NotebookNode) -> str:
    return "".join(output.get("data", {}).get("text/html", ""))


def _html(text: str) -> NotebookNode:
    return nbformat.v4.new_output("display_data", data={"text/html": text})


def _markdown(text: str) -> NotebookNode:
    return nbformat.v4.new_output("display_data", data={"text/markdown": text})


def _output(output: NotebookNode, styles: set[str], file: Path) -> None:
    """Write a picture to its file; let each style stand once in a page, and links lead on."""
    data = output.get("data", {})
    if "image/png" in data:
        facts = output.metadata.get("image/png", {})
        file.write_bytes(base64.b64decode("".join(data["image/png"])))
        told = "".join(data.get("text/plain", ""))
        data.clear()
        data["text/html"] = picture(f"_static/figures/{file.name}", facts, told)
    elif "text/html" in data:
        text = "".join(data["text/html"])
        new = [style for style in map(str.strip, STYLE.findall(text)) if style not in styles]
        styles.update(new)
        data.clear()
        data["text/html"] = "\n".join([*new, file_links(STYLE.sub("", text))])


def picture(address: str, facts: dict, told: str) -> str:
    """A picture with its text and its size; an interactive also says where it moves."""
    size = "".join(f' {name}="{int(facts[name])}"' for name in ("width", "height") if name in facts)
    moves = told.startswith("Interactive:")
    said = '<p class="moves">In JupyterLab, you can move this picture.</p>' if moves else ""
    alt = html.escape(str(facts.get("alt", "")))
    return f'{said}<img class="nsa-picture" src="{address}" alt="{alt}"{size} loading="lazy">'


def file_links(text: str) -> str:
    """HTML of a listing or of the map, whose links lead to the repository and to pages."""

    def there(match: re.Match[str]) -> str:
        line = int(match["line"]) + 1 if match["line"] else None
        address = places.source(match["path"], line)
        return f'<a class="nsa-file" href="{address}">{match["said"]}</a>' if address else match[
            "said"
        ]  # fmt: skip

    text = re.sub(
        r'<a class="nsa-file" href="\.\./(?P<path>[^"#]+)(?:#line=(?P<line>\d+))?">'
        r"(?P<said>.*?)</a>",
        there,
        text,
    )
    return re.sub(r'href="(\d\d_\w+)\.ipynb', r'href="\1.html', text)


def pages(chapters: Iterator[Path], figures: Path, write: Callable[[str, str], None]) -> None:
    """Write the page of each chapter by `write(name, text)`."""
    for path in chapters:
        made = page(nbformat.read(path, 4), path.name, figures)
        write(path.name, nbformat.writes(made))
