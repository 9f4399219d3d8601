"""Options of Kafka's, Delta's and Spark's file sources, for people who come from there.

One with the same meaning is taken (options.py); any other is refused like a misspelt one, with what to say instead.
"""

from collections.abc import Iterator

_GROWS = "a log only grows, so leave it out"
_HINTS = {
    "Kafka's": {
        "assign": "say path, or url for a RabbitMQ stream",
        "endingOffsetsByTimestamp": "say endingOffsets, which takes a time, too",
        "groupIdPrefix": "readers need no group; to have retention wait for a query, say readerName",
        "includeHeaders": "headers is a column anyway; to choose columns, say columns",
        "maxTriggerDelay": "say how often to look: trigger(processingTime=…)",
        "minOffsetsPerTrigger": "say how often to look: trigger(processingTime=…)",
        "startingOffsetsByTimestamp": "say startingOffsets, which takes a time, too",
        "startingOffsetsByTimestampStrategy": "a time behind the last message is the end of the log",
        "subscribe": "say path, or url for a RabbitMQ stream; to choose messages, types or nodes",
        "subscribePattern": "say path, which may have *; to choose messages, types or nodes",
        "topic": "messages go to whoever subscribed to their type; say path, or url for a RabbitMQ stream",
    },
    "Delta's": {
        "endingVersion": "say endingOffsets",
        "excludeRegex": "say path, which may have *, or types",
        "ignoreChanges": _GROWS,
        "ignoreDeletes": _GROWS,
        "ignoreFileDeletion": _GROWS,
        "maxFilesPerTrigger": "say maxMessagesPerTrigger",
        "readChangeFeed": f"{_GROWS}: what is new is what a stream reads",
        "skipChangeCommits": _GROWS,
        "startingVersion": "say startingOffsets",
        "timestampAsOf": "say endingOffsets",
        "versionAsOf": "say endingOffsets",
    },
    "of Spark's files": {
        "cleanSource": "retention removes messages; to have it wait for a query, say readerName",
        "latestFirst": "messages are read in order; to begin at the end, say startingOffsets=latest",
        "maxFileAge": "say startingOffsets, which takes a time, too",
        "modifiedAfter": "say startingOffsets, which takes a time, too",
        "modifiedBefore": "say endingOffsets, which takes a time, too",
        "pathGlobFilter": "say path, which may have *",
        "recursiveFileLookup": "say path, which may have *",
    },
}
_KAFKA_PREFIXES = ("kafka.", "kafkaconsumer.", "fetchoffset.")


def hint(name: str) -> str | None:
    """What to say instead of an option that is another source's; None when nobody there has it."""
    lower = name.lower()
    if lower.startswith(_KAFKA_PREFIXES):
        return f"{name} is Kafka's: there is no Kafka here, say path, or url for a RabbitMQ stream"
    return next((instead for theirs, instead in all_hints() if theirs.lower() == lower), None)


def all_hints() -> Iterator[tuple[str, str]]:
    """Each name, and what to say instead."""
    for whose, options in _HINTS.items():
        for name, instead in options.items():
            yield name, f"{name} is {whose}: {instead}"
