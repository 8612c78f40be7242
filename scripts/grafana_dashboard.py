"""The Grafana dashboard of a run's /metrics, docs/grafana.json: made by `make docs`, imported by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "grafana.json"

# `# row`, then `panel [unit]`, then `legend = query` each; RATE(x) is x per second.
TEXT = """
# Is the trainer waiting?
Trainer idle [percentunit]
    share of time = RATE(agentrl_trainer_waited_seconds_total)
What it does, and for how long [s]
    {{state}} = agentrl_trainer_state * on() group_left() agentrl_trainer_state_seconds
The next batch [none]
    ready groups = agentrl_ready_groups
    a batch = agentrl_batch_groups
    places used = agentrl_window_used
    places = agentrl_window_groups
A step [s]
    interval = agentrl_step_interval_seconds
    waited = agentrl_step_wait_seconds
    optimizer = agentrl_step_train_seconds
    publication = agentrl_step_publish_seconds

# Learning
Reward [none]
    mean of the batch = agentrl_step_reward_mean
Log-prob gap [none]
    {{which}} = agentrl_logprob_gap
What the trainer measured [none]
    {{name}} = agentrl_trainer_metric
Steps and versions [none]
    step = agentrl_step
    trainer's = agentrl_version
    live = agentrl_live_version

# Freshness
Age at the cut [none]
    largest = agentrl_step_age_max
    mean = agentrl_step_age_mean
Open groups by age [none]
    age {{age}} = agentrl_open_groups
Groups a minute [none]
    {{what}} = 60 * RATE(agentrl_groups_total)
Length, trained over completed [none]
    1: no bias to short work = agentrl_length_ratio

# What becomes of finished work: the share that is trained
By length [percentunit]
    {{bucket}} = SHARE(length)
By reward [percentunit]
    {{bucket}} = SHARE(reward)
By turns [percentunit]
    {{bucket}} = SHARE(turns)
By kind of task [percentunit]
    {{bucket}} = SHARE(kind)
Mean age by length [none]
    {{bucket}} = sum by (bucket) (agentrl_trained_ages_total{by="length"}) / sum by (bucket) (TRAINED(length))
Tokens a second [none]
    {{what}} = RATE(agentrl_tokens_total)

# Where a turn's time goes
Mean of a turn [s]
    {{part}} = RATE(agentrl_turn_seconds_sum) / RATE(agentrl_turn_seconds_count)
95th percentile of a turn [s]
    {{part}} = histogram_quantile(0.95, sum by (le, part) (RATE(agentrl_turn_seconds_bucket)))
Opening and verifying, mean [s]
    {{part}} = RATE(agentrl_attempt_seconds_sum) / RATE(agentrl_attempt_seconds_count)
Conversations [none]
    running = agentrl_conversations
    allowed = agentrl_conversations_limit

# Engines
Up [none]
    {{engine}} = agentrl_engine_up
Version [none]
    {{engine}} = agentrl_engine_version
Running requests over slots [percentunit]
    {{engine}}/{{rank}} = agentrl_engine_running / agentrl_engine_slots
Waiting requests [none]
    {{engine}}/{{rank}} = agentrl_engine_waiting
KV cache [percentunit]
    {{engine}}/{{rank}} = agentrl_engine_kv_used_tokens / agentrl_engine_kv_tokens
Sampled tokens a second [none]
    {{engine}}/{{rank}} = agentrl_engine_tokens_per_second
Prefix reuse [percentunit]
    {{engine}}/{{rank}} = agentrl_engine_prefix_reuse
Conversations placed [none]
    {{engine}}/{{rank}} = agentrl_engine_conversations

# Sandbox hosts
Up [none]
    {{host}} = agentrl_host_up
Lanes in use [percentunit]
    {{host}} {{lane}} = agentrl_lane_running / agentrl_lane_cap
Lane queues [none]
    {{host}} {{lane}} = agentrl_lane_queued
Lane waits, mean [s]
    {{host}} {{lane}} = agentrl_lane_wait_mean_seconds
Lane waits, 95th percentile [s]
    {{host}} {{lane}} = agentrl_lane_wait_p95_seconds
Attempts placed [none]
    {{host}} = agentrl_sandboxes

# Health
Event loop lag [s]
    worst of 10 s = agentrl_loop_lag_seconds
Nothing has moved for [s]
    quiet = agentrl_quiet_seconds
Tried again, or too late [none]
    {{what}} a minute = 60 * RATE(agentrl_attempts_total)
Failed in a row [none]
    attempts = agentrl_failed_in_a_row
"""

_SHORT = (
    (r"SHARE\((\w+)\)", r'sum by (bucket) (TRAINED(\1)) / sum by (bucket) (agentrl_finished_total{by="\1"})'),
    (r"TRAINED\((\w+)\)", r'agentrl_finished_total{by="\1", what="trained"}'),
    (r"RATE\((\w+)\)", r"rate(\1[$__rate_interval])"),
)
_SOURCE = {"type": "prometheus", "uid": "${source}"}


def dashboard() -> str:
    """JSON that Grafana imports; it asks for the Prometheus data source."""
    panels: list[dict[str, Any]] = []
    at, across = 0, 0
    for line in TEXT.splitlines():
        if line.startswith("# "):
            at, across = at + (7 if across else 0), 0
            panels.append({"type": "row", "title": line[2:], "gridPos": _at(0, at, 24, 1), "panels": []})
            at += 1
        elif line.startswith(" "):
            legend, _, query = line.strip().partition(" = ")
            _ask(panels[-1]["targets"], legend, query)
        elif line:
            if across == 24:
                at, across = at + 7, 0
            title, _, unit = line.removesuffix("]").partition(" [")
            panels.append(_panel(title, unit, _at(across, at, 6, 7)))
            across += 6
    for number, panel in enumerate(panels, start=1):
        panel["id"] = number
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    made = {
        "title": "agentrl",
        "uid": "agentrl-run",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _at(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(title: str, unit: str, where: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "gridPos": where,
        "fieldConfig": {"defaults": {"unit": unit, "custom": {"fillOpacity": 8}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [],
    }


def _ask(targets: list[dict[str, Any]], legend: str, query: str) -> None:
    for short, long in _SHORT:
        query = re.sub(short, long, query)
    name = chr(ord("A") + len(targets))
    targets.append({"refId": name, "expr": query, "legendFormat": legend, "datasource": _SOURCE})
