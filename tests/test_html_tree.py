"""A state in a notebook: what its tree says, and how it behaves in a browser."""

from collections.abc import Sequence
from html import escape
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Locator, Page

import optimisers as op
from optimisers.html_tree import tree
from tests.browser import watched
from tests.conftest import BACKENDS, Backend, train

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;</summary></details>"
INVISIBLE = "line\nbreak\u202eturned\ud800"


# Helpers --------------------------------------------------------------------------------------------------------------


class _Reader(HTMLParser):
    """Reads HTML, insists that its tags are balanced, and keeps ids, targets of links, names and texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.names: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.add(tag)
        self.texts += [" "] if tag in ("div", "summary") else []
        found = dict(attrs)
        self.ids += [found["id"] or ""] if "id" in found else []
        self.targets += [(found["href"] or "").removeprefix("#")] if "href" in found else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] != "style":
            self.texts.append(data)
        if self.open[-1] == "bdi":
            self.names.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())


def _html(state: op.State) -> str:
    return state._repr_html_()


def _model(backend: Backend) -> dict[str, Any]:
    def array(*shape: int) -> Any:
        return backend.array(np.ones(shape), "float32")

    embed = array(4, 3)
    layers = [{"norm": {"scale": array(3)}, "mlp": {"w": array(3, 3), "b": array(3)}} for _ in range(20)]
    return {"embed": {"weight": embed}, "encoder": {"layers": layers}, "head": {"bias": array(4), "out": {"weight": embed}}}


def _state(backend: Backend = BACKENDS[0]) -> op.State:
    model = _model(backend)
    state = op.setup({"**.b": op.Momentum(0.1), "**": op.Adam(0.1)}, model)
    state, _ = train(state, model, model)
    state = state.freeze("encoder.layers.0").freeze("encoder.layers.1.mlp.w")
    return state.freeze("embed", rows=[0, 1]).mask("head.out.weight")


def _leaf(path: tuple[Any, ...], **changes: Any) -> op.Leaf:
    facts = {
        "shape": (),
        "dtype": "float64",
        "rule": op.Descent(0.1),
        "slots": {},
        "step": 0,
        "frozen": False,
        "frozen_rows": (),
        "ties": {},
        "masked": frozenset(),
    }
    return op.Leaf(op.Path(path), **{**facts, **changes})


def _line(page: Any, name: str) -> Locator:
    """The line of this name, which stands alone in its cell."""
    return page.locator(f'.ot-name:has(> bdi:text-is("{name}"))').locator("..").first


def _in_frame(html: str) -> str:
    return f'<iframe srcdoc="{escape(html)}" style="width:100%;height:300px"></iframe>'


# What it says ---------------------------------------------------------------------------------------------------------


def test_the_tree_says_what_the_state_holds(backend: Backend) -> None:
    state = _state(backend)
    read = _Reader(_html(state))
    assert sum(leaf.nbytes for leaf in state.leaves()) == 2288
    assert "State at step 1 4 of 62 frozen 62 parameters, 316 elements, 1 tied 2.2 KiB" in read.text
    assert "A = Adam(lr=0.1, betas=(0.9, 0.999), eps=1e-08)" in read.text
    assert "B = Momentum(" in read.text
    assert "embed.weight 2 of 4 rows frozen tied 4 × 3 float32 A step 1 96 B" in read.text
    assert "mu 4 × 3 float32 48 B nu 4 × 3 float32 48 B tied: head.out.weight" in read.text
    assert "out.weight masked tied to embed.weight" in read.text
    assert "encoder.layers 4 of 60 frozen 60 parameters, 300 elements" in read.text
    # One that is frozen whole, and one that is not.
    assert "0 frozen 3 parameters, 15 elements" in read.text
    assert "1 1 of 3 frozen 3 parameters, 15 elements" in read.text


def test_a_tie_is_seen_from_both_of_its_ends(sharing_backend: Backend) -> None:
    w = sharing_backend.array(np.ones((2, 3)), "float32")
    read = _Reader(_html(op.setup(op.Adam(), {"w": w, "v": w.T, "alone": sharing_backend.array([1.0])})))
    first, second = "v" if "v tied 3 × 2" in read.text else "w", "w" if "v tied 3 × 2" in read.text else "v"
    assert f"tied: {second} (transposed)" in read.text
    assert f"{second} tied to {first} (transposed)" in read.text
    assert sorted(read.ids) == sorted(read.targets)
    assert len(set(read.ids)) == 2


def test_one_rule_is_named_once() -> None:
    read = _Reader(_html(op.setup(op.Adam(), {"a": np.zeros(2), "b": np.zeros(3)})))
    assert read.text.count("Adam(") == 1
    assert "a 2 float64 step 0 32 B" in read.text


def test_what_rules_keep_is_shown() -> None:
    read = _Reader(_html(op.setup(op.Chain(op.SkipNonFinite(), op.Adam()), {"a": np.zeros(2)})))
    assert "skipnonfinite: skipped=0" in read.text


def test_branches_that_hold_one_thing_are_one_line() -> None:
    read = _Reader(_html(op.setup(op.Descent(), {"params": {"net": {"a": {"w": np.zeros(2)}, "b": {"w": np.zeros(2)}}}})))
    assert read.names == ["params.net", "a.w", "b.w"]


@pytest.mark.parametrize("model", [np.zeros(3), {}, {"": np.zeros(3)}, {"": {"": np.zeros(3)}}, [np.zeros(()), {0: np.zeros(())}]])
def test_odd_models_have_a_tree(model: Any) -> None:
    if isinstance(model, dict) and not model:
        read = _Reader(tree([], "State at step 0"))
    else:
        read = _Reader(_html(op.setup(op.Descent(), model)))
    assert "State at step 0" in read.text
    assert ("(the model)" in read.text) == isinstance(model, np.ndarray)


def test_a_branch_of_a_state_has_a_tree() -> None:
    branch = _state()["encoder.layers.1"]
    assert isinstance(branch, op.State)
    read = _Reader(_html(branch))
    assert "State at step 1 1 of 3 frozen 3 parameters, 15 elements" in read.text
    assert "norm.scale 3 float32" in read.text


def test_counts_of_jax_show_inside_and_outside_a_compiled_step() -> None:
    import jax
    import jax.numpy as jnp

    seen: list[str] = []

    @jax.jit
    def step(state: op.State, model: Any) -> Any:
        state, model = op.update(state, model, model)
        seen.append(_html(state))
        return state, model

    model = {"w": jnp.ones((2, 3))}
    state, _ = step(op.setup(op.Adam(), model), model)
    assert "step 1" in _Reader(_html(state)).text
    assert "JitTracer" in _Reader(seen[0]).text


def test_slots_on_many_devices_count_whole() -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((8,), ("x",))
    w = jax.device_put(jnp.ones((16, 2), "float32"), NamedSharding(mesh, PartitionSpec("x")))
    assert "w 16 × 2 float32 step 0 256 B" in _Reader(_html(op.setup(op.Adam(), {"w": w}))).text


def test_what_cannot_be_seen_is_spelled_out() -> None:
    html = _html(op.setup(op.Descent(), {INVISIBLE: np.zeros(2), "שלום": np.zeros(2)}))
    html.encode()
    assert _Reader(html).names == ['"line\\nbreak\\u202eturned\\ud800"', "שלום"]


# Large models ---------------------------------------------------------------------------------------------------------


def test_a_hundred_thousand_parameters_make_a_page_that_a_notebook_can_keep() -> None:
    slots = {"mu": np.zeros(()), "nu": np.zeros(())}
    leaves = [_leaf((f"branch{i}", f"p{j}"), slots=slots, frozen=i == 99) for i in range(100) for j in range(1000)]
    html = tree(leaves, "A state")
    assert len(html) < 1_000_000
    read = _Reader(html)
    assert "1,000 of 100,000 frozen 100,000 parameters, 100,000 elements 1.5 MiB" in read.text
    lines = len([name for name in read.names if name not in ("mu", "nu")])
    shown = [int(text.split()[2].replace(",", "")) for text in read.texts if text.startswith("… and")]
    assert 500 < lines <= 1000
    assert len(shown) == 100 - shown[-1] + 1
    assert all(left == shown[0] for left in shown[:-1])


@pytest.mark.parametrize("count", [999, 1000, 1001, 5000])
def test_a_branch_is_cut_only_when_the_tree_is_too_large(count: int) -> None:
    read = _Reader(tree([_leaf((at,)) for at in range(count)], "A state"))
    assert len(read.names) == (count if count <= 1000 else 999)
    assert ("more" in read.text) == (count > 1000)
    assert count <= 1000 or read.text.endswith(f"… and {count - 999:,} more")


def test_a_tie_to_what_is_not_shown_is_no_link() -> None:
    leaves = [_leaf((at,)) for at in range(2000)] + [_leaf(("last",), ties={op.Path("first"): "same"})]
    read = _Reader(tree([*reversed(leaves)], "A state"))
    assert read.targets == []
    assert "tied: first" in read.text


def test_of_many_ties_and_rules_some_are_listed() -> None:
    shared = _leaf(("w",), ties={op.Path((f"alias{at}",)): "same" for at in range(150)})
    read = _Reader(tree([shared, *(_leaf((at,), rule=op.Descent(float(at + 1))) for at in range(200))], "A state"))
    assert read.text.count("tied: alias") == 100
    assert read.text.count("… and 50 more") == 1
    assert "201 rules A = Descent(lr=0.1)" in read.text
    assert "CV = Descent(lr=99.0) … and 101 more" in read.text


def test_a_model_ten_thousand_deep_is_one_line() -> None:
    read = _Reader(tree([_leaf(("deep",) * 10_000)], "A state"))
    assert len(read.names) == 1
    assert len(read.names[0]) <= 121
    assert read.names[0].startswith("deep.deep.")
    assert read.names[0].endswith(".deep.deep")


def test_branches_within_branches_become_a_list_at_some_depth() -> None:
    leaves = [_leaf(("in",) * depth + ("w",), shape=(2,)) for depth in range(900)]
    html = tree(leaves, "A state")
    read = _Reader(html)
    assert len(html) < 1_000_000
    assert "900 parameters, 1,800 elements" in read.text
    assert html.count('<div class="ot-inside">') - len(leaves) == 31
    assert "in.in.in.w" in read.names


# In a browser ---------------------------------------------------------------------------------------------------------


def test_branches_open_and_close_at_a_click(page: Page) -> None:
    page.set_content(_html(_state()))
    for name in ("embed.weight", "encoder.layers", "head"):
        assert _line(page, name).is_visible()
    # Twenty layers are within what is shown at first, their insides are not.
    assert _line(page, "19").is_visible()
    scale = page.locator("details", has=_line(page, "19")).last.get_by_text("norm.scale")
    assert not scale.is_visible()
    _line(page, "19").click()
    assert scale.is_visible()
    _line(page, "encoder.layers").click()
    assert not scale.is_visible()
    assert not _line(page, "19").is_visible()
    _line(page, "embed.weight").click()
    assert page.get_by_text("mu", exact=True).first.is_visible()


def test_the_keyboard_opens_branches(page: Page) -> None:
    page.set_content(_html(_state()))
    _line(page, "19").focus()
    page.keyboard.press("Enter")
    assert page.locator("details", has=_line(page, "19")).last.get_by_text("norm.scale").is_visible()


@pytest.mark.parametrize("framed", [False, True])
def test_a_link_opens_what_encloses_its_target_and_goes_there(page: Page, framed: bool) -> None:
    html = _html(_state()).replace("<details open>", "<details>").replace("<details>", "<details open>", 1)
    page.set_content(_in_frame(html) if framed else html)
    view: Any = page.frame_locator("iframe") if framed else page
    _line(view, "embed.weight").click()
    assert not _line(view, "out.weight").is_visible()
    view.locator("a", has_text="head.out.weight").click()
    assert _line(view, "out.weight").is_visible()
    assert _line(view, "out.weight").evaluate("each => each === document.activeElement")
    _line(view, "embed.weight").locator("..").evaluate("each => each.open = false")
    view.locator("a", has_text="embed.weight").click()
    assert _line(view, "embed.weight").evaluate("each => each === document.activeElement")


def test_a_link_scrolls_to_its_target(page: Page) -> None:
    model = {"a": {"w": (w := np.zeros((2, 2))), "b": np.zeros(2)}, "middle": [np.zeros(1) for _ in range(300)], "z": {"w": w}}
    page.set_content(_html(op.setup(op.Adam(), model)))
    _line(page, "a").click()
    _line(page, "w").click()
    _line(page, "middle").click()
    target = page.locator(".ot-line[id]")
    page.locator("a", has_text="z.w").click()
    assert page.evaluate("scrollY") > 1000
    box, height = target.bounding_box(), page.viewport_size
    assert box is not None
    assert height is not None
    assert 0 <= box["y"] < height["height"]


def test_trees_on_one_page_keep_to_themselves(page: Page) -> None:
    state = _state()
    page.set_content(_html(state) + _html(state))
    ids = page.eval_on_selector_all("[id]", "all => all.map(each => each.id)")
    assert len(ids) == len(set(ids)) == 4
    second = page.locator(".optimisers-tree").nth(1)
    _line(second, "embed.weight").click()
    second.locator("a", has_text="head.out.weight").click()
    assert second.evaluate("each => each.contains(document.activeElement)")


def test_nothing_in_a_name_is_run(page: Page) -> None:
    model = {HOSTILE: {HOSTILE: np.zeros(2), "b": np.zeros(2)}, "tied": (w := np.zeros((2, 2))), f"{HOSTILE}2": w}
    plain = _html(op.setup(op.Descent(), {"a": {"a": np.zeros(2), "b": np.zeros(2)}}))
    html = _html(op.setup(op.Descent(), model))
    page.set_content(html)
    page.wait_for_timeout(100)
    assert page.locator("script, img").count() == 0
    assert _Reader(html).tags - {"a"} == _Reader(plain).tags
    assert HOSTILE.replace('"', '\\"') in page.locator(".optimisers-tree").inner_text()


def test_frozen_is_said_in_words(page: Page) -> None:
    page.set_content(_html(_state()))
    assert "frozen" in _line(page, "0").inner_text().split()
    assert "1 of 3 frozen" in _line(page, "1").inner_text()
    assert "frozen" not in _line(page, "2").inner_text()


@pytest.mark.parametrize(("ground", "ink"), [("rgb(255, 255, 255)", "rgb(0, 0, 0)"), ("rgb(17, 17, 17)", "rgb(238, 238, 238)")])
def test_the_tree_wears_the_colours_of_its_page(page: Page, ground: str, ink: str) -> None:
    page.set_content(f'<body style="background:{ground};color:{ink}">{_html(_state())}')
    colours = page.eval_on_selector_all(".optimisers-tree *", "all => [...new Set(all.map(each => getComputedStyle(each).color))]")
    grounds = page.eval_on_selector_all(
        ".optimisers-tree *", "all => [...new Set(all.map(each => getComputedStyle(each).backgroundColor))]"
    )
    assert colours == [ink]
    assert grounds == ["rgba(0, 0, 0, 0)"]


def test_the_style_stays_within_the_tree(page: Page) -> None:
    outside = "<details id=outside><summary>outside</summary><bdi>name</bdi></details>"
    looks = "all => all.map(each => JSON.stringify([...getComputedStyle(each)].map(name => getComputedStyle(each)[name])))"
    page.set_content(outside)
    before = page.eval_on_selector_all("#outside, #outside *", looks)
    page.set_content(outside + _html(_state()))
    assert page.eval_on_selector_all("#outside, #outside *", looks) == before


def test_the_tree_works_without_scripts(browser: Browser) -> None:
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    troubles = watched(page)
    page.set_content(_html(_state()))
    _line(page, "encoder.layers").click()
    assert not _line(page, "19").is_visible()
    _line(page, "encoder.layers").click()
    assert _line(page, "19").is_visible()
    _line(page, "embed.weight").click()
    _line(page, "head").click()
    assert not _line(page, "out.weight").is_visible()
    page.locator("a", has_text="head.out.weight").click()
    assert _line(page, "out.weight").is_visible()
    context.close()
    assert not troubles


def test_the_tree_can_be_read_without_its_style(page: Page) -> None:
    html = _html(_state())
    page.set_content(html[: html.index("<style>")] + html[html.index("</style>") :])
    assert "embed.weight 2 of 4 rows frozen tied 4 × 3 float32 A step 1 96 B" in page.locator("summary").nth(2).inner_text()
