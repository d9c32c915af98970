"""Spellings of llama.cpp's options."""

from __future__ import annotations

import pytest

from exl_cli.spellings import translate
from exl_core.errors import RequestError
from support.commands import Command


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("-t 4 -s 1", "--threads 4 --seed 1"),
        ("--n-predict=5", "-n 5"),
        ("-ctk q8 -md small", "--cache-type q8 --draft-model small"),
        ("-ngl 99", "--device auto"),
        ("-ngl -1", "--device auto"),
        ("--n-gpu-layers=0", "--device cpu"),
        ("-fa on -n 3", "-n 3"),
        ("-fa -n 3", "-n 3"),
        ("-p -s --stop -t", "-p -s --stop -t"),  # values, not options
        ("-- -s", "-- -s"),
    ],
)
def test_known_spellings_become_ours(given: str, ours: str) -> None:
    assert translate(["generate", *given.split()])[0] == ["generate", *ours.split()]


def test_other_commands_are_left_alone() -> None:
    assert translate(["bench", "-t", "4"]) == (["bench", "-t", "4"], [])
    assert translate([]) == ([], [])


@pytest.mark.parametrize(
    ("args", "answer"),
    [
        (["-ngl", "12"], "expected 0 for the CPU, or 99 and more for all layers, got 12"),
        (["-ngl"], "there is no option -ngl"),
        (["-ts", "1,1"], "--split has GB of weights for each GPU"),
    ],
)
def test_others_are_answered_with_our_name(args: list[str], answer: str) -> None:
    with pytest.raises(RequestError, match=answer):
        translate(["chat", *args])


def test_a_command_line_of_llama_cpp_runs(exl: Command) -> None:
    ours = exl("generate", "-p", "1, 2, 3,", "-n", 4, "--temp", 0, "--threads", 1)
    theirs = exl("generate", "-p", "1, 2, 3,", "--n-predict", 4, "--temp", 0, "-t", 1, "-fa", "on")
    assert theirs.out == ours.out
    assert theirs.err == "exl: note: -fa has no effect: attention is always fused\n"
