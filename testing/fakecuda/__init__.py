"""A CUDA device in software, for tests where there is no GPU. docs/gpus.md says what it models."""
