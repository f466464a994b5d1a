"""Listings: what `show` and `side_by_side` find, and what is left of it in any viewer."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import nsa_tutorial
from nsa_tutorial.course import phases, show, side_by_side
from nsa_tutorial.course.listing import Listing, SideBySide, level, shared_names
from nsa_tutorial.course.listing_style import DARK, LIGHT, SHARED, SHARED_COLOURS

ROOT = Path(nsa_tutorial.__file__).parents[1]
KERNELS = [
    "nsa_tutorial.sparse.selected_attention:forward",
    "nsa_tutorial.kernels.tilelang.selected.forward:build_kernel",
    "nsa_tutorial.kernels.triton.selected.forward:kernel",
]


def phased(x: int) -> int:
    # -- first --
    y = x + 1
    for _ in range(2):
        # -- inside the loop --
        y *= 2

        y -= 1
    # -- last --
    return y


def test_show_whole() -> None:
    listing = show(phased)
    assert listing.code.startswith("def phased(x: int) -> int:")
    assert listing.code.endswith("    return y\n")
    assert listing.title.endswith(" · phased")


def test_show_phase() -> None:
    assert show(phased, "first").code == "# -- first --\ny = x + 1\nfor _ in range(2):\n"
    assert show(phased, "inside the loop").code == "# -- inside the loop --\ny *= 2\n\ny -= 1\n"
    assert show(phased, phase="last").code == "# -- last --\nreturn y\n"
    assert phases(phased) == ["first", "inside the loop", "last"]


def test_show_unknown() -> None:
    with pytest.raises(
        ValueError,
        match="no phase 'middle'; the phases here are 'first', 'inside the loop', 'last'",
    ):
        show(phased, "middle")
    with pytest.raises(ValueError, match="defines no 'nothing'"):
        show("nsa_tutorial.course.costs:nothing")
    with pytest.raises(ValueError, match="no module"):
        show("nsa_tutorial.nowhere:f")


def test_show_by_name_is_show_of_the_object() -> None:
    from nsa_tutorial.sparse import selected_attention
    from nsa_tutorial.sparse.selected_attention import QueryRows

    assert (
        show("nsa_tutorial.sparse.selected_attention:forward").code
        == show(selected_attention.forward).code
    )
    assert show("nsa_tutorial.sparse.selected_attention:QueryRows").code == show(QueryRows).code
    assert show("nsa_tutorial.course.costs:Cost.bytes").code.startswith(
        "@property\ndef bytes(self)"
    )


def test_show_a_triton_kernel() -> None:
    pytest.importorskip("triton")
    from nsa_tutorial.kernels.triton.selected import forward as triton_forward

    assert "def kernel(" in show(triton_forward.kernel).code


def test_the_three_kernels_have_the_same_phases() -> None:
    first, second, third = (phases(name) for name in KERNELS)
    assert first == second == third
    assert len(first) == 11


def test_the_online_softmax_has_the_same_names() -> None:
    names = [
        "scores_max",
        "scores_max_prev",
        "scores_scale",
        "scores_sum",
        "running_sum",
        "acc_s",
        "acc_o",
        "scale_log2",
    ]
    for kernel in KERNELS:
        code = show(kernel, "online softmax").code
        assert all(name in code for name in names), kernel


PTX = Listing(
    "PTX from Triton", "mov.u32 %r1, 1 < 2;\n\n\tret;\n", "ptx", note="`ret` ends it & all."
)
CUDA = Listing("CUDA C++", "__global__ void f(int* x) {\n    x[0] = 1;  // one\n}", "cuda")
SHOWN = {
    "a kernel": show(KERNELS[2]),
    "a phase of three": side_by_side(*KERNELS, phase="online softmax"),
    "three kernels": side_by_side(*KERNELS),
    "PTX": PTX,
    "CUDA": CUDA,
    "a module": show("nsa_tutorial.exact.online_softmax"),
}


class Stripped(HTMLParser):
    """What is left where a viewer drops styles, classes and every attribute: a page's texts, and
    those of its `<pre>`s."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.text, self.codes = "", []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.inside.append(tag)
        if tag == "pre":
            self.codes.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.inside.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.inside:
            return
        self.text += data
        if "pre" in self.inside:
            self.codes[-1] += data


def listings_of(shown: Listing | SideBySide) -> tuple[Listing, ...]:
    return shown.listings if isinstance(shown, SideBySide) else (shown,)


@pytest.mark.parametrize("shown", SHOWN.values(), ids=SHOWN)
def test_code_survives_stripped_styles(shown: Listing | SideBySide) -> None:
    """One `<pre>` a listing, which holds the code to the blank: no numbers, no rows that level."""
    left = Stripped(shown._repr_html_())
    assert left.codes == [listing.code.rstrip() + "\n" for listing in listings_of(shown)]
    assert all(listing.title in left.text for listing in listings_of(shown))


@pytest.mark.parametrize("shown", SHOWN.values(), ids=SHOWN)
def test_plain_text_is_whole(shown: Listing | SideBySide) -> None:
    for listing in listings_of(shown):
        assert listing.code.rstrip() in repr(shown)
        assert listing.title in repr(shown)


@pytest.mark.parametrize("shown", SHOWN.values(), ids=SHOWN)
def test_one_style_and_a_span_a_line(shown: Listing | SideBySide) -> None:
    page = shown._repr_html_()
    assert page.count("<style>") == 1
    lines = sum(len(listing.code.rstrip().splitlines()) for listing in listings_of(shown))
    assert page.count('<span class="line">') == lines
    assert page == shown._repr_html_()


