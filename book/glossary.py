"""The glossary's page, and the terms of other pages, which show their definition on hover."""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

from book.terms import Entry, entries, head

PAGE = "glossary"
# where a word is no prose
_OUTSIDE = (
    nodes.literal, nodes.literal_block, nodes.reference, nodes.title, nodes.raw, nodes.math,
    nodes.math_block, nodes.term, nodes.strong,
)  # fmt: skip


def anchor(title: str) -> str:
    """A heading's name in an address, as JupyterLab makes it."""
    return title.replace(" ", "-")


def page(files: dict[int, str]) -> str:
    """The glossary as a page, from the files of the chapters by number."""
    rows = [
        f"{entry.term}\n  {entry.said} [Chapter {entry.chapter:02d}]({files[entry.chapter]})\n"
        for entry in entries()
    ]
    return f"{head()}\n```{{glossary}}\n" + "\n".join(rows) + "```\n"


class Terms(SphinxPostTransform):
    """Links terms to the glossary: where they are bold, and else once a page."""

    default_priority = 700
    formats = ("html",)

    def run(self, **kwargs: object) -> None:
        """Change the document."""
        if self.env.docname == PAGE:
            return
        known = {form: entry for entry in entries() for form in entry.forms}
        words = sorted(map(re.escape, known), key=len, reverse=True)
        self.pattern = re.compile(rf"(?<![\w-])({'|'.join(words)})(?![\w-])", re.I)
        self.known, self.seen = known, set()
        for strong in list(self.document.findall(nodes.strong)):
            entry = known.get(" ".join(strong.astext().split()).casefold())
            if entry:
                self.seen.add(entry)
                link = self.link(strong.astext(), entry)
                strong.clear()
                strong += link
        for text in list(self.document.findall(nodes.Text)):
            self.mark(text)

    def mark(self, text: nodes.Text) -> None:
        """Link what a text has for the first time on this page."""
        if text.parent is None or self.is_outside(text):
            return
        parts: list[nodes.Node] = []
        whole, at = text.astext(), 0
        for match in self.pattern.finditer(whole):
            entry = self.known[match[0].casefold()]
            if entry in self.seen or entry.is_everyday:
                continue
            self.seen.add(entry)
            parts += [nodes.Text(whole[at : match.start()]), self.link(match[0], entry)]
            at = match.end()
        if parts:
            text.parent.replace(text, [*parts, nodes.Text(whole[at:])])

    def is_outside(self, text: nodes.Text) -> bool:
        """Whether a text stands where no word is linked."""
        node = text.parent
        while node is not None:
            if isinstance(node, _OUTSIDE):
                return True
            node = node.parent
        return False

    def link(self, said: str, entry: Entry) -> nodes.reference:
        """The term as a link whose title is its definition."""
        domain = self.env.domains.standard_domain
        _, target = domain.objects["term", entry.term]
        address = f"{self.app.builder.get_relative_uri(self.env.docname, PAGE)}#{target}"
        plain = entry.said.replace("`", "")
        return nodes.reference(
            "", said, internal=True, refuri=address, reftitle=plain, classes=["term"]
        )


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx's door."""
    app.add_post_transform(Terms)
    # pages are written anew where the glossary is another one
    app.add_config_value("glossary_entries", repr(entries()), "html", str)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
