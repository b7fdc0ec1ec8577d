"""A replay's reports as the parts of its page."""

from __future__ import annotations

from collections.abc import Callable

from advisor.replay_report import Drawn, FileReport
from advisor.replay_tiers import TierResult
from advisor.trace_pictures import Course
from advisor.web import formats
from advisor.web.replay_page import Chart, FilePage, Line, Rows

BOUNDS = ("belady-leaf", "min")


def page_of(report: FileReport) -> FilePage:
    page = FilePage(report.path.rpartition("/")[2], _figures(report))
    if report.results:
        page.charts.append(_by_capacity(report))
        page.rows = _one_tier_rows(report)
    if report.tiers:
        page.charts += _of_tiers(report)
        if len({tier.fast_blocks for tier in report.tiers}) > 1:
            page.charts.append(_by_fast_blocks(report))
        page.rows = _two_tier_rows(report)
    if report.drawn is not None:
        page.pictures = report.drawn.pictures
        page.charts += _over_time(report.drawn, report)
    return page


def _figures(report: FileReport) -> list[tuple[str, str, str]]:
    found = [
        ("Requests", formats.count(report.requests), f"in {formats.seconds(report.span_s)}"),
        ("Block accesses", formats.count(report.events), f"of {formats.count(report.blocks)} different"),
        ("Prompt tokens", formats.count(report.input_tokens), "counted"),
    ]
    if report.drawn is not None:
        course = report.drawn.pictures.course
        seen, new = sum(course.seen_tokens_per_s), sum(course.new_tokens_per_s)
        found.append(("Seen before", formats.percent(seen / (seen + new) if seen + new else None), "of the tokens"))
    if ran := [result for result in report.results if result.policy not in BOUNDS]:
        best = max(ran, key=lambda result: result.run_tokens)
        ratio = report.token_hit_ratio(best.run_tokens)
        found.append(("Best", formats.percent(ratio), f"{best.policy}, {formats.count(best.capacity_blocks)} blocks"))
    if report.tiers:
        top = max(report.tiers, key=lambda tier: tier.fhit)
        found.append(("Best", formats.percent(top.fhit), f"{top.admission}, {top.moves_per_block:.2f} moves a block"))
        found.append(("Belady", formats.percent(max(t.belady_fhit for t in report.tiers)), "knows the future"))
    return found


def _by_capacity(report: FileReport) -> Chart:
    lines = []
    for policy in dict.fromkeys(result.policy for result in report.results):
        points = sorted((r.capacity_blocks, r.run_tokens) for r in report.results if r.policy == policy)
        ratios: list[float | None] = [report.token_hit_ratio(tokens) for _, tokens in points]
        lines.append(Line(policy, [float(blocks) for blocks, _ in points], ratios, policy in BOUNDS))
    if report.drawn is not None and report.drawn.bounds:
        bounds = report.drawn.bounds
        lines.append(Line("belady-leaf", [float(blocks) for blocks, _ in bounds], [each for _, each in bounds], True))
    return Chart(
        "capacity",
        "Hit ratio against capacity",
        "Prompt tokens whose blocks were all present from the beginning on, over all prompt tokens. Dotted: a policy"
        " that knows the future.",
        "capacity, blocks",
        "count",
        "share",
        lines,
        logarithmic=True,
    )


def _of_tiers(report: FileReport) -> list[Chart]:
    sizes = list(dict.fromkeys(tier.fast_blocks for tier in report.tiers))
    moved = [float(tier.bytes_moved) for tier in report.tiers]
    lines = []
    for size in sizes:
        of_size = [tier for tier in report.tiers if tier.fast_blocks == size]
        told = f", {size:,} blocks" if len(sizes) > 1 else ""
        for admission, eviction in dict.fromkeys((tier.admission, tier.eviction) for tier in of_size):
            points = sorted(
                (float(t.bytes_moved), t.fhit) for t in of_size if (t.admission, t.eviction) == (admission, eviction)
            )
            lines.append(Line(f"{admission}, {eviction}{told}", [x for x, _ in points], [y for _, y in points]))
        bound = max(tier.belady_fhit for tier in of_size)
        lines.append(Line(f"belady{told}", [min(moved), max(moved)], [bound, bound], True))
    return [
        Chart(
            "moves",
            "Hits against bytes moved",
            "Prompt tokens found in the fast tier over all prompt tokens, by what was copied into it: up and to the"
            " left is better. Dotted: a policy that knows the future.",
            "bytes moved",
            "bytes",
            "share",
            lines,
            logarithmic=min(moved) > 0,
            points=True,
        )
    ]


