"""The page in Chromium, from a file and without a network: what a reader does with it works, and
nothing is fetched or complained of.
"""

import shutil

import by_hand_page as by_hand
import msgspec
import pytest
from by_hand_page import page

from whence.report.html import page_html
from whence.results import PromptMatch, TokenMatch
from whence.results.page import PagePlace

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip(
    "playwright.sync_api", reason="drives the page: pip install playwright"
)
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
if CHROMIUM is None:
    pytest.skip("no chromium on this machine: apt-get install chromium", allow_module_level=True)

EVIL = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a page and gives its tab; at the end nothing but the file was asked for and nothing was
    complained of.
    """
    said, tabs = [], []

    def look(made, fragment="", **given):
        file = tmp_path / "report.html"
        file.write_text(page_html(made), encoding="utf-8")
        context = browser.new_context(
            **(
                {
                    "viewport": {"width": 1280, "height": 900},
                    "color_scheme": "light",
                    "offline": True,
                }
                | given
            )
        )
        tab = context.new_page()
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on(
            "request",
            lambda request: (
                said.append(request.url) if not request.url.startswith(file.as_uri()) else None
            ),
        )
        tab.goto(file.as_uri() + fragment)
        tab.wait_for_selector("html[data-ready]", state="attached")
        # Chromium drops a click that comes before the first frame; a busy machine draws it late.
        tab.evaluate(
            "new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))"
        )
        tabs.append(context)
        return tab

    yield look
    for context in tabs:
        context.close()
    assert said == []


def grid_names(tab):
    return tab.locator("#all .body [role=row]").locator("code").all_inner_texts()


def test_answers_stand_in_their_order_and_the_first_is_in_the_first_screen(opened):
    tab = opened(page())
    assert tab.inner_text("h1") == "The error starts in layers.2.q_proj (Linear)."
    assert tab.locator("main > section").evaluate_all("all => all.map(s => s.id)") == [
        "answer",
        "start",
        "why",
        "matters",
        "tokens",
        "maps",
        "graph",
        "modules",
        "all",
        "sides",
    ]
    assert tab.locator("#run-chart").bounding_box()["y"] < 700
    tiles = tab.locator(".tiles div").all_inner_texts()
    assert [t.split()[-1] for t in tiles] == [
        "captured",
        "paired",
        "measured",
        "replayed",
        "unmatched",
        "incomparable",
    ]
    assert "explained up to" in tab.inner_text("#why")


def test_pointing_shows_the_call_and_a_click_opens_it(opened):
    made = page()
    tab = opened(made)
    box = tab.locator("#run-chart").bounding_box()
    hit = made.comparison.findings[0].pair
    shown = [i for i, c in enumerate(made.calls) if c.leaf]
    low, high = shown[0], shown[-1]
    frame = box["x"] + 60 + 8, box["x"] + box["width"] - 12 - 8
    x = frame[0] + (hit - low) / (high - low) * (frame[1] - frame[0])
    for y in range(int(box["y"]) + 24, int(box["y"] + box["height"]), 8):
        tab.mouse.move(x, y)
        if "introduced" in tab.locator(".tip").inner_text() and tab.locator(".tip").is_visible():
            break
    assert "layers.2.q_proj" in tab.inner_text(".tip")
    assert "error 0.02" in tab.inner_text(".tip")
    tab.mouse.click(x, y)
    assert tab.locator(".drawer").is_visible()
    assert tab.inner_text(".drawer h2") == "layers.2.q_proj Linear"
    assert tab.evaluate("location.hash") == f"#call={hit}"
    assert tab.locator(".drawer canvas").count() == 4
    assert "[1, 6, 63]" in tab.inner_text(".drawer")
    assert "0.1234568" in tab.inner_text(".drawer")


def test_search_filter_and_order_of_the_table_are_in_the_link(opened):
    made = page()
    tab = opened(made)
    tab.fill("#find", "O_PROJ")
    assert set(grid_names(tab)) == {"layers.2.o_proj", "layers.3.o_proj"}  # what differs
    tab.select_option("select[aria-label=verdict]", "any")
    assert set(grid_names(tab)) == {f"layers.{k}.o_proj" for k in range(4)}
    tab.select_option("select[aria-label=verdict]", "inherited")
    assert set(grid_names(tab)) == {"layers.2.o_proj", "layers.3.o_proj"}
    tab.click("#all [role=columnheader][data-key=error] button")
    errors = [c.error for c in made.calls if c.name.endswith("o_proj") and c.verdict == "inherited"]
    assert [
        float(t)
        for t in tab.locator("#all .body [role=row] [role=gridcell]:nth-child(8)").all_inner_texts()
    ] == pytest.approx(sorted(errors, reverse=True), rel=5e-3)
    assert tab.locator("#all [data-key=error]").get_attribute("aria-sort") == "descending"
    link = tab.evaluate("location.hash")
    again = opened(made, link)
    assert grid_names(again) == grid_names(tab)
    assert again.input_value("#find") == "O_PROJ"


def test_a_link_opens_its_call(opened):
    made = page()
    tab = opened(made, "#call=3&table=tensors")
    assert tab.inner_text(".drawer h2") == f"{made.calls[3].name} {made.calls[3].op_type}"
    assert (
        "a scale error above 0.02 %; one channel shifted by 1 % of the root mean square"
        in tab.inner_text(".drawer")
    )
    assert tab.locator("#all [role=tab][aria-selected=true]").inner_text().endswith("tensors")
    tab.keyboard.press("Escape")
    assert tab.locator(".drawer").is_hidden()
    assert tab.evaluate("location.hash") == "#table=tensors"


def test_what_the_chart_shows_is_in_the_link(opened):
    made = page()
    tab = opened(made)
    tab.click("#start >> text=by layer")
    tab.select_option("#start select", "1")
    tab.click("#start button[data-verdict=identical]")
    link = tab.evaluate("location.hash")
    again = opened(made, link)
    assert again.locator("#start button[aria-pressed=true]").all_inner_texts()[0] == "by layer"
    assert again.input_value("#start select") == "1"
    assert (
        again.locator("#start button[data-verdict=identical]").get_attribute("aria-pressed")
        == "false"
    )
    again.mouse.move(
        *[v + 5 for v in list(again.locator("#run-chart").bounding_box().values())[:2]]
    )
    assert (
        opened(made, "#by=nothing&at=99&hide=nothing")
        .locator("#start button[aria-pressed=true]")
        .first.inner_text()
        == "by order"
    )


def test_the_header_says_what_ran_and_marks_what_differs(opened):
    tab = opened(page())
    assert tab.locator(".ran dd").all_inner_texts() == [
        "runs/ref \u00b7 torch 2.13 \u00b7 python infer.py",
        "runs/tgt \u00b7 torch 2.13 \u00b7 python infer.py --bf16",
    ]
    assert tab.locator(".ran .differs").all_inner_texts() == [
        "python infer.py",
        "python infer.py --bf16",
    ]


@pytest.mark.parametrize(
    "link", ["#call=999999", "#call=-1", "#call=x", "#sort=nothing", "#verdict=nothing"]
)
def test_a_link_to_nothing_is_no_error(opened, link):
    assert opened(page(), link).locator(".drawer").is_hidden()


def test_a_name_with_a_script_is_text(opened):
    tab = opened(page(guilty=EVIL, sentence=EVIL))
    assert tab.evaluate("window.hacked") is None
    assert EVIL in tab.inner_text("h1")
    assert EVIL in tab.inner_text("#why")
    assert tab.locator("img").count() == 0
    tab.keyboard.press("f")
    assert EVIL in tab.inner_text(".drawer h2")


def test_keys(opened):
    made = page()
    tab = opened(made)
    faults = [call.name for call in made.calls if call.verdict == "introduced"]
    tab.keyboard.press("j")
    assert tab.inner_text(".drawer h2").startswith(faults[0])
    for _ in faults:
        tab.keyboard.press("j")
    assert tab.inner_text(".drawer h2").startswith(made.calls[0].name)  # behind the worst: in order
    tab.keyboard.press("k")
    assert tab.inner_text(".drawer h2").startswith(faults[-1])
    tab.keyboard.press("Escape")
    tab.keyboard.press("/")
    assert tab.evaluate("document.activeElement.id") == "find"
    tab.keyboard.type("j?")
    assert tab.input_value("#find") == "j?"
    tab.keyboard.press("Escape")
    tab.keyboard.press("?")
    assert tab.locator("dialog").is_visible()
    tab.keyboard.press("Escape")
    assert tab.locator("dialog").is_hidden()


def test_the_theme_is_the_systems_until_it_is_switched(opened):
    dark = opened(page(), color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    assert dark.evaluate("document.documentElement.dataset.theme") == "dark"
    before = dark.evaluate(ground)
    dark.keyboard.press("t")
    assert dark.evaluate("document.documentElement.dataset.theme") == "light"
    assert dark.evaluate(ground) != before
    assert opened(page()).evaluate(ground) == dark.evaluate(ground)


def test_it_prints_light_with_its_charts_and_without_controls(opened, tmp_path):
    tab = opened(page(layers=30), color_scheme="dark")
    tab.pdf(path=tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes()[:5] == b"%PDF-"
    tab.emulate_media(media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.evaluate("document.documentElement.dataset.theme") == "light"
    assert tab.locator("header.bar").is_hidden()
    assert tab.locator("#run-chart").is_visible()
    assert len(grid_names(tab)) == 50
    assert tab.locator("#all .body [role=row]").first.inner_text().split()[1] == "introduced"
    end = tab.locator("#all .grid").bounding_box()
    assert end["y"] + end["height"] <= tab.locator("#sides").bounding_box()["y"]
    tab.emulate_media(media="screen")
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    assert grid_names(tab)[0] == "layers.2.q_proj"


def test_the_tree_unfolds_to_the_fault_and_follows_the_error(opened):
    made = page(steps=1)
    tab = opened(made)
    hit = made.comparison.findings[0].pair
    assert tab.locator(f"#modules [data-call='{hit}'] > .row.on").is_visible()
    tab.click("#modules button[data-kind=down]")
    behind = len(made.calls) - hit - 1
    controls = tab.locator("#modules .controls")
    controls.filter(has_text=f"{behind} calls after layers.2.q_proj").wait_for()
    tab.click("#modules button[data-kind=up]")
    controls.filter(has_text=f"{hit - 1} calls before").wait_for()
    tab.focus(f"#modules [data-call='{hit}']")
    tab.keyboard.press("Enter")
    assert tab.inner_text(".drawer h2").startswith("layers.2.q_proj")


def test_a_hundred_thousand_rows_are_a_few_elements(opened):
    tab = opened(page(layers=130, steps=26, generation=False), "#table=tensors")
    tab.select_option("select[aria-label=verdict]", "any")
    assert tab.locator("#all [role=grid]").get_attribute("aria-rowcount") == str(3 * 26 * 1301 + 1)
    assert tab.locator("#all .body [role=row]").count() < 60
    tab.locator("#all [role=grid]").evaluate("box => { box.scrollTop = box.scrollHeight }")
    tab.wait_for_selector(f"#all [aria-rowindex='{3 * 26 * 1301 + 1}']")
    assert tab.locator("#all .body [role=row]").count() < 60


def test_ten_thousand_pairs_take_work_in_proportion(opened):
    """Opened, drawn, and a key answered: the blocks of code that run grow as the pairs do, the
    elements of the page hardly.
    """

    def work(made):
        tab = opened(made)
        session = tab.context.new_cdp_session(tab)
        session.send("Profiler.enable")
        session.send("Profiler.startPreciseCoverage", {"callCount": True, "detailed": True})
        tab.reload()
        tab.wait_for_selector("html[data-ready]", state="attached")
        tab.keyboard.press("j")
        tab.wait_for_selector(".drawer h2")
        scripts = session.send("Profiler.takePreciseCoverage")["result"]
        ran = sum(
            block["count"]
            for script in scripts
            for function in script["functions"]
            for block in function["ranges"]
        )
        return ran, tab.evaluate("document.getElementsByTagName('*').length")

    large, small = (
        page(layers=100, steps=10, generation=False),
        page(layers=10, steps=10, generation=False),
    )
    assert len(large.calls) > 10_000
    ratio = len(large.calls) / len(small.calls)
    (many, nodes), (few, fewer) = work(large), work(small)
    assert many < 1.5 * ratio * few
    assert nodes < 2 * fewer


def test_csv_is_what_is_shown_and_no_formula(opened):
    tab = opened(page(guilty='=1+1,"x"'))
    tab.evaluate(
        "window.copied = ''; navigator.clipboard.writeText = async text => { window.copied = text }"
    )
    tab.select_option("select[aria-label=verdict]", "introduced")
    tab.click("text=Copy as CSV")
    lines = tab.evaluate("window.copied").splitlines()
    assert lines[0].startswith("#,verdict,call,type,step")
    assert len(lines) == 3
    assert '"\'=1+1,""x"""' in lines[1]
    assert ",0.02," in lines[1]


