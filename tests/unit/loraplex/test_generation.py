from __future__ import annotations

import pytest

from loraplex.generation import ChoiceFinished, Finished, Gatherer, ServingFacts, TextDelta, Usage, gather

END = Finished(Usage(3, 4), ServingFacts("b", "", "", "", 0.0, 0.0, 0.1, 0.2, "w0"))


def test_interleaved_choices_are_put_together_by_index():
    completion = gather(
        [
            TextDelta(1, "x", (7,)),
            TextDelta(0, "a", (1, 2)),
            TextDelta(1, "y", (8,)),
            ChoiceFinished(1, "length", None),
            TextDelta(0, "b", (3,)),
            ChoiceFinished(0, "stop", "!"),
            END,
        ]
    )
    assert [(c.text, c.token_ids, c.finish_reason, c.stop_string) for c in completion.choices] == [
        ("ab", (1, 2, 3), "stop", "!"),
        ("xy", (7, 8), "length", None),
    ]
    assert (completion.text, completion.usage, completion.facts) == ("ab", END.usage, END.facts)


def test_a_choice_without_a_delta_is_empty():
    assert gather([ChoiceFinished(0, "stop", None), END]).text == ""


def test_a_stream_that_broke_off_is_no_completion():
    gatherer = Gatherer()
    gatherer.add(TextDelta(0, "a", (1,)))
    with pytest.raises(ValueError, match="not finished"):
        gatherer.completion()
