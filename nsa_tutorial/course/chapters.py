"""The chapters, once: what the map draws, what README.md lists and the tests compare.

Every chapter ends with one line that leads to its neighbours. After adding or renaming a chapter:

    python -m nsa_tutorial.course.chapters            write these lines
    python -m nsa_tutorial.course.chapters --check    only say which of them are not right
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
PARTS = ("Start", "Attention, exactly", "Attention, sparsely", "Kernels", "Training and serving")


@dataclass(frozen=True)
class Chapter:
    """One chapter.

    Attributes:
        number: 0 to 19.
        name: of its notebook, its module and its exercises.
        part: index into `PARTS`.
        idea: the one idea, as a phrase.
    """

    number: int
    name: str
    part: int
    idea: str

    @property
    def file(self) -> str:
        """The notebook's file name."""
        return f"{self.number:02d}_{self.name}.ipynb"

    @property
    def is_ready(self) -> bool:
        """Whether the notebook is there."""
        return (NOTEBOOKS / self.file).exists()

    @property
    def title(self) -> str:
        """The title in the notebook's first line, up to a colon: "Online softmax". Without a
        notebook, the name."""
        if self.is_ready:
            notebook = json.loads((NOTEBOOKS / self.file).read_text(encoding="utf-8"))
            first = "".join(notebook["cells"][0]["source"])
            found = re.match(r"# \d\d · ([^:\n]+)", first)
            if found:
                return found.group(1).strip()
        return self.name.replace("_", " ").capitalize()


CHAPTERS = tuple(
    Chapter(number, name, part, idea)
    for number, (name, part, idea) in enumerate(
        [
            ("start_here", 0, "your first kernel"),
            ("dense_attention", 1, "a soft lookup, and its cost is N²"),
            ("grouped_query_attention", 1, "share the keys, shrink the cache"),
            ("online_softmax", 1, "softmax in one pass, base two"),
            ("tiled_attention", 1, "bytes, not FLOPs"),
            ("selected_attention", 2, "a short list of blocks"),
            ("compression", 2, "a window can be summarised"),
            ("block_selection", 2, "cheap scores choose the blocks"),
            ("native_sparse_attention", 2, "three views, gated"),
            ("two_tile_languages", 3, "one tile's program, run many times"),
            ("tilelang_forward", 3, "one program per query and KV head"),
            ("triton_forward", 3, "the same, with pointers and masks"),
            ("gradients", 4, "the backward without the matrix"),
            ("backward_kernels", 4, "a list, and its inverse"),
            ("selection_kernels", 4, "pick without storing the scores"),
            ("decoding", 4, "one query, a long cache"),
            ("performance", 4, "is it fast, and why"),
            ("capstone", 4, "train it"),
            ("many_gpus", 4, "split the queries, gather the keys"),
            ("after_nsa", 4, "two dials: what is listed, who chooses"),
        ]
    )
)


_NEIGHBOURS = re.compile(r"\n+(?:← )?[^\n]*\[Map\]\(00_start_here\.ipynb[^)]*\)[^\n]*\s*$")
_MAP = "The-map"  # the heading in chapter 00


def neighbours(chapter: Chapter) -> str:
    """The last line of a chapter: links to the chapter before it, to the map in chapter 00, and to
    the chapter after it, or to the next one that there is."""
    parts = []
    if chapter.number > 0:
        before = next(c for c in reversed(CHAPTERS[: chapter.number]) if c.is_ready)
        parts.append(f"← [{before.title}]({before.file})")
    parts.append(f"[Map]({CHAPTERS[0].file}#{_MAP})")
    if chapter.number + 1 < len(CHAPTERS):
        after = CHAPTERS[chapter.number + 1]
        ready, coming = f"[{after.title}]({after.file}) →", f"{after.title} (in preparation)"
        parts.append(ready if after.is_ready else coming)
        later = next((c for c in CHAPTERS[after.number + 1 :] if c.is_ready), None)
        if later is not None and not after.is_ready:
            parts.append(f"[{later.title}]({later.file}) →")
    return " · ".join(parts)


def link_neighbours(chapter: Chapter, *, write: bool = True) -> bool:
    """End a chapter with the line that `neighbours` gives; True if another one, or none, was
    there.

    Args:
        chapter: one whose notebook exists; its last cell is the section `## Next`.
        write: False only looks.
    """
    path = NOTEBOOKS / chapter.file
    notebook = json.loads(path.read_text(encoding="utf-8"))
    last = notebook["cells"][-1]
    source = "".join(last["source"])
    wanted = f"{_NEIGHBOURS.sub('', source).rstrip()}\n\n{neighbours(chapter)}"
    if source == wanted:
        return False
    if write:
        last["source"] = wanted.splitlines(keepends=True)
        text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        path.write_text(text, encoding="utf-8")
    return True


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m nsa_tutorial.course.chapters",
        description="End every chapter with a line that leads to its neighbours.",
    )
    parser.add_argument("--check", action="store_true", help="only say what is not right")
    check = parser.parse_args(arguments).check
    ready = [c for c in CHAPTERS if c.is_ready]
    wrong = [c for c in ready if link_neighbours(c, write=not check)]
    for chapter in wrong:
        print(f"{chapter.file}: {'its last line is not right' if check else 'written'}")
    return int(check and bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