def test_tokens_are_cells_and_the_first_that_parts_is_marked(opened):
    match = PromptMatch(
        number=1,
        prompt="Tell me",
        verdict="FAIL",
        common="the lamp is ",
        reference_at="lit",
        target_at="<b>out</b>",
        first_character=12,
    )
    texts = TokenMatch(
        reference="a",
        target="b",
        status="fail",
        count=1,
        full_match=0.0,
        half_match=0.0,
        full_count=0,
        half_count=0,
        full_interval=(0.0, 1.0),
        half_interval=(0.0, 1.0),
        full_threshold=0.75,
        half_threshold=0.4,
        thresholds_from="default",
        longer_reference=0,
        longer_target=0,
        not_compared=0,
        repeated=0,
        prompts=(match,),
    )
    tab = opened(msgspec.structs.replace(page(), texts=texts))
    cells = tab.locator("#tokens .prompts .cells button")
    assert cells.all_inner_texts() == ["11", "12", "13", "14\n15", "15", "16"]
    assert tab.locator("#tokens .first").inner_text() == "14\n15"
    assert "rounding does not explain" in tab.locator("#tokens .first").get_attribute("aria-label")
    assert tab.inner_text("#tokens .diff").replace("\n", "") == "the lamp is lit | <b>out</b>"


