"""`exl eval acceptance`: options, table and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exl_eval.prompts import CATEGORIES, prompt_set
from support.commands import Command

SHORT = ("--prompts", 1, "-n", 8)


def test_model_accepts_all_of_its_own_drafts(exl: Command, tiny_llama_dir: Path) -> None:
    done = exl(
        *("eval", "acceptance", tiny_llama_dir, "--draft-model", tiny_llama_dir),
        *("--draft-tokens", 3, "--exact", "--json", *SHORT),
    )
    assert (done.code, done.err) == (0, "")
    result = json.loads(done.out)
    assert (result["kind"], result["draft_tokens"], result["exact"]) == ("model", 3, True)
    assert [one["name"] for one in result["samplers"]] == ["greedy", "temperature 1"]
    for sampler in result["samplers"]:
        assert set(sampler["categories"]) == set(CATEGORIES)
        assert sampler["t_draft_s"] > 0
        assert set(sampler["t_verify_s"]) == {str(rows) for rows in range(1, 18)}
        found = sampler["overall"]
        assert found["N"] == sum(group["N"] for group in sampler["categories"].values())
        assert found["alpha"]["mean"] == pytest.approx(1.0, abs=1e-4)
        assert found["E"] in (found["A"] + found["N"], found["A"] + found["N"] - 4)
        assert found["theory_speed_up"] > 0
        assert found["measured_speed_up"] > 0
    # The 7 tokens after the first: 3 draft tokens and 1 sampled, then 2 draft tokens and 1 sampled.
    greedy = result["samplers"][0]["overall"]
    assert (greedy["D"], greedy["R"], greedy["utilization"]) == (20, 0, 1.0)
    assert greedy["tau"]["mean"] == 3.5


def test_table(exl: Command, tiny_llama_dir: Path) -> None:
    done = exl("eval", "acceptance", tiny_llama_dir, "--ngram", *SHORT)
    assert (done.code, done.err) == (0, "")
    for expected in ("n-grams, at most 8", *CATEGORIES, "A/(A+R)", "break-even tau", "greedy: a"):
        assert expected in done.out


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((), "--mtp, --ngram or --draft-model"),
        (("--ngram", "--draft-model", "x"), "--draft-model and --ngram"),
        (("--mtp",), "no layer for multi-token prediction"),
        (("--ngram", "-n", 500), "do not fit the model's context"),
        (("--draft-model", "/no/such/model"), "/no/such/model"),
    ],
)
def test_invalid_options(
    args: tuple[object, ...], expected: str, exl: Command, tiny_llama_dir: Path
) -> None:
    code = 3 if {"/no/such/model", "--mtp"} & set(args) else 2
    assert expected in exl("eval", "acceptance", tiny_llama_dir, *args).error_line(code)


def test_prompt_set_covers_all_categories() -> None:
    prompts = prompt_set()
    assert tuple(prompts) == CATEGORIES
    assert all(len(listed) == 4 and all(listed) for listed in prompts.values())
    assert len({text for listed in prompts.values() for text in listed}) == 16
