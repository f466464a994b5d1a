"""What a page without a kernel shows: pictures with their texts, and no controls.

A stored interactive names a model of the kernel that made it. Once that kernel is gone, JupyterLab
shows an error in its place. So what is stored keeps the picture, and leaves the controls out.
"""

from __future__ import annotations

from nsa_tutorial.course import themes

WIDGET = "application/vnd.jupyter.widget-view+json"
INTERACTIVE = "Interactive:"  # how a panel begins to tell of itself in plain text
# in the metadata of an output that is of no use once its kernel is gone
LIVE = {"nsa_live": True}


def is_live(output: dict) -> bool:
    """Whether an output is of no use without its kernel: buttons, say."""
    return output.get("metadata", {}).get("nsa_live") is True


def describe(output: dict) -> None:
    """Give a stored picture its text for those who do not see it, and the colours of a dark page;
    an interactive also says that it can be moved. JupyterLab does neither for a PNG, and prefers
    HTML."""
    data, facts = output.get("data", {}), output.get("metadata", {}).get("image/png", {})
    if "image/png" not in data or "alt" not in facts:
        return
    pixels = "".join("".join(data["image/png"]).split())
    told = "".join(data.get("text/plain", ""))
    data["text/html"] = themes.image(pixels, facts, told if told.startswith(INTERACTIVE) else "")
