"""The HTML page of a privacy report.

Its sections are in the order in which a reviewer asks: what is guaranteed, what ran, what was
charged, what was assumed and what is not covered. The last section is a published checklist
(Ponomareva et al. 2023) with links to the answers. Values come from the facts through `leaf` and
`escape` only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from lightning_dpsparse.report.plot import draw_epsilon_curve
from lightning_dpsparse.report.style import STYLE
from lightning_dpsparse.report.text import escape, leaf

Facts = Mapping[str, Any]

_LABELS = {
    "clip_norm": "Clip norm C",
    "noise_multiplier": "Noise multiplier σ",
    "noise_stddev": "Noise standard deviation",
    "dense_scale": "Noise on dense layers, over that on tables",
    "num_units": "Units in the training data",
    "sampling_rate": "Sampling rate q",
    "max_batch": "Largest batch allowed",
    "steps": "Steps taken",
    "ranks": "Ranks (processes)",
    "rounding_price": "Part of C kept back for rounding",
    "averaged": "Weights are averaged (post-processing) over",
    "calibrated_tasks": "Tasks that the calibration counts each example in",
}

# What to report (Ponomareva et al. 2023, section 5.3), and the sections that answer it.
_CHECKLIST = [
    ("Setting and threat model: who is trusted, and what an attacker sees", ["guarantee"]),
    (
        "Data accesses covered: this training run alone, or also hyper-parameter tuning, "
        "vocabularies and statistics",
        ["ledger", "history", "taints", "not-covered"],
    ),
    ("Final output: what may be released under the guarantee", ["guarantee", "not-covered"]),
    ("Unit of privacy", ["guarantee"]),
    ("Adjacency: which data sets count as neighbours", ["guarantee"]),
    ("Mechanism: clipping, noise, and where its randomness comes from", ["ran"]),
    ("Kind of accounting, and what was accounted for", ["ledger", "cross-check"]),
    (
        "Assumptions of the accounting, sampling above all, and whether they hold",
        ["ran", "assumed", "taints"],
    ),
    (
        "Formal statement: final epsilon and delta, and how they were computed",
        ["guarantee", "over-time", "other-deltas", "cross-check"],
    ),
    ("Transparency: what others need to verify it", ["ran", "audits", "versions"]),
]


def page(facts: Facts) -> str:
    """The whole page as text."""
    sections = [
        ("guarantee", "Guarantee", _guarantee(facts)),
        ("ran", "What ran", _ran(facts)),
        ("ledger", "Ledger", _ledger(facts)),
        ("over-time", "Epsilon over steps", _over_time(facts)),
        ("other-deltas", "Epsilon for other deltas", _other_deltas(facts)),
        ("cross-check", "Cross check", _cross_check(facts)),
        ("taints", "Taints", _list(facts, ["taints"], "None declared or found.")),
        ("assumed", "Assumed", _assumed(facts)),
        ("history", "History of the weights", _history(facts)),
        ("not-covered", "Not covered", _list(facts, ["not_covered"], "Nothing was listed.")),
        ("audits", "Audits", _audits(facts)),
        ("versions", "Versions", _versions(facts)),
    ]
    titles = {name: f"{i}. {title}" for i, (name, title, _) in enumerate(sections, start=1)}
    titles["checklist"] = f"{len(sections) + 1}. Checklist"
    sections.append(("checklist", "Checklist", _checklist(titles)))
    body = "\n".join(
        f'<section id="{name}" aria-labelledby="{name}-title">\n'
        f'<h2 id="{name}-title">{titles[name]}</h2>\n{content}\n</section>'
        for name, _, content in sections
    )
    # The policy makes a browser refuse scripts and loads, should escaping ever fail.
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Privacy report: {escape(_verdict(facts)[1])}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>Privacy report</h1>
<p class="dim">Run {leaf(facts, "run")}, created {leaf(facts, "created")},
format {leaf(facts, "format")}.</p>
</header>
<main>
{body}
</main>
<footer>
<div class="sign"><p>Reviewed by</p><p>Decision</p><p>Date</p></div>
<p class="dim">Fractions are rounded to six digits; privacy_report.json, beside this page, holds
them in full.</p>
</footer>
</body>
</html>
"""


def _is_private(facts: Facts) -> bool:
    """Whether the run is private: the facts say so, epsilon is bounded, and there is no fault."""
    found = facts["guarantee"]
    return bool(found["is_private"]) and found["epsilon"] is not None and not found["faults"]


def _verdict(facts: Facts) -> tuple[str, str]:
    """The CSS class of the box, and the verdict in words."""
    if not _is_private(facts):
        return "broken", "NOT PRIVATE"
    if _audit_failed(facts):
        return "tainted", "PRIVATE BY ACCOUNTING, BUT AN AUDIT FAILED"
    if facts["taints"]:
        return "tainted", "PRIVATE, BUT TAINTED"
    return "private", "PRIVATE"


def _audit_failed(facts: Facts) -> bool:
    return not all(audit["passed"] for audit in facts["audits"])


def _epsilon_head(facts: Facts) -> str:
    """Head of a column of epsilons. Those of a run that is not private are no guarantee."""
    return "ε (epsilon), " + ("at most" if _is_private(facts) else "computed but not guaranteed")


def _guarantee(facts: Facts) -> str:
    kind, verdict = _verdict(facts)
    head = _epsilon_head(facts) if facts["guarantee"]["epsilon"] is not None else "ε (epsilon)"
    box = [
        f'<p class="verdict">{verdict}</p>',
        f'<p class="sentence">{leaf(facts, "guarantee", "sentence")}</p>',
        '<dl class="big">',
        f"<div><dt>{head}</dt><dd>{leaf(facts, 'guarantee', 'epsilon')}</dd></div>",
        f"<div><dt>δ (delta)</dt><dd>{leaf(facts, 'guarantee', 'delta')}</dd></div>",
        "</dl>",
    ]
    if facts["guarantee"]["faults"]:
        box.append("<p>Faults:</p>" + _list(facts, ["guarantee", "faults"], ""))
    if kind == "tainted":
        names = ["taints"] * bool(facts["taints"]) + ["audits"] * _audit_failed(facts)
        links = " and ".join(f'<a href="#{name}">{name.capitalize()}</a>' for name in names)
        box.append(f"<p>Read {links} before relying on this guarantee.</p>")
    rows = [
        ("Private, as the run recorded", leaf(facts, "guarantee", "is_private")),
        ("Unit of privacy", leaf(facts, "guarantee", "unit")),
        ("Adjacency", leaf(facts, "guarantee", "adjacency")),
        ("Threat model", leaf(facts, "guarantee", "threat_model")),
        ("Target", _target(facts)),
    ]
    parts = [f'<div class="box {kind}">', *box, "</div>"]
    if _is_private(facts):
        parts.append(
            '<p class="dim">The data of one unit can change the odds of any outcome by a factor of '
            "at most e<sup>ε</sup>, up to a slack of δ. Smaller is stronger.</p>"
        )
    return "\n".join([*parts, _definitions(rows)])


def _target(facts: Facts) -> str:
    if facts["target"] is None:
        return leaf(facts, "target")
    found, target = facts["guarantee"], facts["target"]
    is_met = (
        _is_private(facts)
        and found["delta"] is not None
        and found["epsilon"] <= target["epsilon"]
        and found["delta"] <= target["delta"]
    )
    word = "met" if is_met else '<span class="failed">not met</span>'
    return f"ε {leaf(facts, 'target', 'epsilon')} at δ {leaf(facts, 'target', 'delta')}: {word}"


def _ran(facts: Facts) -> str:
    rows = []
    for key, value in facts["ran"].items():
        if not key.endswith("_settings"):
            rows.append((_label(key), leaf(facts, "ran", key)))
        elif value:
            for name in value:
                label = f"{_label(key.removesuffix('s'))}: {escape(name)}"
                rows.append((label, leaf(facts, "ran", key, name)))
        else:
            rows.append((_label(key), "none"))
    return _definitions(rows)


def _label(key: str) -> str:
    return escape(_LABELS.get(key, key.replace("_", " ").capitalize()))


def _ledger(facts: Facts) -> str:
    if not facts["ledger"]:
        return "<p>No event was recorded.</p>"
    rows = [
        [leaf(facts, "ledger", i, key) for key in ("event", "partition", "steps")]
        for i in range(len(facts["ledger"]))
    ]
    note = "<p>Every access to the data that was accounted for, in order.</p>"
    return note + _table(["Event", "Partition", "Steps"], rows, numbers={2})


def _over_time(facts: Facts) -> str:
    curve = facts["epsilon_over_time"]
    target = facts["target"]["epsilon"] if facts["target"] is not None else None
    drawing = draw_epsilon_curve([(steps, eps) for steps, eps in curve if eps is not None], target)
    items = "".join(
        f"<li><span>{leaf(facts, 'epsilon_over_time', i, 0)} steps</span>"
        f"<span>ε {leaf(facts, 'epsilon_over_time', i, 1)}</span></li>"
        for i in range(len(curve))
    )
    return drawing + (f'<ul class="points">{items}</ul>' if items else "")


def _other_deltas(facts: Facts) -> str:
    curve = facts["epsilon_for_delta"]
    if not curve:
        return "<p>No other delta was computed.</p>"
    rows = [[leaf(facts, "epsilon_for_delta", i, j) for j in (0, 1)] for i in range(len(curve))]
    return _table(["δ (delta)", _epsilon_head(facts)], rows, numbers={1}, kind="narrow")


def _cross_check(facts: Facts) -> str:
    rows = [
        [leaf(facts, "cross_check", "accountant"), leaf(facts, "cross_check", "epsilon")],
        ["Rényi (RDP) accountant", leaf(facts, "cross_check", "rdp_epsilon")],
        ["The guarantee above", leaf(facts, "guarantee", "epsilon")],
    ]
    note = "<p>Each is an upper bound for the same ledger; the Rényi bound is usually looser.</p>"
    return note + _table(["Accountant", _epsilon_head(facts)], rows, numbers={1}, kind="narrow")


def _assumed(facts: Facts) -> str:
    """What was taken on the user's word. Older reports lack this fact."""
    note = "<p>Taken on the user's word. What the run measured itself is not listed.</p>"
    if not facts.get("assumptions"):
        return "<p>Nothing was taken on the user's word.</p>"
    return note + _list(facts, ["assumptions"], "")


_SPAN = {"data": "Data set", "steps": "Steps", "run": "Private run", "ledger": "Its ledger"}


def _history(facts: Facts) -> str:
    found = facts.get("history") or []
    if not found:
        return "<p>No training was recorded.</p>"
    rows = [[leaf(facts, "history", i, key) for key in _SPAN] for i in range(len(found))]
    note = (
        "<p>What the weights were trained on, in order: data sets and ledgers by digest. Steps "
        "without a private run were not protected.</p>"
    )
    return note + _table(list(_SPAN.values()), rows, numbers={1})


def _audits(facts: Facts) -> str:
    exposures = _exposures(facts)
    if not facts["audits"]:
        return exposures or "<p>No audit was run.</p>"
    keys = ("name", "claimed_epsilon", "measured_epsilon", "confidence")
    rows = []
    for i, audit in enumerate(facts["audits"]):
        passed = leaf(facts, "audits", i, "passed")
        if not audit["passed"]:
            passed = f'<span class="failed">{passed}</span>'
        rows.append([*(leaf(facts, "audits", i, key) for key in keys), passed])
    note = (
        "<p>An attack measures a lower bound on epsilon. One above the claim disproves the claim; "
        "one below it proves nothing.</p>"
    )
    heads = ["Audit", "Claimed ε", "Measured ε, at least", "Confidence", "Passed"]
    return note + _table(heads, rows, numbers={1, 2, 3, 4}) + exposures


_EXPOSURE = {
    "repeats": "Times in the data",
    "canaries": "Canaries",
    "interpolation": "Exposure by rank",
    "low": "Lower quartile",
    "high": "Upper quartile",
    "extrapolation": "Exposure by fit",
}


def _exposures(facts: Facts) -> str:
    found = facts.get("exposures") or []
    rows = [[leaf(facts, "exposures", i, key) for key in _EXPOSURE] for i in range(len(found))]
    note = (
        "<p>Random examples (canaries) were put into the training data. Exposure, in bits, says "
        "how far the model's loss on them stands out from that on others: it is no bound on "
        "epsilon, and random examples have 1.4.</p>"
    )
    numbers = set(range(len(_EXPOSURE)))
    return note + _table(list(_EXPOSURE.values()), rows, numbers=numbers) if rows else ""


def _versions(facts: Facts) -> str:
    return _definitions(
        [(escape(name), leaf(facts, "versions", name)) for name in facts["versions"]]
    )


def _checklist(titles: Mapping[str, str]) -> str:
    rows = [
        [
            f'<span class="tick"></span>{item}',
            "<br>".join(f'<a href="#{name}">{titles[name]}</a>' for name in names),
        ]
        for item, names in _CHECKLIST
    ]
    note = (
        "<p>What a report of differential privacy should state, after Ponomareva et al., "
        "“How to DP-fy ML” (arXiv:2303.00654), section 5.3, and where this page states it.</p>"
    )
    return note + _table(["To report", "Answered in"], rows)


# The builders below take HTML: whatever comes from the facts has passed `leaf` or `escape`.


def _list(facts: Facts, path: Sequence[str], empty: str) -> str:
    texts: Any = facts
    for key in path:
        texts = texts[key]
    items = "".join(f"<li>{leaf(facts, *path, i)}</li>" for i in range(len(texts)))
    return f"<ul>{items}</ul>" if items else f"<p>{empty}</p>"


def _definitions(rows: Iterable[tuple[str, str]]) -> str:
    body = "\n".join(
        f'<tr><th scope="row">{name}</th><td>{value}</td></tr>' for name, value in rows
    )
    return f'<table class="defs"><tbody>\n{body}\n</tbody></table>'


def _table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Collection[int] = (),
    kind: str = "wide",
) -> str:
    """A table whose columns `numbers` are aligned to the right."""
    marks = [' class="number"' if i in numbers else "" for i in range(len(heads))]
    head = "".join(f'<th scope="col"{mark}>{text}</th>' for mark, text in zip(marks, heads))
    body = "\n".join(
        f"<tr>{''.join(f'<td{mark}>{cell}</td>' for mark, cell in zip(marks, row))}</tr>"
        for row in rows
    )
    return f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>'
