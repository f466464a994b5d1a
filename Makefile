# make lab    set up, open your own copy of the chapters in JupyterLab (my_chapters/)
# make copy   set up, make your copy or bring it up to date, and open nothing
# make mine   judge what you built: your library, function by stage
# make check  run your copy: every cell, and whether it prints what the course says
# make test   set up, run the unit tests and every chapter
# make test-all   the same with all cases of every test: every size, dtype and architecture (make test-rest: the difference)
# make book   set up, and build the chapters as a static site: book/_build/html
#             (make book REPOSITORY=owner/name links it to that repository, to Colab and to Kaggle)
# make clean  forget the set-up

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
BOOK   := $(VENV)/.book
REPOSITORY ?=
# JupyterLab's port and the rest can be set: make lab LAB_FLAGS="--port 9999 --no-browser"
LAB_FLAGS ?=
COPIES := $(BIN)/python -m nsa_tutorial.course.copies
# .venv holds the path of its folder, and so does .ready: where the folder is another one now, its
# programs are not found, and it is made anew
MOVED  := $(shell [ -s $(READY) ] && IFS= read -r was < $(READY) && [ "$$was" != "$$(pwd -P)" ] && echo moved)
# a process for every core, four at most, and one thread in each; the tests of a file stay together,
# and files come in the order of tests/conftest.py. Python keeps what it compiled, also where the
# environment says otherwise: every chapter's kernel and every second process imports the course
SPREAD := --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
TEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --nbval $(SPREAD)

.PHONY: lab copy mine check test test-all test-rest lint execute book clean moved

lab: $(READY)
	$(COPIES) --lab $(LAB_FLAGS)

copy: $(READY)
	$(COPIES)

mine: $(READY)
	@$(BIN)/python -m nsa_tutorial.course.mine

check: $(READY)
	@OMP_NUM_THREADS=1 $(COPIES) --check $(SPREAD)

test: $(READY)
	$(TEST)

test-all: $(READY)
	$(TEST) -m ""

test-rest: $(READY)
	$(TEST) -m exhaustive

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

execute: $(READY)
	$(BIN)/python -m nsa_tutorial.course.execute

book: $(BOOK)
	OMP_NUM_THREADS=1 BOOK_REPOSITORY="$(REPOSITORY)" $(BIN)/python -m book

$(BOOK): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[book]"
	@touch $(BOOK)

$(READY): pyproject.toml constraints.txt $(MOVED)
	@command -v $(PYTHON) >/dev/null || { echo "nsa_tutorial needs Python 3.10 or newer, and there is no '$(PYTHON)' here: install it, or name yours with '$(strip make $(MAKECMDGOALS)) PYTHON=/path/to/python3'."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "nsa_tutorial needs Python 3.10 or newer, and '$(PYTHON)' is $$($(PYTHON) -V 2>&1): name a newer one with '$(strip make $(MAKECMDGOALS)) PYTHON=/path/to/python3'."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "Python's venv module is missing: install it (on Debian and Ubuntu: apt-get install python3-venv), then run make again."; exit 1; }
	@command -v g++ >/dev/null || command -v clang++ >/dev/null || command -v c++ >/dev/null || { echo "A C++ compiler is missing, which TileLang needs to run its kernels on the CPU: install g++ or clang++ (on Debian and Ubuntu: apt-get install g++), then run make again."; exit 1; }
	@[ -z "$(MOVED)" ] || echo "This folder was moved or renamed since .venv was made in it, so .venv is made anew."
	$(PYTHON) -m venv $(if $(MOVED),--clear) $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[course,test]"
	@pwd -P > $(READY)

clean:
	rm -rf $(VENV)
