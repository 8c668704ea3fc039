"""What a directory or a repository on the Hub holds to be named as `custom_generate`; specla must be installed."""

from typing import Any

from specla.hf import speculative


def generate(model: Any, **arguments: Any) -> Any:
    return model.generate(custom_generate=speculative, **arguments)
