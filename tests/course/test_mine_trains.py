"""What a reader has built by chapter 14 is an NSA that trains: the file alone, on a toy."""

from __future__ import annotations

import importlib.util
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from nsa_tutorial.course import keeping, reader
from nsa_tutorial.course.exercises import Exercise
from nsa_tutorial.course.gathering import piece_of
from nsa_tutorial.course.library_file import FILE

# those in PyTorch; `make mine` judges kernels, too
CHAPTERS = (
    "dense_attention", "grouped_query_attention", "online_softmax", "tiled_attention",
    "selected_attention", "compression", "block_selection", "native_sparse_attention", "gradients",
)  # fmt: skip
SIZES = {"top_n": 4, "block_size": 4, "window_size": 3, "length": 4, "stride": 2}
N, HQ, H, D, WORDS = 40, 4, 2, 8, 6


def as_in_a_notebook(chapter: str, exercise: Exercise, taken: dict[str, Callable]) -> Callable:
    """The solution, written in a cell below others that take functions of earlier chapters."""
    piece = piece_of(chapter, exercise, exercise.solution)
    names = {"__name__": "__main__", **taken}
    sources = [piece.source]
    for line in piece.imports:
        name = line.split()[-1]
        if f".exercises.{chapter} import" in line:  # of this chapter: a cell of its own
            sources.insert(-1, inspect.getsource(getattr(sys.modules[line.split()[1]], name)))
        elif name not in taken:
            sources.insert(0, line)
    for source in sources:
        file = f"<cell of {exercise.name} {abs(hash(source))}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        exec(compile(source, file, "exec", dont_inherit=True), names)
    return names[exercise.name]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """`my_nsa.py` as a reader has it who wrote the course's solutions, imported from its file."""
    folder = tmp_path_factory.mktemp("copy")
    (folder / reader.FOLDER).mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for chapter, exercise in keeping.all_builds():
            if chapter in CHAPTERS:
                before = {e.name: keeping.built(e.name) for c, e in keeping.all_builds()
                          if c in CHAPTERS[: CHAPTERS.index(chapter)]}  # fmt: skip
                function = as_in_a_notebook(chapter, exercise, before)
                told = keeping.keep(chapter, exercise, function)
                assert told.startswith(f"Kept in {FILE}"), (exercise.name, told)
    spec = importlib.util.spec_from_file_location("my_nsa", folder / FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


def test_the_file_is_the_readers_own(library: ModuleType) -> None:
    """It has every function in reading order, and nothing of ours."""
    text = Path(library.__file__).read_text(encoding="utf-8")
    assert "nsa_tutorial" not in text
    names = [e.name for chapter, e in keeping.all_builds() if chapter in CHAPTERS]
    places = [text.index(f"\ndef {name}(") for name in names]
    assert places == sorted(places)


class Toy(nn.Module):
    """One layer of Native Sparse Attention from the file, which reads words and says words."""

    def __init__(self, library: ModuleType) -> None:
        super().__init__()
        self.attend, width = library.native_sparse_attention, HQ * D
        self.word, self.place = nn.Embedding(WORDS, width), nn.Embedding(N, width)
        self.q, self.out = nn.Linear(width, HQ * D), nn.Linear(HQ * D, WORDS)
        self.k, self.v = (nn.Linear(width, 3 * H * D) for _ in range(2))
        self.gate = nn.Linear(width, 3 * HQ)

    def forward(self, words: Tensor) -> Tensor:
        x = self.word(words) + self.place.weight  # [N, width]
        keys, values = (f(x).view(N, 3, H, D).unbind(1) for f in (self.k, self.v))
        gates = self.gate(x).view(N, 3, HQ).sigmoid().unbind(1)
        o = self.attend(self.q(x).view(N, HQ, D), keys, values, gates, *SIZES.values())
        return self.out(o.flatten(1))


def test_a_toy_learns(library: ModuleType) -> None:
    """Every position says the first word, which the window of three keys has long left."""
    torch.manual_seed(0)
    toy = Toy(library)
    optimizer = torch.optim.AdamW(toy.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        texts = torch.randint(WORDS, (4, N))
        loss = torch.stack(
            [nn.functional.cross_entropy(toy(t), t[:1].expand(N)) for t in texts]
        ).mean()
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        assert all(p.grad is not None and p.grad.isfinite().all() for p in toy.parameters())
        optimizer.step()
    assert losses[0] > 1.5 and losses[-1] < losses[0] / 4, losses[::8]
