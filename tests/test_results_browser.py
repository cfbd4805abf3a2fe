"""The report in a real browser with scripts on: it draws without a network, sorts, follows clicks, and takes
no name for markup. Skipped where no Chromium is installed."""

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from results_runs import write_run

from results.difference import Difference, Row
from results.load import Run
from results.report import write_difference, write_report

NAMES = ("chromium", "google-chrome", "google-chrome-stable", "chromium-browser", "chrome", "headless_shell")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
DRIVER = shutil.which("chromedriver")
HOSTILE = "<img src=x onerror=document.title='owned'>&amp;</script>$$x$$"
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER),
    reason="needs a Chromium and its chromedriver (Debian: chromium, chromium-driver)",
)


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1300,3200",
                 "--host-resolver-rules=MAP * ~NOTFOUND", "--disable-gpu"):  # fmt: skip
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield found
    found.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Run]]:
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        write_run(folder / f"{policy}-{chunk}", policy, chunk, workload=HOSTILE, trace=False, notes=[HOSTILE])
        for policy, chunk in (("atomic", 4), ("wcpb", 8), ("wcpb", 16))
    ]
    write_report(runs, folder / "page.html")
    return folder / "page.html", runs


def eventually(driver: Any, script: str) -> Any:
    """What `script` returns once that is something, within 30 s."""
    for _ in range(300):
        if found := driver.execute_script(script):
            return found
        time.sleep(0.1)
    raise AssertionError(f"nothing came of {script}")


SHADOW = """
const all = selector => {
  const found = [];
  const walk = root => {
    found.push(...root.querySelectorAll(selector));
    for (const item of root.querySelectorAll('*')) if (item.shadowRoot) walk(item.shadowRoot);
  };
  walk(document);
  return found;
};
"""
SORT = "all('.slick-header-column').find(x => x.textContent.trim() === 'chunk').click()"
TOP_ROW = """
const top = row => parseFloat(row.style.top);
const rows = all('.slick-pane-left .slick-row').sort((a, b) => top(a) - top(b));
return rows.length ? rows[0].textContent : null
"""
CHOSEN = """
const source = by('table').source, at = source.selected.indices;
return at.length ? source.data.run[at[0]] : null
"""
MODELS = "const doc = Bokeh.documents[0]; const by = name => doc.get_model_by_name(name);"


def test_the_page_works_in_a_browser_without_a_network(driver: Any, page: tuple[Path, list[Run]]) -> None:
    path, _ = page
    assert path.stat().st_size < 3_000_000
    text = path.read_text()
    assert not re.search(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", text.split("<script>", 1)[0])
    driver.get(path.as_uri())
    rows = eventually(
        driver,
        SHADOW
        + "const r = all('.slick-pane-left .slick-row'); return r.length ? r.map(x => x.textContent) : null",
    )
    assert len(rows) == 3 and all("<img src=x onerror" in row for row in rows)
    chunks = [chunk for row in rows for chunk in re.findall(r"(?:atomic|wcpb)(\d+)", row)]
    assert chunks == ["4", "8", "16"]

    # A click on a head sorts, twice the other way.
    for _ in range(2):
        driver.execute_script(SHADOW + SORT)
    first = eventually(driver, SHADOW + TOP_ROW)
    assert "wcpb16" in first

    # A click on a row chooses its run everywhere: distributions and the wavefront.
    driver.execute_script(
        SHADOW + "all('.slick-row .slick-cell').find(x => x.textContent === 'wcpb').click()"
    )
    chosen = eventually(driver, MODELS + CHOSEN)
    assert "wcpb" in chosen
    assert eventually(driver, MODELS + "return by('choice').value") == chosen

    # Nothing was taken for markup, nothing failed, nothing was asked of the network.
    assert (
        driver.title == "Runs"
        and driver.execute_script("return document.querySelectorAll('img').length") == 0
    )
    assert (
        driver.execute_script(
            "return performance.getEntriesByType('resource').filter(x => x.name.startsWith('http')).length"
        )
        == 0
    )
    faults = [item["message"] for item in driver.get_log("browser") if item["level"] == "SEVERE"]
    assert faults == []
    assert HOSTILE in driver.execute_script("return document.body.textContent")


def test_differences_sort_by_what_they_are_and_not_by_how_they_are_written(
    driver: Any, page: tuple[Path, list[Run]]
) -> None:
    path, runs = page
    changes = (0.095, -0.12, 1.01)
    rows = [
        Row(run, run, (Difference("requests/s", 1.0, 1.0 + change),), None)
        for run, change in zip(runs, changes, strict=True)
    ]
    write_difference(runs, runs, rows, [], path.with_name("difference.html"))
    driver.get(path.with_name("difference.html").as_uri())
    eventually(driver, SHADOW + "return all('.slick-row').length")
    click = SHADOW + "all('.slick-header-column').find(x => x.textContent.trim() === 'requests/s').click()"
    for expected in (["-12.0%", "+9.5%", "+101.0%"], ["+101.0%", "+9.5%", "-12.0%"]):
        driver.execute_script(click)
        shown = (
            SHADOW
            + """
        const top = row => parseFloat(row.style.top);
        const rows = all('.slick-pane-right .slick-row').sort((a, b) => top(a) - top(b));
        const found = rows.map(x => x.textContent.trim());
        return JSON.stringify(found) === JSON.stringify(arguments_) ? found : null
        """.replace("arguments_", repr(expected))
        )
        assert eventually(driver, shown) == expected
    faults = [item["message"] for item in driver.get_log("browser") if item["level"] == "SEVERE"]
    assert faults == []
