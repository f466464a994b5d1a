"""The mask explorer: its words and its picture say what the masks hold, and a control says what is
drawn."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from types import SimpleNamespace

import ipywidgets
import numpy as np
import pytest
import torch
from PIL import Image

from nsa_tutorial.course import costs, latency, masks
from nsa_tutorial.course.mask_report import amount, attention_of, explore
from nsa_tutorial.course.masks import BRANCHES, REAL, SYNTHETIC, Settings
from nsa_tutorial.course.widgets import Panel
from nsa_tutorial.course.widgets import mask_explorer as pictures
from nsa_tutorial.course.widgets.mask_explorer import KINDS

BLOCKED = Settings(N=64, block_size=8, top_n=2, num_initial=0, num_local=1, window=12, query=40)
each_view = pytest.mark.parametrize("show", pictures.SHOWN)

# -- the mask --


@each_view
def test_colours_lie_over_one_another_in_the_order_of_the_branches(show):
    made, branches = masks.masks_of(BLOCKED), pictures.SHOWN[show]
    found = pictures.kinds(made, branches)
    for t, key in np.ndindex(64, 64):
        seen = [name for name in BRANCHES if name in branches and made[name][t, key]]
        expected = seen[-1] if seen else "not seen" if key <= t else "future"
        assert KINDS[found[t, key]] == expected


def test_each_kind_has_its_colour():
    found = pictures.kinds(masks.masks_of(BLOCKED))
    assert np.array_equal(pictures.painted(found), pictures.colours()[found])
    assert len({tuple(colour) for colour in pictures.colours()}) == len(KINDS)
    assert tuple(pictures.colours()[KINDS.index("not seen")]) == (255, 255, 255, 255), "blank"


# -- the list --


def test_a_long_list_keeps_its_sums_and_its_own_block():
    settings = Settings(N=512, block_size=8, top_n=40, query=500)
    found = explore(settings)[1]
    lines = pictures.table(settings, found)
    assert len(lines) == pictures.ROOM + 3, "and heading, sum and dense"
    shown = [int(cells[3]) for branch, cells in lines if branch]
    assert sum(shown) == int(lines[-2][1][3]) == sum(item.keys for item in found.items)
    assert sum(branch == "own block" for branch, _ in lines) == 1
    assert any("more" in cells[1] for _, cells in lines)


@each_view
@pytest.mark.parametrize("query", [0, 3, 200])
def test_the_list_holds_the_branches_that_are_shown(query, show):
    settings, branches = Settings(query=query), pictures.SHOWN[show]
    found = explore(settings)[1]
    lines = pictures.table(settings, found, branches)
    listed = [item for item in found.items if item.branch in branches]
    assert [branch for branch, _ in lines if branch] == [item.branch for item in listed]
    assert int(lines[-2][1][3]) == sum(item.keys for item in listed)
    assert lines[-1][1][3:] == (str(query + 1), f"{(query + 1) / 2:.2f}"), "0.5 KiB a key"


def texts(settings: Settings, show: str = "all branches") -> dict[str, float]:
    """Every text of the picture, and how many inches from the upper edge it stands."""
    (sheet,) = pictures.draw(settings, show).figure.axes
    return {text.strip(): y for words in sheet.artists for _, y, text in words.entries}


@each_view
def test_the_picture_writes_the_list_and_explains_its_colours(show):
    settings = replace(BLOCKED, query=50)
    written = "\n".join(texts(settings, show))
    lines = pictures.table(settings, explore(settings)[1], pictures.SHOWN[show])
    for _, cells in lines:
        assert re.search(r"\s+".join(map(re.escape, filter(None, cells))), written)
    drawn = {KINDS[kind] for kind in np.unique(pictures.kinds(masks.masks_of(settings)))}
    legend = {"own block": "own", "selected": "selected", "window": "window",
              "compressed": "summaries", "not seen": "not seen", "future": "later"}  # fmt: skip
    for kind in drawn & {*pictures.SHOWN[show], "not seen", "future"}:
        assert legend[kind] in written


def test_the_longest_list_ends_above_the_legend():
    settings = Settings(N=512, block_size=4, top_n=32, stride=4, query=511)
    written = texts(settings)
    last = next(y for text, y in written.items() if text.startswith("dense "))
    assert written["own block"] - last > pictures.LINE


# -- in words --


def test_findings():
    settings = Settings(data=REAL, group=3, query=385) if REAL in masks.sources() else None
    if settings is None:
        pytest.skip("no heads are stored")
    assert pictures.finding(settings, "selected") == (
        "Query 385 finds all of the best 4 blocks, reads 98 of 386 keys"
    )
    assert pictures.finding(replace(settings, top_n=1, num_initial=1, num_local=0)) == (
        "Query 385 misses its best block: 95 loads, not 386"
    )
    assert pictures.finding(settings, "compressed") == (
        "Query 385 reads 47 summaries in place of 386 keys"
    )


@each_view
def test_a_finding_is_a_title_and_the_sentence_is_short(show):
    short, long = Settings(N=16, query=9, window=8), Settings(block_size=4, stride=4, query=511)
    for settings in (Settings(), short, long):
        assert len(pictures.finding(settings, show)) <= 70, "a longer title leaves the figure"
        assert len(pictures.sentence(settings, show)) < 360


@each_view
def test_a_sentence_tells_cost_and_attention_of_what_is_shown(show):
    settings = Settings(query=300)
    made, found = explore(settings)
    said, names = pictures.sentence(settings, show), pictures.PRICED[show]
    flops = sum(found.branches[name].flops for name in names) / found.dense.flops
    assert f"take {flops:.0%} of dense attention's work" in said
    choosing = f"plus {found.choice.flops / found.dense.flops:.0%} to choose"
    assert (choosing in said) == ("selected" in names)
    seen = np.zeros(512, dtype=bool)
    for name in set(pictures.SHOWN[show]) - {"compressed"}:
        seen |= made[name][300]
    held = attention_of(settings)[seen[:301]].sum()
    assert (f"{held:.0%} of its attention" in said) == (show != "compressed")


def test_a_sentence_says_why_short_texts_move_more_and_that_long_ones_do_not():
    """Lists of 7 blocks of 16 keys: what is moved at 65,536
    tokens is what the operator's cost says."""
    settings, N = Settings(query=300), 65_536
    data = masks.source(settings.data, settings.N, settings.group)
    sizes = {"D": data.D, "DV": data.DV, "HQ": len(data.logits), "H": 1}
    lists = costs.selected_attention(N, N, block_size=16, top_n=7, **sizes).bytes
    dense = costs.tiled_attention(N, N, **sizes).bytes
    said = pictures.sentence(settings, "selected")
    assert "as 64 queries share a load" in said
    told = f"At 65,536 tokens it is {amount(lists, 'B')} (dense: {amount(dense, 'B')})."
    assert said.endswith(told)
    assert lists < dense


