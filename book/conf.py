"""Sphinx, for the pages that `python -m book` writes. Nothing is run, and nothing is fetched."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from book import places

project = "From dense attention to Native Sparse Attention"
author = "nsa_tutorial"
project_copyright = ""
extensions = ["myst_nb", "sphinx-mathjax-offline", "book.glossary"]

nb_execution_mode = "off"
nb_render_markdown_format = "gfm"  # statements of exercises have tables
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Fold the code"
myst_enable_extensions = ["dollarmath", "amsmath", "deflist", "attrs_inline"]
myst_heading_anchors = 4
myst_heading_slug_func = "book.glossary.anchor"
suppress_warnings = ["myst.header", "mystnb.lexer"]

html_theme = "sphinx_book_theme"
html_title = project
html_static_path = [str(places.BOOK / "static"), str(places.STATIC)]
html_css_files = ["book.css", "pictures.css"]
html_js_files = ["book.js"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
html_last_updated_fmt = None
html_context = {"default_mode": "auto"}
html_theme_options = {
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "navbar_persistent": [],
}
if places.REPOSITORY:
    html_theme_options["repository_url"] = f"https://github.com/{places.REPOSITORY}"
    html_theme_options["use_repository_button"] = True
