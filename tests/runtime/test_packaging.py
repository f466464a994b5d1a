"""The files that install the course agree with each other, and its two commands answer a bare
machine in one sentence."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def constraints() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def here(requirements: list[Requirement]) -> dict[str, Requirement]:
    """Those that hold for this interpreter and platform, extras included, by normalised name."""
    environments = [{"extra": extra} for extra in ("", "course", "test")]
    return {
        r.name.lower().replace("_", "-"): r
        for r in requirements
        if r.marker is None or any(r.marker.evaluate(e) for e in environments)
    }


def declared() -> dict[str, Requirement]:
    return here([Requirement(line) for line in requires("nsa_tutorial")])


def conda_pip_section() -> list[str]:
    """The pip section of environment.yml, as the lines of the requirements file that conda makes of
    it."""
    text = (ROOT / "environment.yml").read_text()
    return [line.split("- ", 1)[1] for line in text.split("- pip:\n", 1)[1].splitlines()]


def test_constraints_pin_exactly() -> None:
    for r in constraints():
        assert re.fullmatch(r"==[0-9.a-z]+", str(r.specifier)), f"{r}: expected one exact version"
    pins = {r.name: str(r.specifier) for r in constraints()}
    assert (pins["torch"], pins["triton"], pins["tilelang"]) == ("==2.13.0", "==3.7.1", "==0.1.15")


def test_constraints_satisfy_the_lower_bounds() -> None:
    bounds = {name.lower(): r for name, r in declared().items()}
    for pin in constraints():
        bound = bounds.get(pin.name.lower())
        if bound is not None:
            pinned = str(pin.specifier).removeprefix("==")
            assert bound.specifier.contains(pinned), f"{pin} is outside of {bound}"
            assert bound.specifier, f"{bound}: expected a lower bound"


def test_a_wheel_holds_every_file_of_the_package() -> None:
    """Those without Python in them are named in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split("[tool.setuptools.package-data]\n", 1)[1].split("\n\n", 1)[0]
    patterns = {
        line.split('"')[1]: re.findall(r'"([^"]+)"', line.partition("=")[2])
        for line in section.splitlines()
    }
    package = ROOT / "nsa_tutorial"
    others = [p for p in package.rglob("*.*") if p.suffix not in (".py", ".pyc") and p.is_file()]
    assert {p.suffix for p in others} >= {".md", ".js", ".json"}
    for path in others:
        where = ".".join(path.parent.relative_to(ROOT).parts)
        assert any(path.match(each) for each in patterns.get(where, ())), f"{path} is in no wheel"


def test_every_dependency_has_a_lower_bound() -> None:
    for r in declared().values():
        assert any(s.operator == ">=" for s in r.specifier), f"{r}: expected a lower bound"


def test_this_environment_is_the_constrained_one() -> None:
    """Stored outputs are compared here, so the versions they depend on are these. What builds the
    book is installed by `make book`."""
    if Path(sys.prefix) != ROOT / ".venv":
        pytest.skip("not in the environment that make sets up")
    has_book, needed = (ROOT / ".venv" / ".book").exists(), declared()
    for name, pin in here(constraints()).items():
        try:
            version(name)
        except PackageNotFoundError:
            assert not has_book and name not in needed, f"{name} is not installed"
            continue
        assert pin.specifier.contains(version(name).split("+")[0]), (
            f"{name} {version(name)} is installed, {pin} is pinned"
        )


def test_conda_uses_the_same_constraints() -> None:
    assert conda_pip_section() == ["--constraint constraints.txt", "--editable .[course,test]"]
    makefile = (ROOT / "Makefile").read_text()
    assert '--constraint constraints.txt --editable ".[course,test]"' in makefile


@pytest.mark.exhaustive
def test_conda_pip_section_resolves(tmp_path: Path) -> None:
    """pip finds one set of versions for it: what is installed here already, when make installed
    it."""
    # beside constraints.txt, where conda's pip runs
    requirements = ROOT / "requirements-of-the-test.txt"
    requirements.write_text("\n".join(conda_pip_section()) + "\n")
    try:
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--dry-run",
            "--no-build-isolation",
            "-r",
            requirements.name,
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    finally:
        requirements.unlink()
    assert done.returncode == 0, done.stderr
    would = re.findall(r"Would install (.*)", done.stdout)
    assert all(
        word.startswith("nsa_tutorial") or word.startswith("nsa-tutorial")
        for line in would
        for word in line.split()
    ), would


