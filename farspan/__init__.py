"""farspan: pretrain small language models on your own text with whatever GPUs you have."""

__version__ = "0.1.0"