def test_a_sentence_says_what_is_out_of_range():
    assert "Out of range: query 900 becomes 511." in pictures.sentence(Settings(query=900))


# -- the picture --


def test_the_same_picture_every_time_and_small():
    for settings in (Settings(), Settings(N=16), Settings(block_size=4, top_n=64, stride=4)):
        first = pictures.draw(settings).png()
        assert first == pictures.draw(settings).png()
        assert len(first) < 60_000


# -- trained heads --


@pytest.fixture
def heads(monkeypatch):
    """Heads as `nsa_tutorial.course.heads.load` gives them, random and shorter than 512."""
    g = torch.Generator().manual_seed(0)
    made = SimpleNamespace(
        q=torch.randn(1, 200, 6, 8, generator=g), k=torch.randn(1, 200, 3, 8, generator=g),
        v=torch.randn(1, 200, 3, 4, generator=g), text=bytes(range(32, 127)) + b"\n" * 105, G=2,
    )  # fmt: skip
    kept = masks._real_logits, masks._scores_of, masks._masks_of
    for function in kept:
        function.cache_clear()
    monkeypatch.setattr(masks, "_heads", lambda: made)
    yield made
    for function in kept:
        function.cache_clear()


def test_trained_heads_are_a_choice_where_they_are(heads):
    assert masks.sources() == {SYNTHETIC: (2, 512), REAL: (3, 200)}
    settings = Settings(data=REAL, group=2, query=50)
    assert (settings.N, settings.group) == (200, 2)
    source = masks.source(REAL, 120, 2)
    assert (source.D, source.DV, source.text) == (8, 4, heads.text[:120])
    for head in range(2):
        expected = heads.q[0, :120, 4 + head] @ heads.k[0, :120, 2].T * 8**-0.5
        np.testing.assert_allclose(source.logits[head], expected, atol=1e-5)
    assert "the last byte of “GHIJKLMNOPQR”" in pictures.sentence(settings)


def test_data_bounds_length_and_group(heads):
    panel = pictures.mask_explorer()
    panel.controls["data"].value = REAL
    assert (panel.controls["N"].max, panel.values["N"]) == (200, 200)
    assert "tokens: 512 is out of range here, now 200." in panel.moved
    panel.set(group=2)
    panel.controls["data"].value = SYNTHETIC
    assert latency.choices(panel.controls["group"]) == [0, 1]
    assert panel.moved == "head group: 2 is out of range here, now 1."
    assert panel.controls["N"].max == 512


