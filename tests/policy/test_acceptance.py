"""What an acceptance may say: its texts get into another region's log, so it is read as strictly as the terms it accepts."""

import msgspec
import pytest
from signed_grants import signed_grant, signing_key

from policy.grant import ImportGrant
from policy.signed import Purpose, SignatureError, canonical, decode_body, sign


@pytest.mark.parametrize(
    "changes",
    [
        {"bridge": "spiffe://us-east.acme/bridge/" + "x" * 600},
        {"bridge": "spiffe://us-east.acme/operator/ana"},
        {"bridge": "somebody"},
        {"destination_stream": "("},
        {"from_region": "US East"},
        {"to_region": "x" * 600},
    ],
    ids=str,
)
def test_an_acceptance_with_a_text_that_no_leaf_takes_is_refused_where_it_is_read(
    changes: dict[str, str],
) -> None:
    fields = msgspec.to_builtins(signed_grant().half)

    def read(body: object) -> ImportGrant:
        document = sign(Purpose.IMPORT, "eu-west", canonical(body), signing_key("eu-west"))
        return decode_body(document, ImportGrant, Purpose.IMPORT)

    assert read(fields) == signed_grant().half
    with pytest.raises(SignatureError):
        read({**fields, **changes})