def test_a_note_follows_the_code() -> None:
    assert repr(PTX).endswith("ret;\n// `ret` ends it & all.\n")
    assert Stripped(PTX._repr_html_()).text.rstrip().endswith("ret;\n\nret ends it & all.")
    python = Listing("f", "x = 1\n", note="Why not 2?")
    assert repr(python) == "# f\nx = 1\n# Why not 2?\n"
    assert 'nsa-note"' not in CUDA._repr_html_()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_phase_keeps_its_file_and_its_lines(kernel: str) -> None:
    """The title names the file, and the numbers are those of its lines."""
    for listing in (show(kernel), *(show(kernel, phase) for phase in phases(kernel))):
        lines = (ROOT / listing.path).read_text().splitlines()[listing.first - 1 :]
        shown = listing.code.splitlines()
        assert [line.strip() for line in lines[: len(shown)]] == [line.strip() for line in shown]
        assert listing.title.startswith(listing.path)
        page = listing._repr_html_()
        assert f'href="../{listing.path}#line={listing.first - 1}"' in page
        assert f"counter-reset:nsa-line {listing.first - 1}" in page


def test_an_object_and_its_name_are_shown_alike() -> None:
    from nsa_tutorial.exact import online_softmax

    assert show(online_softmax) == show("nsa_tutorial.exact.online_softmax")
    assert show(online_softmax.merge) == show("nsa_tutorial.exact.online_softmax:merge")


@pytest.mark.parametrize("listing", [show(phased), PTX], ids=["outside the package", "no file"])
def test_what_has_no_file_in_the_package_has_no_link(listing: Listing) -> None:
    assert "<a " not in listing._repr_html_()


def test_html_is_escaped() -> None:
    page = show(lambda: "<b>&</b>")._repr_html_()
    assert "<b>" not in page
    assert "&lt;b&gt;&amp;&lt;/b&gt;" in page


def phased_listing(*names: str) -> Listing:
    """A phase is as long as its name, with its marker."""
    return Listing("", "".join(f"# -- {name} --\n" + "...\n" * (len(name) - 1) for name in names))


@pytest.mark.parametrize(
    ("columns", "levelled"),
    [
        ([("aa", "bbb", "c"), ("x", "aa", "c")], ["aa", "c"]),
        ([("a", "bb", "ccc"), ("bb", "ccc", "a")], ["bb", "ccc"]),
        ([("a", "b"), ("c", "d")], []),
        ([("a",), ("long", "a"), ("longer", "x", "a")], ["a"]),
    ],
    ids=["one more each", "another order", "nothing common", "three columns"],
)
def test_common_phases_are_level(columns: list[tuple[str, ...]], levelled: list[str]) -> None:
    listings = [phased_listing(*names) for names in columns]
    rows = []
    for listing, blank in zip(listings, level(listings), strict=True):
        known = listing.markers()
        more = {name: sum(n for row, n in blank.items() if row <= known[name]) for name in levelled}
        assert set(blank) <= {known[name] for name in levelled}, "blank rows elsewhere"
        rows.append([known[name] + more[name] for name in levelled])
    assert all(column == rows[0] for column in rows)
    if levelled:
        starts = [listing.markers()[levelled[0]] for listing in listings]
        assert rows[0][0] == max(starts), "more blank rows than needed"


def test_the_kernels_are_level_in_every_phase() -> None:
    listings = [show(kernel) for kernel in KERNELS]
    starts = []
    for listing, blank in zip(listings, level(listings), strict=True):
        starts.append(
            [
                row + sum(n for at, n in blank.items() if at <= row)
                for row in listing.markers().values()
            ]
        )
    assert starts[0] == starts[1] == starts[2]
    assert len(starts[0]) == 11


def test_shared_names() -> None:
    """Names of two columns or more; no keyword, builtin, module, attribute or single letter."""
    first = Listing("", "for row in range(tile.rows):\n    acc = torch.exp2(x, alone)  # other\n")
    second = Listing("", "acc = tl.exp2(x + row)\nrows = 'alone'\n")
    third = Listing("", "for other in range(len(x)):\n    pass\n")
    assert shared_names([first, second, third]) == {"row": 0, "acc": 1}


def test_a_shared_name_has_one_class_in_all_columns() -> None:
    page = side_by_side(*KERNELS, phase="online softmax")._repr_html_()
    spans = re.findall(r'<span class="(shared-\d)">(\w+)</span>', page)
    classes = {name: {c for c, n in spans if n == name} for _, name in spans}
    assert {"scores_max", "scores_scale", "running_sum", "acc_s", "acc_o"} <= set(classes)
    assert all(len(found) == 1 for found in classes.values())
    assert not {"torch", "tl", "exp2", "for"} & set(classes)


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio of two colours."""

    def light(colour: str) -> float:
        parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("theme", "palette"), [("light", LIGHT), ("dark", DARK)])
def test_colours_are_readable_and_shared_ones_differ(theme: str, palette: dict[str, str]) -> None:
    letters = {name: c for name, c in palette.items() if name not in ("ground", "edge")}
    colours = [*letters.values(), *SHARED[theme]]
    assert [c for c in colours if contrast(c, palette["ground"]) < 4.5] == []
    assert len(set(SHARED[theme])) == SHARED_COLOURS


def test_a_decorated_function_is_found_in_its_file() -> None:
    """`torch.no_grad()` puts a function of torch's around it."""
    from nsa_tutorial.sparse import block_selection

    assert show(block_selection.importance).path == "nsa_tutorial/sparse/block_selection.py"
