"""The site is what README.md leads to; pages, pictures and recordings are read where they lie in the repository.

Source files that a page links to, and folders without a README, become pages too: no link leaves the site.
"""

import ast
import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
AS_THEY_ARE = {".md", ".png", ".svg", ".html", ".csv"}
LINK = re.compile(r"(?<=\]\()[^)#:\s]+(?=[)#])")  # the path of a link that is not one of the web
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
NESTED = re.compile(r"^ {2,3}(?=- )|(?<=\n\n) {2,3}(?=\S)", re.MULTILINE)


def page_of(link: str, page: Path) -> str:
    """The link to the page of a folder or source file, for the link to the folder or file itself."""
    path = page.parent / link
    if path.is_dir():
        return f"{link.rstrip('/')}/README.md"
    return link if path.suffix in AS_THEY_ARE or not path.exists() else f"{link}.md"


def code(path: Path) -> str:
    language = {".py": "python", ".yml": "yaml"}.get(path.suffix, "sh")
    fence = f'~~~~~~ {{.{language} linenums="1"}}\n{path.read_text()}~~~~~~\n'
    return f"---\nsearch: {{exclude: true}}\nhide: [toc]\n---\n# {path.relative_to(ROOT)}\n\n{fence}"


def listing(folder: Path) -> str:
    lines = [f"# {folder.relative_to(ROOT)}/\n"]
    for path in sorted(path for path in folder.iterdir() if path.name[0] not in "_."):
        module = path if path.is_file() else path / "__init__.py"
        about = ast.get_docstring(ast.parse(module.read_text())) if module.suffix == ".py" and module.exists() else None
        lines.append(f"- [`{path.name}`]({path.name}) {(about or '').partition(chr(10))[0]}")
    return "\n".join(lines)


def prose(page: Path) -> str:
    """As GitHub reads it: lists nest by two spaces or three, and Markdown may be folded."""
    parts = FENCED.split(page.read_text() if page.exists() else listing(page.parent))
    parts[::2] = [NESTED.sub("    ", part).replace("<details>", "<details markdown>") for part in parts[::2]]
    return LINK.sub(lambda link: page_of(link[0], page), "".join(parts))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """MkDocs calls this. INCLUDED holds also for names with a dot in front, which it else leaves out."""
    found = [ROOT / "README.md"]
    for path in found:  # it grows
        if path.with_suffix("").is_file():
            content = code(path.with_suffix(""))
        elif path.suffix == ".md" and path.parent.is_dir() and (path.exists() or path.name == "README.md"):
            content = prose(path)
            linked = [Path(os.path.normpath(path.parent / link)) for link in LINK.findall(content)]
            found += [file for file in dict.fromkeys(linked) if file not in found]
        elif path.exists():
            content = path.read_bytes()
        else:
            continue  # MkDocs names the page with the dead link
        name = str(path.relative_to(ROOT))
        files.append(File.generated(config, name, content=content, inclusion=InclusionLevel.INCLUDED))
    return files
