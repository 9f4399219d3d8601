"""Every codec keeps the promises of the codec suite, and for every promise there is a codec that breaks it."""

from itertools import count
from typing import Any

import msgspec
import pytest

from faregate.codec import CODECS, Codec, JsonCodec, MsgpackCodec
from faregate.codec.port import Decode, Encode
from faregate.testing import CODEC_CASES
from tests.conformance.faults import Faults

FAULTS = Faults(CODEC_CASES)
breaks = FAULTS.breaks


@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
@pytest.mark.parametrize("case", CODEC_CASES)
def test_the_codec_keeps_the_promise(case: str, codec: Codec) -> None:
    assert CODEC_CASES[case](codec) is None


def test_both_codecs_are_tested() -> None:
    assert {type(codec) for codec in CODECS.values()} == {JsonCodec, MsgpackCodec}


def changed(message: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(message, **{k: v for k, v in fields.items() if k in message.__struct_fields__})


@breaks("a_message_comes_back_equal")
class LosesDigits(JsonCodec):
    def decoder(self, cls: type) -> Decode:
        decode = super().decoder(cls)
        return lambda body: changed(decode(body), number=0)


@breaks("a_message_comes_back_equal")
class ReturnsPlainData(JsonCodec):
    def decoder(self, cls: type) -> Decode:
        decode = super().decoder(cls)
        return lambda body: msgspec.to_builtins(decode(body))


@breaks("a_message_comes_back_equal")
class WritesText(JsonCodec):
    def encoder(self, cls: type) -> Encode:
        encode = super().encoder(cls)
        return lambda message: encode(message).decode()  # type: ignore[return-value]


@breaks("encoding_twice_gives_the_same_bytes")
class NumbersItsBodies(JsonCodec):
    def encoder(self, cls: type) -> Encode:
        encode, numbers = super().encoder(cls), count()
        return lambda message: encode(message) + b" " * next(numbers)


class Positional(JsonCodec):
    """Writes the values without their names, as some compact formats do."""

    def encoder(self, cls: type) -> Encode:
        def encode(message: Any) -> bytes:
            return msgspec.json.encode([getattr(message, name) for name in message.__struct_fields__])

        return encode

    def decoder(self, cls: type) -> Decode:
        def decode(body: bytes) -> Any:
            values = msgspec.json.decode(body, type=list[Any])
            return msgspec.convert(dict(zip(cls.__struct_fields__, values, strict=False)), cls)  # type: ignore[attr-defined]

        return decode


breaks("a_consumer_with_fewer_fields_reads_it")(Positional)


@breaks("a_consumer_with_fewer_fields_reads_it")
class RefusesUnknownFields(JsonCodec):
    def decoder(self, cls: type) -> Decode:
        decode = super().decoder(cls)

        def strict(body: bytes) -> Any:
            if set(msgspec.json.decode(body)) - set(cls.__struct_fields__):  # type: ignore[attr-defined]
                raise ValueError("there is a field that I do not know")
            return decode(body)

        return strict


@breaks("a_consumer_with_a_new_default_reads_old_messages")
class FillsInZeroes(JsonCodec):
    """Takes a missing number for 0, as some formats do."""

    def decoder(self, cls: type) -> Decode:
        decode = super().decoder(cls)

        def filled(body: bytes) -> Any:
            message = decode(body)
            present = set(msgspec.json.decode(body))
            return changed(message, **{name: 0 for name in message.__struct_fields__ if name not in present})

        return filled


@breaks("garbage_is_a_value_error")
class IgnoresWhatFollows(JsonCodec):
    def decoder(self, cls: type) -> Decode:
        decode = super().decoder(cls)
        return lambda body: decode(body[: body.rfind(b"}", 0, -1) + 1] if body.endswith(b"\x00}") else body)


@breaks("garbage_is_a_value_error")
class ReadsAnythingAsNothing(JsonCodec):
    def decoder(self, cls: type) -> Decode:
        decode = super().decoder(cls)

        def lenient(body: bytes) -> Any:
            try:
                return decode(body)
            except msgspec.ValidationError:
                raise
            except ValueError:
                return None

        return lenient


@breaks("a_wrong_type_is_a_value_error")
class DoesNotValidate(JsonCodec):
    def decoder(self, cls: type) -> Decode:
        decode = super().decoder(cls)

        def unchecked(body: bytes) -> Any:
            try:
                return decode(body)
            except msgspec.ValidationError:
                return msgspec.json.decode(body)

        return unchecked


@FAULTS.pairs()
def test_the_case_fails_on_a_codec_with_this_fault(case: str, fault: type[JsonCodec]) -> None:
    with pytest.raises(AssertionError):
        CODEC_CASES[case](fault())


def test_every_case_has_a_fault() -> None:
    FAULTS.check()


@FAULTS.each()
def test_a_fault_is_one_fault_and_leaves_other_promises_kept(fault: type[JsonCodec]) -> None:
    kept = []
    for name, case in CODEC_CASES.items():
        try:
            case(fault())
        except Exception:
            continue
        kept.append(name)
    assert kept, "it breaks everything"
