"""Tests with a real vLLM: `make test-vllm` runs them in the environment that `make vllm-env` makes, and nothing else."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
