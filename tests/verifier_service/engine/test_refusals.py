"""A Start that is refused says which of its fields is wrong, so that the gateway can tell who sent it."""

from __future__ import annotations

from typing import Any

import pytest

from spire.errors import InvalidRequest, OutOfCapacity
from spire.rpc.errors import item_status, raise_for
from spire.rpc.limits import MAX_LOGPROBS
from spire.v1 import tensor_pb2 as codes, verifier_pb2 as pb
from tests.verifier_service.harness import GREEDY, Verifier, prompt_of

SOUND = {"sequence_id": "a", "tokens": prompt_of(5), "sampling": GREEDY}


def sampling(**changed: float) -> dict[str, Any]:
    return {"sampling": codes.Sampling(**{"top_p": 1, **changed})}


def adjustments(**changed: Any) -> dict[str, Any]:
    return {"adjustments": pb.Adjustments(**changed)}


WRONG = [
    ({"tokens": []}, "tokens"),
    ({"tokens": [2**31]}, "tokens"),
    ({"tokens": [5] * 100_000}, "tokens"),
    ({"prompt_tokens": 6}, "prompt_tokens"),
    ({"sequence_id": ""}, "sequence_id"),
    ({"sequence_id": "a" * 1000}, "sequence_id"),
    ({"logprobs": MAX_LOGPROBS + 1}, "logprobs"),
    (sampling(temperature=-1), "temperature"),
    (sampling(temperature=float("nan")), "temperature"),
    (sampling(top_p=0), "top_p"),
    (sampling(min_p=2), "min_p"),
    (sampling(rule=99), "rule"),
    (adjustments(logit_bias={2**31: 1.0}), "logit_bias"),
    (adjustments(logit_bias={5: float("inf")}), "logit_bias"),
    (adjustments(allowed_tokens=[2**31]), "allowed_tokens"),
    (adjustments(end_tokens=[2**31]), "end_tokens"),
    (adjustments(presence_penalty=float("nan")), "presence_penalty"),
    (adjustments(frequency_penalty=float("nan")), "frequency_penalty"),
    (adjustments(repetition_penalty=-1), "repetition_penalty"),
    (adjustments(grammar=pb.Grammar(regex="(")), "grammar"),
    (adjustments(grammar=pb.Grammar()), "grammar"),
]


@pytest.mark.parametrize(("changed", "param"), WRONG, ids=[f"{param} {at}" for at, (_, param) in enumerate(WRONG)])
async def test_a_refused_start_names_the_field_that_is_wrong(
    verifier: Verifier, changed: dict[str, Any], param: str
) -> None:
    client = verifier.client()
    await client.send(pb.RoundsRequest(start=pb.Start(**SOUND | changed)))
    status = (await client.read()).started.status
    assert (status.code, status.param) == (codes.CODE_INVALID_ARGUMENT, param)


def test_the_field_travels_with_the_error_and_no_other_error_has_one() -> None:
    with pytest.raises(InvalidRequest, match="too hot") as error:
        raise_for(item_status(InvalidRequest("too hot", "temperature")))
    assert error.value.param == "temperature"
    assert item_status(OutOfCapacity("full")).param == ""