def test_ranks_and_steps_have_maps(opened):
    made = page(ranks=2, steps=3)
    # A call that holds others is shown only where it is at fault; its column stands where it
    # begins.
    late = msgspec.structs.replace(made.calls[-41], verdict="introduced", error=0.5)
    tab = opened(msgspec.structs.replace(made, calls=(*made.calls[:-41], late, *made.calls[-40:])))
    tab.locator("#maps canvas").first.hover(position={"x": 60, "y": 60})
    assert "TinyLM rank 1" in tab.inner_text(".tip")
    assert tab.locator("#maps figure .name").all_inner_texts() == ["rank by layer", "step by layer"]
    tab.locator("#maps canvas").first.hover(position={"x": 400, "y": 20})
    assert "rank 0" in tab.inner_text(".tip")


def test_a_narrow_screen_has_no_sideways_scroll(opened):
    tab = opened(page(), viewport={"width": 380, "height": 800})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 380
    tab.keyboard.press("f")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 380


def test_a_fault_far_down_a_flat_list_is_in_view(opened):
    """Dumps of other tools have thousands of operators and no tree."""
    made = page(layers=60, steps=1)
    flat = msgspec.structs.replace(
        made, calls=tuple(msgspec.structs.replace(c, parent=-1, leaf=True) for c in made.calls)
    )
    hit = made.comparison.findings[0].pair
    far = opened(flat, f"#call={hit + 400}")
    assert far.locator(f"#modules [data-call='{hit + 400}'] > .row.on").count() == 1
    assert "more before" in far.inner_text("#modules .tree")


