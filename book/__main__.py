"""Build the book: `python -m book`. Writes its pages, and has Sphinx make the site of them."""

from __future__ import annotations

import shutil
import sys
import time

from sphinx.cmd.build import main as sphinx

from book import chapter, exercises, glossary, listings, places
from nsa_tutorial.course import themes
from nsa_tutorial.course.chapters import CHAPTERS, NOTEBOOKS, PARTS

READY = [c for c in CHAPTERS if c.is_ready]
MADE = ("exercises", "misconceptions", "listings")
WRITTEN = ("tools.md",)  # as they are
EXERCISES = (
    "# Exercises\n\nEvery exercise of the course, with its hints, its stages and its solution.\n"
)


def write(name: str, text: str) -> None:
    """A page of that name; one that stays as it was keeps its time, so that Sphinx skips it."""
    path = places.PAGES / name
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def index() -> str:
    """The first page: what the course is, and the chapters in their parts."""
    text = (places.BOOK / "index.md").read_text(encoding="utf-8")
    for part, name in enumerate(PARTS):
        files = [c.file.removesuffix(".ipynb") for c in READY if c.part == part]
        text += f"\n```{{toctree}}\n:caption: {name}\n:hidden:\n\n" + "\n".join(files) + "\n```\n"
    names = [*MADE, *(name.removesuffix(".md") for name in WRITTEN), "glossary"]
    more = "\n".join(names)
    text += f"\n```{{toctree}}\n:caption: Beside the chapters\n:hidden:\n\n{more}\n```\n"
    cards = "\n".join(f"{c.number}. [{c.title}]({c.file}): {c.idea}" for c in READY)
    return text.replace("CHAPTERS", cards)


def pages() -> None:
    """Everything that Sphinx reads."""
    static = places.STATIC
    for folder in (places.PAGES, static / "figures", static / "notebooks"):
        folder.mkdir(parents=True, exist_ok=True)
    for ready in READY:
        shutil.copyfile(NOTEBOOKS / ready.file, static / "notebooks" / ready.file)
    turned = themes.turning("img.nsa-picture")
    (static / "pictures.css").write_text(f"{turned}\n", encoding="utf-8")
    chapter.pages((NOTEBOOKS / c.file for c in READY), static / "figures", write)
    write("listings.md", listings.page())
    write("glossary.md", glossary.page({c.number: c.file for c in READY}))
    for name in WRITTEN:
        write(name, (places.BOOK / name).read_text(encoding="utf-8"))
    for ready in READY:
        write(f"exercises_{ready.name}.md", exercises.page(ready))
        write(f"misconceptions_{ready.name}.md", exercises.mistakes(ready))
    write("exercises.md", exercises.index(READY, "exercises", EXERCISES))
    write("misconceptions.md", exercises.index(READY, "misconceptions", exercises.MISTAKES, 3))
    write("index.md", index())


def main() -> int:
    """Build the site; returns the exit status."""
    begun = time.perf_counter()
    pages()
    made = time.perf_counter()
    status = sphinx([
        "-b", "html", "-c", str(places.BOOK), "-d", str(places.BOOK / "_build" / "doctrees"),
        "-q", "-W", "--keep-going", str(places.PAGES), str(places.SITE),
    ])  # fmt: skip
    seconds = time.perf_counter() - begun
    print(
        f"{seconds:.0f} s, {made - begun:.0f} of them for the pages, "
        f"{seconds / len(READY):.1f} s a chapter: {places.SITE / 'index.html'}"
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
