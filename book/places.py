"""Where things are: folders of the book, and addresses of the repository it is made from."""

from __future__ import annotations

import os
from pathlib import Path

BOOK = Path(__file__).resolve().parent
ROOT = BOOK.parent
PAGES = BOOK / "_build" / "pages"  # what Sphinx reads
STATIC = BOOK / "_build" / "static"  # what it copies: pictures, notebooks
SITE = BOOK / "_build" / "html"

# The repository on GitHub, "owner/name": the one place for it. Without it, pages offer the chapter
# to download, and link to nothing outside.
REPOSITORY = os.environ.get("BOOK_REPOSITORY", "")
BRANCH = "main"


def source(path: str, line: int | None = None) -> str:
    """The address of a file of the repository; "" where the repository is not known."""
    anchor = f"#L{line}" if line else ""
    return f"https://github.com/{REPOSITORY}/blob/{BRANCH}/{path}{anchor}" if REPOSITORY else ""


def openers(notebook: str) -> dict[str, str]:
    """Ways to open a chapter, `notebook` its file's name: what a link says, and its address."""
    found = {"Download the notebook": f"_static/notebooks/{notebook}"}
    if REPOSITORY:
        there = f"github.com/{REPOSITORY}/blob/{BRANCH}/notebooks/{notebook}"
        found["Open in Colab"] = there.replace(
            "github.com", "https://colab.research.google.com/github", 1
        )
        found["Open in Kaggle"] = f"https://kaggle.com/kernels/welcome?src=https://{there}"
    return found
