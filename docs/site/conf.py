"""The site that scripts/docs builds: the documents as they are, and the references from the sources' own comments."""
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import picture

project = "softdelta"
version = release = re.search(r"project\(softdelta VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())[1]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "tests/*.md", "autoapi/**"]
extensions = ["myst_parser", "breathe", "sphinx.ext.autodoc", "autoapi.extension"]

myst_fence_as_directive = ["math"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4

breathe_projects = {"softdelta": os.environ["SOFTDELTA_DOXYGEN_XML"]}
breathe_default_project = "softdelta"
breathe_domain_by_extension = {"h": "c", "hpp": "cpp"}

autoapi_dirs = [str(ROOT / "src/python/softdelta")]
autoapi_add_toctree_entry = False
suppress_warnings = ["autoapi.python_import_resolution"]  # of names that are assigned several at once
autoapi_options = ["members", "imported-members", "show-module-summary"]
autoapi_python_class_content = "both"

html_theme = "furo"
html_title = f"softdelta {version}"
html_copy_source = False

# Debian's KaTeX draws the formulas, in the place of MathJax: a reader needs no other server.
html_static_path = ["wide.css", "/usr/share/javascript/katex"]
html_css_files = ["katex.min.css", "wide.css"]
html_js_files = [("contrib/auto-render.js", {"defer": "", "onload": "renderMathInElement(document.body)", "priority": 900})]
mathjax_path, mathjax_options = "katex.min.js", {"defer": ""}

# What the documents do not have: the list of pages, and a picture of each table of figures.
PAGES = """
```{toctree}
:hidden:
:caption: Guide
docs/c-and-cpp
docs/serving
docs/python
docs/transformers
docs/llama
docs/cuda
docs/distributed
docs/performance
```

```{toctree}
:hidden:
:caption: Kernels
docs/case-file
docs/diagnose
docs/museum
docs/stages
docs/math
docs/glossary
```

```{toctree}
:hidden:
:caption: Reference
docs/site/c
docs/site/cpp
Python interface <autoapi/softdelta/index>
```

```{toctree}
:hidden:
:caption: Project
docs/README
docs/architecture
CONTRIBUTING
tests/README
docs/changelog
docs/releasing
```
"""


def read(app, name, source):
    text = source[0]
    text = re.sub(r"\]\((?:\.\./)?include/softdelta/softdelta\.h(pp)?\)",
                  lambda found: "](/docs/site/cpp.md)" if found[1] else "](/docs/site/c.md)", text)
    if name == "README":
        text += PAGES
    if name == "docs/performance":
        lines = text.splitlines()
        for index, ((place, title), rows) in reversed(list(enumerate(picture.tables(text).items()))):
            (Path(app.srcdir) / f"{index}.svg").write_text(picture.draw(rows, title, {name: name.split(" (")[0] for name in rows}))
            lines.insert(place + 1, f"\n![{title}](/{index}.svg)\n")
        text = "\n".join(lines)
    source[0] = text


def plain(app, what, name, value, options, lines):
    """A docstring is Markdown: what is indented is code, a star is a star."""
    code, changed = False, []
    for line in lines:
        indented = line.startswith("    ")
        if indented and not code:
            changed += ["", "::", ""]
        elif code and line and not indented:
            changed.append("")
        code = indented or (code and not line)
        changed.append(line if code else re.sub(r"([*|\\`]|_(?=\W|$))", r"\\\1", line))
    lines[:] = changed


def setup(app):
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", plain)
