"""The site is what README.md leads to; pages, pictures and recordings are read where they lie in the repository.

Source files that a page links to become pages too: no link leaves the site.
"""

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
        return f"{link}/README.md"
    return link if path.suffix in AS_THEY_ARE or not path.exists() else f"{link}.md"


def code(path: Path) -> str:
    language = {".py": "python", ".yml": "yaml"}.get(path.suffix, "sh")
    fence = f'~~~~~~ {{.{language} linenums="1"}}\n{path.read_text()}~~~~~~\n'
    return f"---\nsearch: {{exclude: true}}\nhide: [toc]\n---\n# {path.relative_to(ROOT)}\n\n{fence}"


def prose(page: Path) -> str:
    """As GitHub reads it: lists nest by two spaces or three, and Markdown may be folded."""
    parts = FENCED.split(page.read_text())
    parts[::2] = [NESTED.sub("    ", part).replace("<details>", "<details markdown>") for part in parts[::2]]
    return LINK.sub(lambda link: page_of(link[0], page), "".join(parts))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """MkDocs calls this. INCLUDED holds also for names with a dot in front, which it else leaves out."""
    found = [ROOT / "README.md"]
    content: str | bytes
    for path in found:  # it grows
        if path.with_suffix("").is_file():
            content = code(path.with_suffix(""))
        elif not path.exists():
            continue  # MkDocs names the page with the dead link
        elif path.suffix == ".md":
            content = prose(path)
            if path.name == "AGENTS.md":  # no result of a reader's search
                content = f"---\nsearch: {{exclude: true}}\n---\n{content}"
            linked = [Path(os.path.normpath(path.parent / link)) for link in LINK.findall(content)]
            found += [file for file in dict.fromkeys(linked) if file not in found]
        else:
            content = path.read_bytes().replace(b'href="README.md"', b'href="index.html"')  # of a recording
        name = str(path.relative_to(ROOT))
        files.append(File.generated(config, name, content=content, inclusion=InclusionLevel.INCLUDED))
    return files
