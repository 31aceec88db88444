"""Configuration tables: JSON files of rows, of which the first that matches is used.

A row has conditions, each a value or a list of values, and the fields of a configuration:

    {"when": {"architecture": "hopper", "bits": [1, 2], "max_m": 8}, "config": {"warps": 4}}

A condition that a row leaves out always holds.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

C = TypeVar("C")


class Table(Generic[C]):
    """The rows of ``configs/<name>.json``.

    ``find(**facts)`` returns the configuration for facts such as ``bits=4``.

    Args:
        name: name of the file, without the suffix.
        make: dataclass of a configuration.

    Attributes:
        rows: conditions and configuration of each row.
    """

    def __init__(self, name: str, make: type[C]) -> None:
        text = Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8")
        self.rows = [(row["when"], make(**row["config"])) for row in json.loads(text)]
        self.find = cache(self._find)

    def _find(self, **facts: Any) -> C:
        """Returns the configuration of the first row whose conditions all hold."""
        for when, config in self.rows:
            if all(_holds(wanted, facts[name]) for name, wanted in when.items()):
                return config
        raise LookupError(f"no configuration for {facts}")


def _holds(wanted: Any, fact: Any) -> bool:
    return fact in wanted if isinstance(wanted, list) else bool(fact == wanted)