def test_equal_runs_need_no_chart(opened):
    made = page()
    equal = tuple(
        msgspec.structs.replace(c, verdict="identical", error=0.0, noise=None) for c in made.calls
    )
    same = msgspec.structs.replace(
        made.comparison, status="same", findings=(), counts={"identical": len(equal)}
    )
    tab = opened(msgspec.structs.replace(made, calls=equal, comparison=same, details=()))
    assert tab.inner_text("h1") == "Bitwise identical."
    assert tab.locator("#run-chart").count() == 0
    assert "bit for bit" in tab.inner_text("#start")


def test_the_first_screen_answers_on_a_screen_and_on_a_phone(opened):
    made = by_hand.with_places(
        page(
            sentence="introduced here: 900 times this; mul.Tensor: other is 1.0 in the reference, 1.5 in the target"
        )
    )
    for size in ((1280, 800), (390, 844)):
        tab = opened(made, viewport={"width": size[0], "height": size[1]})
        assert tab.locator(".six dt").all_inner_texts() == [
            "Where",
            "Why",
            "How sure",
            "Effect",
            "Next",
        ]
        end = tab.locator(".six").bounding_box()
        assert end["y"] + end["height"] < size[1]
        where, why, sure, effect, ahead = tab.locator(".six dd").all_inner_texts()
        assert where.startswith("layers.2.q_proj \u00b7 Linear")
        assert why.startswith("mul.Tensor: other is 1.0 in the reference, 1.5 in the target.")
        assert sure == "Certain; all 82 calls replayed and measured"
        assert effect == "TinyLM output.0: rel_l2 0.03; argmax changed in 1 of 4 rows."
        commands = tab.locator(".six .command code").all_inner_texts()
        assert commands == ["whence repro runs/cmp -o repro", "whence run --level op -- COMMAND"]
        assert "Which operator. Words in capitals are yours to fill in." in ahead


