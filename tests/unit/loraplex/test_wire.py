from __future__ import annotations

import pytest

from loraplex import wire
from loraplex.errors import InvalidRequest
from loraplex.generation import Message, Sampling, TextDelta
from loraplex.router.v1 import inference_pb2
from loraplex.types.v1 import sampling_pb2


def test_every_sampling_parameter_of_the_contract_can_be_asked_for():
    assert set(Sampling.__dataclass_fields__) == {field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields}


def test_what_is_not_chosen_stays_unset_and_zero_is_a_choice():
    params = wire.sampling_params(Sampling(temperature=0.0, seed=-1, stop=("a",), logit_bias={5: -1.5}))
    assert {field.name for field, _ in params.ListFields()} == {"temperature", "seed", "stop", "logit_bias"}
    assert params.HasField("temperature")
    assert dict(params.logit_bias) == {5: -1.5}


@pytest.mark.parametrize(
    "sampling",
    [Sampling(top_k=-1), Sampling(max_tokens=2**32), Sampling(stop=("\ud800",)), Sampling(logit_bias={-1: 1})],
)
def test_values_that_do_not_fit_their_type_are_refused_before_sending(sampling):
    with pytest.raises(InvalidRequest) as refused:
        wire.sampling_params(sampling)
    assert refused.value.field == "sampling"


@pytest.mark.parametrize(
    "inputs", [(None, None, None), ("p", [Message("user", "m")], None), ("p", None, [1]), (None, [], [])]
)
def test_exactly_one_kind_of_input_is_asked_for(inputs):
    with pytest.raises(InvalidRequest, match="exactly one"):
        wire.generate_request("m", inputs[0], inputs[1], inputs[2], None)


@pytest.mark.parametrize(
    ("inputs", "kind"),
    [
        (("p", None, None), "prompt"),
        (("", None, None), "prompt"),
        ((None, [], None), "chat"),
        ((None, None, []), "tokens"),
    ],
)
def test_an_empty_input_is_sent_so_that_the_server_names_what_is_wrong(inputs, kind):
    assert wire.generate_request("m", inputs[0], inputs[1], inputs[2], None).WhichOneof("input") == kind


def test_a_lone_surrogate_is_refused():
    with pytest.raises(InvalidRequest):
        wire.generate_request("m", "\udc80", None, None, None)


def test_logprobs_come_with_their_bytes():
    response = inference_pb2.GenerateResponse()
    response.delta.text, response.delta.index = "é", 1
    entry = response.delta.logprobs.add()
    entry.chosen.token_id, entry.chosen.token, entry.chosen.logprob = 7, b"\xc3", -0.5
    entry.top.add(token_id=8, token=b"a", logprob=-1.5)
    event = wire.event(response)
    assert isinstance(event, TextDelta)
    assert event.logprobs[0].chosen.token == b"\xc3"
    assert [token.token_id for token in event.logprobs[0].top] == [8]


def test_metadata_holds_only_what_is_known():
    assert wire.metadata(0) == ()
    assert wire.metadata(7, "r") == (("x-loraplex-min-revision", "7"), ("x-loraplex-request-id", "r"))
