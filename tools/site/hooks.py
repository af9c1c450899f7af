"""The site shows the README, CONTRIBUTING and pages of `benchmarks/` where a reader of the repository finds them.

The repository's pages link each other by relative paths that also leave `docs/`. Here each file of the repository that
a page names becomes a file of the site: `docs/x` as `x`, `README.md` as `index.md`, all else under its own path.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
from pathlib import Path

from command_line import describe_commands
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from cakegen.cli.main import main

# what git calls a remote -> where a browser finds it
REMOTE = re.compile(r"(?:https?://(?:[^@/]*@)?|(?:ssh://)?git@)([\w.-]+)(?::\d+(?=/))?[:/](.+?)(?:\.git)?/?")
ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs/"
COMMANDS = re.compile(r"<!-- commands: .*? -->")
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^(```+)(\w+) +\w+$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def site_name(path: str) -> str:
    """Where a file of the repository stands in the site's sources."""
    return "index.md" if path == "README.md" else path.removeprefix(DOCS)


def repository_name(source: str) -> str:
    """The repository's path of a file of the site's sources."""
    if source == "index.md":
        return "README.md"
    return DOCS + source if (ROOT / DOCS / source).exists() else source


def linked_files(path: str, text: str) -> set[str]:
    """Files of the repository that a page names by relative links, by their paths from its root."""
    targets = (link[1] for link in LINK.findall(CODE.sub("", text)) if ":" not in link[1])
    paths = (posixpath.normpath(posixpath.join(posixpath.dirname(path), target)) for target in targets)
    return {name for name in paths if (ROOT / name).is_file()}


def repository_link(remote: str) -> str:
    """The address of a repository for a browser; empty where git's name of it tells none."""
    found = REMOTE.fullmatch(remote.strip())
    return f"https://{found[1]}/{found[2]}" if found else ""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Link the repository that this checkout came from, in the footer of every page."""
    command = ["git", "-C", str(ROOT), "config", "--get", "remote.origin.url"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    link = repository_link(found.stdout)
    if link:
        config.extra["social"] = [{"icon": "fontawesome/brands/git-alt", "link": link, "name": "The repository"}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README, and all that pages reach by links, and what these reach."""
    waiting = ["README.md", *(DOCS + file.src_uri for file in files.documentation_pages())]
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        if not path.startswith(DOCS):
            files.append(File.generated(config, site_name(path), abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            waiting.extend(linked_files(path, (ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the site has them; a fence keeps its language and loses our marks; the reference of the commands."""
    source = page.file.src_uri
    folder = posixpath.dirname(repository_name(source))

    def relink(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if ":" in target or not (ROOT / path).is_file():
            return match[0]  # elsewhere, or broken, which mkdocs then says
        return before + posixpath.relpath(site_name(path), posixpath.dirname(source) or ".") + after

    text = LINK.sub(relink, FENCE.sub(r"\1\2", markdown))
    return COMMANDS.sub(lambda _: describe_commands(main, "cakegen"), text)
