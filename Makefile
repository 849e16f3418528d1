# make serve   install if needed, start the server with the default model on 127.0.0.1:30000
# make test    install if needed, run the whole test suite
# make lint    ruff and mypy --strict
# make test-slow  the tests that the suite leaves out: more of the same, or long
# make faults  every process x every fault x every phase, then half an hour of soak; writes the table in docs/operations.md
# ARGS go to what is run: make serve ARGS="--model Qwen/Qwen3-0.6B --port 8000"

VENV ?= .venv
PY = $(VENV)/bin/python
INSTALLED = $(VENV)/.installed
PACKAGES = common gateway tokenizer_proc scheduler_proc worker_proc detokenizer_proc launcher launch.py tools bench
ARGS ?=

.PHONY: serve test test-slow lint faults readme clean

serve: $(INSTALLED)
	@exec $(PY) launch.py $(ARGS)

test: $(INSTALLED)
	$(PY) -m pytest $(ARGS)

lint: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m mypy --strict $(PACKAGES)

test-slow: $(INSTALLED)
	$(PY) -m pytest -m slow $(ARGS)

faults: $(INSTALLED)
	QUINTET_FAULTS=all $(PY) -m pytest -s tests/faults $(ARGS)

readme: $(INSTALLED)
	$(PY) -m launcher.readme

$(INSTALLED): pyproject.toml deploy/setup_venv.sh
	PYTHON="$(PYTHON)" ./deploy/setup_venv.sh $(VENV)
	@touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
