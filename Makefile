# make demo   trains, evaluates and renders the committed aerial scene on the CPU (STEPS=n shortens it)
# make demo-distributed   the same on 2 ranks (RANKS=n)
# make test   runs all tests        make lint   ruff and pyright        make clean   removes .venv and outputs
# make soak   a long run on 2 ranks, killed ten times and resumed, against one that is left alone
# make cuda-check   compiles the CUDA kernels (needs nvcc, no GPU); ARCHS="8.0 8.6 8.9 9.0 10.0 12.0" for all releases'
PYTHON ?= python3
STEPS ?= 3000
RANKS ?= 2
ARCHS ?= 9.0
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SCENE := tests/data/matrixcity_caliterra/small_city/aerial
RUN := outputs/demo/splaxel/run
RECIPE = $(shell grep -v '^\#' configs/caliterra_1r.args)

.PHONY: demo demo-distributed test lint soak cuda-check clean

$(INSTALLED): pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if v == (3, 11) else \
	  f"Python 3.11 is needed, {sys.executable} is {v[0]}.{v[1]}: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing nerfstudio, gsplat, torch and splaxel into $(VENV) (about 8 GB, 4 to 10 minutes) ..."
	$(BIN)/pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e '.[dev]'
	@touch $@

demo: $(INSTALLED)
	rm -rf $(RUN)
	$(BIN)/ns-train splaxel $(RECIPE) --max-num-iterations $(STEPS) --data $(SCENE) \
	  --output-dir outputs --experiment-name demo --timestamp run --viewer.quit-on-train-completion True
	$(BIN)/ns-eval --load-config $(RUN)/config.yml --output-path $(RUN)/eval.json --render-output-path $(RUN)/eval
	$(BIN)/ns-render dataset --load-config $(RUN)/config.yml --split test --output-path $(RUN)/render
	@$(BIN)/python -c 'import json; r = json.load(open("$(RUN)/eval.json"))["results"]; \
	  print("PSNR %.2f dB, SSIM %.4f on the held-out photographs" % (r["psnr"], r["ssim"]))'
	@echo "Pictures: $(RUN)/eval (photograph beside render), $(RUN)/render. Look around: $(BIN)/ns-viewer --load-config $(RUN)/config.yml"

demo-distributed: $(INSTALLED)
	rm -rf outputs/demo-distributed
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) $(BIN)/ns-train splaxel \
	  $(RECIPE) --max-num-iterations $$(( ($(STEPS) + $(RANKS) - 1) / $(RANKS) )) --data $(SCENE) \
	  --pipeline.datamanager.batch-size $(RANKS) --output-dir outputs --experiment-name demo-distributed --timestamp run \
	  --vis tensorboard
	$(BIN)/ns-eval --load-config outputs/demo-distributed/splaxel/run/config.yml \
	  --output-path outputs/demo-distributed/splaxel/run/eval.json
	@$(BIN)/python -c 'import json; r = json.load(open("outputs/demo-distributed/splaxel/run/eval.json"))["results"]; \
	  print("PSNR %.2f dB, SSIM %.4f on the held-out photographs, trained on $(RANKS) ranks" % (r["psnr"], r["ssim"]))'

soak: $(INSTALLED)
	$(BIN)/splaxel-bench soak --data $(SCENE) --json configs/results/soak.json

test: $(INSTALLED)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

cuda-check:
	$(PYTHON) .ci/cuda_check.py $(ARCHS)

clean:
	rm -rf $(VENV) outputs renders *.egg-info
