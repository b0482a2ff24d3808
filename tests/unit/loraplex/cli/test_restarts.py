from __future__ import annotations

import pytest

from loraplex.cli.restarts import MAX_DELAY_S, Ended, History


@pytest.mark.parametrize("code", [0, 1, 2])
def test_one_that_ends_by_itself_before_it_ever_was_ready_is_given_up(code):
    ended = Ended(code, 0.0)
    assert History().after(ended).delay_s(ended) is None


def test_one_that_is_killed_while_it_starts_gets_a_few_chances():
    history, ended, delays = History(), Ended(-9, 0.0), []
    for _ in range(3):
        history = history.after(ended)
        delays.append(history.delay_s(ended))
    assert delays == [0.5, 1.0, None]


def test_one_that_was_ready_once_is_always_started_again_ever_more_slowly():
    history, delays = History().after(Ended(-9, 1.0)), []
    for code in (1, 2, -11, 0, 1, 1, 1, 1):
        ended = Ended(code, 0.0)
        history = history.after(ended)
        delays.append(history.delay_s(ended))
    assert delays == [1.0, 2.0, 4.0, 8.0, MAX_DELAY_S, MAX_DELAY_S, MAX_DELAY_S, MAX_DELAY_S]


def test_a_stable_run_wipes_the_sheet_clean():
    history = History(ever_ready=True, failures=7).after(Ended(1, 60.0))
    assert history.delay_s(Ended(1, 60.0)) == 0.5


@pytest.mark.parametrize(
    ("code", "reason"), [(2, "exit code 2"), (-9, "killed by SIGKILL"), (-63, "killed by signal 63")]
)
def test_reasons_are_for_people(code, reason):
    assert Ended(code, 0.0).reason == reason
