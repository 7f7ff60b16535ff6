"""The towers, by the model_type of config.json. A new family is one file in this folder that calls `register`."""

import pkgutil
from importlib import import_module

from vitbatch.towers.registry import FAMILIES, Family, family_of, register

__all__ = ["FAMILIES", "Family", "family_of", "register"]

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)
