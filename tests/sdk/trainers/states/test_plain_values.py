"""Does a blob take what trainers hold, once it is plain, and does the plain form mean the same?"""

from __future__ import annotations

import argparse
import enum

import numpy as np
import pytest
import torch

from weighbridge import InvalidArgument
from weighbridge._trainers.states import blobs
from weighbridge._trainers.states.plain_values import plain


class Backend(enum.Enum):
    AUTO = 5


def test_numpys_generator_goes_on_from_the_plain_form_of_its_state_that_a_blob_has_kept() -> None:
    generator = np.random.RandomState(7)
    generator.rand(3)
    state = {"rng": [{"numpy": generator.get_state()}]}
    with pytest.raises(InvalidArgument, match=r"rng\[0\].numpy"):
        blobs.encode(state)
    kept = blobs.decode(blobs.encode(plain(state)), "kept")
    again = np.random.RandomState(0)
    again.set_state(kept["rng"][0]["numpy"])
    assert np.array_equal(again.rand(5), generator.rand(5))


def test_what_only_this_process_may_load_is_no_part_of_a_blob() -> None:
    array = np.arange(3.0)
    reconstruct = array.__reduce__()[0]
    with torch.serialization.safe_globals([reconstruct, np.ndarray, np.dtype, type(array.dtype)]):
        with pytest.raises(InvalidArgument, match=r"rng is a numpy.ndarray"):
            blobs.encode({"rng": array})
        assert blobs.decode(blobs.encode({"step": 3}), "kept") == {"step": 3}


def test_numbers_of_numpy_are_pythons_and_the_value_that_was_given_stays_as_it_is() -> None:
    given = {"loss": np.float64(0.5), "step": (np.int64(3), [np.bool_(True)]), "array": np.arange(3)}
    made = plain(given)
    assert (made["loss"], made["step"]) == (0.5, (3, [True]))
    assert [type(each) for each in (made["loss"], made["step"][0], made["step"][1][0])] == [float, int, bool]
    made["array"][0] = 9
    assert given["array"].tolist() == [0, 1, 2]


def test_arrays_of_any_order_are_tensors_and_what_torch_does_not_have_is_named() -> None:
    numbers = np.arange(6.0).reshape(2, 3)
    for given in (numbers.astype(">f4"), numbers[::-1, ::-1], numbers.T, np.array(3, np.float32)):
        assert plain({"of": [given]})["of"][0].tolist() == given.tolist()
    with pytest.raises(InvalidArgument, match=r"of\[0\] is a numpy.ndarray"):
        blobs.encode(plain({"of": [numbers.astype(np.longdouble)]}))


def test_of_a_namespace_those_attributes_stay_that_a_blob_takes() -> None:
    arguments = argparse.Namespace(
        hidden_size=64,
        lr=np.float32(0.5),
        params_dtype=torch.bfloat16,
        backend=Backend.AUTO,
        init=print,
        none=None,
    )
    made = plain({"args": arguments})["args"]
    assert made == {"hidden_size": 64, "lr": 0.5, "params_dtype": torch.bfloat16, "none": None}
    assert blobs.decode(blobs.encode(made), "kept") == made
    with pytest.raises(InvalidArgument, match="backend is a"):
        blobs.encode({"backend": plain(Backend.AUTO)})
