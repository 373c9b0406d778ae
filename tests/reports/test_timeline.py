"""Pictures of schedules: what they show, and that they stay well-formed."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from hetflow.formats.reports.grid import fitted_to
from hetflow.formats.reports.timeline import (
    html_timeline,
    svg_timeline,
    terminal_timeline,
    trace_json,
)
from hetflow.planning.schedules.registry import generate
from hetflow.planning.schedules.timing import StageTimes, Timing, time_schedule
from hetflow.schema.schedule import PASSES, SCHEDULES, SENDS

HOSTILE = '</svg><script>alert("1")</script>&amp; \'"<b>'
SVG = "{http://www.w3.org/2000/svg}"


def timed(name: str = "1f1b", transfer: float = 0, m: int = 8) -> Timing:
    schedule = generate(name, pipeline_parallel_size=4, num_microbatches=m)
    times = StageTimes.uniform(schedule.num_stages, 1, 2, transfer_seconds=transfer)
    return time_schedule(schedule, times)


def hostile(timing: Timing) -> Timing:
    return replace(timing, schedule=replace(timing.schedule, name=HOSTILE))


def test_the_terminal_draws_figure_4_4() -> None:
    lines = terminal_timeline(timed()).splitlines()
    assert lines[:4] == [
        "rank 0 |0-1-2-3-............0===4-1===5-2===6-3===7-4===..5===..6===..7===|  73%",
        "rank 1 |..0-1-2-........0===3-1===4-2===5-3===6-4===7-5===..6===..7===....|  73%",
        "rank 2 |....0-1-....0===2-1===3-2===4-3===5-4===6-5===7-6===..7===........|  73%",
        "rank 3 |......0-0===1-1===2-2===3-3===4-4===5-5===6-6===7-7===............|  73%",
    ]
    assert "bubble 37.5% of ideal time" in lines[-1]


@pytest.mark.parametrize("name", SCHEDULES.names())
@pytest.mark.parametrize("width", [20, 120, 400])
def test_rows_are_equally_long_and_within_the_width(name: str, width: int) -> None:
    lines = terminal_timeline(timed(name), width=width).splitlines()[:4]
    rows = [line.split("|")[1] for line in lines]
    assert len({len(row) for row in rows}) == 1
    assert len(rows[0]) <= width
    assert all(line.isascii() for line in lines)


@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_lines_fit_the_terminal_and_the_page_however_many_ranks(ranks: int) -> None:
    schedule = generate("1f1b", pipeline_parallel_size=ranks, num_microbatches=2 * ranks)
    times = StageTimes.uniform(ranks, 1, 2)
    timing = time_schedule(schedule, replace(times, update_seconds=(0.5,) * ranks))
    with fitted_to(80):
        lines = terminal_timeline(timing).splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert len(lines[-1]) < 160
    assert all(fraction >= 0 for fraction in timing.span_bubble_fractions)
    assert timing.span_bubble_fractions[-1] == 0


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_svg_has_one_bar_for_each_pass(name: str) -> None:
    timing = timed(name)
    root = ElementTree.fromstring(svg_timeline(timing))
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    passes = sum(op.kind in PASSES for operations in timing.schedule.ranks for op in operations)
    assert len(titles) == passes
    width = float(root.attrib["width"])
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("x", 0)) + float(rect.get("width", 0)) <= width


def test_hostile_names_are_escaped() -> None:
    timing = hostile(timed())
    root = ElementTree.fromstring(svg_timeline(timing))
    assert not list(root.iter(f"{SVG}script"))
    assert any(HOSTILE in (text.text or "") for text in root.iter(f"{SVG}text"))
    for page in (html_timeline(timing), html_timeline(timed(), title=HOSTILE)):
        assert "<script" not in page
        assert "&lt;script&gt;" in page
    assert json.loads(trace_json(timing))["traceEvents"][0]["args"]["name"] == HOSTILE


def test_html_is_one_file_with_a_row_for_each_rank() -> None:
    page = html_timeline(timed())
    assert page.startswith("<!DOCTYPE html>")
    assert page.count("<tr><td>") == 4
    assert "src=" not in page
    assert "href=" not in page


def test_trace_holds_every_pass_at_its_time() -> None:
    timing = timed(transfer=0.25)
    trace = json.loads(trace_json(timing))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for rank, operations in enumerate(timing.schedule.ranks):
        drawn = [
            (event["ts"], event["dur"], event["args"]["microbatch"])
            for event in slices
            if event["tid"] == 2 * rank
        ]
        expected = [
            (start * 1e6, (end - start) * 1e6, op.microbatch)
            for op, (start, end) in zip(operations, timing.spans[rank], strict=True)
            if op.kind in PASSES
        ]
        assert drawn == expected
    sends = [event for event in slices if event["cat"].startswith("send_")]
    assert len(sends) == 2 * 3 * 8
    assert {event["dur"] for event in sends} == {0.25e6}


def test_trace_arrows_point_from_cause_to_effect() -> None:
    timing = timed("dualpipe", transfer=0.5)
    events = json.loads(trace_json(timing))["traceEvents"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    sent = sum(op.kind in SENDS for operations in timing.schedule.ranks for op in operations)
    assert len(starts) == len(ends) == sent
    for number, start in starts.items():
        assert start["tid"] != ends[number]["tid"]
        assert start["ts"] < ends[number]["ts"]


def test_an_empty_time_axis_is_drawn() -> None:
    schedule = generate("gpipe", pipeline_parallel_size=2, num_microbatches=1)
    timing = time_schedule(schedule, StageTimes.uniform(2, 0, 0))
    assert "rank 1 ||" in terminal_timeline(timing)
    ElementTree.fromstring(svg_timeline(timing))


def test_the_legend_names_each_colour_of_the_picture_and_ticks_are_round() -> None:
    for name in ("1f1b", "zb-h1"):
        picture = svg_timeline(timed(name))
        bars = set(re.findall(r'height="22" fill="(#[0-9a-f]{6})"', picture))
        assert len(bars) > 2
        assert set(re.findall(r'height="12" fill="(#[0-9a-f]{6})"', picture)) == bars
        assert re.findall(r">([\d.]+) s</text>", picture)[:3] == ["0", "5", "10"]
    assert "gradient of the weights" in picture
