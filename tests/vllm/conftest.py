"""Tests with a real vLLM, for `make test-vllm` in the environment of `make vllm-env`; elsewhere none is collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