def _by_fast_blocks(report: FileReport) -> Chart:
    lines = []
    budgets = list(dict.fromkeys(tier.budget for tier in report.tiers))
    for key in dict.fromkeys((t.admission, t.eviction, t.budget) for t in report.tiers):
        points = sorted(
            (float(t.fast_blocks), t.fhit) for t in report.tiers if (t.admission, t.eviction, t.budget) == key
        )
        told = f", {_budget_text(key[2])}" if len(budgets) > 1 else ""
        lines.append(Line(f"{key[0]}, {key[1]}{told}", [x for x, _ in points], [y for _, y in points]))
    bounds = sorted({(float(tier.fast_blocks), tier.belady_fhit) for tier in report.tiers})
    lines.append(Line("belady", [x for x, _ in bounds], [y for _, y in bounds], True))
    return Chart(
        "capacity",
        "Hit ratio against the fast tier's size",
        "Prompt tokens found in the fast tier over all prompt tokens. Dotted: a policy that knows the future.",
        "fast tier, blocks",
        "count",
        "share",
        lines,
        logarithmic=True,
    )


def _budget_text(budget: float | None) -> str:
    return "no budget" if budget is None else f"budget {budget:g}"


def _over_time(drawn: Drawn, report: FileReport) -> list[Chart]:
    course = drawn.pictures.course
    charts = []
    if drawn.courses:
        told = f", {_budget_text(drawn.course_budget)}" if report.tiers else ""
        lines = [Line(policy, course.starts_s, values, policy in BOUNDS) for policy, values in drawn.courses.items()]
        charts.append(
            Chart(
                "course",
                "Hit ratio over time",
                f"At {drawn.course_blocks:,} blocks{told}. Dotted: a policy that knows the future.",
                "time",
                "seconds",
                "share",
                lines,
            )
        )
    return [*charts, _tokens(course), _requests(course)]


def _tokens(course: Course) -> Chart:
    lines = [
        Line("seen before", course.starts_s, list(course.seen_tokens_per_s)),
        Line("new", course.starts_s, list(course.new_tokens_per_s), quiet=True),
    ]
    says = "What an endless cache would find, and what nobody had asked before."
    return Chart("tokens", "Prompt tokens a second", says, "time", "seconds", "rate", lines, stacked=True)


def _requests(course: Course) -> Chart:
    lines = [Line("requests", course.starts_s, list(course.requests_per_s))]
    return Chart("requests", "Requests a second", "As they arrived.", "time", "seconds", "rate", lines)


def _one_tier_rows(report: FileReport) -> Rows:
    heads = ["policy", "capacity, blocks", "token hit ratio", "block hit ratio", "run tokens", "block hits"]
    cells = [
        [
            r.policy,
            f"{r.capacity_blocks:,}",
            f"{report.token_hit_ratio(r.run_tokens):.4f}",
            f"{r.seq_block_hits / report.events:.4f}" if report.events else formats.NOTHING,
            f"{r.run_tokens:,}",
            f"{r.seq_block_hits:,}",
        ]
        for r in report.results
    ]
    return Rows(heads, cells)


_TWO_TIERS: list[tuple[str, Callable[[TierResult], str]]] = [
    ("admission", lambda t: t.admission),
    ("eviction", lambda t: t.eviction),
    ("fast, blocks", lambda t: f"{t.fast_blocks:,}"),
    ("budget", lambda t: formats.NOTHING if t.budget is None else f"{t.budget:g}"),
    ("hit ratio", lambda t: f"{t.fhit:.4f}"),
    ("belady", lambda t: f"{t.belady_fhit:.4f}"),
    ("moves a block", lambda t: f"{t.moves_per_block:.3f}"),
    ("moved", lambda t: formats.size(t.bytes_moved)),
    ("precision", lambda t: f"{t.precision:.3f}"),
    ("write amplification", lambda t: f"{t.write_amplification:.2f}"),
    ("ping-pong", lambda t: f"{t.ping_pong:.3f}"),
    ("full", lambda t: f"{t.full:.3f}"),
    ("scan survival", lambda t: f"{t.scan_survival:.2f}"),
    ("first token, s", lambda t: f"{t.first_token_s.mean:.3f}"),
    ("p99", lambda t: f"{t.first_token_s.p99:.3f}"),
    ("always loading", lambda t: f"{t.first_token_s_always_load.mean:.3f}"),
    ("dollars", lambda t: formats.NOTHING if t.cost_dollars is None else f"{t.cost_dollars:,.2f}"),
]


def _two_tier_rows(report: FileReport) -> Rows:
    cells = [[written(tier) for _, written in _TWO_TIERS] for tier in report.tiers]
    return Rows([head for head, _ in _TWO_TIERS], cells)
