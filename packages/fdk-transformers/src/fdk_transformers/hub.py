"""The model card of a saved folder: how to load it, and what it holds."""

from torch import nn

from fdk_formats import model_report

TEMPLATE = """---
library_name: transformers
tags:
- fdk
---

# {name}

Weights in {bits:.2f} bits ({formats}), made with fdk: {before:.2f} GB became {after:.2f} GB.

```
pip install fdk-transformers
```

```python
import fdk_transformers
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{name}", device_map="auto")
```

`import fdk_transformers` makes transformers know the format; without it the files are refused.
"""


def model_card(model: nn.Module, name: str) -> str:
    """Writes the text of a README.md for a quantised model.

    ``push_to_hub`` of transformers writes a card that does not say how the model is loaded; save
    this one in the folder that is uploaded.

    Args:
        model: the model.
        name: its name on the hub.

    Raises:
        ValueError: if the model has no quantised layer.

    Example:
        >>> Path(folder, "README.md").write_text(model_card(model, "me/llama-kmeans4"))
    """
    report = model_report(model)
    if not report.layers:
        raise ValueError("model_card: the model has no quantised layer")
    formats = sorted({str(layer.format) for layer in report.layers})
    class_name = type(model).__name__
    text = TEMPLATE.format(
        name=name,
        bits=report.bits_per_weight,
        formats=", ".join(formats),
        before=(report.bytes_before + report.other_bytes) / 1e9,
        after=(report.bytes_after + report.other_bytes) / 1e9,
    )
    if class_name.endswith("ForCausalLM"):
        return text
    return text.replace("AutoModelForCausalLM", class_name)
