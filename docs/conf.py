"""The site: Sphinx with furo and MyST-NB. `nox -s docs` builds it, warnings being errors.

Three things are made from elsewhere each time, so that none is kept twice: the lessons (notebooks/, with the outputs
that they were committed with; `nox -s notebooks` executes them), the pages of the API (from `fcp.__all__`, see
`_api.py`), and the tables of SUPPORT.md and CHANGELOG.md, which are included.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]

import _api  # noqa: E402

import fcp  # noqa: E402

for source in sorted((ROOT / "notebooks").glob("*.ipynb")):
    copy = HERE / "lessons" / source.name
    if not copy.is_file() or copy.read_bytes() != source.read_bytes():
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, copy)
_api.write_pages(HERE / "api")

project = "fcp"
author = "the fcp authors"
release = version = fcp.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

nb_execution_mode = "off"
nb_merge_streams = True
nb_mime_priority_overrides = [("html", "text/html", 5)]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

default_role = "code"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "special-members": "__call__"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Args, Raises", "notes_style")]
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "fcp"
html_static_path = ["_static"]
html_css_files = ["fcp.css"]
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _api.to_rest, priority=400)  # before napoleon, which reads sections
    app.connect("autodoc-process-docstring", _api.keep_properties, priority=600)
    app.connect("autodoc-process-signature", _api.short_signature)