def test_code_and_operators_stand_in_place_with_the_difference_marked(opened):
    tab = opened(by_hand.with_places(page()))
    code = tab.locator("#answer .code")
    assert code.locator("figcaption code").all_inner_texts() == ["model.py:12", "old/model.py:11"]
    assert "newer than the run" in code.nth(1).inner_text()
    assert code.first.locator(".hit").inner_text().split("\n")[0].startswith("12")
    assert "return self.q_proj(h)" in code.first.locator(".hit").inner_text()
    odd = tab.locator("#answer .pairs .odd")
    assert odd.first.locator("del").inner_text() == "1.0"
    assert odd.first.locator("ins").inner_text() == "1.5"
    assert odd.nth(1).locator("[role=cell]").all_inner_texts() == ["(none)", "%5 = relu(%4)"]
    assert "3 equal operators not shown" in tab.inner_text("#answer .pairs .gap")


def test_code_is_text(opened):
    made = by_hand.with_places(page())
    places = msgspec.to_builtins(made.places)
    places[0]["excerpts"][0]["lines"] = [EVIL] * 3
    places[0]["operators"][2]["target"] = EVIL
    places = msgspec.convert(places, tuple[PagePlace, ...])
    tab = opened(msgspec.structs.replace(made, places=places))
    assert EVIL in tab.inner_text("#answer .code")
    assert EVIL in tab.inner_text("#answer .pairs")
    assert tab.evaluate("window.hacked") is None


