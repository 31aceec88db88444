"""Griffe extension: reads a docstring's section `Example:` as `Examples:`, which it knows."""

import re
from typing import Any

from griffe import Extension, Object


class ExampleSections(Extension):
    """Renames the section of every docstring before it is parsed."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rename the section in one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )
