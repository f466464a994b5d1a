"""Marks shared by all tests: `gpu` runs where there is a CUDA device, the chapters' frame where the
notebook packages are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import nsa_tutorial  # noqa: F401  (decides how triton runs, before a test imports it)

# A bare GPU machine may hold the kernels' packages alone: there, tests of the course frame are not
# collected.
if any(find_spec(package) is None for package in ("ipywidgets", "nbclient", "nbformat")):
    tests = Path(__file__).parent.glob("*/test_*.py")
    collect_ignore = [str(p) for p in tests if "nsa_tutorial.course" in p.read_text()]


@cache
def takes_long(path: Path) -> bool:
    """Whether a file has to do with compiled kernels, or with a browser."""
    return path.parent.name == "browser" or "tilelang" in path.read_text()


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what carries a mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A GPU has the time for every case.
    for item in items:
        if "gpu" in item.keywords:
            item.own_markers = [mark for mark in item.own_markers if mark.name != "exhaustive"]
    # What takes longest comes first, so that no process is left with it at the end.
    items.sort(key=lambda item: not takes_long(item.path))
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


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
    from accesses import assert_sound, watch

    with watch() as seen:
        yield
    if seen.launches:
        assert_sound(seen)


@pytest.fixture(autouse=True)
def exact_matmul() -> None:
    """The plain fp32 reference computes in fp32, not in TF32."""
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
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
