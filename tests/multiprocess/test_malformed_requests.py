"""Ten thousand requests that are wrong in every way, and those that a fuzzer makes of the OpenAPI description."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from served import Serving, serving
from small_run import make_run
from wrong_requests import RIGHT, assert_wrong_requests_harm_nothing

pytestmark = pytest.mark.slow  # some hundreds are in `make test`: tests/multiprocess/test_serve.py


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(make_run(tmp_path_factory.mktemp("small")), "--body-timeout", "1") as found:
        yield found


@pytest.mark.timeout(1800)
def test_ten_thousand_malformed_requests_give_4xx_and_neither_a_crash_nor_growth(served: Serving) -> None:
    assert_wrong_requests_harm_nothing(served, 1000, 9000)


def each_case(served: Serving, mode: str, count: int, check: Callable[[Any, Any], None]) -> None:
    """Send so many requests that schemathesis makes of the OpenAPI description: `positive` or `negative` ones."""
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    from hypothesis import HealthCheck, Phase, given, settings

    schema = schemathesis.openapi.from_url(served.address + "/openapi.json")
    cases = schema["/predict"]["POST"].as_strategy(generation_mode=schemathesis.GenerationMode(mode))
    sent = 0

    @given(case=cases)
    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    def answered(case: Any) -> None:
        nonlocal sent
        sent += 1
        check(case, case.call(base_url=served.address))

    answered()
    assert sent >= count


@pytest.mark.timeout(1800)
def test_what_the_openapi_description_forbids_gives_4xx(served: Serving) -> None:
    def refused(case: Any, response: Any) -> None:
        assert 400 <= response.status_code < 500, (case.method, case.body, response.text)
        assert response.status_code == 405 or response.json()["error"]

    each_case(served, "negative", 500, refused)
    assert len(served.predict(RIGHT)) == 1


@pytest.mark.timeout(1800)
def test_what_the_openapi_description_allows_is_answered(served: Serving) -> None:
    def right(case: Any, response: Any) -> None:
        if case.media_type == "application/json":
            assert response.status_code == 200, (json.dumps(case.body)[:500], response.text)
            assert len(response.json()["outputs"]) == len(case.body["inputs"])

    each_case(served, "positive", 150, right)
