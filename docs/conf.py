"""Configures the site that `make docs` builds from docs/, the READMEs and the package itself.

Pages are copied to build/docs/source with the paths that they have here, so that links between them
hold. Beside them stand the pages of reference.py, and the output of the scripts in docs/tutorials
and docs/gallery.
"""

import os
import re
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "build/docs/source"
PAGES = ("*.md", "docs/**/*.md", "docs/**/*.png", "docs/**/*.svg", "csrc/**/README.md")
PAGES += ("csrc/include/ikattn/*.h", "benchmarks/results/*.md", "tests/**/README.md")
PAGES += ("torch_ext/ikattn/**/README.md",)


def first_file(folder: Path) -> Path:
    """Returns the file that a link to a folder opens."""
    first = ("README.md", "CMakeLists.txt")
    return min(
        filter(Path.is_file, folder.iterdir()), key=lambda file: (file.name not in first, file)
    )


def copy_pages() -> None:
    """Copies pages, and files that they link to; removes what was made of pages that are gone."""
    wanted = {page: page.read_bytes() for pattern in PAGES for page in ROOT.glob(pattern)}
    for page in [page for page in wanted if page.suffix == ".md"]:
        text = page.read_text()
        for link in re.findall(r"\]\(([^)\s:#]+)\)", text):
            file = (page.parent / link).resolve()
            if file.is_dir():
                file = first_file(file)
                text = text.replace(f"]({link})", f"]({os.path.relpath(file, page.parent)})")
            if file.is_file():
                wanted.setdefault(file, file.read_bytes())
        wanted[page] = text.encode()
    for copy in [*SOURCE.rglob("*.md"), *SOURCE.glob("docs/[tg]*/*.rst")]:
        page = ROOT / copy.relative_to(SOURCE)
        is_made = "generated" in copy.parts or copy.stem == "index"
        if not (is_made or page in wanted or page.with_suffix(".py").exists()):
            copy.unlink()
    for page, content in wanted.items():
        copy = SOURCE / page.relative_to(ROOT)
        if not copy.exists() or copy.read_bytes() != content:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)


os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1", OMP_NUM_THREADS="1")
sys.path.insert(0, str(ROOT / "docs"))
copy_pages()
reference = import_module("reference")
reference.write_pages(SOURCE / "docs/reference/generated")

project = "ikattn"
author = "the ikattn contributors"
release = version = reference.VERSION
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_gallery.gen_gallery",
    "sphinx_design",
    "sphinx_copybutton",
    *(["breathe"] if reference.DOXYGEN else []),
]
breathe_projects = {"ikattn": str(ROOT / "build/docs/headers/xml")}
breathe_default_project = "ikattn"
root_doc = "docs/index"
templates_path = [str(ROOT / "docs/_templates")]
nitpicky = True

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autosummary_imported_members = True
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_use_legacy_class_based = False
napoleon_use_rtype = False
nitpick_ignore = [("py:class", "TrainingArguments")]  # of transformers, for type checkers alone
nitpick_ignore_regex = [("cpp:identifier", r"(at|std|c10|torch)(::.*)?|u?int64_t|ikattn(::nn)?")]
maximum_signature_line_length = 88
python_use_unqualified_type_names = True

# Other libraries' pages are linked where the network is: sphinx-build -t online.
intersphinx_mapping = {}
if tags.has("online"):  # noqa: F821
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "numpy": ("https://numpy.org/doc/stable", None),
    }

sphinx_gallery_conf = {
    "examples_dirs": [str(ROOT / "docs" / name) for name in ("tutorials", "gallery")],
    "gallery_dirs": ["docs/tutorials", "docs/gallery"],
    "filename_pattern": r"\.py$",
    "within_subsection_order": "FileNameSortKey",
    "backreferences_dir": "docs/reference/generated/backreferences",
    "doc_module": ("ikattn",),
    "abort_on_example_error": True,
    "capture_repr": ("_repr_html_",),
    "download_all_examples": False,
    "show_signature": False,
    "min_reported_time": 3600,
    "write_computation_times": False,
    "reset_modules_order": "both",
}

html_theme = "furo"
html_title = "ikattn"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "to_index.html"}
html_copy_source = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}


def resolve(app, env, node, contnode):
    """Links a name of the package to where it is documented, by whatever path it is written.

    Other names that exist in Python stay text; a name that does not exist is warned of.
    """
    if node.get("refdomain") != "py":
        return None
    name, exists = reference.documented_name(node["reftarget"], node.get("py:module"))
    if name is None:
        return contnode if exists else None
    domain = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, contnode)


def skip(app, what, name, obj, skipped, options):
    """Leaves out fields of named tuples, which classes describe, and methods that PyG writes."""
    is_alias = (getattr(obj, "__doc__", None) or "").startswith("Alias for field number")
    return True if is_alias or name in ("propagate", "edge_updater") else None


def readable(app, what, name, obj, options, signature, annotation):
    """Writes the default of fields that are made for each object as Python can read it."""
    return (signature or "").replace("<factory>", "...") or None, annotation


def link_pages(app, what, name, obj, options, lines):
    """Turns the paths of pages that docstrings name into links."""
    lines[:] = [re.sub(r"`*(docs/[\w/]+)\.md`*", r":doc:`/\1`", line) for line in lines]


def setup(app):
    app.connect("autodoc-process-docstring", link_pages)
    app.connect("autodoc-process-signature", readable)
    app.connect("autodoc-skip-member", skip)
    app.connect("missing-reference", resolve)
