"""Drafted tokens: what they bring is what is accepted, less the checking and the drafting."""

from __future__ import annotations

import pytest

from planner.export.serving.commands import command
from planner.serving.answer import estimate_of, serving_account
from planner.serving.question.from_flags import ServingFlags, serving_question
from planner.validate.serving_points import validate_point
from simulator.config.hf_config import load_model
from simulator.serving.deployment import Deployment, Pool, Speculation
from simulator.serving.forward_pass import ForwardPass
from topology.catalog.clusters import cluster
from topology.errors import UserError

DEEPSEEK, H200, EIGHT = load_model("deepseek-v3"), cluster("dgx-h200", 8), Pool(tp=8)


def token_s(speculation: Speculation | None, sequences: int) -> float:
    deployment = Deployment(engine="sglang", pool=EIGHT, weights="float8", speculation=speculation)
    costs = ForwardPass(DEEPSEEK, H200, deployment, EIGHT)
    found = costs.seconds(prompt_tokens=0, pairs=0.0, sequences=sequences, keys=1024.0 * sequences)
    parts = costs.parts(prompt_tokens=0, pairs=0.0, sequences=sequences, keys=1024.0 * sequences)
    assert sum(parts.values()) == pytest.approx(found)
    return found


def test_one_drafted_token_brings_less_than_it_is_accepted():
    """DeepSeek-V3 (arXiv 2412.19437, section 5.4.3): 85 to 90 % of second tokens are accepted, 1.8 times the rate."""
    gain = token_s(None, 128) / token_s(Speculation(draft=1, accepted=0.87), 128)

    assert 1.5 < gain < 1.87


@pytest.mark.parametrize("sequences", [1, 32])
def test_what_is_drafted_and_never_accepted_costs(sequences):
    assert token_s(Speculation(draft=3, accepted=0.0), sequences) > token_s(None, sequences)
    rising = [token_s(Speculation(draft=3, accepted=accepted), sequences) for accepted in (0.0, 1.0, 2.0, 3.0)]
    assert rising == sorted(rising, reverse=True)


def test_the_account_adds_up_to_the_token():
    flags = ServingFlags(
        model="deepseek-v3", cluster="dgx-h200", isl=256, osl=32, concurrency=4, draft_tokens=2, accepted_tokens=1.5
    )
    question = serving_question(flags)
    deployment = question.deployment(EIGHT)
    estimate = estimate_of(question, deployment)
    account = serving_account(question, deployment, estimate)

    assert sum(account.token_s.values()) == pytest.approx(estimate.tpot_s.value)
    assert account.token_s["draft"] > 0
    words = command(deployment, EIGHT, "m", longest=512)
    assert '{"method": "mtp", "num_speculative_tokens": 2}' in words


@pytest.mark.parametrize(
    "stated",
    [{"draft_tokens": 2}, {"draft_tokens": 2, "accepted_tokens": 3.0}, {"accepted_tokens": 1.0}],
)
def test_a_half_of_it_is_refused(stated):
    with pytest.raises(UserError, match="accepted-tokens"):
        serving_question(ServingFlags(model="deepseek-v3", cluster="dgx-h200", **stated))
    with pytest.raises(UserError, match="no prediction layer"):
        serving_question(ServingFlags(model="llama3-8b", draft_tokens=1, accepted_tokens=0.5))


def test_a_row_that_states_what_is_accepted_is_predicted_and_one_that_does_not_says_what_is_missing():
    row = {
        "id": "r", "hardware": "H200 SXM 141GB", "model": "deepseek-ai/DeepSeek-R1", "backend": "sglang", "tp": 8,
        "precision": "fp8", "n_gpus": 8, "isl": 128, "osl": 16, "concurrency": 2, "tpot_ms": 8.0, "spec_decode": "mtp",
    }  # fmt: skip
    stated = validate_point({**row, "draft_tokens": 3, "accepted_tokens": 1.8})
    plain = validate_point({**row, "spec_decode": "none"})

    assert "without draft_tokens and accepted_tokens" in validate_point(row)["skipped"]
    assert stated["predicted"]["tpot_s"] < plain["predicted"]["tpot_s"]
