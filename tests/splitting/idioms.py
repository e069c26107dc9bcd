"""All idioms: datasets with random samples as people write them."""

from __future__ import annotations

import importlib

from idiom import Idiom

LIBRARIES = ["torchvision", "leaves", "views", "detection", "arrays", "wrappers", "generators", "medical", "signals"]

IDIOMS: list[Idiom] = [idiom for name in LIBRARIES for idiom in importlib.import_module(f"idioms_{name}").TABLE]
