"""Split serving of large language models: prefill and decode on separate pools of workers."""

__version__ = "0.1.0"