def make(
    *arguments: str, path: str | None = None, folder: Path = ROOT
) -> subprocess.CompletedProcess:
    # `make test` may run this test
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    variables |= {"PATH": path} if path is not None else {}
    return subprocess.run(
        [shutil.which("make"), *arguments],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder with the files make needs, no environment, and a `bin` with nothing but the tools
    named into it."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    for tool in ("sh", "id", "touch"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    return tmp_path


def script(path: Path, text: str) -> None:
    path.write_text(f"#!{shutil.which('sh')}\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("goal", ["lab", "test"])
@pytest.mark.parametrize(
    ("python", "sentence"),
    [
        (None, "needs Python 3.10 or newer, and there is no 'python3' here"),
        (
            '[ "$1" = -V ] && echo Python 3.9.18; exit 1',
            "needs Python 3.10 or newer, and 'python3' is Python 3.9.18",
        ),
        ('case "$2" in *ensurepip*) exit 1;; esac', "Python's venv module is missing"),
        ("exit 0", "A C++ compiler is missing, which TileLang needs"),
    ],
    ids=["no python", "old python", "no venv", "no compiler"],
)
def test_make_says_what_is_missing(
    goal: str, python: str | None, sentence: str, bare: Path
) -> None:
    if python is not None:
        script(bare / "bin" / "python3", python)
    done = make(goal, path=str(bare / "bin"), folder=bare)
    assert done.returncode != 0
    assert sentence in done.stdout
    assert len(done.stdout.strip().splitlines()) == 1, done.stdout
    assert not (bare / ".venv").exists()


def test_make_alone_names_a_command_without_a_gap(bare: Path) -> None:
    told = make(path=str(bare / "bin"), folder=bare).stdout
    assert "with 'make PYTHON=/path/to/python3'" in told


def test_a_moved_clone_is_set_up_anew(bare: Path) -> None:
    """.venv holds the path of its folder: in another one, it is made anew, once, and make says
    so."""
    for tool in ("mkdir", "chmod"):
        (bare / "bin" / tool).symlink_to(shutil.which(tool))
    script(bare / "bin" / "c++", "")
    program = "for p in python pytest; do echo : > .venv/bin/$p; chmod +x .venv/bin/$p; done"
    script(bare / "bin" / "python3", f'[ "$2" != venv ] || {{ mkdir -p .venv/bin; {program}; }}')

    def told(folder: Path) -> str:
        done = make("test", path=str(folder / "bin"), folder=folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "-m venv" in told(bare)
    assert "-m venv" not in told(bare)
    moved = bare.rename(bare.with_name("another name, größer $HOME"))
    again = told(moved)
    assert "This folder was moved or renamed since .venv was made in it" in again
    assert "-m venv --clear .venv" in again
    assert "-m venv" not in told(moved)


def skip_unless_set_up() -> None:
    """With the environment that make set up from the files as they are now."""
    ready = ROOT / ".venv" / ".ready"
    files = [ROOT / name for name in ("pyproject.toml", "constraints.txt")]
    if (
        shutil.which("make") is None
        or not ready.exists()
        or any(ready.stat().st_mtime < path.stat().st_mtime for path in files)
    ):
        pytest.skip("not in the environment that make sets up")


def test_make_is_quick_the_second_time() -> None:
    """Once the environment stands, make goes straight to the command."""
    skip_unless_set_up()
    plan = make("--dry-run", "test").stdout.strip().splitlines()
    assert len(plan) == 1
    assert ".venv/bin/pytest --nbval" in plan[0]
    plan = make("--dry-run", "copy").stdout.strip().splitlines()
    assert plan == [".venv/bin/python -m nsa_tutorial.course.copies"]


def test_make_test_all_leaves_nothing_out() -> None:
    """The command of `make test` on every case: a later -m replaces the one in pyproject.toml."""
    skip_unless_set_up()
    some, every, rest = (
        make("--dry-run", goal).stdout.strip() for goal in ("test", "test-all", "test-rest")
    )
    assert every == f'{some} -m ""'
    assert rest == f"{some} -m exhaustive"
    assert "-m 'not exhaustive'" in (ROOT / "pyproject.toml").read_text()


def test_ci_runs_the_command_of_the_readme() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    commands = [line.partition("  #")[0] for line in lines[-4:]]
    assert commands == ["make lint", "make book", "make test", "make test-rest"]
    assert "make test" in (ROOT / "README.md").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


PAGES = ("README.md", "OPERATORS.md", "CONTRIBUTING.md")


@pytest.mark.parametrize("page", PAGES)
def test_links_and_commands_of_a_page_lead_somewhere(page: str) -> None:
    """Files that are linked or named in code exist; so do the modules and the goals of commands."""
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\((?!https?:|#)([^)]+)\)", text):
        assert (ROOT / link).exists(), f"{page} links to {link}, which does not exist"
    for name in re.findall(r"\b(?:notebooks|tests|assets)/[\w/]+\.\w+", text):
        assert (ROOT / name).exists(), f"{page} names {name}, which does not exist"
    for module in re.findall(r"python -m ([\w.]+)", text):
        assert importlib.util.find_spec(module) is not None, f"{page} runs {module}"
    for goal in re.findall(r"^make ([\w-]+)", text, re.MULTILINE):
        assert f"\n{goal}: " in (ROOT / "Makefile").read_text(), f"{page} makes {goal}"


@pytest.mark.parametrize("page", PAGES[:2])
def test_the_examples_of_a_page_run(page: str) -> None:
    """As they stand, one after the other."""
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        exec(code, names)
    if page == "README.md":
        assert names["y"].shape == (1, 1024, 512)
    else:
        assert names["o"].shape == (1, 256, 16, 64)
