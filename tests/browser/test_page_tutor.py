"""The tutor in JupyterLab: what it says can be read in both themes, exercises are in the table of
contents, the page of progress leads to the chapters."""

from __future__ import annotations

import json
from collections.abc import Iterator

import nbformat
import pytest
from lab import CHROMIUM, Lab

from nsa_tutorial.course.chapters import CHAPTERS

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
    pytest.mark.exhaustive,  # in make test, tests/course/test_tutor.py looks at colours and words
]
VIEWS = [f"{theme}-{app}" for theme in ("light", "dark") for app in ("lab", "notebook")]
NOTEBOOKS = [f"{name}.ipynb" for name in (*VIEWS, "contents")]  # a kernel each
CELLS = [
    "from nsa_tutorial.course import check, exercise, hint, progress",
    'exercise("dense_attention", "causal_weights")',
    "def causal_weights(scores):\n    return scores.softmax(-1)",
    'check("dense_attention", causal_weights=causal_weights)',
    "def causal_weights(scores):\n    ...",
    'check("dense_attention", causal_weights=causal_weights)',
    'hint("dense_attention", "causal_weights")',
    "from nsa_tutorial.course.exercises import chapter_exercises\n"
    'found = chapter_exercises("dense_attention")["causal_weights"].solution\n'
    'check("dense_attention", causal_weights=found)',
    'progress("dense_attention")',
]
# The contrast of every piece of text with the nearest ground behind it that is not transparent.
CONTRASTS = """() => {
  const parts = c => c.match(/[0-9.]+/g).map(Number);
  const light = c => parts(c).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = e => {
    const c = getComputedStyle(e).backgroundColor;
    return parts(c).length === 4 && parts(c)[3] === 0 ? ground(e.parentElement) : c;
  };
  const found = [];
  for (const said of document.querySelectorAll('.nsa-said'))
    for (const e of said.querySelectorAll('*')) {
      const text = [...e.childNodes].filter(n => n.nodeType === 3).map(n => n.data.trim()).join('');
      if (!text) continue;
      const style = getComputedStyle(e);
      const [low, high] = [light(style.color), light(ground(e))].sort((a, b) => a - b);
      found.push([text, (high + 0.05) / (low + 0.05), style.fontFamily]);
    }
  return found;
}"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    (folder / ".course").mkdir()
    kernel = {"name": "python3", "display_name": "", "language": "python"}
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    for name in NOTEBOOKS:
        nbformat.write(notebook, folder / name)
    server = Lab(folder)
    yield server
    server.close()


@pytest.mark.parametrize(
    ("theme", "app"),
    [("light", "lab"), ("dark", "notebook"), ("dark", "lab"), ("light", "notebook")],
)
def test_what_is_said_can_be_read(lab: Lab, theme: str, app: str) -> None:
    page = lab.run_all(f"{theme}-{app}.ipynb", theme=theme, app=app, size=(1400, 4000))
    found = page.evaluate(CONTRASTS)
    faint = [piece for piece in found if piece[1] < 4.5]
    assert not faint
    text = " ".join(piece[0] for piece in found)
    for words in ("Not yet.", "not attempted yet.", "Right, on all", "exercises solved"):
        assert words in text
    mono = {piece[0] for piece in found if "mono" in piece[2]}
    assert "causal_weights" in mono
    assert not any("Smallest failing case" in piece for piece in mono)
    page.close()


def test_exercises_are_in_the_contents_and_progress_leads_to_chapters(lab: Lab) -> None:
    page = lab.run_all("contents.ipynb", size=(1400, 4000))
    page.get_by_role("menuitem", name="View", exact=True).click()
    page.get_by_role("menuitem", name="Table of Contents").click()
    contents = page.locator(".jp-TableOfContents")
    lab.wait(lambda: contents.locator(":text('Exercise: causal_weights')").count() > 0, "contents")
    links = page.locator(".nsa-said a").evaluate_all("links => links.map(a => a.textContent)")
    assert len(links) == sum(c.is_ready for c in CHAPTERS)
    assert "1 of" in page.locator(".nsa-here").text_content()
    assert "✓ causal_weights" in page.locator(".nsa-names").text_content()
    notes = json.loads((lab.folder / ".course" / "progress.json").read_text())
    assert notes["solved"] == {"dense_attention": ["causal_weights"]}
    page.close()
