"""Speculative generation for models that transformers or flash-linear-attention has loaded.

model.generate(**inputs, custom_generate=speculative, max_new_tokens=64)
"""

from specla.hf.adoption import forget
from specla.hf.generate import Speculative

__all__ = ["Speculative", "forget", "speculative"]

speculative = Speculative()
