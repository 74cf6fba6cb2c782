"""What a step of DCP says of its keys, and what is done where it is damaged."""

from __future__ import annotations

import pytest

from ckptkit.errors import FormatError
from ckptkit.plugins.dcp.names import Names, value_in


@pytest.mark.parametrize("said", [3, [], [3], [[]], [["x"]], [["x", 0]], [["x", [0]], 1]])
def test_a_value_of_a_damaged_step_is_refused(said: object) -> None:
    with pytest.raises(FormatError) as caught:
        value_in(Names(), {"extra/x": {"y": 1}} if said != [["x"]] else {}, said, "keys")
    assert caught.value.where == "keys"
