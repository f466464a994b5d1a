"""What all tests share: those marked `gpu` are left out where there is no CUDA device, and the
chapters' frame where the notebook packages are missing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode

# A bare GPU machine may hold the kernels' packages alone: there, tests of the course frame are not
# collected.
if any(find_spec(package) is None for package in ("ipywidgets", "nbclient", "nbformat")):
    tests = Path(__file__).parent.glob("*/test_*.py")
    collect_ignore = [str(p) for p in tests if "nsa_tutorial.course" in p.read_text()]


@cache
def takes_long(path: Path) -> bool:
    """Whether a file is a chapter, or has to do with compiling or with a browser."""
    text = path.read_text(encoding="utf-8")
    compiles = any(word in text for word in ("tilelang", "torch.compile", "--compile"))
    return path.suffix == ".ipynb" or path.parent.name == "browser" or compiles


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of tests come to stay: while they are collected, and afterwards, Python need not
    look through them for what can go."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


LEFT_OUT = pytest.StashKey[int]()  # how many tests need a CUDA device that is not here


def pytest_configure(config: pytest.Config) -> None:
    """Decide how Triton runs, before a test defines a kernel. The process that hands tests to
    others imports none of them, so that it need not wait for PyTorch."""
    config.stash[LEFT_OUT] = 0
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        from nsa_tutorial.runtime import environment

        environment.prepare()


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what carries a mark
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    # What takes longest comes first, so that no process is left with it at the end.
    items.sort(key=lambda item: not takes_long(item.path))
    on_gpu = [item for item in items if "gpu" in item.keywords]
    if torch.cuda.is_available():  # which has the time for every case
        for item in on_gpu:
            item.own_markers = [mark for mark in item.own_markers if mark.name != "exhaustive"]
        return
    items[:] = [item for item in items if "gpu" not in item.keywords]
    config.hook.pytest_deselected(items=on_gpu)
    config.stash[LEFT_OUT] = len(on_gpu)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Every process has collected the same tests."""
    node.config.stash[LEFT_OUT] = node.workeroutput.get("left_out", 0)


def pytest_terminal_summary(terminalreporter: object, config: pytest.Config) -> None:
    if left_out := config.stash[LEFT_OUT]:
        terminalreporter.write_line(f"{left_out} tests need a CUDA device and were left out")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--accesses",
        action="store_true",
        help="hold every load and store of interpreted Triton kernels against its tensors",
    )


@pytest.fixture(autouse=True)
def sound_accesses(request: pytest.FixtureRequest) -> Iterator[None]:
    """With `--accesses`, a test fails where a kernel leaves its tensors or programs race."""
    if not request.config.getoption("--accesses") or request.path.stem == "test_accesses":
        yield
        return
    from accesses import assert_sound

    from nsa_tutorial.course.watching import watching

    with watching() as seen:
        yield
    if seen.launches:
        assert_sound(seen)


@pytest.fixture(autouse=True)
def exact_matmul() -> None:
    """The plain fp32 reference computes in fp32, not in TF32."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[TorchDispatchMode], object]:
    """A mode that sees what a backend does inside of an operator: from outside, that is one
    call."""
    from nsa_tutorial import backends

    @contextmanager
    def on(mode: TorchDispatchMode) -> Iterator[TorchDispatchMode]:
        load = backends.load

        def watched(*arguments: object) -> Callable:
            function = load(*arguments)

            def run(*tensors: object, **options: object) -> object:
                with mode:
                    return function(*tensors, **options)

            return run

        with monkeypatch.context() as patch, mode:
            patch.setattr(backends, "load", watched)
            yield mode

    return on


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch computes in one thread: on a busy machine, many small operations in two spend their
    time waiting for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
