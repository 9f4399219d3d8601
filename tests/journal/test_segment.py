"""The one writer of segments: what it wrote is what readers find."""

from faregate.broker.journal import frame as frames
from faregate.broker.journal.segment import Memory, Segment, batch_frames, new_header


def test_a_sealed_segment_has_its_frames_in_a_chain_and_says_what_is_in_it() -> None:
    file = Memory()
    segment = Segment(new_header(base=7, commit=3, time=10), file)
    segment.start()
    segment.write(b"one", {"A": 2}, kind=frames.ROWS, rows=2, base=7, time=11, commit=4)
    segment.write(b"two", {}, kind=frames.DEAD_LETTERS, rows=1, base=9, time=12, commit=5)
    size = segment.end(segment.footer(10, 5))
    data = bytes(file.data)
    assert size == len(data)
    header = frames.read_segment_header(data)
    assert header == segment.header
    found = [(frame.kind, frame.base, bytes(frames.body_of(data, frame))) for frame in frames.scan(data, header)]
    assert found[:2] == [(frames.ROWS, 7, b"one"), (frames.DEAD_LETTERS, 9, b"two")]
    footer = frames.read_footer(data, header)
    assert footer is not None
    assert (footer.base, footer.end, footer.messages, footer.dead_letters, footer.types) == (7, 10, 2, 1, {"A": 2})
    assert (footer.first_time, footer.last_time, footer.last_commit) == (11, 12, 5)


def test_a_frame_that_is_counted_is_counted_as_it_was_when_it_was_written() -> None:
    written = Segment(new_header(0, 0, 1), Memory())
    written.start()
    for base in range(3):
        written.write(b"x", {}, kind=frames.DEAD_LETTERS, rows=1, base=base, time=base, commit=base + 1)
    data = bytes(written.file.data)  # type: ignore[attr-defined]
    counted = Segment(written.header, Memory())
    for frame in frames.scan(data, written.header):
        counted.count(frame, None)
    assert counted.footer(3, 3) == written.footer(3, 3)
    assert counted.previous == written.previous


def test_the_frames_of_a_batch_are_a_chain_of_parts() -> None:
    data = b"".join(piece for each in batch_frames([(frames.ROWS, b"abc", 1)] * 3, 3) for piece in each)
    found, at_byte, previous = [], 0, 0
    while (frame := frames.read_header(data, at_byte, 0)) is not None:
        assert frames.is_sound(data, frame) and frame.previous == previous
        found.append((frame.part, frame.parts))
        at_byte, previous = frame.end, frame.crc
    assert found == [(0, 3), (1, 3), (2, 3)]