def test_legend_tally_and_table_count_the_same(opened):
    made = page()
    tab = opened(made)
    counts = {
        v: sum(c.verdict == v for c in made.calls) for v in ("identical", "inherited", "introduced")
    }
    spoken = {f"{v} {n}" for v, n in counts.items()}
    assert set(tab.locator("#start .legend button").all_inner_texts()) == spoken
    assert set(tab.locator("#matters .legend .chip").all_inner_texts()) == spoken
    options = tab.locator("select[aria-label=verdict] option").all_inner_texts()
    differing = counts["inherited"] + counts["introduced"]
    assert options[:2] == [f"differing ({differing})", f"all ({len(made.calls)})"]
    assert {f"{v} ({n})" for v, n in counts.items()} == set(options[2:])
    assert tab.locator("#all [role=grid]").get_attribute("aria-rowcount") == str(differing + 1)
    assert "2 calls that only hold others are not drawn" in tab.inner_text("#start .legend")


ALARM = """() => [...document.querySelectorAll("canvas")].reduce((red, c) => {
    const { data } = c.getContext("2d").getImageData(0, 0, c.width, c.height);
    for (let k = 0; k < data.length; k += 4)
        red += data[k + 3] > 200 && data[k] > 150 && data[k] - data[k + 1] > 90 && data[k] - data[k + 2] > 90;
    return red; }, 0)"""


def test_a_clean_pair_has_no_alarm_colours_and_a_fault_has(opened):
    steps = page(steps=3, generation=False)
    assert opened(by_hand.same(steps, "noise")).evaluate(ALARM) == 0
    assert opened(steps).evaluate(ALARM) > 100


def test_the_name_of_the_fault_stands_where_no_point_is(opened):
    """Between the title of the axis and the plot; the plot begins below it."""
    tab = opened(page(guilty="layers.0.input_norm"))
    inked = """() => { const c = document.getElementById("run-chart"), r = c.width / c.clientWidth;
        const strip = new OffscreenCanvas(c.width, 14 * r), g = strip.getContext("2d");
        g.drawImage(c, 0, -20 * r);
        const { data } = g.getImageData(0, 0, strip.width, strip.height);
        let n = 0; for (let k = 3; k < data.length; k += 4) n += data[k] > 128; return n; }"""
    assert tab.evaluate(inked) > 50
    for verdict in ("introduced", "inherited"):
        tab.click(f"#start button[data-verdict={verdict}]")
    assert tab.evaluate(inked) == 0


def test_the_graph_has_rows_of_what_does_not_depend_on_each_other(opened):
    made = page(steps=1)
    tab = opened(made)
    tab.locator("#graph").scroll_into_view_if_needed()
    tab.wait_for_selector("#graph .box.first")
    assert tab.locator("#graph .graph").count() == 1
    assert tab.locator("#graph .box.first .plain").inner_text() == "layers.2.q_proj"
    assert tab.locator("#graph .layer").count() == len(made.calls) - 1  # each reads the one before
    assert tab.locator("#graph .wires path").count() == len(made.calls) - 2
    tab.click("#graph .fold")
    assert tab.locator("#graph .box").count() == 1
    assert "introduced inside" in tab.inner_text("#graph .box")
    tab.focus("#graph .fold")
    tab.keyboard.press("Enter")
    assert tab.locator("#graph .box").count() == len(made.calls)
    tab.click("#graph .box.first .plain")
    assert tab.inner_text(".drawer h2").startswith("layers.2.q_proj")


def test_runs_of_other_structure_stand_side_by_side(opened):
    tab = opened(by_hand.with_unpaired(page(steps=1)))
    tab.locator("#graph").scroll_into_view_if_needed()
    tab.wait_for_selector("#graph .box.first")
    assert tab.locator("#graph h3").all_inner_texts() == ["reference", "target"]
    left, right = (tab.locator("#graph .graph").nth(k) for k in (0, 1))
    assert left.locator(".alone .line code").all_inner_texts() == ["layers.1.scale"]
    assert right.locator(".alone .line code").all_inner_texts() == [
        "layers.1.clip",
        "layers.1.clip.low",
    ]
    names = right.locator(".box > .line code").all_inner_texts()
    assert names.index("layers.1.clip") == names.index("layers.1.o_proj") + 1