def test_without_trained_heads_only_made_up_scores_are_offered(monkeypatch):
    monkeypatch.setattr(masks, "_heads", lambda: None)
    assert list(masks.sources()) == [SYNTHETIC]
    assert pictures.mask_explorer().controls["data"].options == (SYNTHETIC,)


# -- the interactive --


def test_the_interactive_says_what_the_pure_function_computes():
    panel = pictures.mask_explorer()
    assert panel.sentence == pictures.sentence(Settings())
    values = {"N": 256, "block_size": 32, "top_n": 4, "num_initial": 0, "num_local": 1,
              "window": 9, "length": 8, "stride": 4, "query": 200, "group": 1}  # fmt: skip
    said = [panel.sentence]
    for name, value in values.items():
        said.append(panel.set(**{name: value}))
        assert said[-1] != said[-2], f"{name} changes nothing"
    assert said[-1] == pictures.sentence(Settings(**values))


def test_it_begins_where_it_is_told_to():
    start = Settings(N=200, query=90, top_n=3)
    panel = pictures.mask_explorer(start, "selected")
    assert panel.sentence == pictures.sentence(start, "selected")
    panel.set(query=10, show="compressed")
    panel.reset()
    assert panel.sentence == pictures.sentence(start, "selected")


@pytest.mark.parametrize(
    ("moved", "reads"),
    [
        ({"N": 16}, {"N": 16, "query": 15, "window": 16}),
        ({"length": 128, "N": 64}, {"length": 64}),
        ({"top_n": 1}, {"num_local": 1, "num_initial": 0}),
        ({"num_local": 7}, {"num_local": 7, "num_initial": 0}),
        ({"block_size": 4}, {"stride": 4}),
        ({"length": 4}, {"stride": 4}),
    ],
    ids=str,
)
def test_a_control_never_reads_what_is_not_drawn(moved, reads):
    panel = pictures.mask_explorer()
    for name, value in moved.items():
        panel.controls[name].value = value
    values = panel.values
    assert {name: values[name] for name in reads} == reads
    values.pop("show")
    assert Settings(**values).adjusted == ()
    for name in set(reads) - set(moved):
        assert f"{panel.controls[name].description}: " in panel.moved


def test_every_offered_value_is_in_range():
    panel = pictures.mask_explorer()
    panel.set(N=40, top_n=2, num_local=1)
    for name, control in panel.controls.items():
        for value in latency.choices(control) if name != "show" else ():
            values = {**panel.values, name: value}
            values.pop("show")
            moved = {move.split()[0] for move in Settings(**values).adjusted}
            assert name not in moved


def drawn(panel: Panel) -> tuple[bytes, str]:
    values = panel.values
    show = values.pop("show")
    return pictures.draw(Settings(**values), show).png(), panel.sentence


@pytest.mark.exhaustive
@each_view
def test_what_is_not_shown_is_greyed_out_and_changes_nothing(show):
    panel = pictures.mask_explorer()
    panel.set(show=show)
    for name, control in panel.controls.items():
        before = drawn(panel)
        panel.set(**{name: latency.choices(control)[1]})
        same = drawn(panel) == before
        assert same or not control.disabled, name
        panel.reset()
        panel.set(show=show)
    if show != "all branches":
        assert panel.controls["top_n"].disabled == (show != "selected")
        assert panel.controls["window"].disabled == (show != "sliding window")


def test_the_button_saves_the_picture_and_names_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    panel = pictures.mask_explorer()
    panel.set(query=77, show="compressed")
    _, button, saved = panel.actions.children
    assert isinstance(button, ipywidgets.Button)
    button.click()
    (path,) = tmp_path.iterdir()
    assert path.name == pictures.file_name(Settings(query=77), "compressed")
    assert path.name in saved.value
    assert path.read_bytes() == pictures.draw(Settings(query=77), "compressed").png()
    with Image.open(path) as image:
        width, height = pictures.draw().size
        assert (image.format, image.size) == ("PNG", (2 * width, 2 * height))


def test_file_names_differ_as_settings_do():
    base = Settings()
    names = {pictures.file_name(base, show) for show in pictures.SHOWN}
    changes = {"N": 500, "block_size": 32, "top_n": 6, "num_initial": 2, "num_local": 3,
               "window": 9, "length": 32, "stride": 4, "query": 3, "group": 1}  # fmt: skip
    names |= {pictures.file_name(replace(base, **{k: v})) for k, v in changes.items()}
    assert len(names) == len(pictures.SHOWN) + len(changes)
    assert all(name.endswith(".png") and " " not in name and "/" not in name for name in names)


@pytest.mark.exhaustive
def test_a_move_at_512_tokens_is_quick():
    times = latency.measure(pictures.mask_explorer())
    assert statistics.median(t for found in times.values() for t in found) < 90, "ms"
