"""Reports in a real Chromium: what it draws is right, small, readable, and harmless."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedbilevel.cli.output import write_report
from fedbilevel.result import Result
from tests.browser import Page, needs_chromium, opened
from tests.reports import made_up, save_comparison, save_run
from tests.test_report import hostile_run

pytestmark = needs_chromium
UNFOLD = "document.querySelectorAll('details').forEach(d => d.open = true)"
PRICES = {"cheap": 1000, "dear": 4000, "still": 0}


@pytest.fixture(scope="module")
def browser():
    with opened() as page:
        yield page


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = save_comparison(tmp_path_factory.mktemp("compared"), PRICES, seeds=5)
    # One of the seeds ended early.
    short = made_up("cheap", 0, 9, 1000)
    short.save(place / "cheap" / "seed-0")
    return written(place)


def written(folder: Path) -> Path:
    write_report(folder)
    return folder


def show(browser: Page, folder: Path, **how) -> None:
    browser.complaints.clear()
    browser.requests.clear()
    address = (folder / "report.html").as_uri()
    browser.open("about:blank")
    browser.open(address, **how)
    browser.wait_for("document.documentElement.dataset.drawn === 'yes'")
    assert browser.complaints == []
    assert browser.requests == [address]


def drawn(browser: Page, name: str) -> dict[str, list[float]]:
    """Return the line of a curve as it is on the screen."""
    picked = f"document.getElementById('curves').data.filter(t => t.name === '{name}')"
    found = browser.evaluate(f"{picked}.map(t => ({{x: [...t.x], y: [...t.y]}}))")
    (one,) = found
    return one


def choose(browser: Page, axis: str, metric: str = "upper_loss") -> str:
    browser.evaluate(
        f"document.getElementById('metric').value = '{metric}';"
        f"document.querySelector('input[value={axis}]').click();"
        "document.getElementById('metric').dispatchEvent("
        "new Event('change', {bubbles: true}))"
    )
    return browser.evaluate(
        "JSON.stringify(['xaxis', 'yaxis'].map(a => ["
        "document.getElementById('curves').layout[a].title.text,"
        "document.getElementById('curves').layout[a].type]))"
    )


def padded(columns: list[np.ndarray]) -> np.ndarray:
    longest = max(map(len, columns))
    return np.stack([np.append(c, [c[-1]] * (longest - len(c))) for c in columns])


def test_axes_switch_and_curves_are_means_with_bands_of_the_saved(browser, folder):
    show(browser, folder)
    results = [Result.load(folder / "cheap" / f"seed-{seed}") for seed in range(5)]
    assert [len(one.columns["round"]) for one in results] == [9, 12, 12, 12, 12]
    values = padded([one.columns["upper_loss"].astype(float) for one in results])
    costs = {
        "exchanges": [one.columns["exchanges"] for one in results],
        "megabytes": [one.columns["bytes"] / 1e6 for one in results],
        "samples": [one.columns["samples"] for one in results],
        "seconds": [
            3.0 * one.columns["round"] / len(one.columns["round"]) for one in results
        ],
    }
    for axis, columns in costs.items():
        (below, _), (beside, scale) = json.loads(choose(browser, axis))
        assert axis.removesuffix("s") in below
        assert (beside, scale) == ("upper_loss", "log")
        line, band = drawn(browser, "cheap"), drawn(browser, "band of cheap")
        along = padded(columns).mean(axis=0)
        np.testing.assert_allclose(line["x"], along)
        np.testing.assert_allclose(line["y"], values.mean(axis=0), rtol=1e-6)
        # 2.7764 of a table of Student's t, with 4 degrees of freedom.
        half = 2.7764 * values.std(axis=0, ddof=1) / np.sqrt(5)
        low, high = values.mean(axis=0) - half, values.mean(axis=0) + half
        np.testing.assert_allclose(band["x"], [*along, *along[::-1]])
        np.testing.assert_allclose(band["y"], [*high, *low[::-1]], rtol=1e-3)
    assert browser.complaints == []


@pytest.mark.slow
def test_an_accuracy_is_linear_and_what_costs_nothing_is_named(browser, folder):
    show(browser, folder)
    _, (name, scale) = json.loads(choose(browser, "megabytes", "test_accuracy"))
    assert (name, scale) == ("test_accuracy", "linear")
    names = browser.evaluate(
        "document.getElementById('curves').data.map(t => t.name).join()"
    )
    assert "still" not in names
    told = "document.getElementById('notes').textContent"
    assert "at no cost in megabytes: still" in browser.evaluate(told)
    choose(browser, "samples", "test_accuracy")
    assert "still" not in browser.evaluate(told)
    assert len(drawn(browser, "still")["x"]) == 12


@pytest.mark.slow
def test_ticks_of_a_logarithmic_axis_are_plain_numbers(browser, folder):
    show(browser, folder)
    choose(browser, "exchanges")
    texts = browser.evaluate(
        "[...document.querySelectorAll('#curves .ytick text')].map(t => t.textContent)"
    )
    assert {"0.5", "1", "10"} <= set(texts)


def test_a_keyboard_is_enough(browser, folder):
    show(browser, folder)
    seen: list[str] = []
    for _ in range(40):
        browser.press("Tab", 9)
        seen.append(
            browser.evaluate(
                "(e => e.dataset.does || e.name || e.id || e.tagName)"
                "(document.activeElement)"
            )
        )
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        if seen[-1] != "BODY":
            assert browser.evaluate(outline) != "none", seen[-1]
        if seen[-1] == "axis" and "axis" not in seen[:-1]:
            browser.press("ArrowRight", 39)
            chosen = "document.querySelector('input[name=axis]:checked').value"
            assert browser.evaluate(chosen) == "megabytes"
            axis = "document.getElementById('curves').layout.xaxis.title.text"
            assert browser.evaluate(axis) == "megabytes sent"
    assert {"metric", "axis", "copy", "csv", "latex", "columns", "command"} <= set(seen)


@pytest.mark.slow
def test_a_choice_stays_when_the_page_is_read_again(browser, folder):
    show(browser, folder)
    choose(browser, "seconds", "test_accuracy")
    browser.evaluate("delete document.documentElement.dataset.drawn; location.reload()")
    browser.wait_for("document.documentElement.dataset.drawn === 'yes'")
    found = "[...document.querySelectorAll('#metric, input:checked')].map(e => e.value)"
    assert browser.evaluate(found) == ["test_accuracy", "seconds"]


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_overflows_on_a_phone_and_the_dark_is_dark(browser, folder, dark):
    show(browser, folder, width=400, dark=dark)
    browser.evaluate(UNFOLD)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 400
    assert browser.evaluate("document.getElementById('curves').clientWidth") <= 400
    paper, ink = (
        browser.evaluate(f"getComputedStyle(document.body).{name}")
        for name in ("backgroundColor", "color")
    )
    light, shade = (sum(map(int, one[4:-1].split(","))) / 765 for one in (paper, ink))
    assert (light < 0.2 and shade > 0.8) if dark else (light > 0.8 and shade < 0.2)
    text = "getComputedStyle(document.querySelector('#curves .xtick text')).fill"
    assert browser.evaluate(text) == ink


def test_hostile_names_are_shown_and_do_nothing(browser, tmp_path):
    folder = written(hostile_run(tmp_path))
    for width in (1200, 400):
        show(browser, folder, width=width)
        assert browser.evaluate("typeof window.taken") == "undefined"
        browser.evaluate(
            "document.querySelectorAll('details').forEach(d => d.open = 1)"
        )
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        title = browser.evaluate("document.querySelector('h1').textContent")
        assert title.startswith("Predicting </script><script>")


def test_should_escaping_fail_the_policy_lets_no_other_program_run(browser, folder):
    show(browser, folder)
    browser.evaluate(
        "(() => { const s = document.createElement('script');"
        "s.textContent = 'window.taken = 1'; document.head.append(s); })()"
    )
    assert browser.evaluate("typeof window.taken") == "undefined"


def test_buttons_hand_out_the_tables_and_all_measurements(browser, folder):
    show(browser, folder)
    browser.evaluate(
        "window.handed = []; HTMLAnchorElement.prototype.click = function () {"
        "handed.push(this.download) };"
        "window.made = []; URL.createObjectURL = b => { made.push(b); return '#' }"
    )
    for kind in ("csv", "latex", "columns"):
        browser.evaluate(f"document.querySelector('[data-does={kind}]').click()")
    table, latex, columns = browser.evaluate("Promise.all(made.map(b => b.text()))")
    names = browser.evaluate("handed")
    assert [Path(name).suffix for name in names] == [".csv", ".tex", ".csv"]
    assert table.startswith("algorithm,upper_loss,exchanges,MB,samples,seconds\n")
    assert r"\toprule" in latex and "upper\\_loss" in latex
    head, *lines = columns.splitlines()
    assert len(lines) == 15 * 12 - 3
    at = head.split(",").index("upper_loss")
    mine = [line.split(",") for line in lines if line.startswith("dear,1,")]
    saved = Result.load(folder / "dear" / "seed-1").columns["upper_loss"]
    np.testing.assert_array_equal([np.float32(one[at]) for one in mine], saved)


@pytest.mark.slow
def test_bars_are_drawn_for_named_sites(browser, tmp_path):
    classes = {"classes": {"ill": 1, "well": 2}}
    sites = [{"name": "St. Mary", **classes}, {"name": "B" * 80, **classes}]
    one = made_up("one", config={"clients": 2, "data": {"sites": sites}})
    show(browser, written(save_run(tmp_path, one)), width=400)
    ticks = "document.querySelectorAll('#holdings .ytick text')"
    texts = browser.evaluate(f"[...{ticks}].map(t => t.textContent)")
    assert texts[:2] == ["St. Mary", "B" * 47 + "…"]
    widths = f"[...{ticks}].map(t => t.getBoundingClientRect())"
    assert browser.evaluate(f"{widths}.every(b => b.left >= 0 && b.width < 160)")
    assert browser.evaluate("document.documentElement.scrollWidth") <= 400


@pytest.mark.slow
def test_an_old_browser_gets_a_sentence_and_the_tables(browser, folder):
    program = "delete window.DecompressionStream"
    found = browser.ask("Page.addScriptToEvaluateOnNewDocument", source=program)
    try:
        browser.complaints.clear()
        browser.open("about:blank")
        browser.open((folder / "report.html").as_uri())
        told = browser.evaluate("document.getElementById('notes').textContent")
        assert "need JavaScript and a browser of 2023 or newer" in told
        assert browser.evaluate("document.querySelectorAll('table').length") >= 3
        assert browser.complaints == []
    finally:
        browser.ask("Page.removeScriptToEvaluateOnNewDocument", **found)