def test_of_a_long_run_the_graph_draws_what_lies_around_the_fault(opened):
    tab = opened(page(layers=100, steps=10, generation=False))
    assert tab.locator("#graph .box").count() == 0  # nothing before it is looked at
    tab.locator("#graph").scroll_into_view_if_needed()
    tab.wait_for_selector("#graph .box.first")
    assert tab.locator("#graph .box").count() < 100
    shown = tab.locator("#graph .box").count()
    tab.locator("#graph .more").last.click()
    assert tab.locator("#graph .box").count() == shown + 40


def test_tokens_have_their_text_where_it_is_known(opened):
    tab = opened(
        msgspec.structs.replace(page(), vocabulary=((11, " the"), (14, "\n"), (15, "<b>")))
    )
    cells = tab.locator("#tokens .prompts .cells button")
    assert cells.all_inner_texts() == ["\u2423the", "12", "13", "\u21b5\n<b>", "<b>", "16"]
    assert '"\\n" (14) against "<b>" (15)' in tab.locator("#tokens .first").get_attribute(
        "aria-label"
    )


def test_a_phone_has_a_menu_of_sections(opened):
    tab = opened(page(), viewport={"width": 390, "height": 844})
    assert tab.locator("header.bar > nav").is_hidden()
    tab.focus(".menu summary")
    tab.keyboard.press("Enter")
    wide = tab.locator("header.bar > nav a").all_text_contents()
    assert tab.locator(".menu nav a").all_inner_texts() == wide
    tab.click(".menu nav a >> text=Table")
    assert tab.locator(".menu nav").is_hidden()
    assert tab.evaluate("document.activeElement.id") == "all-title"
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_introduced_and_accumulated_error_stand_side_by_side(opened):
    tab = opened(page())
    heads = tab.locator("#all [role=columnheader]").all_inner_texts()
    assert heads[5:7] == ["introduced", "accumulated"]
    row = tab.locator("#all .body [role=row]").first.locator("[role=gridcell]").all_inner_texts()
    assert row[5:7] == ["0.02", "0.02"]
    inherited = (
        tab.locator("#all .body [role=row]").nth(3).locator("[role=gridcell]").all_inner_texts()
    )
    assert inherited[5] == "1.00e-7"
    assert float(inherited[6]) > 0.02


def test_by_keyboard_alone_a_row_of_the_table_is_opened(opened):
    made = page()
    tab = opened(made)
    tab.focus("#all [role=grid]")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown"):
        tab.keyboard.press(key)
    marked = tab.locator("#all .body .active")
    assert marked.locator("code").inner_text() == grid_names(tab)[2]
    assert tab.locator("#all [role=grid]").get_attribute(
        "aria-activedescendant"
    ) == marked.get_attribute("id")
    tab.keyboard.press("Enter")
    assert tab.inner_text(".drawer h2").startswith(made.calls[0].name)
    tab.keyboard.press("Escape")
    tab.focus("#all [role=grid]")
    tab.keyboard.press("End")
    assert tab.locator("#all .body .active").get_attribute("aria-rowindex") == tab.locator(
        "#all [role=grid]"
    ).get_attribute("aria-rowcount")


def test_the_call_that_only_stands_for_a_dump_is_not_counted(opened):
    made = page(steps=1)
    calls = (msgspec.structs.replace(made.calls[0], whole=True), *made.calls[1:])
    tab = opened(msgspec.structs.replace(made, calls=calls))
    assert (
        tab.locator("select[aria-label=verdict] option").nth(1).inner_text()
        == f"all ({len(calls) - 1})"
    )
    inherited = sum(call.verdict == "inherited" for call in calls[1:])
    assert f"inherited {inherited}" in tab.locator("#start .legend button").all_inner_texts()
    tab.select_option("select[aria-label=verdict]", "any")
    assert "TinyLM" not in grid_names(tab)
    assert "that only holds others" not in tab.inner_text("#start .legend")
